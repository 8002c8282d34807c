"""Put a small file in place so that a reader sees the old content or the new, also after a power cut."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenmill.files.tree import Tree


def fsync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    Tree(path).fsync("")


def write_atomic(path: Path, data: bytes | Iterable[bytes], *, directory: Path | None = None) -> None:
    """Replace a small file so that a reader sees the old content or the new, also after a power cut.

    `directory` below the file's own keeps the temporary file out of sight. No link is written through.
    """
    Tree(path.parent).write_atomic(path, data, directory=directory)


def size_of(path: str | Path) -> int | None:
    """Return a file's size in bytes; None when it is missing."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - for 59,166 files a Path each would take longer than the call
    except (FileNotFoundError, NotADirectoryError):
        return None


def publish_once(path: Path, data: bytes | Sequence[bytes]) -> bool:
    """Create a file whole unless it exists; return whether this call created it (the first writer wins)."""
    return Tree(path.parent).publish_once(path, data)
