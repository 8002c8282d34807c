"""Directories of checkpoints: steps that build a state, and functions that read a state."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.torchdist import NOW, TRACKER, save, write
from tokenmill.checkpoints.repair import list_checkpoints
from tokenmill.checkpoints.torch_dist import Checkpoint


def only_checkpoint(path: Path, *, full: bool = False) -> Checkpoint:
    """Return the only checkpoint of a directory."""
    [checkpoint] = list_checkpoints(path, full=full)
    return checkpoint


def tree(path: Path) -> dict[str, bytes | None]:
    """Return the content of a directory: None for a directory, a link's target, a file's bytes."""
    return {
        entry.relative_to(path).as_posix(): os.readlink(entry).encode()
        if entry.is_symlink()
        else None
        if entry.is_dir()
        else entry.read_bytes()
        for entry in path.rglob("*")
    }


def names_moved_aside(path: Path) -> list[str]:
    """Return the names of the entries that were moved aside, without their numbers."""
    return sorted(entry.name.rpartition("-")[0] for entry in (path / ".tokenmill" / "aside").glob("*"))


def iterations(path: Path) -> list[str]:
    """Return the names of the checkpoints in a directory."""
    return sorted(entry.name for entry in path.iterdir() if entry.name.startswith(("iter_", "release")))


SAVED = NOW + 6000
"""Time at which iteration 100 was saved, in seconds since the epoch."""
START = "iter_{:07d}".format


def integrity(directory: Path, **changed: str) -> None:
    """Write integrity.json as --verify-integrity does."""
    hashed = [file for file in sorted(directory.iterdir()) if file.name != "integrity.json"]
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in hashed}
    content = {"algorithm": "sha256", "files": files | changed}
    write(directory / "integrity.json", json.dumps(content, indent=2).encode(), SAVED + 4)


def tracker(path: Path, content: str | None) -> None:
    """Set the tracker, or remove it."""
    if content is None:
        (path / TRACKER).unlink(missing_ok=True)
    else:
        write(path / TRACKER, content.encode(), NOW)


def remove_shard(path: Path, iteration: int) -> None:
    """Remove a data file of a checkpoint."""
    (path / f"iter_{iteration:07d}" / "__0_0.distcp").unlink()


def saving(iteration: int | str, steps: int = 99) -> Callable[[Path], Any]:
    """Return a step that saves a checkpoint, or performs the first `steps` of the save."""
    return lambda path: save(path, iteration, steps=steps)


def tracking(content: str | None) -> Callable[[Path], Any]:
    """Return a step that sets the tracker."""
    return lambda path: tracker(path, content)


def removing_shard(iteration: int) -> Callable[[Path], Any]:
    """Return a step that removes a data file of a checkpoint."""
    return lambda path: remove_shard(path, iteration)


CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate", "os.utime"}
KILLED = 77


def dies_at_change(work: Callable[[], Any], count: int) -> bool:
    """Run `work` in a child that dies just before its `count`-th change to a file system; return whether it died."""
    child = os.fork()
    if child == 0:
        left = count

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if event in CHANGES or writes:
                left -= 1
                if left == 0:
                    os._exit(KILLED)

        code = 1
        try:
            sys.addaudithook(hook)
            work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED
