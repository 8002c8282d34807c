"""Conversion of operating system errors into messages with a remedy.

Every place that writes an output uses `explain_os_errors`; errors of reading inputs pass through the same block.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tokenmill.errors import MachineError, RequestError, TransientError
from tokenmill.files.mounts import find_mount_point

TMPDIR = "the directory for temporary files, which TMPDIR names"
"""The description in messages of the directory that `tempfile` uses."""


@contextlib.contextmanager
def explain_os_errors(output: Path, description: str = "") -> Iterator[None]:
    """Raise a TokenmillError with a remedy for an OSError of the block.

    A retry does not change a full or read-only file system or a forbidden directory, so the exit code is 2.
    An input/output error or a stale handle can be temporary, so the exit code is 1. An OSError that is not in the
    list below is a bug and is raised unchanged.

    Args:
        output: the path in the message if the OSError has no file name.
        description: what the directory is for, if its path does not show this.
    """
    try:
        yield
    except OSError as error:
        path = error.filename or output
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError(
                f"no space left writing {path}; free space on {output}{description and f', {description}'} "
                "(or raise the quota) and run the same command again: finished units are kept"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            error_class = MachineError if error.errno == errno.EROFS else RequestError
            raise error_class(
                f"cannot use {path}: {error.strerror}; choose a path that this user may write (uid {os.getuid()}), "
                "or mount the volume read-write"
            ) from error
        if error.errno == errno.ENOENT:
            raise TransientError(f"{path} was removed while tokenmill used it; run the same command again") from error
        if error.errno == errno.EXDEV:
            raise RequestError(
                f"cannot rename {path} to {error.filename2}: they are on different file systems; "
                f"move {output} and everything in it to one file system"
            ) from error
        if error.errno in (errno.EEXIST, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
            raise RequestError(f"cannot use {path}: {error.strerror}; choose another path") from error
        if error.errno == errno.EFBIG:
            raise RequestError(
                f"{path} would be larger than its file system or the limit of this process (ulimit -f) allows; raise "
                f"the limit, write smaller files (--target-files), or move {output} to another file system"
            ) from error
        if error.errno == errno.EINVAL:
            raise TransientError(
                f"{path}: {error.strerror}; its file system refused this kind of access: run the same command again; "
                f"if the error occurs again, move {output} to another file system, or mount it with other options"
            ) from error
        if error.errno == errno.ENOTCONN:
            raise TransientError(
                f"{path}: the process that serves the mount {find_mount_point(path)} has died (blobfuse or another "
                "FUSE file system); unmount it (fusermount -u, or umount -l), mount it again (on Kubernetes, start a "
                "new pod), and run the same command again"
            ) from error
        if error.errno in (errno.ENOMEM, errno.ENFILE, errno.EMFILE):
            resource = "memory" if error.errno == errno.ENOMEM else "open files (ulimit -n, or fs.file-max)"
            raise TransientError(
                f"{path}: {error.strerror}; the machine or this process is out of {resource}: raise the limit, or "
                "reduce parallel work (--processes, --connections), and run the same command again"
            ) from error
        if error.errno in (
            errno.EIO,
            errno.ESTALE,
            errno.ENODEV,
            errno.ETIMEDOUT,
            errno.EREMOTEIO,
            errno.EBUSY,
            errno.EAGAIN,
            errno.ENOLCK,
            errno.EHOSTDOWN,
            errno.EHOSTUNREACH,
            errno.ECONNRESET,
            errno.ECONNABORTED,
            errno.ENETDOWN,
            errno.ENETUNREACH,
            errno.ETXTBSY,
            errno.ENXIO,
        ):
            raise TransientError(f"{path}: {error.strerror}; run the same command again") from error
        raise
