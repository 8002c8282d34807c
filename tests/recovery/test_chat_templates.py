"""Hostile chat templates through the command line: the operating system ends what computes or fills the memory."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.chat import conversations, lines, make_tokenizer
from support.runs import children, tokenmill
from tokenmill.stages.chat.template import builtin_source

SECONDS = 300.0
ATTACKED = 60
"""The row with which a template does what it hides from the trial; the trial has the first 25 rows."""

NUMBERS = (
    "{% set ns = namespace(s='f' * 3000000) %}{% set y = ((ns.s * 20) | int(0, 16)) // ((ns.s * 10) | int(0, 16)) %}"
)
"""One operation that takes an hour and that no signal handler of Python interrupts."""

ATTACKS = {
    "numbers": (NUMBERS, "used more than 5 seconds of CPU time"),
    "memory": (
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s * 2 %}{% endfor %}",
        "384 MiB",
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "chatml")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write two files; one row of the first one has the text for which the templates of these tests wait."""
    rows = conversations(1, 90)
    rows[ATTACKED]["messages"][0]["content"] = "now"
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(lines(rows))
    (tmp_path / "in/b.jsonl").write_bytes(lines(conversations(2, 30)))
    return tmp_path / "in"


def start(source: Path, tokenizer: Path, template: str) -> "subprocess.Popen[str]":
    path = source.with_name("t.jinja")
    path.write_text(template)
    output = source.with_name("out")
    return tokenmill("chat", source, output, "--tokenizer", tokenizer, "--chat-template", path, "--processes", 1)


def attack_later(attack: str) -> str:
    return "{% if messages and messages[0].content == 'now' %}" + attack + "{% endif %}" + builtin_source("chatml")


def wait_until(process: "subprocess.Popen[str]", condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "the event did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_on_one_row_ends_the_command(source: Path, tokenizer: Path, attack: str) -> None:
    text, reason = ATTACKS[attack]
    process = start(source, tokenizer, attack_later(text))
    log, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2, log
    assert f"a.jsonl, line {ATTACKED + 1}: " in log
    assert "t.jinja" in log and reason in log and "--chat-template" in log
    assert sorted(path.name for path in source.parent.iterdir()) == ["in", "out", "t.jinja"]


def test_an_attack_on_the_trial_ends_the_command(source: Path, tokenizer: Path) -> None:
    process = start(source, tokenizer, NUMBERS + builtin_source("chatml"))
    log, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2, log
    assert "t.jinja used more than 5 seconds of CPU time" in log and "--chat-template" in log


def test_sigterm_ends_a_command_whose_trial_computes(source: Path, tokenizer: Path) -> None:
    process = start(source, tokenizer, NUMBERS + builtin_source("chatml"))
    wait_until(process, lambda: children(process.pid, "chat.trial"))
    os.killpg(process.pid, signal.SIGTERM)
    log, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 143, log


def test_sigterm_ends_a_command_whose_encoder_process_computes(source: Path, tokenizer: Path) -> None:
    process = start(source, tokenizer, attack_later(NUMBERS))
    wait_until(process, lambda: any(used_seconds(pid) > 2 for pid in children(process.pid, "encoder_process")))
    os.killpg(process.pid, signal.SIGTERM)
    log, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 143, log
    assert "CPU time" not in log


def used_seconds(pid: int) -> float:
    """Return the CPU time of a process (proc(5): utime and stime of /proc/PID/stat)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
