"""Conversion of operating system errors into messages with a remedy.

Every place that writes an output uses `explain_os_errors`; errors of reading inputs pass through the same block.
"""

import contextlib
import errno
import os
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from tokenmill.core.files.mounts import find_mount_point
from tokenmill.core.files.named_file import get_operation
from tokenmill.core.redaction import STREAMS
from tokenmill.errors import MachineError, RequestError, TransientError

TMPDIR = "the directory for temporary files, which TMPDIR names"
"""The description in messages of the directory that `tempfile` uses."""

_NO_RESOURCES = (errno.ENOMEM, errno.ENFILE, errno.EMFILE)

_TEMPORARY = (
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
)

OWN_PREFIX = "tokenmill-"
"""Prefix of the names of tokenmill's directories for temporary files."""


@contextlib.contextmanager
def explain_os_errors(output: Path, description: str = "") -> Iterator[None]:
    """Raise a TokenmillError with a remedy for an OSError of the block.

    A retry does not change a full or read-only file system or a forbidden directory, so the exit code is 2.
    An input/output error or a stale handle can be temporary, so the exit code is 1. An OSError without a number or
    without a file, such as a library's own, is raised unchanged.

    Args:
        output: the path in the message if the OSError has no file name.
        description: what the directory is for, if its path does not show this.
    """
    try:
        yield
    except OSError as error:
        path = error.filename or _find_path(error) or output
        if not description:
            output, description = _find_temporary_directory(path) or (output, description)
        if path in STREAMS.values():
            output = Path("its volume")
        problem = _explain_permanent(error, path, output, description) or _explain_temporary(error, path, output)
        if problem is None:
            raise
        raise problem from error


def _explain_permanent(error: OSError, path: str | Path, output: Path, description: str) -> RequestError | None:
    """Return the error that the user must correct, or None."""
    action = f"cannot {get_operation(error) or 'use'} {path}: {error.strerror}"
    problem: RequestError | None = None
    if error.filename is None and "temporary directory" in str(error.strerror):  # tempfile.gettempdir
        problem = RequestError(
            f"{error.strerror}: they are full, or this user may not write to them; free space there, or set TMPDIR to "
            "another directory"
        )
    elif is_full(error):
        problem = MachineError(
            f"no space left writing {path}; free space on {output}{description and f', {description}'} "
            "(or raise the quota) and run the same command again: finished units are kept"
        )
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        error_class = MachineError if error.errno == errno.EROFS else RequestError
        problem = error_class(
            f"{action}; choose a path that this user may write (uid {os.getuid()}), or mount the volume read-write"
        )
    elif error.errno == errno.EXDEV:
        problem = RequestError(
            f"cannot rename {path} to {error.filename2}: they are on different file systems; "
            f"move {output} and everything in it to one file system"
        )
    elif error.errno in (errno.EEXIST, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
        problem = RequestError(f"{action}; choose another path")
    elif error.errno == errno.EFBIG:
        problem = RequestError(
            f"{path} would be larger than its file system or the limit of this process (ulimit -f) allows; raise "
            f"the limit, write smaller files (--target-files), or move {output} to another file system"
        )
    return problem


def _explain_temporary(error: OSError, path: str | Path, output: Path) -> TransientError | None:
    """Return the error after which a retry may succeed, or None for an error without a number or without a file."""
    operation = get_operation(error)
    problem = f"{f'cannot {operation} {path}' if operation else path}: {error.strerror}"
    if error.errno == errno.ENOENT:
        text = f"{path} was removed while tokenmill used it; run the same command again"
    elif error.errno == errno.EINVAL:
        text = (
            f"{problem}; its file system refused this kind of access: run the same command again; if the error occurs "
            f"again, move {output} to another file system, or mount it with other options"
        )
    elif error.errno == errno.ENOTCONN:
        text = (
            f"{path}: the process that serves the mount {find_mount_point(path)} has died (blobfuse or another "
            "FUSE file system); unmount it (fusermount -u, or umount -l), mount it again (on Kubernetes, start a "
            "new pod), and run the same command again"
        )
    elif error.errno in _NO_RESOURCES:
        resource = "memory" if error.errno == errno.ENOMEM else "open files (ulimit -n, or fs.file-max)"
        text = (
            f"{problem}; the machine or this process is out of {resource}: raise the limit, or reduce parallel work "
            "(--processes, --connections), and run the same command again"
        )
    elif error.errno in _TEMPORARY:
        text = f"{problem}; run the same command again"
    elif error.errno and (error.filename or operation):
        text = f"{problem}; run the same command again, and check the file system of {output} if the error occurs again"
    else:
        return None
    return TransientError(text)


def is_full(problem: BaseException) -> bool:
    """Return whether an error, or the OSError that it explains, is that of a full file system or an exceeded quota."""
    error = problem if isinstance(problem, OSError) else problem.__cause__
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_temporary(error: OSError) -> bool:
    """Return whether a retry may succeed: the file system or the machine failed, not the request."""
    return error.errno in (*_TEMPORARY, *_NO_RESOURCES, errno.ENOTCONN)


def _find_path(error: OSError) -> Path | None:
    """Return the path whose method (`read_bytes`, `write_text`) raised an error without a path."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = frame.f_locals.get("self")
        if frame.f_globals.get("__name__", "").startswith("pathlib") and isinstance(path, Path):
            return path
    return None


def _find_temporary_directory(path: str | Path) -> tuple[Path, str] | None:
    """Return the directory for temporary files and its description, if a path is in one of tokenmill's directories."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        directory = Path(tempfile.gettempdir())
        if Path(os.fspath(path)).relative_to(directory).parts[0].startswith(OWN_PREFIX):
            return directory, TMPDIR
    return None
