"""Records larger than a worker's memory, and files of blank lines: refused, logged, and stopped without delay."""

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.commandline import tokenmill
from support.corpus import TOKENIZER
from support.runs import HANG_TIMEOUT_SECONDS, environment

MEMORY = 3_000_000 << 10
"""Bytes of address space: enough for a small corpus, and a tenth of what a line of 200 MB takes."""

LIMITED = 'ulimit -v "$1" && shift && exec "$@"'

# The same program, which logs its progress more often.
FREQUENT_LOGS = "import tokenmill.engine.progress as p; p.LOG_SECONDS = 0.05; from tokenmill.cli import main; main()"


def preprocess(source: Path, output: Path, *options: Any) -> subprocess.Popen[str]:
    """Start preprocess with the memory that a container might have."""
    command = ["preprocess", source, output, "--tokenizer", TOKENIZER, "--processes", 1, *options]
    return subprocess.Popen(
        ["/bin/sh", "-c", LIMITED, "sh", str(MEMORY >> 10), sys.executable, "-c", FREQUENT_LOGS, *map(str, command)],
        env=environment(),
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def long_line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of three records, the second of 200 MB."""
    path = tmp_path_factory.mktemp("long") / "a.jsonl"
    with path.open("w") as file:
        file.write('{"text": "first"}\n{"text": "')
        for _ in range(200):
            file.write("lorem ipsum " * 83_334)
        file.write('"}\n{"text": "last"}\n')
    return path


def test_a_record_too_large_for_memory_is_refused(long_line: Path, tmp_path: Path) -> None:
    run = preprocess(long_line, tmp_path / "out")
    log = run.communicate(timeout=HANG_TIMEOUT_SECONDS)[1]
    assert run.returncode == 2, log
    assert f"{long_line}, line 2: record of 200,0" in log and "--max-record-size" in log
    assert "memory limit 2930 MiB" in log and "Traceback" not in log
    run = preprocess(long_line, tmp_path / "out", "--on-bad-record", "quarantine")
    log = run.communicate(timeout=HANG_TIMEOUT_SECONDS)[1]
    assert run.returncode == 0, log
    (kept,) = (tmp_path / "out/rejected/a.jsonl").read_text().splitlines()
    assert json.loads(kept)["line"] == 2 and len(kept) < 1 << 17
    assert tokenmill("inspect", tmp_path / "out", "--document", "1").out.endswith("\nlast\n")


def test_a_file_of_blank_lines_is_logged_and_stoppable(tmp_path: Path) -> None:
    """Planning and the unit both read the file; both log their progress."""
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(2048):
            file.write(b" \r\n" * 500_000)
        file.write(b'{"text": "a"}\n')
    for sign, message in (
        ("still planning after", "stopped while planning"),
        ("units finished, ", "units left; run the same"),
    ):
        run = preprocess(tmp_path / "a.jsonl.gz", tmp_path / "out")
        assert run.stderr is not None
        progress = next(line for line in run.stderr if sign in line)
        assert "memory limit" in progress
        run.send_signal(signal.SIGTERM)
        log = run.communicate(timeout=HANG_TIMEOUT_SECONDS)[1]
        assert run.returncode == 143, log
        assert message in log or "stopped while waiting" in log
