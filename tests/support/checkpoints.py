"""Directories of checkpoints: what lies there, and how it came to be like that."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.torchdist import NOW, TRACKER, save, write
from tokenmill.training.checkpoints.repair import scan
from tokenmill.training.checkpoints.torch_dist import Checkpoint


def only(path: Path, *, full: bool = False) -> Checkpoint:
    """Look at the one checkpoint there."""
    [found] = scan(path, full=full)
    return found


def tree(path: Path) -> dict[str, bytes | None]:
    """Return what lies in a directory: directories, links as their targets, files as their bytes."""
    return {
        each.relative_to(path).as_posix(): os.readlink(each).encode()
        if each.is_symlink()
        else None
        if each.is_dir()
        else each.read_bytes()
        for each in path.rglob("*")
    }


def aside(path: Path) -> list[str]:
    """Return the names of what was moved aside, without the numbers."""
    return sorted(each.name.rpartition("-")[0] for each in (path / ".tokenmill" / "aside").glob("*"))


def iterations(path: Path) -> list[str]:
    """Return the names of the checkpoints that lie there."""
    return sorted(each.name for each in path.iterdir() if each.name.startswith(("iter_", "release")))


SAVED = NOW + 6000
"""When iteration 100 was."""
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


def missing(path: Path, iteration: int) -> None:
    """Remove a file of a checkpoint's data."""
    (path / f"iter_{iteration:07d}" / "__0_0.distcp").unlink()


def saving(iteration: int | str, steps: int = 99) -> Callable[[Path], Any]:
    """Return the step that saves a checkpoint, or its first steps."""
    return lambda path: save(path, iteration, steps=steps)


def tracking(content: str | None) -> Callable[[Path], Any]:
    """Return the step that sets the tracker."""
    return lambda path: tracker(path, content)


def losing(iteration: int) -> Callable[[Path], Any]:
    """Return the step that removes a file of a checkpoint."""
    return lambda path: missing(path, iteration)


CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate", "os.utime"}
KILLED = 77


def killed(work: Callable[[], Any], count: int) -> bool:
    """Do some work in a child that dies just before its `count`-th change to a file system; tell whether it did."""
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
