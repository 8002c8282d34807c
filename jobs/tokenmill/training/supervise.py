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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tokenmill.training.watch import Watch

POLL = 0.2
LOOK = 5.0
"""Seconds between two looks at the shared directory."""
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


@dataclass
class Supervisor:
    """Runs a command to its end, its output passed on.

    SIGTERM goes to the ranks themselves, whose handler saves and ends: torchrun would kill them after 30 seconds,
    in the middle of a large save. A hang ends with SIGABRT, at which Python's fault handler writes all stacks.
    """

    watch: Watch
    patience: Patience
    on_iteration: Callable[[int], None]
    elsewhere: Callable[[], object]
    """Returns what changes while other nodes move."""
    every_while: Callable[[], None]
    """Called every few seconds, and once the command has ended."""
    _asked: list[int] = field(default_factory=list)
    _stopping: bool = False
    _hung: str = ""
    _moved: float = 0.0

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> End:
        """Run it; nothing that it started is left behind."""
        signals = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, lambda number, _: self._asked.append(number)) for number in signals}
        _adopt_orphans()
        try:
            process = subprocess.Popen(
                command,
                env={**environment, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - no thread has been started yet
            )
            self._follow(process)
            self.every_while()
            return End(process.wait(), self._stopping, self._hung)
        finally:
            _kill_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _follow(self, process: "subprocess.Popen[bytes]") -> None:
        lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
        self._moved = looked = time.monotonic()
        seen, ended = self.elsewhere(), 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=POLL)
                if line is None:
                    return
                self._read(line)
            now = time.monotonic()
            if process.poll() is not None:
                ended = ended or now
                if now - ended > DRAIN:
                    return
            if now - looked > LOOK:
                looked = now
                self.every_while()
                if (found := self.elsewhere()) != seen:
                    self._moved, seen = now, found
            self._stop(process)
            self._end_a_hang(process, now)

    def _read(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        sys.stdout.write(text)
        alive, said = self.watch.read(text.rstrip("\n"))
        for words in said:
            sys.stdout.write(f"tokenmill: {words}\n")
        sys.stdout.flush()
        if alive:
            self._moved = time.monotonic()
            if self.watch.iteration is not None:
                self.on_iteration(self.watch.iteration)

    def _stop(self, process: "subprocess.Popen[bytes]") -> None:
        """Pass on what was asked for: first that the ranks save and end, the second time that they end."""
        if self._asked and not self._stopping:
            self._stopping = True
            _say(f"{signal.Signals(self._asked[0]).name}: the ranks save and end")
            if not _signal_ranks(process.pid, signal.SIGTERM):
                process.terminate()
        if len(self._asked) > 1:
            _say("asked twice: they end now")
            _kill_all()
            del self._asked[1:]

    def _end_a_hang(self, process: "subprocess.Popen[bytes]", now: float) -> None:
        allowed = self.patience.iteration if self.watch.started else self.patience.start
        if self._hung or self._stopping or now - self._moved <= allowed:
            return
        self._hung = f"{allowed / 60:g} minutes"
        _say(f"no iteration for {self._hung}: the stacks of all ranks, then the end")
        _signal_ranks(process.pid, signal.SIGABRT)
        killer = threading.Timer(STACKS, _kill_all)
        killer.daemon = True
        killer.start()


def _pump(pipe: IO[bytes] | None, lines: "queue.SimpleQueue[bytes | None]") -> None:
    for line in pipe or ():
        lines.put(line)
    lines.put(None)


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


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    """Let the launcher end its ranks when this process is killed (prctl(2), PR_SET_PDEATHSIG)."""
    _prctl(1, signal.SIGTERM)


def _adopt_orphans() -> None:
    """Become the parent of ranks whose launcher dies, so that they are found (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    _prctl(36, 1)


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
