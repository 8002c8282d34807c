"""Messages and progress of a command: a bar on a terminal, a line every 30 s in a log, JSON lines with `--json`.

All of it goes to standard error. Standard output is for results.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from tokenmill.core.json_lines import JsonEvent, format_json
from tokenmill.core.machine import describe_memory, memory_limit
from tokenmill.core.printing import format_bytes, format_duration, printable_message
from tokenmill.core.redaction import redact, redact_json
from tokenmill.engine.faults import read_faults

LOG_SECONDS = 30.0
"""Interval of the progress lines in the log of a pod."""

RUNNING_LOG_SECONDS = 1.0
"""Minimum interval of the events with the running units."""

LARGE_SHARE = 0.001
"""A unit with this share of the memory limit is named when it starts, if it is the largest one so far.

If the kernel kills a pod for its memory, only the log remains, and the last line must name the unit."""


class MessageEvent(JsonEvent, frozen=True, tag="message"):
    """A message about the work."""

    text: str


class StartEvent(MessageEvent, frozen=True, tag="message"):
    """The message that a stage starts; `units` is the number of units of this worker."""

    stage: str
    plan: str
    units: int
    done_before: int


class WarningEvent(JsonEvent, frozen=True, tag="warning"):
    """A message about a problem that the user should check."""

    text: str


class RunningEvent(JsonEvent, frozen=True, tag="at_work"):
    """The ids of the running units, and the memory limit in bytes."""

    stage: str
    at_work: list[str]
    memory_limit: int | None


class ProgressEvent(JsonEvent, frozen=True, tag="progress", kw_only=True):
    """The progress of a stage; `requests_repeated` has the number of repeated requests by fault."""

    stage: str
    units_done: int
    units: int
    bytes_done: int
    bytes: int
    bytes_per_second: int
    seconds_left: int | None
    requests_repeated: dict[str, int]
    at_work: list[str]
    memory_limit: int | None


class Reporter:
    """The destination of messages and progress; `json_lines` selects JSON for programs instead of text."""

    def __init__(self, *, json_lines: bool = False) -> None:
        """Select the format, which is the same for all stages of a command."""
        self.json_lines = json_lines
        self._lock = threading.Lock()

    def log(self, text: str) -> None:
        """Write a message."""
        self.write(text, MessageEvent(text))

    def detail(self, text: str) -> None:
        """Write a message that only programs and developers need: with --json."""
        if self.json_lines:
            self.log(text)

    def warn(self, text: str) -> None:
        """Write a message about a problem that the user should check."""
        self.write(f"warning: {text}", WarningEvent(text))

    def write(self, text: str, event: JsonEvent) -> None:
        """Write the text, or with --json the event."""
        line = format_json(event, redact_json) if self.json_lines else printable_message(redact(text))
        with self._lock:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Log at intervals that work without measurable progress continues, and for how long."""
        started, done = time.monotonic(), threading.Event()

        def repeat() -> None:
            while not done.wait(LOG_SECONDS):
                self.log(f"{text} after {format_duration(time.monotonic() - started)}{_describe_limit()}")

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def progress(self, stage: str, total: int, units: int, read: Callable[[], tuple[int, int]]) -> "ProgressDisplay":
        """Show the progress until the context ends: `read()` returns (bytes, units) done of `total` and `units`."""
        return ProgressDisplay(self, stage, total, units, read)


class ProgressDisplay:
    """A thread that reads counters at intervals and shows them."""

    def __init__(
        self, reporter: Reporter, stage: str, total: int, units: int, read: Callable[[], tuple[int, int]]
    ) -> None:
        """See Reporter.progress."""
        self._reporter = reporter
        self._stage, self._total, self._units, self._read = stage, total, units, read
        self._done = threading.Event()
        self._started = time.monotonic()
        self._first = read()[0]
        self._lock = threading.Lock()
        self._running: list[tuple[str, int]] = []
        self._logged: list[tuple[str, int]] = []
        self._logged_time = -RUNNING_LOG_SECONDS
        self._largest = 0
        self._bar: Any = None
        self._thread: threading.Thread | None = None

    @property
    def _terminal(self) -> bool:
        return sys.stderr.isatty() and not self._reporter.json_lines

    def set_running(self, units: list[tuple[str, int]]) -> None:
        """Set the running units (id and weight); name a unit that may need much of the memory."""
        with self._lock:
            self._running = sorted(units)
        if self._reporter.json_lines:
            self._log_running()
        elif units and not self._terminal:
            self._name_large_unit(*max(units, key=lambda unit: unit[1]))

    def _log_running(self) -> None:
        """Write the running units after a change, but not too often; the thread writes a later change that persists."""
        with self._lock:
            now = time.monotonic()
            if self._running in ([], self._logged) or now - self._logged_time < RUNNING_LOG_SECONDS:
                return
            self._logged, self._logged_time = self._running, now
            self._reporter.write("", RunningEvent(self._stage, [unit for unit, _ in self._running], memory_limit()))

    def _name_large_unit(self, unit: str, weight: int) -> None:
        limit = memory_limit()
        if limit is not None and weight >= limit * LARGE_SHARE and weight > self._largest:
            self._largest = weight
            self._reporter.log(f"{self._stage}: started {unit} ({format_bytes(weight)}){_describe_limit()}")

    def __enter__(self) -> "ProgressDisplay":
        """Start the thread."""
        self._thread = threading.Thread(target=self._show_bar if self._terminal else self._show_lines, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the thread."""
        self._done.set()
        if self._thread:
            self._thread.join()

    def _show_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        bar = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            TextColumn("{task.fields[units]}"),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
            console=Console(stderr=True),
            transient=True,
        )
        with bar:
            task = bar.add_task(self._stage, total=self._total, completed=self._first, units="", state="")
            while True:
                finished = self._done.wait(0.2)
                done, units = self._read()
                bar.update(task, completed=done, units=f"{units}/{self._units}", state=self._describe_state())
                if finished:
                    return

    def _describe_state(self) -> str:
        """Describe in a few words how many units run, and how many requests were repeated."""
        with self._lock:
            running = len(self._running)
        return ", ".join(part for part in (f"{running} running" if running else "", _describe_repeated()) if part)

    def _show_lines(self) -> None:
        due = self._started + LOG_SECONDS
        while not self._done.wait(RUNNING_LOG_SECONDS / 4):
            if self._reporter.json_lines:
                self._log_running()
            if time.monotonic() >= due:
                due += LOG_SECONDS
                self._log_progress()

    def _log_progress(self) -> None:
        done, units = self._read()
        rate = (done - self._first) / (time.monotonic() - self._started)
        left = (self._total - done) / rate if rate > 0 else None
        with self._lock:
            largest = max(self._running, key=lambda unit: unit[1], default=None)
            running = f", the largest {largest[0]} ({format_bytes(largest[1])})" if largest else ""
            parts = (
                f"{self._stage}: {units} of {self._units} units finished, {format_bytes(done)} of "
                f"{format_bytes(self._total)}, {format_bytes(rate)}/s, "
                f"{'about ' + format_duration(left) + ' left' if left is not None else 'no progress yet'}",
                _describe_repeated(),
                f"{len(self._running)} running{running}",
            )
            text = "; ".join(filter(None, parts)) + _describe_limit()
            event = ProgressEvent(
                stage=self._stage,
                units_done=units,
                units=self._units,
                bytes_done=done,
                bytes=self._total,
                bytes_per_second=round(rate),
                seconds_left=None if left is None else round(left),
                requests_repeated={fault: number for fault, number in read_faults().items() if number},
                at_work=[unit for unit, _ in self._running],
                memory_limit=memory_limit(),
            )
        self._reporter.write(text, event)


def _describe_limit() -> str:
    """Return the memory limit after a semicolon, or an empty text without a limit."""
    return "" if memory_limit() is None else f"; {describe_memory()}"


def _describe_repeated() -> str:
    """Return the number of repeated requests with the most frequent fault, or an empty text without any."""
    faults = read_faults()
    if not (number := sum(faults.values())):
        return ""
    most = max(faults, key=lambda fault: faults[fault]).replace("_", " ")
    return f"repeated requests: {number}, most often {most}"
