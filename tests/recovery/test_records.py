"""Records that a worker has no memory for, and files of blank lines: refused, told of, stopped at once."""

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
"""Bytes of address space: enough for all that a small corpus takes, and a tenth of what a line of 200 MB does."""

LIMITED = 'ulimit -v "$1" && shift && exec "$@"'

# The same program, only with more to say.
TALKATIVE = "import tokenmill.flow.progress as p; p.LOG_SECONDS = 0.05; from tokenmill.cli import main; main()"


def preprocess(source: Path, output: Path, *options: Any) -> subprocess.Popen[str]:
    """Start the command in as much memory as a container might have."""
    command = ["preprocess", source, output, "--tokenizer", TOKENIZER, "--processes", 1, *options]
    return subprocess.Popen(
        ["/bin/sh", "-c", LIMITED, "sh", str(MEMORY >> 10), sys.executable, "-c", TALKATIVE, *map(str, command)],
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


def test_a_record_that_memory_is_too_small_for_is_refused_before_it_fills_it(long_line: Path, tmp_path: Path) -> None:
    run = preprocess(long_line, tmp_path / "out")
    said = run.communicate(timeout=HANG_TIMEOUT_SECONDS)[1]
    assert run.returncode == 2, said
    assert f"{long_line}, line 2: record of 200,0" in said and "--max-record-size" in said
    assert "memory limit 2930 MiB" in said and "Traceback" not in said
    run = preprocess(long_line, tmp_path / "out", "--on-bad-record", "quarantine")
    said = run.communicate(timeout=HANG_TIMEOUT_SECONDS)[1]
    assert run.returncode == 0, said
    (kept,) = (tmp_path / "out/rejected/a.jsonl").read_text().splitlines()
    assert json.loads(kept)["line"] == 2 and len(kept) < 1 << 17
    assert tokenmill("inspect", tmp_path / "out", "--document", "1").out.endswith("\nlast\n")


def test_a_file_of_blank_lines_is_told_of_and_can_be_stopped(tmp_path: Path) -> None:
    """The file is looked at while the plan is made, and read by the unit: both say that they go on."""
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(2048):
            file.write(b" \r\n" * 500_000)
        file.write(b'{"text": "a"}\n')
    for sign, words in (("still planning after", "stopped while planning"), ("units finished, ", "units left; run the same")):
        run = preprocess(tmp_path / "a.jsonl.gz", tmp_path / "out")
        assert run.stderr is not None
        told = next(line for line in run.stderr if sign in line)
        assert "memory limit" in told
        run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=HANG_TIMEOUT_SECONDS)[1]
        assert run.returncode == 143, said
        assert words in said or "stopped while waiting" in said
