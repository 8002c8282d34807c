"""Input files of the user that change while a stage reads them."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.corpus import TOKENIZER, text
from support.runs import Forge, stop_at

COMMANDS: dict[str, list[Any]] = {
    "extract": ["--processes", 1],
    "concatenate": ["--processes", 1, "--target-files", 1],
    "preprocess": ["--processes", 1, "--target-files", 1, "--tokenizer", TOKENIZER],
}


def rewritten(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def replaced(path: Path, content: bytes) -> None:
    """Replace the file with another one of the same size and time."""
    before = path.stat()
    other = path.with_name(".new")
    other.write_bytes(content)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("change", [rewritten, replaced])
@pytest.mark.parametrize("stage", COMMANDS)
def test_a_change_of_the_same_size_during_reading_is_detected(
    stage: str, change: Callable[[Path, bytes], None], forge: Forge, prepared: Path, tmp_path: Path
) -> None:
    """The run pauses just before it opens the second file for reading; it has checked that file already."""
    source, opened = tmp_path / "in", tmp_path / "opened"
    source.mkdir()
    for name in ("a", "b"):
        (source / f"{name}.jsonl").write_bytes(text(1, 50))

    def command(output: Path) -> list[Any]:
        if stage == "preprocess":
            shutil.copytree(prepared, output)
        return [stage, source, output, *COMMANDS[stage]]

    forge.complete(command(tmp_path / "out"), watch=str(source), opened=str(opened))
    last = opened.read_text().split().count(str(source / "b.jsonl"))
    run = forge.start(command(tmp_path / "again"), stop_at(source, r"^open .*/b\.jsonl", last))
    assert run.wait() == "stopped"
    change(source / "b.jsonl", text(1, 50).swapcase())
    os.kill(run.pid, signal.SIGCONT)
    assert run.wait() == 1 and f"{source / 'b.jsonl'}: it changed while it was read" in run.output, run.output
    assert "another program writes to it" in run.output
    assert not (tmp_path / "again/.tokenmill" / stage / "manifest.json").exists()
