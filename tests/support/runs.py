"""What the recovery tests share: runs of the real command line, and what an output tree holds."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

PATIENCE = 60.0
"""Seconds after which a run is taken to hang: all of them end within a few."""


@dataclass
class Run:
    """A run of tokenmill that the forge has begun."""

    forge: "Forge"
    pid: int
    log: Path
    exit: int | str | None = None

    def wait(self, seconds: float = PATIENCE) -> int | str:
        """Return the exit code, minus the signal's number for one killed, or "stopped"; the run must not hang."""
        found = self.poll(seconds)
        if found is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.poll(PATIENCE)
            raise AssertionError(f"a run hangs; it said:\n{self.said}")
        return found

    def poll(self, seconds: float) -> int | str | None:
        """Wait so long for the end; None when it still runs."""
        if self.exit is None or self.exit == "stopped":
            self.exit = self.forge.ask({"wait": self.pid, "seconds": seconds})["exit"]
        return self.exit

    def kill(self, *, group: bool = True) -> None:
        """Kill it with its children, or alone; a run that is over is left."""
        if isinstance(self.exit, int):
            return
        (os.killpg if group else os.kill)(self.pid, signal.SIGKILL)

    @property
    def said(self) -> str:
        """What it wrote to standard output and standard error."""
        return self.log.read_text() if self.log.exists() else ""


class Forge:
    """The process that forks runs (see forge.py)."""

    def __init__(self, directory: Path) -> None:
        """Start it; logs of the runs go to `directory`."""
        self.directory = directory
        self._numbers = count()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forge.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
        )

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send an order and return its answer."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def start(self, argv: Sequence[Any], *at: dict[str, Any], **order: Any) -> Run:
        """Begin a run; `at` says when signals come to it (`kill_at`, `stop_at`)."""
        log = self.directory / f"{next(self._numbers)}.log"
        pid = self.ask({"argv": [str(a) for a in argv], "log": str(log), "at": at, **order})["pid"]
        return Run(self, pid, log)

    def run(self, argv: Sequence[Any], *at: dict[str, Any], **order: Any) -> Run:
        """Run to the end."""
        run = self.start(argv, *at, **order)
        run.wait()
        return run

    def done(self, argv: Sequence[Any], **order: Any) -> Run:
        """Run to the end, which must be exit code 0."""
        run = self.run(argv, **order)
        assert run.exit == 0, run.said
        return run

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(10)


def kill_at(below: Path, match: str = "", count: int = 1) -> dict[str, Any]:
    """Kill a run just before its `count`-th file system operation of this kind below a directory (see forge.py)."""
    return {"signal": signal.SIGKILL, "below": str(below), "match": match, "count": count}


def stop_at(below: Path, match: str = "", count: int = 1) -> dict[str, Any]:
    """Pause a run there instead."""
    return {**kill_at(below, match, count), "signal": signal.SIGSTOP}


def environment() -> dict[str, str]:
    """Return this process's environment without what would change a run, but for where tokenizers are cached."""
    kept = {name: os.environ[name] for name in ("TOKENMILL_CACHE_DIR",) if name in os.environ}
    clean = {k: v for k, v in os.environ.items() if k != "JOB_COMPLETION_INDEX" and not k.startswith("TOKENMILL_")}
    return clean | kept


def tokenmill(*argv: Any, **keywords: Any) -> subprocess.Popen[str]:
    """Start `python -m tokenmill` in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tokenmill", *map(str, argv)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment(),
        text=True,
        **keywords,
    )


def ends(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and what was said; the process must not hang."""
    try:
        said, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        raise AssertionError(f"a run hangs; it said:\n{said}") from None
    return process.returncode, said


def group_members(group: int) -> list[int]:
    """Return the processes of a process group that live (proc(5): field 5 of stat; Z is dead)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            found.append(int(path.parent.name))
    return found


def children(parent: int, command: str) -> list[int]:
    """Return the live children of a process whose command line holds `command`, the oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # A process in the middle of execve(2) has no command line yet, and its parent goes on before it has one.
            while (fields := path.read_text().rpartition(")")[2].split())[0] not in "ZX" and int(fields[1]) == parent:
                if line := path.with_name("cmdline").read_text():
                    found += [int(path.parent.name)] if command in line else []
                    break
        except OSError:
            continue
    return sorted(found)


def all_gone(group: int, seconds: float = 15.0) -> bool:
    """Wait until no process of the group lives."""
    deadline = time.monotonic() + seconds
    while group_members(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def tree(root: Path) -> dict[str, bytes]:
    """Return every file and empty directory below `root`; receipts without their times and hosts."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_dir():
            if not any(path.iterdir()):
                found[f"{name}/"] = b""
        elif "/receipts/" in name and path.suffix == ".json":
            value = {k: v for k, v in json.loads(path.read_bytes()).items() if k not in ("started", "finished", "host")}
            found[name] = json.dumps(value).encode()
        else:
            found[name] = path.read_bytes()
    return found


def assert_same_tree(root: Path, expected: dict[str, bytes], context: str = "") -> None:
    """Compare a tree with what it must be, and name the differences."""
    found = tree(root)
    missing, more = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    other = sorted(name for name in found.keys() & expected.keys() if found[name] != expected[name])
    assert not (missing or more or other), f"missing {missing}, left over {more}, other bytes {other}; {context}"


Receipts = dict[str, tuple[int, bytes, dict[str, int]]]


def receipts(output: Path, stage: str) -> Receipts:
    """Return the receipts that name files that are there: by name, their time, content and outputs' times."""
    found: Receipts = {}
    for path in (output / ".tokenmill" / stage / "receipts").glob("[!.]*.json"):
        data = path.read_bytes()
        files = {entry["path"]: (output / entry["path"]).stat().st_mtime_ns for entry in json.loads(data)["outputs"]}
        found[path.name] = (path.stat().st_mtime_ns, data, files)
    return found


def assert_kept(before: Receipts, after: Receipts) -> None:
    """Check that what had its receipt was not done again."""
    again = sorted(name for name in before if after.get(name) != before[name])
    assert not again, f"done twice: {again}"


def receipt(output: Path, stage: str, unit: str) -> dict[str, Any]:
    """Read a receipt."""
    value: dict[str, Any] = json.loads((output / ".tokenmill" / stage / "receipts" / f"{unit}.json").read_bytes())
    return value
