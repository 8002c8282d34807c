"""One start of the training script on one node: started, listened to, stopped when asked or when it hangs."""

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenmill.training.watch import Watch

POLL = 0.2
STACKS = 10.0
"""Seconds that ranks get to dump their stacks."""
DRAIN = 5.0
"""Seconds for what was written before the launcher's end; a rank that outlives it holds the pipe open."""


@dataclass(frozen=True)
class End:
    """How the launcher ended."""

    code: int
    """Its exit code, negative for a signal."""
    stopped: bool
    """SIGTERM or Ctrl-C arrived."""
    hung: str
    """How long nothing moved, when that was the reason."""


@dataclass(frozen=True)
class Patience:
    """Seconds without a sign of life after which a run hangs: until its first iteration, and from then on."""

    start: float
    iteration: float


def supervise(
    command: list[str],
    environment: Mapping[str, str],
    watch: Watch,
    patience: Patience,
    *,
    on_iteration: Callable[[int], None],
    elsewhere: Callable[[], object],
    every_while: Callable[[], None],
) -> End:
    """Run a command to its end, its output passed on.

    SIGTERM goes to the ranks themselves, whose handler saves and ends: torchrun would kill them after 30 seconds,
    in the middle of a large save. A hang ends with SIGABRT, at which Python's fault handler writes all stacks.
    `elsewhere` returns what changes while other nodes move; `every_while` is called every few seconds.
    """
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    _adopt_orphans()
    process = subprocess.Popen(
        command,
        env={**environment, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return _follow(process, asked, watch, patience, on_iteration, elsewhere, every_while)
    finally:
        _kill_all()
        process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(
    process: "subprocess.Popen[bytes]",
    asked: list[int],
    watch: Watch,
    patience: Patience,
    on_iteration: Callable[[int], None],
    elsewhere: Callable[[], object],
    every_while: Callable[[], None],
) -> End:
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_pump, args=(process, lines), daemon=True).start()
    moved, seen = time.monotonic(), elsewhere()
    looked, told, hung, over = moved, False, "", None
    while True:
        try:
            line = lines.get(timeout=POLL)
        except queue.Empty:
            line = b""
        now = time.monotonic()
        if over is None and process.poll() is not None:
            over = now
        if line is None or (over is not None and now - over > DRAIN):
            break
        if line:
            alive, said = watch.read(_pass_on(line))
            for words in said:
                sys.stdout.write(f"tokenmill: {words}\n")
            if alive:
                moved = now
                if watch.iteration is not None:
                    on_iteration(watch.iteration)
        if asked and not told:
            told = True
            _say(f"{signal.Signals(asked[0]).name}: the ranks save and end")
            if not _signal_ranks(process.pid, signal.SIGTERM):
                process.terminate()
        if len(asked) > 1:
            _say("asked twice: they end now")
            _kill_all()
            asked[1:] = []
        if now - looked > 5:
            looked = now
            every_while()
            if (found := elsewhere()) != seen:
                moved, seen = now, found
        allowed = patience.iteration if watch.started or watch.iteration else patience.start
        if now - moved > allowed and not hung and not told:
            hung = f"{allowed / 60:g} minutes"
            _say(f"no iteration for {hung}: the stacks of all ranks, then the end")
            _signal_ranks(process.pid, signal.SIGABRT)
            killer = threading.Timer(STACKS, _kill_all)
            killer.daemon = True
            killer.start()
    return End(process.wait(), told, hung)


def _pump(process: "subprocess.Popen[bytes]", lines: "queue.SimpleQueue[bytes | None]") -> None:
    assert process.stdout
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _pass_on(line: bytes) -> str:
    text = line.decode(errors="replace")
    sys.stdout.write(text)
    sys.stdout.flush()
    return text.rstrip("\n")


def _say(words: str) -> None:
    sys.stdout.write(f"tokenmill: {words}\n")
    sys.stdout.flush()


def _signal_ranks(launcher: int, number: signal.Signals) -> int:
    """Send a signal to the launcher's children; return how many there were."""
    ranks = [pid for pid, parent in _processes().items() if parent == launcher]
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(ranks)


def _adopt_orphans() -> None:
    """Become the parent of ranks whose launcher dies, so that they are found (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def _kill_all() -> None:
    """Kill all that descends from this process: torch gives ranks sessions of their own, so a group is not enough."""
    while True:
        parents = _processes()
        found = {os.getpid()}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        if len(found) == 1:
            return
        for pid in found - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.01)


def _processes() -> dict[int, int]:
    """Return the parent of every live process (proc(5), fields 3 and 4 of stat)."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            found[int(path.parent.name)] = int(fields[1])
    return found
