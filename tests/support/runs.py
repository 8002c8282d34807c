"""Helpers of the recovery tests: runs of the real command line, and the content of an output tree."""

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

HANG_TIMEOUT_SECONDS = 60.0
"""Seconds after which a run counts as hanging; a normal run ends within a few seconds."""


@dataclass
class Run:
    """A run of tokenmill that the fork server started."""

    forge: "Forge"
    pid: int
    log: Path
    exit: int | str | None = None

    def wait(self, seconds: float = HANG_TIMEOUT_SECONDS) -> int | str:
        """Return the exit code (minus the signal's number after a signal) or "stopped"; fail if the run hangs."""
        exit_code = self.poll(seconds)
        if exit_code is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.poll(HANG_TIMEOUT_SECONDS)
            raise AssertionError(f"a run hangs; its output:\n{self.output}")
        return exit_code

    def poll(self, seconds: float) -> int | str | None:
        """Wait for the end; return None if the run continues after this time."""
        if self.exit is None or self.exit == "stopped":
            self.exit = self.forge.send({"wait": self.pid, "seconds": seconds})["exit"]
        return self.exit

    def kill(self, *, group: bool = True) -> None:
        """Kill the run with or without its children, unless it has ended."""
        if isinstance(self.exit, int):
            return
        (os.killpg if group else os.kill)(self.pid, signal.SIGKILL)

    @property
    def output(self) -> str:
        """Return the text of standard output and standard error."""
        return self.log.read_text() if self.log.exists() else ""


class Forge:
    """The fork server of runs (see forge.py)."""

    def __init__(self, directory: Path) -> None:
        """Start the server; the logs of the runs go to `directory`."""
        self.directory = directory
        self._numbers = count()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forge.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
        )

    def send(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the response."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        response: dict[str, Any] = json.loads(self._process.stdout.readline())
        return response

    def start(self, argv: Sequence[Any], *triggers: dict[str, Any], **options: Any) -> Run:
        """Start a run; each trigger sends the run a signal (`kill_at`, `stop_at`)."""
        log = self.directory / f"{next(self._numbers)}.log"
        pid = self.send({"argv": [str(a) for a in argv], "log": str(log), "at": triggers, **options})["pid"]
        return Run(self, pid, log)

    def run(self, argv: Sequence[Any], *triggers: dict[str, Any], **options: Any) -> Run:
        """Start a run and wait for its end."""
        run = self.start(argv, *triggers, **options)
        run.wait()
        return run

    def complete(self, argv: Sequence[Any], **options: Any) -> Run:
        """Start a run and wait for its end; its exit code must be 0."""
        run = self.run(argv, **options)
        assert run.exit == 0, run.output
        return run

    def stop(self) -> None:
        """Stop the server."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(10)


def kill_at(below: Path, match: str = "", count: int = 1) -> dict[str, Any]:
    """Return a trigger: kill a run just before its `count`-th matching file operation below a directory (forge.py)."""
    return {"signal": signal.SIGKILL, "below": str(below), "match": match, "count": count}


def stop_at(below: Path, match: str = "", count: int = 1) -> dict[str, Any]:
    """Return a trigger that pauses a run at this operation."""
    return {**kill_at(below, match, count), "signal": signal.SIGSTOP}


def environment() -> dict[str, str]:
    """Return this process's environment without variables that change a run; only the tokenizer cache stays."""
    kept = {name: os.environ[name] for name in ("TOKENMILL_CACHE_DIR",) if name in os.environ}
    clean = {k: v for k, v in os.environ.items() if k != "JOB_COMPLETION_INDEX" and not k.startswith("TOKENMILL_")}
    return clean | kept


def tokenmill(*argv: Any, **keywords: Any) -> subprocess.Popen[str]:
    """Start `python -m tokenmill` in a new process group."""
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


def wait_for_exit(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and the output of a process; fail if it hangs."""
    try:
        output, _ = process.communicate(timeout=HANG_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"a run hangs; its output:\n{output}") from None
    return process.returncode, output


def group_members(group: int) -> list[int]:
    """Return the live processes of a process group (proc(5): field 5 of stat; Z is dead)."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            members.append(int(path.parent.name))
    return members


def children(parent: int, command: str) -> list[int]:
    """Return the live children of a process whose command line contains `command`, the oldest first."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # A process in the middle of execve(2) has no command line yet, although its parent already continues.
            while (fields := path.read_text().rpartition(")")[2].split())[0] not in "ZX" and int(fields[1]) == parent:
                if line := path.with_name("cmdline").read_text():
                    pids += [int(path.parent.name)] if command in line else []
                    break
        except OSError:
            continue
    return sorted(pids)


def wait_for_group_end(group: int, seconds: float = 15.0) -> bool:
    """Wait until the group has no live process; return whether that happened in time."""
    deadline = time.monotonic() + seconds
    while group_members(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def tree(root: Path) -> dict[str, bytes]:
    """Return every file and empty directory below `root`, receipts without times and hosts."""
    content = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_dir():
            if not any(path.iterdir()):
                content[f"{name}/"] = b""
        elif "/receipts/" in name and path.suffix == ".json":
            value = {k: v for k, v in json.loads(path.read_bytes()).items() if k not in ("started", "finished", "host")}
            content[name] = json.dumps(value).encode()
        else:
            content[name] = path.read_bytes()
    return content


def assert_same_tree(root: Path, expected: dict[str, bytes], context: str = "") -> None:
    """Compare a tree with the expected tree, and report the differences."""
    actual = tree(root)
    missing, more = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    other = sorted(name for name in actual.keys() & expected.keys() if actual[name] != expected[name])
    assert not (missing or more or other), f"missing {missing}, unexpected {more}, other bytes {other}; {context}"


Receipts = dict[str, tuple[int, bytes, dict[str, int]]]


def receipts(output: Path, stage: str) -> Receipts:
    """Return the receipts by name: their time, their content, and the times of their outputs."""
    by_name: Receipts = {}
    for path in (output / ".tokenmill" / stage / "receipts").glob("[!.]*.json"):
        data = path.read_bytes()
        files = {entry["path"]: (output / entry["path"]).stat().st_mtime_ns for entry in json.loads(data)["outputs"]}
        by_name[path.name] = (path.stat().st_mtime_ns, data, files)
    return by_name


def assert_kept(before: Receipts, after: Receipts) -> None:
    """Check that units with a receipt did not run again."""
    repeated = sorted(name for name in before if after.get(name) != before[name])
    assert not repeated, f"units that ran twice: {repeated}"


def receipt(output: Path, stage: str, unit: str) -> dict[str, Any]:
    """Read a receipt."""
    value: dict[str, Any] = json.loads((output / ".tokenmill" / stage / "receipts" / f"{unit}.json").read_bytes())
    return value
