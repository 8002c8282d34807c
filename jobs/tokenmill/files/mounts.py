"""What a mount is, and how long its client may show directory entries that are out of date."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any


def settle_seconds(path: Path) -> float:
    """Return how long this mount may show stale directory entries, in seconds.

    A client of a network file system may answer "no such file" from its cache: blobfuse for up to 120 s
    with the mount options Azure's guides give, NFS for acdirmax (60 s). Local file systems and Lustre
    are coherent.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return 0.0
    target, best, kind = os.path.realpath(path), "", ""  # Path.resolve raises for a link to itself
    for line in mounts:
        fields, _, rest = line.partition(" - ")
        point = fields.split(" ")[4].replace("\\040", " ")
        if (target == point or target.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, rest.split(" ")[0]
    if kind.startswith("fuse"):
        return 125.0
    return 65.0 if kind.startswith("nfs") else 0.0


def patiently(look: Any, path: Path) -> Any:
    """Repeat a look until it finds something or the mount's caches must have expired; return the last."""
    deadline = time.monotonic() + settle_seconds(path)
    while True:
        found = look()
        left = deadline - time.monotonic()
        if found or left <= 0:
            return found
        with contextlib.suppress(OSError):  # reading the directory makes NFS revalidate it
            list(path.iterdir())
        time.sleep(min(5.0, left))


def mount_of(path: str | Path) -> str:
    """Return the directory where the file system of a path is mounted."""
    place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - nothing of a dead mount is to be looked at
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return place
    points = [line.split(" ")[1].replace("\\040", " ") for line in lines]
    return max((point for point in points if f"{place}/".startswith(f"{point.rstrip('/')}/")), key=len, default=place)
