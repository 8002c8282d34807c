"""Temporary files of killed commands: the next command that writes to the directory removes them, and only them."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.corpus import TOKENIZER, text
from support.hub_models import make_model
from support.pairs import random_sequences, write_pair
from support.runs import Forge, kill_at
from tokenmill.core.machine import process_name

OPEN = """
import os, signal, sys
import tokenmill.data

def kill(event, arguments):
    if event == "os.rename" and ".new-" in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[3:] == ["killed"]:
    sys.addaudithook(kill)
print(tokenmill.data.open(sys.argv[1], seq_length=16, index_cache=sys.argv[2]).digest(0, 10))
"""
"""A program that opens a dataset whose order is stored; it can be killed just before the order is complete."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> Path:
    """Return a dataset, an imported model, and a model."""
    root = tmp_path_factory.mktemp("inputs")
    (root / "texts").mkdir()
    (root / "texts" / "a.jsonl").write_bytes(text(0, 40))
    make_model(root / "model")
    forge.complete(["preprocess", root / "texts", root / "pairs", "--tokenizer", TOKENIZER, "--processes", 1])
    forge.complete(["checkpoint", "import", root / "model", root / "imported"])
    return root


def list_leftovers(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*.tmp") if path.name.startswith("."))


def recycle(path: Path) -> Path:
    """Rename a leftover as if this process had got the number of the killed process."""
    name = re.sub(r"-\d+\.(\d+)-", rf"-{os.getpid()}.\1-", path.name)
    assert name != path.name
    return path.rename(path.with_name(name))


Command = Callable[[Path, Path], list[Any]]
COMMANDS: dict[str, tuple[Command, str]] = {
    "report": (
        lambda inputs, out: ["report", inputs / "pairs", "--html", out / "report.html"],
        r"rename .*report\.html",
    ),
    "blend": (
        lambda inputs, out: ["blend", out / "blend.json", inputs / "pairs", "--split", "100,0,0"],
        r"rename .*blend\.json",
    ),
    "import": (lambda inputs, out: ["checkpoint", "import", inputs / "model", out], r"rename .*latest_checkpointed"),
    "import record": (lambda inputs, out: ["checkpoint", "import", inputs / "model", out], r"rename .*\.metadata"),
    "export": (lambda inputs, out: ["checkpoint", "export", inputs / "imported", out], r"rename .*README\.md"),
    "export record": (lambda inputs, out: ["checkpoint", "export", inputs / "imported", out], r"rename .*export\.json"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_next_command_removes_what_a_killed_one_left(forge: Forge, inputs: Path, tmp_path: Path, name: str) -> None:
    make, operation = COMMANDS[name]
    output = tmp_path / "out"
    output.mkdir()
    command = make(inputs, output)
    assert forge.run(command, kill_at(output, operation)).exit == -signal.SIGKILL
    (left,) = list_leftovers(output)
    left = recycle(left)
    live, user = (left.with_name(other) for other in (f".live.{process_name()}.tmp", ".user.tmp"))
    for path in (live, user):
        path.touch()
    forge.complete(command)
    assert list_leftovers(output) == sorted([live, user])


@pytest.mark.slow
def test_the_next_order_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    pair, cache = write_pair(tmp_path / "pair", random_sequences(1, 60_000, 4)), tmp_path / "cache"
    cache.mkdir(mode=0o700)

    def run(*arguments: Any) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", OPEN, *map(str, arguments)]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=600)

    assert run(pair, cache, "killed").returncode == -signal.SIGKILL
    (left,) = (cache / "orders").glob(".new-*")
    left = recycle(left)
    live = cache / "orders" / f".new-{process_name()}.tmp"
    live.mkdir()
    again = run(pair, cache)
    assert again.returncode == 0
    assert list((cache / "orders").glob(".new-*")) == [live]
    assert again.stdout == run(pair, tmp_path / "other").stdout
