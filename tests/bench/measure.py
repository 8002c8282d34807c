"""Run whole processes on one CPU and say what they took."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """One process: wall and CPU seconds with those of its children, and the peak of the largest of them."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    output: str


@dataclass(frozen=True)
class Spread:
    """Least, median and greatest of several runs."""

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
        """Return the three, rounded to what a clock can tell."""
        return {name: round(value, 4) for name, value in vars(self).items()}


def pin(cpu: int | None) -> int | None:
    """Keep this process, and so everything it starts, on one CPU; return which, None where that cannot be."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    chosen = max(os.sched_getaffinity(0)) if cpu is None else cpu
    os.sched_setaffinity(0, {chosen})
    return chosen


def run(command: Sequence[str], **environment: str) -> Run:
    """Run a command to its end; one that fails ends the benchmark with what it said.

    A child's peak begins with the memory of the process that started it (Linux), so the caller must be small.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=said, env=os.environ | environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            sys.exit(
                f"{' '.join(command)}\nended with {process.returncode}:\n{said.read().decode(errors='replace')[-4000:]}"
            )
        out.seek(0)
        unit = 1 if sys.platform == "darwin" else 1024
        return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit, out.read().decode())


def machine(cpu: int | None) -> dict[str, Any]:
    """Describe where the figures were measured, without naming the machine."""
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
        "pinned": cpu is not None,
        "memory_gb": round(int(memory) / 2**20, 1) if memory.isdecimal() else None,
        "os": release.get("PRETTY_NAME", platform.system()),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("tokenmill", *packages)},
    }
