"""Complete processes and their costs: wall and CPU time, memory, and bytes written."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MB = 1_000_000


class Failed(Exception):
    """A section cannot be measured, or its sides did unequal work."""


@dataclass(frozen=True)
class Run:
    """The costs of a command: wall and CPU seconds, the peak of its largest process, the bytes written to disk.

    Only children that their parents waited for count. If the processes were watched, `peak_bytes` includes all of
    them, and `first_peak_bytes` is the peak of the first process alone.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    written_bytes: int
    output: str
    first_peak_bytes: int = 0

    @property
    def result(self) -> dict[str, Any]:
        """Return the last line of output as JSON."""
        value: dict[str, Any] = json.loads(self.output.splitlines()[-1])
        return value


@dataclass(frozen=True)
class Spread:
    """Least, median and greatest value of several runs."""

    least: float
    median: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise at least one value."""
        return cls(min(values), statistics.median(values), max(values))

    def text(self, digits: int) -> str:
        """Format as `median (least to greatest)`."""
        return f"{self.median:,.{digits}f} ({self.least:,.{digits}f} to {self.greatest:,.{digits}f})"

    def to_json(self) -> dict[str, float]:
        """Return the three values, rounded to the precision of a clock."""
        return {name: round(value, 4) for name, value in vars(self).items()}


def run(
    command: Sequence[str | Path], *, cpus: Sequence[int] = (), watch: bool = False, env: Mapping[str, str] = {}
) -> Run:
    """Run a command to its end on these CPUs (default: all CPUs); raise Failed with its output."""
    return together([command], cpus=cpus, watch=watch, env=env)[0]


def together(
    commands: Sequence[Sequence[str | Path]],
    *,
    cpus: Sequence[int] = (),
    watch: bool = False,
    env: Mapping[str, str] = {},
) -> list[Run]:
    """Start commands at once and wait for all; each `seconds` ends no later than the last command.

    On Linux a child's peak starts with the memory of its parent, so the caller must stay small.
    """
    with contextlib.ExitStack() as files:
        started = time.perf_counter()
        processes = []
        peaks: dict[int, int] = {}
        stopped = threading.Event()
        try:
            for command in commands:
                stdout, stderr = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
                with _pinned(cpus):
                    process = subprocess.Popen(
                        command, stdout=stdout, stderr=stderr, env=os.environ | env, start_new_session=True
                    )
                processes.append((process, stdout, stderr))
            if watch:
                sessions = {process.pid for process, _, _ in processes}
                watcher = threading.Thread(target=_watch, args=(sessions, peaks, stopped))
                watcher.start()
                files.callback(watcher.join)
                files.callback(stopped.set)
            ended = []
            for process, _, _ in processes:
                _, status, usage = os.wait4(process.pid, 0)
                ended.append((time.perf_counter() - started, status, usage))
                process.returncode = os.waitstatus_to_exitcode(status)
        except BaseException as error:
            for process, _, _ in processes:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if isinstance(error, FileNotFoundError):
                raise Failed(f"{error.filename} does not exist") from error
            raise
        runs = []
        for command, (process, stdout, stderr), (seconds, _, usage) in zip(commands, processes, ended, strict=True):
            if process.returncode:
                stderr.seek(0)
                text = stderr.read().decode(errors="replace")[-4000:]
                raise Failed(f"{' '.join(map(str, command))}\nended with {process.returncode}:\n{text}")
            stdout.seek(0)
            peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            runs.append(
                Run(
                    seconds=seconds,
                    cpu_seconds=usage.ru_utime + usage.ru_stime,
                    peak_bytes=max([peak, *peaks.values()]),
                    written_bytes=usage.ru_oublock * 512,
                    output=stdout.read().decode(),
                    first_peak_bytes=peaks.get(process.pid, 0),
                )
            )
        return runs


@contextlib.contextmanager
def _pinned(cpus: Sequence[int]) -> Iterator[None]:
    """Move this thread to some CPUs, which its subprocesses inherit, and back."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _watch(sessions: set[int], peaks: dict[int, int], stopped: threading.Event) -> None:
    """Record the peak of every process of the sessions: wait4 omits processes without a waiting parent."""
    while not stopped.wait(0.1):
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, StopIteration):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) in sessions:
                    lines = (entry / "status").read_text().splitlines()
                    peak = next(line for line in lines if line.startswith("VmHWM"))
                    peaks[int(entry.name)] = int(peak.split()[1]) * 1024


def in_rounds(rounds: int, sides: Mapping[str, Callable[[], Run]], log: Callable[[str], None]) -> dict[str, list[Run]]:
    """Run each side once per round, and reverse the order of the sides in every second round."""
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            os.sync()  # writes of the side before must not count for this one
            runs[name].append(sides[name]())
            log(f"  round {number + 1} of {rounds}: {name}: {runs[name][-1].seconds:.2f} s")
    return runs


def machine() -> dict[str, Any]:
    """Describe the machine without its name."""
    import platform
    from importlib.metadata import version

    def field(path: str, name: str) -> str:
        try:
            with open(path) as file:
                return next(line.partition(":")[2].strip() for line in file if line.startswith(name))
        except (OSError, StopIteration):
            return "unknown"

    memory = field("/proc/meminfo", "MemTotal").removesuffix(" kB")
    release = platform.freedesktop_os_release() if hasattr(platform, "freedesktop_os_release") else {}
    packages = ("fastokens", "gigatoken", "tokenizers", "transformers", "orjson", "zstandard", "numpy", "xxhash")
    return {
        "cpu": field("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory_gb": round(int(memory) / 2**20, 1) if memory.isdecimal() else None,
        "os": release.get("PRETTY_NAME", platform.system()),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }
