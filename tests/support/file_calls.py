"""Count the calls to the file system that a command makes (see tests/file_calls/sitecustomize.py)."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

HOOK = Path(__file__).parents[1] / "file_calls"
READS = {"open", "stat", "lstat", "listdir", "scandir", "access", "readlink", "statvfs"}
"""Calls that a metadata server answers from memory; all others change its state."""


class Call(NamedTuple):
    """A call: its name, and the path below the observed directory."""

    name: str
    path: str

    @property
    def is_read(self) -> bool:
        """Whether the call changes nothing."""
        return self.name in READS


def read_log(log: Path) -> list[Call]:
    """Return the calls of a log."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [Call(*line.split("\t", 1)) for line in lines]


def start(
    below: Path, log: Path, *arguments: Any, program: tuple[str, ...] = ("-m", "tokenmill")
) -> subprocess.Popen[str]:
    """Start a command of tokenmill, or another Python program, whose calls below a directory are logged."""
    log.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(HOOK), os.environ.get("PYTHONPATH")]))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENMILL_", "JOB_COMPLETION"))}
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        env={**clean, "PYTHONPATH": path, "FILE_CALLS": str(log), "FILE_CALLS_BELOW": str(below)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_with_fault(
    fault: str, below: Path, *arguments: Any, match: str = "", environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a command whose calls below a directory have a fault (see the hook); return its exit code and output."""
    path = os.pathsep.join(filter(None, [str(HOOK), os.environ.get("PYTHONPATH")]))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENMILL_", "JOB_COMPLETION"))}
    process = subprocess.run(
        [sys.executable, "-m", "tokenmill", *map(str, arguments)],
        env={
            **clean,
            "PYTHONPATH": path,
            "FILE_CALLS_BELOW": str(below),
            "FILE_CALLS_FAULT": fault,
            "FILE_CALLS_MATCH": match,
            **(environment or {}),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    return process.returncode, process.stdout


def count(below: Path, *arguments: Any) -> list[Call]:
    """Run a command of tokenmill, and return its calls below a directory."""
    log = below.with_name(f"{below.name}.calls")
    process = start(below, log, *arguments)
    _, errors = process.communicate(timeout=3600)
    assert process.returncode == 0, errors
    return read_log(log)


def summarize(calls: list[Call]) -> dict[str, int]:
    """Return the number of calls by name and kind of path, most frequent first; names in a directory are one kind."""

    def kind(call: Call) -> str:
        names = call.path.split("/")
        index = names.index(".tokenmill") if ".tokenmill" in names else 0
        fixed = names[: index + 3] if index else names[:1]
        return f"{call.name} {'/'.join(fixed)}{'/*' if len(names) > len(fixed) else ''}"

    return dict(Counter(map(kind, calls)).most_common())
