"""Atomic writes of small files: a reader sees the old or the new content, also after a power failure.

These functions take complete paths. Callers that have a `Tree` use its methods instead.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenmill.core.files.lease import remove_abandoned
from tokenmill.core.files.tree import Tree


def fsync_directory(path: Path) -> None:
    """Make the renames in a directory durable."""
    Tree(path).fsync("")


def write_atomic(path: Path, data: bytes | Iterable[bytes], *, directory: Path | None = None) -> None:
    """Replace a small file so that a reader sees the old or the new content, also after a power failure.

    The temporary file is in `directory`, which must be below the parent directory of the file, or in the parent
    directory itself. The function does not write through links. It removes the temporary files that killed processes
    left in the directory.
    """
    tree = Tree(path.parent)
    remove_abandoned(tree, "" if directory is None else directory)
    tree.write_atomic(path, data, directory=directory)


def get_size(path: str | Path) -> int | None:
    """Return the size of a file in bytes, or None when the file is missing."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - for 59,166 files, Path objects would take longer than the calls
    except (FileNotFoundError, NotADirectoryError):
        return None


def publish_once(path: Path, data: bytes | Sequence[bytes]) -> bool:
    """Create a complete file unless the path exists; return whether this call created the file."""
    return Tree(path.parent).publish_once(path, data)
