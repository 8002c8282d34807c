"""Runs the launcher of one attempt on this node: reads its output, and stops it on a signal or a hang.

`run` composes a `Supervisor` and decides the verdict from the `LauncherExit` that it returns.
"""

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

from tokenmill.core.machine import STOP_SIGNALS
from tokenmill.errors import RequestError, Stopped, Superseded, TokenmillError
from tokenmill.train.runtime.hang_record import DUMP_SECONDS, HOLD_AFTER_SECONDS, STACKS_AFTER_SECONDS, HangRecord
from tokenmill.train.runtime.log_monitor import LogMonitor, TrainingProgress
from tokenmill.train.runtime.output import is_blocked, log, pump_lines, write
from tokenmill.train.runtime.processes import (
    adopt_orphans,
    dump_stacks,
    kill_descendants,
    leads_session,
    list_ranks,
    prepare_launcher,
    reap_orphans,
    signal_ranks,
    stop_ranks,
)

OUTPUT_POLL_SECONDS = 0.2
"""Seconds to wait for output before the next check for signals and hangs."""
FREEZE_SECONDS = 5.0
"""Seconds between two checks after which this process was not running: the machine or the container was suspended."""
TASK_SECONDS = 5.0
"""Seconds between two runs of the periodic tasks, which use the shared directory."""
STARTUP_TASK_SECONDS = 1.0
"""Seconds between two runs of the periodic tasks before there are ranks."""
STACK_DUMP_SECONDS = 10.0
"""Seconds for all ranks together to dump their stacks."""
DRAIN_SECONDS = 5.0
"""Seconds that ranks may outlive the launcher; all of their output is passed on, however long that takes.

A process that cannot be killed keeps the pipe open, so the wait for output also ends after this long a silence.
"""
BARRIER_TIMEOUT_SECONDS = 60.0
"""Seconds for a launcher whose ranks have ended; torchrun waits 300 s for other nodes' ranks, which may be dead.

Nobody but the launcher learns the exit codes of the ranks. Their output shows whether one failed.
"""
KILL_TIMEOUT_SECONDS = 30.0
"""Seconds for killed processes to end; one that waits for a dead device or file server may never end."""


class Signals:
    """Handles the stop signals: with `raise_on_signal` by an exception, otherwise by a note in `received`.

    Without a handler these signals would not end PID 1 of a container, because the kernel delivers only signals that
    have a handler to PID 1.
    """

    def __init__(self) -> None:
        """Create the state; `__enter__` installs the handlers."""
        self.received: list[int] = []
        self.raise_on_signal = True

    def __enter__(self) -> Self:
        numbers = [*STOP_SIGNALS]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores the end of the terminal
            numbers.append(signal.SIGHUP)
        self._previous_handlers = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        self.received.append(number)
        if self.raise_on_signal:
            self.raise_on_signal = False
            raise Stopped(
                f"stopped by {signal.Signals(number).name} before the trainer was started; start the run again"
            )


@dataclass(frozen=True)
class LauncherExit:
    """How the launcher ended."""

    exit_code: int | None
    """Exit code of the launcher, negative for a signal.

    If the launcher waited after its ranks: the exit code of the rank that failed first, None if no failure was printed.
    """
    stopped: bool
    """A stop signal arrived."""
    abort_reason: str
    """Why the supervisor ended the launcher; empty when the launcher ended by itself."""
    has_iterated: bool
    """This node or another one reported an iteration."""
    ranks_started_at: float
    """Time (`time.time`) at which ranks were first observed, or at which the launcher ended without any."""

    @property
    def has_failed(self) -> bool:
        """Return whether the launcher or a rank failed."""
        return self.exit_code not in (0, None)


@dataclass(frozen=True)
class HangTimeouts:
    """Seconds without progress after which a run counts as hanging.

    `rendezvous` applies from the time when all nodes have started until the ranks run. `start` applies until the first
    iteration, and during a save, which may take as long as loading a checkpoint.
    """

    rendezvous: float
    start: float
    iteration: float


@dataclass
class Supervisor:
    """Runs a command to its end, and passes its output on.

    SIGTERM goes to the ranks themselves, whose handler saves and ends: torchrun would kill them after 30 seconds, in
    the middle of a large save. The supervisor ends a hang with SIGABRT, on which Python's fault handler writes all
    stacks.
    """

    monitor: LogMonitor
    timeouts: HangTimeouts
    read_peer_progress: Callable[[], TrainingProgress | None]
    """Returns the progress that other nodes report; any change of it counts as progress."""
    tasks: Sequence[Callable[[], object]]
    """Periodic tasks. They run in a thread, which a file server may block, and again after the command has ended.

    Superseded ends the command; any other error is only logged.
    """
    signals: Signals
    poll_nodes: Callable[[bool], bool] = lambda ranks_started: True
    """Returns whether all nodes have started; its argument is whether ranks have.

    Until then the absence of ranks is not a hang.
    """
    hang_record: HangRecord | None = None
    """Collects the stacks and dumps of the ranks."""
    on_hang: Callable[[str], None] = lambda reason: None
    """Called in a thread when a hang is detected, with its reason."""
    on_stop: Callable[[], object] = lambda: None
    """Called in a thread at the first signal: the machine may be gone before the ranks have ended."""
    _ranks_started_at: float = 0.0
    """Time at which ranks were first observed, 0 before."""
    _all_nodes_started: bool = False
    _records_unavailable: bool = False
    """This node, and perhaps the others too, cannot write or read records."""
    _peer_progress: TrainingProgress | None = None
    _stopping: bool = False
    _abort_reason: str = ""
    _hanging: bool = False
    """The ranks were requested to write their stacks."""
    _ranks_finished: bool = False
    _progress_at: float = 0.0
    """Monotonic time of the last progress."""
    _kill_at: float = float("inf")
    _logged_warnings: set[str] = field(default_factory=set)
    _finished: threading.Event = field(default_factory=threading.Event)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> LauncherExit:
        """Run the command to its end; no process that it started outlives this call.

        Raises:
            RequestError: the command cannot be started.
        """
        self.signals.raise_on_signal = False
        if self.signals.received:
            return LauncherExit(
                -self.signals.received[0],
                stopped=True,
                abort_reason="",
                has_iterated=False,
                ranks_started_at=time.time(),
            )
        adopt_orphans()
        try:
            process = subprocess.Popen(
                command,
                env={**environment, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare_launcher,  # noqa: PLW1509 - no thread has been started yet
            )
        except (FileNotFoundError, PermissionError, NotADirectoryError) as problem:
            raise RequestError(
                f"cannot start the launcher {command[0]}: {problem.strerror}; correct trainer.launcher"
            ) from None
        task_thread = threading.Thread(target=self._run_tasks_periodically, args=(process.pid,), daemon=True)
        try:
            task_thread.start()
            self._relay_output(process)
        finally:
            self._finished.set()
            kill_descendants(KILL_TIMEOUT_SECONDS)
        task_thread.join(KILL_TIMEOUT_SECONDS)
        self._run_tasks()
        code = -signal.SIGKILL if process.poll() is None else process.returncode
        launcher_exit = LauncherExit(
            self.monitor.rank_exit_code if self._ranks_finished else code,
            self._stopping,
            self._abort_reason,
            has_iterated=any(progress.iteration is not None for progress in self._all_progress()),
            ranks_started_at=self._ranks_started_at or time.time(),
        )
        if self.hang_record and launcher_exit.has_failed:
            self.hang_record.save()
        return launcher_exit

    def _run_tasks_periodically(self, launcher: int) -> None:
        ranks_seen_at, previous_ranks = 0.0, set[int]()
        while not self._finished.wait(TASK_SECONDS if self._ranks_started_at else STARTUP_TASK_SECONDS):
            self._run_tasks()
            reap_orphans(launcher)
            ranks = set(list_ranks(launcher))
            # Processes of torchrun's own imports (ldconfig) lead no session, and have ended by the next poll.
            if ranks & previous_ranks or any(leads_session(pid) for pid in ranks):
                ranks_seen_at = time.monotonic()
                if not self._ranks_started_at:
                    self._ranks_started_at, self._progress_at = time.time(), ranks_seen_at
                    self._run_tasks()  # at once: these ranks connect to those of the nodes that have started by now
            elif not ranks and not ranks_seen_at and self.monitor.has_failed_rank:
                ranks_seen_at = time.monotonic()  # the ranks lived for less than the time between two polls
            elif (
                not ranks
                and ranks_seen_at
                and time.monotonic() - ranks_seen_at > BARRIER_TIMEOUT_SECONDS
                and not self._ranks_finished
            ):
                self._ranks_finished = True
                log("all ranks of this node have ended: ending the launcher, which still waits")
                kill_descendants(KILL_TIMEOUT_SECONDS)
            previous_ranks = ranks

    def _run_tasks(self) -> None:
        failed = False
        for task in (*self.tasks, self._update_peer_progress, self._update_nodes):
            try:
                task()
            except Superseded as problem:
                self._abort_reason = self._abort_reason or str(problem)
            except Exception as problem:  # a record that cannot be written must not end the run
                failed = True
                message = f"{type(problem).__name__}: {problem}"
                if message not in self._logged_warnings:
                    self._logged_warnings.add(message)
                    log(f"warning: {message}; the run continues")
        self._records_unavailable = failed

    def _update_peer_progress(self) -> None:
        self._peer_progress = self.read_peer_progress()

    def _update_nodes(self) -> None:
        self._all_nodes_started = self.poll_nodes(self._ranks_started_at > 0)

    def _relay_output(self, process: "subprocess.Popen[bytes]") -> None:
        """Pass the output on until the launcher and its output have ended; check for signals and hangs meanwhile."""
        batches: queue.Queue[list[bytes] | None] = queue.Queue(maxsize=64)
        threading.Thread(target=pump_lines, args=(process.stdout, batches), daemon=True).start()
        self._progress_at = now = time.monotonic()
        peer_progress, output_ended, exited_at, output_at = self._peer_progress, False, 0.0, 0.0
        while True:
            # The launcher waits for a slow reader of the log, unless it ends: its last lines have the reason.
            log_is_blocked = is_blocked() and not exited_at and not self._stopping
            if log_is_blocked:
                time.sleep(OUTPUT_POLL_SECONDS)
            else:
                with contextlib.suppress(queue.Empty):
                    batch = batches.get(timeout=OUTPUT_POLL_SECONDS)
                    output_ended = output_ended or batch is None
                    self._read_batch(batch or [])
                    output_at = time.monotonic()
            previous, now = now, time.monotonic()
            if now - previous > FREEZE_SECONDS:
                self._progress_at += now - previous
                self._kill_at += now - previous
            if not exited_at and process.poll() is not None:
                exited_at, self._kill_at = now, min(self._kill_at, now + DRAIN_SECONDS)
            if exited_at and (output_ended or now - max(exited_at, output_at) > DRAIN_SECONDS):
                return
            is_waiting = exited_at or not (self._ranks_started_at or self._all_nodes_started)
            if (
                is_waiting
                or log_is_blocked
                or self._peer_progress != peer_progress
                or (self._records_unavailable and self.monitor.iteration is None)
            ):
                self._progress_at, peer_progress = now, self._peer_progress
            self._forward_signals(process)
            self._abort_if_necessary(process, now)

    def _read_batch(self, batch: list[bytes]) -> None:
        output = []
        for line in batch:
            text = line.decode(errors="replace")
            shows_progress, messages = self.monitor.read_line(text)
            output += [text, *(f"tokenmill: {message}\n" for message in messages)]
            if self._hanging and self.hang_record:
                self.hang_record.read_line(text)
            if shows_progress:
                self._progress_at, self._ranks_started_at = time.monotonic(), self._ranks_started_at or time.time()
        if output:
            write("".join(output))

    def _forward_signals(self, process: "subprocess.Popen[bytes]") -> None:
        """Let the ranks save and end after the first signal, and kill them after a second Ctrl-C."""
        received = self.signals.received
        if received and not self._stopping:
            self._stopping = True
            log(f"received {signal.Signals(received[0]).name}: the ranks save and end")
            threading.Thread(target=self._call_on_stop, daemon=True).start()
            if not signal_ranks(process.pid, signal.SIGTERM) or not self._ranks_started_at:
                process.terminate()
        # A second SIGTERM does not kill: engines repeat SIGTERM, and a save may be in progress.
        if received.count(signal.SIGINT) > 1:
            log("received SIGINT twice: killing the ranks")
            kill_descendants(KILL_TIMEOUT_SECONDS)
            received.remove(signal.SIGINT)

    def _call_on_stop(self) -> None:
        try:
            self.on_stop()
        except (OSError, TokenmillError) as problem:
            log(f"warning: cannot record the signal: {problem}; this attempt may count as a failure")

    def _abort_if_necessary(self, process: "subprocess.Popen[bytes]", now: float) -> None:
        """Kill a run that must not continue; let a run that hangs dump its stacks first."""
        self._abort_reason = self._abort_reason or self.monitor.abort_reason
        if now > self._kill_at or (self._abort_reason and self._kill_at == float("inf")):
            self._kill_at = now + KILL_TIMEOUT_SECONDS
            kill_descendants(KILL_TIMEOUT_SECONDS)
        timeout = self._hang_timeout()
        reporter = self.hang_record.announced_by if self.hang_record and self._ranks_started_at else None
        if self._abort_reason or (now - self._progress_at <= timeout and reporter is None):
            return
        self._abort_reason = f"the run hangs: no progress for {timeout / 60:.3g} minutes"
        if now - self._progress_at <= timeout:
            self._abort_reason = f"the run hangs: node {reporter} reported no progress"
        cause = self._abort_reason.removeprefix("the run hangs: ")
        if not self._ranks_started_at:
            self._abort_reason = (
                f"all nodes have started, but their ranks did not connect for {timeout / 60:.3g} minutes (check the "
                "network between them)"
            )
        self._kill_at = now + STACK_DUMP_SECONDS + self._delay_stacks_seconds
        self._hanging = True
        log(f"{cause}: printing the stacks of all ranks, then ending the run")
        threading.Thread(target=self._dump, args=(process.pid,), daemon=True).start()
        threading.Thread(target=self.on_hang, args=(self._abort_reason,), daemon=True).start()

    @property
    def _delay_stacks_seconds(self) -> float:
        """Return the maximum seconds before the ranks write their stacks."""
        if self.hang_record is None:
            return 0.0
        return STACKS_AFTER_SECONDS if self.hang_record.has_peers else DUMP_SECONDS

    def _dump(self, launcher: int) -> None:
        """Let the ranks write what they do: first the dumps, because the signal for the stacks ends a rank."""
        started_at = time.monotonic()
        if self.hang_record and self._ranks_started_at:
            self.hang_record.announce()
            self.hang_record.request_dumps()
            if self.hang_record.has_peers:
                time.sleep(max(0.0, started_at + HOLD_AFTER_SECONDS - time.monotonic()))
                stop_ranks(launcher)
                time.sleep(max(0.0, started_at + STACKS_AFTER_SECONDS - time.monotonic()))
        dump_stacks(launcher, STACK_DUMP_SECONDS)

    def _hang_timeout(self) -> float:
        if not self._ranks_started_at:
            return self.timeouts.rendezvous
        reports = self._all_progress()
        if any(report.saving for report in reports) or all(report.iteration is None for report in reports):
            return max(self.timeouts.start, self.timeouts.iteration)
        return self.timeouts.iteration + max(report.report_interval_seconds for report in reports)

    def _all_progress(self) -> list[TrainingProgress]:
        return [self.monitor.progress, *([self._peer_progress] if self._peer_progress else [])]
