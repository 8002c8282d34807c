"""Running units in the log: the last line of a pod that was killed for its memory use names them."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.hub import Fault, Hub
from support.runs import environment
from tokenmill.engine.progress import Reporter


def read_lines(capfd: pytest.CaptureFixture[str], seconds: float = 0.0) -> list[str]:
    """Return the lines so far; wait up to `seconds` for the first line."""
    lines: list[str] = []
    deadline = time.monotonic() + seconds
    while not lines:
        lines = capfd.readouterr().err.splitlines()
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return lines


def test_a_unit_that_may_need_much_memory_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if it is the largest one so far, and only under a memory limit."""
    with Reporter().progress("preprocess", 10, 5, lambda: (0, 0)) as progress:
        progress.set_running([("a", 1_200_000_000)])
        assert read_lines(capfd) == []
        monkeypatch.setattr("tokenmill.engine.progress.memory_limit", lambda: 1 << 30)
        monkeypatch.setattr("tokenmill.core.machine.memory_limit", lambda: 1 << 30)
        for units in ([("a", 2_000_000)], [("b", 1)], [("c", 1_900_000)], [("c", 1_900_000), ("d", 3_000_000)]):
            progress.set_running(units)
        progress.set_running([])
    assert read_lines(capfd) == [
        "preprocess: started a (2.00 MB); memory limit 1024 MiB",
        "preprocess: started d (3.00 MB); memory limit 1024 MiB",
    ]


def test_json_lines_log_an_event(capfd: pytest.CaptureFixture[str]) -> None:
    with Reporter(json_lines=True).progress("extract", 10, 5, lambda: (0, 0)) as progress:
        progress.set_running([("a", 1)])
    [line] = read_lines(capfd)
    assert json.loads(line).items() >= {"event": "at_work", "stage": "extract", "at_work": ["a"]}.items()
    assert "memory_limit" in json.loads(line)


def test_a_progress_line_names_the_largest_running_unit(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.engine.progress.LOG_SECONDS", 0.0)
    with Reporter().progress("extract", 10, 5, lambda: (0, 0)) as progress:
        progress.set_running([("a", 1), ("b", 2000)])
        lines = (line for _ in range(100) for line in read_lines(capfd, 1.0) if "0 of 5 units finished" in line)
        line = next(lines)
    assert "; 2 running, the largest b (2.00 kB)" in line


@pytest.mark.slow
def test_a_terminal_shows_running_units_and_repeated_requests(tmp_path: Path) -> None:
    with Hub() as hub:
        hub.add_dataset("org/corpus", {f"{n}.jsonl": b'{"text": "a"}\n' * 5000 for n in range(3)})
        hub.faults.add(Fault("429", "0.jsonl", retry="seconds", seconds=0), Fault("stall", "2.jsonl", seconds=300))
        terminal, child = pty.openpty()
        command = [sys.executable, "-m", "tokenmill", "download", "hf://datasets/org/corpus", tmp_path / "out"]
        variables = environment() | {"TERM": "xterm", "COLUMNS": "160", "HF_ENDPOINT": hub.endpoint}
        process = subprocess.Popen(command, env=variables, stdout=child, stderr=child)
        os.close(child)
        text = ""
        try:
            while not re.search(r"2/3.* 1 running, repeated requests: 1, most often throttled", text):
                assert len(text) < 1_000_000, text[-2000:]
                text += os.read(terminal, 65536).decode(errors="replace")
        finally:
            process.kill()
            process.wait()
            os.close(terminal)
