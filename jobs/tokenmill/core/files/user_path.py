"""The paths that a user names, on the command line, in a settings file or in Python.

Every interface passes such a path through `local_path` before it becomes a `Path`. `read_named_file` reads a small file
that a user names.
"""

import os
import re
import stat
from pathlib import Path

from tokenmill.core.files.tree import describe_file_type
from tokenmill.errors import RequestError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/|(.*[/=])?[A-Za-z][A-Za-z0-9+.-]*://", re.DOTALL)
"""An address such as s3://BUCKET, its form s3:/BUCKET that pathlib makes, and an address within a path."""
_SECRET = re.compile(r"(?<=//)[^/]*@|[?#].*", re.DOTALL)
"""The parts of an address that may contain credentials."""
MAX_NAMED_BYTES = 64 << 20
"""The largest size of a file that is read whole: settings, values, a blend."""


def local_path(path: str | Path, parameter: str) -> Path:
    """Return a path that a user names as `parameter`.

    Without this check, a `Path` of s3://BUCKET would be a local directory with the name `s3:`.

    Raises:
        RequestError: the path is the address of a bucket or of another service.
    """
    if _ADDRESS.match(text := str(path)):
        raise RequestError(
            f"invalid {parameter}: {_SECRET.sub('', text)!r} is an address, but only a path works here: buckets and "
            "other services are not supported; set a local directory or a mounted volume (to name a relative "
            "directory so, write ./ before it)"
        )
    return Path(path)


def read_named_file(path: Path, description: str, limit: int = MAX_NAMED_BYTES) -> bytes:
    """Return the content of a small regular file that a user names.

    Symbolic links are followed, because a mounted ConfigMap consists of links. Other kinds of files are refused at
    once: a pipe may have no writer, and a device no end.

    Raises:
        RequestError: the path is a pipe, a socket or a device, or the file is larger than `limit` bytes.
        OSError: the file cannot be read.
    """
    _check_type(path, path.stat().st_mode, description)  # opening a socket fails
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOCTTY", 0))
    try:
        _check_type(path, os.fstat(descriptor).st_mode, description)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            data = file.read(limit + 1)
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise RequestError(
            f"cannot read {description} {path}: it has more than {limit:,} bytes; pass the path of the right file"
        )
    return data


def _check_type(path: Path, mode: int, description: str) -> None:
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise RequestError(
            f"cannot read {description} {path}: it is {describe_file_type(mode)}; pass the path of a regular file"
        )


def volume_path(path: str, root: Path) -> Path:
    """Return a path relative to the root of a volume, as the charts name it.

    Raises:
        RequestError: the path is not below the root.
    """
    relative = Path(os.path.relpath(root / path, root))
    if relative.parts[:1] in ((), ("..",)):
        raise RequestError(
            f"{path} is not below {root.absolute()}, but the chart needs the path of each dataset on its volume: "
            "set --root to the mount point of the volume"
        )
    return relative
