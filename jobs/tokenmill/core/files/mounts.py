"""Mounts of network file systems: their mount points, and how long their clients show stale directory entries.

Readers of records and the training run use this module before they report that a file is missing.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Any


def directory_cache_seconds(path: Path) -> float:
    """Return how long the mount of a path may show stale directory entries, in seconds.

    A client of a network file system may return "no such file" from its cache: blobfuse for up to 120 s
    with the mount options of Azure's guides, NFS for acdirmax (60 s). Local file systems and Lustre
    are coherent.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return 0.0
    target, longest, kind = os.path.realpath(path), "", ""  # Path.resolve raises for a link to itself
    for line in mounts:
        fields, _, rest = line.partition(" - ")
        point = fields.split(" ")[4].replace("\\040", " ")
        if (target == point or target.startswith(point.rstrip("/") + "/")) and len(point) >= len(longest):
            longest, kind = point, rest.split(" ")[0]
    if kind.startswith("fuse"):
        return 125.0
    return 65.0 if kind.startswith("nfs") else 0.0


def retry_while_stale(read: Any, path: Path) -> Any:
    """Call `read` until it returns a true value or the mount's directory cache has expired; return its last result."""
    deadline = time.monotonic() + directory_cache_seconds(path)
    while True:
        result = read()
        remaining = deadline - time.monotonic()
        if result or remaining <= 0:
            return result
        with contextlib.suppress(OSError):  # NFS revalidates a directory when a client reads it
            list(path.iterdir())
        time.sleep(min(5.0, remaining))


def find_mount_point(path: str | Path) -> str:
    """Return the directory where the file system of a path is mounted."""
    absolute = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - this makes no system call, which would fail here
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return absolute
    points = [line.split(" ")[1].replace("\\040", " ") for line in lines]
    return max(
        (point for point in points if f"{absolute}/".startswith(f"{point.rstrip('/')}/")), key=len, default=absolute
    )
