"""Signals to the subprocesses that load a tokenizer or run the parity gate: they prove nothing about either."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.corpus import TOKENIZER, text
from support.runs import children, tokenmill

LOADER, GATE = "tokenize.resolve", "tokenize.gate"
SECONDS = 300.0
"""Timeout in seconds: planning takes seconds, and many of them on a busy machine."""


@pytest.fixture(autouse=True)
def without_cached_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", "")


def run(output: Path, command: str, do: Callable[[int, int], None], *more: str) -> tuple[int, str]:
    """Run preprocess, call `do(parent, child)` once its child `command` runs, and return exit code and output."""
    source = output.with_name("in.jsonl")
    source.write_bytes(text(0, 5))
    process = tokenmill("preprocess", source, output, "--tokenizer", TOKENIZER, "--processes", 1, *more)
    deadline = time.monotonic() + SECONDS
    while not (pids := children(process.pid, command)):
        assert process.poll() is None and time.monotonic() < deadline, "no such process was started"
        time.sleep(0.005)
    do(process.pid, pids[0])
    log, _ = process.communicate(timeout=SECONDS)
    return process.returncode, log


def verdict(output: Path) -> dict[str, object]:
    (path,) = output.glob(".tokenmill/preprocess/encoders/*/verdict-*.json")
    value: dict[str, object] = json.loads(path.read_bytes())
    return value


@pytest.mark.parametrize("command", [LOADER, GATE])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_child_is_transient(tmp_path: Path, command: str, number: signal.Signals) -> None:
    code, log = run(tmp_path / "out", command, lambda _, child: os.kill(child, number))
    assert "cannot be used" not in log and "no encoder gives" not in log
    if code == 0:  # the child left the signal to its parent, or was started again
        assert (verdict(tmp_path / "out")["encoder"], verdict(tmp_path / "out")["rejected"]) == ("fastokens", [])
    else:
        assert code == 1, log
        assert "was killed" in log
        assert not list(tmp_path.glob("out/.tokenmill/preprocess/encoders/*/verdict-*.json"))
    if (command, number) == (LOADER, signal.SIGKILL):
        assert code == 1


@pytest.mark.parametrize("command", [LOADER, GATE])
def test_sigterm_stops_a_run_while_its_children_work(tmp_path: Path, command: str) -> None:
    code, log = run(tmp_path / "out", command, lambda group, _: os.killpg(group, signal.SIGTERM))
    assert code == 143, log
    assert "stopped" in log
