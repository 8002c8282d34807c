"""Turn the operating system's refusals into messages that say what to do."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tokenmill.errors import MachineError, RequestError, TransientError
from tokenmill.files.mounts import mount_of

TMPDIR = "the directory for temporary files, which TMPDIR names"
"""How messages name the directory that `tempfile` chose."""


@contextlib.contextmanager
def explained(output: Path, called: str = "") -> Iterator[None]:
    """Turn the operating system's refusals into messages that say what to do.

    A full or read-only file system and a forbidden directory are the machine's state, which a retry
    does not change (exit 2); an input/output error or a stale handle may pass (exit 1). `called`: what the
    directory is, where that is not plain from its path.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or output
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError(
                f"no space left writing {where}; free space on {output}{called and f', {called}'} (or raise the quota) "
                "and run the same command again: finished units are kept"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            kind = MachineError if error.errno == errno.EROFS else RequestError
            raise kind(
                f"cannot use {where}: {error.strerror}; give a path this user may write (uid {os.getuid()}), "
                "or mount the volume read-write"
            ) from error
        if error.errno == errno.ENOENT:
            raise TransientError(f"{where} vanished while it was being used; run the same command again") from error
        if error.errno == errno.EXDEV:
            raise RequestError(
                f"{where} and {error.filename2} are on different file systems, and one cannot be renamed to the other; "
                f"let {output} and everything in it be on one"
            ) from error
        if error.errno in (errno.EEXIST, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
            raise RequestError(f"cannot use {where}: {error.strerror}; choose another path") from error
        if error.errno == errno.EFBIG:
            raise RequestError(
                f"{where} would be larger than its file system or the limit of this process (ulimit -f) allows; raise "
                f"the limit, make smaller files (--target-files), or let {output} be on another file system"
            ) from error
        if error.errno == errno.EINVAL:
            raise TransientError(
                f"{where}: {error.strerror}; its file system refused this kind of access: run the same command again, "
                f"and where that does not help let {output} be on another file system, or mount it with other options"
            ) from error
        if error.errno == errno.ENOTCONN:
            raise TransientError(
                f"{where}: the process that serves the mount {mount_of(where)} has died (blobfuse or another FUSE "
                "file system); unmount it (fusermount -u, or umount -l) and mount it again, which a new pod does on "
                "Kubernetes, and run the same command again"
            ) from error
        if error.errno in (errno.ENOMEM, errno.ENFILE, errno.EMFILE):
            what = "memory" if error.errno == errno.ENOMEM else "open files (ulimit -n, or fs.file-max)"
            raise TransientError(
                f"{where}: {error.strerror}; the machine or this process is out of {what}: give more, or let less run "
                "at a time (--processes, --connections), and run the same command again"
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
            raise TransientError(f"{where}: {error.strerror}; run the same command again") from error
        raise
