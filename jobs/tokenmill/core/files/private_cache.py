"""The directory of this user's caches: $TOKENMILL_CACHE_DIR, or $XDG_CACHE_HOME/tokenmill, or ~/.cache/tokenmill.

`tokenize.cache` keeps resolved tokenizers there, and `samples.order_store` the orders of large datasets. An empty
TOKENMILL_CACHE_DIR disables all caches.
"""

import os
import stat
from pathlib import Path

from tokenmill.core.files.tree import Tree
from tokenmill.core.files.user_path import local_path

DIRECTORY_VARIABLE = "TOKENMILL_CACHE_DIR"
"""Environment variable with the directory of the caches."""


def open_cache(*, create: bool = False) -> Tree | None:
    """Return the cache's directory; None if no directory exists that only this user may write to."""
    configured = os.environ.get(DIRECTORY_VARIABLE)
    if configured == "":
        return None
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        return open_private(
            local_path(configured, DIRECTORY_VARIABLE) if configured else Path(base) / "tokenmill", create=create
        )
    except (OSError, RuntimeError):
        return None


def open_private(root: Path, *, create: bool = False) -> Tree | None:
    """Return a directory if only this user may write to it, otherwise None; raise OSError if it is missing."""
    if create:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.stat()
    is_private = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return Tree(root) if is_private else None
