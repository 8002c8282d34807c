"""One start of the training script on one node: started, listened to, stopped when asked or when it hangs."""

import contextlib
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tokenmill.errors import RequestError, Stopped, Superseded
from tokenmill.training.runtime.log_monitor import LogMonitor, TrainingProgress
from tokenmill.training.runtime.output import flush, pass_on, pump, say
from tokenmill.training.runtime.processes import (
    adopt_orphans,
    die_with_parent,
    dump_stacks,
    kill_all,
    ranks_of,
    reap,
    signal_ranks,
)

POLL = 0.2
LOOK = 5.0
"""Seconds between two looks at the shared directory."""
FIRST_LOOK = 1.0
"""The same, until there are ranks."""
STACKS = 10.0
"""Seconds that ranks get to dump their stacks, all of them together."""
DRAIN = 5.0
"""Seconds that ranks may outlive the launcher; what was written is passed on however long that takes.

One that cannot be killed holds the pipe open: after as long a silence nothing more is waited for.
"""
BARRIER = 60.0
"""Seconds for a launcher whose ranks have ended; torchrun waits 300 for those of other nodes, which may have died."""
KILL = 30.0
"""Seconds for killed processes to be gone; one that waits for a dead device or file server may never be."""


class Signals:
    """SIGTERM and Ctrl-C: while `ending`, they end this process by an exception; else they are noted.

    PID 1 of a container would not even be ended by them: the kernel passes it what it has a handler for alone.
    """

    def __init__(self) -> None:
        """Take over nothing yet."""
        self.asked: list[int] = []
        self.ending = True

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._take) for each in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _: object) -> None:
        self.asked.append(number)
        if self.ending:
            self.ending = False
            raise Stopped(f"stopped by {signal.Signals(number).name} before the trainer was started")


@dataclass(frozen=True)
class LauncherExit:
    """How the launcher ended."""

    code: int
    """Its exit code, negative for a signal."""
    stopped: bool
    """SIGTERM or Ctrl-C arrived."""
    ended: str
    """Why it was ended from here; empty when it ended by itself."""
    iterated: bool
    """An iteration was reported, here or by another node."""
    met: float
    """When ranks were first seen to run, as `time.time` says it; when it ended, where none were."""


@dataclass(frozen=True)
class HangTimeouts:
    """Seconds without a sign of life after which a run hangs.

    `meeting` counts from when all nodes are here until the ranks are started, `start` until the first iteration and
    during a save, which may take as long as all of a checkpoint.
    """

    meeting: float
    start: float
    iteration: float


@dataclass
class Supervisor:
    """Runs a command to its end, its output passed on.

    SIGTERM goes to the ranks themselves, whose handler saves and ends: torchrun would kill them after 30 seconds,
    in the middle of a large save. A hang ends with SIGABRT, at which Python's fault handler writes all stacks.
    """

    watch: LogMonitor
    patience: HangTimeouts
    others: Callable[[], TrainingProgress | None]
    """Returns what other nodes see; any change is a sign of life."""
    chores: Sequence[Callable[[], object]]
    """Done every few seconds, on a thread that a file server may hold up, and once the command has ended.

    Superseded ends the command; another error is said, and no more.
    """
    signals: Signals
    gathered: Callable[[bool], bool] = lambda met: True
    """Looks for other nodes, told whether ranks are started; those that are here wait until it says that all are."""
    _met: float = 0.0
    """When ranks were first seen to run."""
    _here: bool = False
    _blind: bool = False
    """Records cannot be written or read, perhaps not by others either."""
    _elsewhere: TrainingProgress | None = None
    _stopping: bool = False
    _ended: str = ""
    _finished: bool = False
    _moved: float = 0.0
    _kill_at: float = float("inf")
    _warned: set[str] = field(default_factory=set)
    _done: threading.Event = field(default_factory=threading.Event)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> LauncherExit:
        """Run it; nothing that it started is left behind.

        Raises:
            RequestError: it cannot be started.
        """
        self.signals.ending = False
        if self.signals.asked:
            return LauncherExit(-self.signals.asked[0], stopped=True, ended="", iterated=False, met=time.time())
        adopt_orphans()
        try:
            process = subprocess.Popen(
                command,
                env={**environment, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread has been started yet
            )
        except (FileNotFoundError, PermissionError, NotADirectoryError) as problem:
            raise RequestError(
                f"the launcher {command[0]} cannot be started: {problem.strerror}; look at trainer.launcher"
            ) from None
        looking = threading.Thread(target=self._look_on, args=(process.pid,), daemon=True)
        try:
            looking.start()
            self._follow(process)
        finally:
            self._done.set()
            kill_all(KILL)
        looking.join(KILL)
        self._look()
        code = process.poll()
        code = 0 if self._finished else code
        iterated = any(each.iteration is not None for each in self._signs())
        met = self._met or time.time()
        return LauncherExit(-signal.SIGKILL if code is None else code, self._stopping, self._ended, iterated, met)

    def _look_on(self, launcher: int) -> None:
        working, before = 0.0, set[int]()
        while not self._done.wait(LOOK if self._met else FIRST_LOOK):
            self._look()
            reap(launcher)
            found = set(ranks_of(launcher))
            if found & before:  # what torchrun's own imports start (ldconfig) is gone by the next look
                working = time.monotonic()
                if not self._met:
                    self._met, self._moved = time.time(), working
                    self._look()  # at once: these ranks meet those of the nodes that are here now
            elif not found and working and time.monotonic() - working > BARRIER and not self._finished:
                self._finished = True
                say("the ranks have ended well, and the launcher waits for those of other nodes: not any longer")
                kill_all(KILL)
            before = found

    def _look(self) -> None:
        blind = False
        for chore in (*self.chores, self._ask, self._gather):
            try:
                chore()
            except Superseded as problem:
                self._ended = self._ended or str(problem)
            except Exception as problem:  # no record is worth a run
                blind = True
                words = f"{type(problem).__name__}: {problem}"
                if words not in self._warned:
                    self._warned.add(words)
                    say(f"warning: {words}; the run goes on")
        self._blind = blind

    def _ask(self) -> None:
        self._elsewhere = self.others()

    def _gather(self) -> None:
        self._here = self.gathered(self._met > 0)

    def _follow(self, process: "subprocess.Popen[bytes]") -> None:
        batches: queue.Queue[list[bytes] | None] = queue.Queue(maxsize=64)
        threading.Thread(target=pump, args=(process.stdout, batches), daemon=True).start()
        self._moved = time.monotonic()
        seen, over, exited, heard = self._elsewhere, False, 0.0, 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                batch = batches.get(timeout=POLL)
                over = over or batch is None
                self._read(batch or [])
                heard = time.monotonic()
            now = time.monotonic()
            if not exited and process.poll() is not None:
                exited, self._kill_at = now, min(self._kill_at, now + DRAIN)
            if exited and (over or now - max(exited, heard) > DRAIN):
                return
            waits = exited or not (self._met or self._here)
            if waits or self._elsewhere != seen or (self._blind and self.watch.iteration is None):
                self._moved, seen = now, self._elsewhere
            self._stop(process)
            self._end_what_must_not_go_on(process, now)

    def _read(self, batch: list[bytes]) -> None:
        for line in batch:
            text = line.decode(errors="replace")
            alive, said = self.watch.read(text)
            pass_on("".join([text, *(f"tokenmill: {words}\n" for words in said)]))
            if alive:
                self._moved, self._met = time.monotonic(), self._met or time.time()
        flush()

    def _stop(self, process: "subprocess.Popen[bytes]") -> None:
        """Pass on what was asked for: that the ranks save and end, or, at a second Ctrl-C, that they end."""
        asked = self.signals.asked
        if asked and not self._stopping:
            self._stopping = True
            say(f"{signal.Signals(asked[0]).name}: the ranks save and end")
            if not signal_ranks(process.pid, signal.SIGTERM) or not self._met:
                process.terminate()
        if asked.count(signal.SIGINT) > 1:  # SIGTERM twice is no hurry: engines repeat it, and a save may be under way
            say("asked twice: they end now")
            kill_all(KILL)
            asked.remove(signal.SIGINT)

    def _end_what_must_not_go_on(self, process: "subprocess.Popen[bytes]", now: float) -> None:
        self._ended = self._ended or self.watch.astray
        if now > self._kill_at or (self._ended and self._kill_at == float("inf")):
            self._kill_at = now + KILL
            kill_all(KILL)
        allowed = self._allowed()
        if self._ended or now - self._moved <= allowed:
            return
        self._ended = f"it hung: no sign of life for {allowed / 60:.3g} minutes"
        if not self._met:
            self._ended = f"all nodes are here, and did not meet for {allowed / 60:.3g} minutes: look at their network"
        self._kill_at = now + STACKS
        say(f"no iteration for {allowed / 60:.3g} minutes: the stacks of all ranks, then the end")
        threading.Thread(target=dump_stacks, args=(process.pid, STACKS), daemon=True).start()

    def _allowed(self) -> float:
        if not self._met:
            return self.patience.meeting
        signs = self._signs()
        if any(each.saving for each in signs) or all(each.iteration is None for each in signs):
            return max(self.patience.start, self.patience.iteration)
        return self.patience.iteration + max(each.quiet for each in signs)

    def _signs(self) -> list[TrainingProgress]:
        return [self.watch.signs, *([self._elsewhere] if self._elsewhere else [])]
