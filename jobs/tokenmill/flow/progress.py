"""How far a run is, for whoever watches: a bar on a terminal, a line an interval in a log, JSON for machines.

Progress goes to standard error; standard output is for results.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from tokenmill.machine import memory_limit, memory_words
from tokenmill.redaction import redact, redacted

LOG_SECONDS = 30.0
"""Interval of the lines in a pod's log."""

AT_WORK_SECONDS = 1.0
"""Least interval of the lines that say which units are at work."""

NAMED = 8
"""How many units a line names."""


def size(count: float) -> str:
    """Word a number of bytes for a person, in decimal units as storage is sold."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """Word a number of seconds for a person."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Reporter:
    """Where messages and progress go: `json_lines` for machines, else words; both on standard error."""

    def __init__(self, *, json_lines: bool = False) -> None:
        """Choose the form once, for all stages of a command."""
        self.json_lines = json_lines
        self._lock = threading.Lock()

    def say(self, text: str, **event: Any) -> None:
        """Report something that a person reads once; `event` is its machine form."""
        self._write(text, {"event": "message", "text": text, **event})

    def warn(self, text: str) -> None:
        """Report something that a person should look at."""
        self._write(f"warning: {text}", {"event": "warning", "text": text})

    def _write(self, text: str, event: dict[str, Any]) -> None:
        line = json.dumps(redacted(event)) if self.json_lines else redact(text)
        with self._lock:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Say at intervals that something goes on whose progress nobody can measure, and for how long it has."""
        started, done = time.monotonic(), threading.Event()

        def repeat() -> None:
            while not done.wait(LOG_SECONDS):
                self.say(f"{text} after {duration(time.monotonic() - started)}; {memory_words()}")

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def progress(self, stage: str, total: int, units: int, read: Callable[[], tuple[int, int]]) -> "ProgressDisplay":
        """Show `read()` -> (bytes, units) done of `total` and `units` until the context ends."""
        return ProgressDisplay(self, stage, total, units, read)


class ProgressDisplay:
    """A thread that looks at counters at intervals and shows them."""

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
        self._at_work: list[tuple[str, int]] = []
        self._said: list[tuple[str, int]] = []
        self._said_at = -AT_WORK_SECONDS
        self._bar: Any = None
        self._thread: threading.Thread | None = None

    @property
    def _terminal(self) -> bool:
        return sys.stderr.isatty() and not self._reporter.json_lines

    def at_work(self, units: list[tuple[str, int]]) -> None:
        """Say which units, of which weight, are at work from now on: of a pod killed for memory only a log is left."""
        with self._lock:
            self._at_work = sorted(units)
        if not self._terminal:
            self._say_at_work()

    def _say_at_work(self) -> None:
        """Say it when it changed, but not too often: the thread says later what still holds then."""
        with self._lock:
            now = time.monotonic()
            if self._at_work in ([], self._said) or now - self._said_at < AT_WORK_SECONDS:
                return
            self._said, self._said_at = self._at_work, now
            event = {"event": "at_work", "stage": self._stage, **self._facts()}
            self._reporter._write(f"{self._stage}: {self._words()}", event)

    def _words(self) -> str:
        named = ", ".join(f"{unit} ({size(weight)})" for unit, weight in self._at_work[:NAMED])
        more = f" and {len(self._at_work) - NAMED} more" if len(self._at_work) > NAMED else ""
        return f"at work: {named}{more}; {memory_words()}"

    def _facts(self) -> dict[str, Any]:
        return {"at_work": [unit for unit, _ in self._at_work], "memory_limit": memory_limit()}

    def __enter__(self) -> "ProgressDisplay":
        """Begin to show."""
        self._thread = threading.Thread(target=self._show_bar if self._terminal else self._show_lines, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop showing."""
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
            console=Console(stderr=True),
            transient=True,
        )
        with bar:
            task = bar.add_task(self._stage, total=self._total, completed=self._first, units="")
            while True:
                finished = self._done.wait(0.2)
                done, units = self._read()
                bar.update(task, completed=done, units=f"{units}/{self._units}")
                if finished:
                    return

    def _show_lines(self) -> None:
        due = self._started + LOG_SECONDS
        while not self._done.wait(AT_WORK_SECONDS / 4):
            self._say_at_work()
            if time.monotonic() >= due:
                due += LOG_SECONDS
                self._say_progress()

    def _say_progress(self) -> None:
        done, units = self._read()
        rate = (done - self._first) / (time.monotonic() - self._started)
        left = (self._total - done) / rate if rate > 0 else None
        with self._lock:
            text = (
                f"{self._stage}: {units}/{self._units} units, {size(done)} of {size(self._total)}, {size(rate)}/s, "
                f"{'about ' + duration(left) + ' left' if left is not None else 'waiting'}; {self._words()}"
            )
            event = {
                "event": "progress",
                "stage": self._stage,
                "units_done": units,
                "units": self._units,
                "bytes_done": done,
                "bytes": self._total,
                "bytes_per_second": round(rate),
                "seconds_left": None if left is None else round(left),
                **self._facts(),
            }
        self._reporter._write(text, event)
