"""Encoder processes that crash, hang or grow: the run goes on, and its bytes are the same."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recovery.conftest import TOKENIZER, text
from recovery.support import Forge, assert_same_tree, children, stop_at, tree
from tokenmill.errors import TransientError
from tokenmill.tokens import pool
from tokenmill.tokens.pool import EncoderProcesses
from tokenmill.tokens.serve import Segment, Task

LINES = text(0, 50)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return files of a block each."""
    source = tmp_path_factory.mktemp("inputs")
    for i in range(8):
        (source / f"{i:02d}.jsonl").write_bytes(text(i, 3000))
    return source


@pytest.fixture(scope="module")
def whole(inputs: Path, settled: Path, forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return what an undisturbed run makes."""
    output = tmp_path_factory.mktemp("whole") / "out"
    shutil.copytree(settled, output)
    forge.done(tokenise(inputs, output))
    return tree(output)


def tokenise(source: Path, output: Path, *more: Any) -> list[Any]:
    return ["preprocess", source, output, "--tokenizer", TOKENIZER, "--target-files", 1, "--processes", 1, *more]


def paused(forge: Forge, inputs: Path, output: Path, settled: Path, *more: Any) -> Any:
    """Start a run that stops before its fifth file, with blocks in its encoder process and on their way."""
    shutil.copytree(settled, output)
    run = forge.start(tokenise(inputs, output, *more), stop_at(inputs, "open .*/04.jsonl"))
    assert run.wait() == "stopped", run.said
    return run


def test_a_killed_encoder_is_replaced(
    forge: Forge, inputs: Path, settled: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    run = paused(forge, inputs, tmp_path / "out", settled)
    (encoder,) = children(run.pid, "tokens.serve")
    os.kill(encoder, signal.SIGKILL)
    os.kill(run.pid, signal.SIGCONT)
    assert run.wait() == 0, run.said
    assert "warning: the encoder fastokens was killed (SIGKILL); its records went to Hugging Face" in run.said
    assert_same_tree(tmp_path / "out", whole)
    assert not children(run.pid, "tokens.serve")


def test_an_encoder_that_hangs_is_replaced(
    forge: Forge, inputs: Path, settled: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    run = paused(forge, inputs, tmp_path / "out", settled, "--encoder-patience", 1)
    (encoder,) = children(run.pid, "tokens.serve")
    os.kill(encoder, signal.SIGSTOP)
    os.kill(run.pid, signal.SIGCONT)
    assert run.wait() == 0, run.said
    assert "warning: the encoder fastokens gave no answer for" in run.said
    assert_same_tree(tmp_path / "out", whole)


def test_encoders_end_with_a_run_that_is_killed(forge: Forge, inputs: Path, settled: Path, tmp_path: Path) -> None:
    run = paused(forge, inputs, tmp_path / "out", settled)
    encoders = children(run.pid, "tokens.serve")
    os.kill(run.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in encoders):
        assert time.monotonic() < deadline, "an encoder process outlives the run it belongs to"
        time.sleep(0.01)


def test_a_difference_stops_the_run(forge: Forge, settled: Path, tmp_path: Path) -> None:
    """gigatoken differs on characters of newer Unicode versions, from which its verdict guards it: here no more."""
    source, output = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text('{"text": "first"}\n' * 4000 + '{"text": "new \\ua7ce\'s letter"}\n')
    shutil.copytree(settled, output)
    command = ["preprocess", source, output, "--tokenizer", TOKENIZER, "--processes", 1, "--encoder", "gigatoken"]
    forge.done([*command, "--verify-encoder", "all"])
    exact = (output / "a_text_document.bin").read_bytes()
    (verdict,) = output.glob(".tokenmill/preprocess/encoders/*/verdict-gigatoken.json")
    verdict.write_text(json.dumps(json.loads(verdict.read_text()) | {"guard": ""}))

    def again(*more: Any) -> Any:
        (output / "a_text_document.bin").unlink()
        return forge.run([*command, *more])

    assert again().exit == 0
    assert (output / "a_text_document.bin").read_bytes() != exact, "else this test shows nothing"
    run = again("--verify-encoder", "all")
    assert run.exit == 2, run.said
    assert "a.jsonl: the encoder gigatoken differs from Hugging Face on" in run.said
    assert "\\ua7ce" in run.said and "--encoder hf" in run.said
    assert forge.run([*command, "--verify-encoder", "sample"]).exit == 0, "one text in 1,000 is not this one"
    (output / "a_text_document.bin").unlink()
    forge.done([*command[:-1], "hf", "--verify-encoder", "all"])
    assert (output / "a_text_document.bin").read_bytes() == exact


@pytest.fixture
def processes(settled: Path, request: pytest.FixtureRequest) -> Callable[..., EncoderProcesses]:
    """Return a way to start one encoder process."""
    (backend,) = settled.glob(".tokenmill/preprocess/encoders/*/backend.json")

    def start(warnings: list[str], backend: Path = backend) -> EncoderProcesses:
        task = Task("fastokens", str(backend), True, "", ("text",), 0, "start")
        found = EncoderProcesses(task, 1, patience=60.0, warn=warnings.append)
        request.addfinalizer(found.close)
        return found

    return start


def encode(processes: EncoderProcesses, meanwhile: Callable[[], None] = lambda: None) -> bytes:
    """Return the ids of a block, with something done while it is in work."""
    with processes.share() as share:
        slot = share.acquire()
        assert slot is not None
        slot.text.data[: len(LINES)] = LINES
        meanwhile()
        slot.submit([Segment(0, len(LINES), False, True)])
        (column,), (found,), refused = slot.result()
        assert (found.documents, refused) == (50, "")
        return bytes(slot.ids.data[column.start : column.start + column.size])


def test_an_encoder_process_loads_the_encoder_and_no_numpy(processes: Callable[..., EncoderProcesses]) -> None:
    encode(processes([]))
    (encoder,) = children(os.getpid(), "tokens.serve")
    loaded = {Path(line.split()[-1]).parent.name for line in Path(f"/proc/{encoder}/maps").read_text().splitlines()}
    assert "fastokens" in loaded
    assert not {name for name in loaded if name.startswith(("numpy", "tokenizers"))}


def test_an_encoder_that_always_crashes_gives_way_to_hugging_face(processes: Callable[..., EncoderProcesses]) -> None:
    warnings: list[str] = []
    running = processes(warnings)
    expected = encode(running)
    exact: set[int] = set()

    def kill() -> None:
        (encoder,) = set(children(os.getpid(), "tokens.serve")) - exact
        os.kill(encoder, signal.SIGKILL)
        while _state(encoder) != "Z":
            time.sleep(0.001)

    for _ in range(pool.MAX_FAILURES):
        before = set(children(os.getpid(), "tokens.serve"))
        assert encode(running, kill) == expected
        exact = exact or {min(set(children(os.getpid(), "tokens.serve")) - before)}  # Hugging Face's came first
    assert len(warnings) == pool.MAX_FAILURES
    assert "Hugging Face does all that is left" in warnings[-1]
    assert encode(running) == expected


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_when_hugging_face_fails_too_a_retry_is_asked_for(
    processes: Callable[..., EncoderProcesses], settled: Path, tmp_path: Path
) -> None:
    (backend,) = settled.glob(".tokenmill/preprocess/encoders/*/backend.json")
    copy = tmp_path / "backend.json"
    shutil.copy(backend, copy)
    running = processes([], copy)
    encode(running)

    def break_both() -> None:
        copy.write_text("{}")
        os.kill(children(os.getpid(), "tokens.serve")[0], signal.SIGKILL)

    with pytest.raises(TransientError, match=r"fastokens was killed \(SIGKILL\), and Hugging Face did no better"):
        encode(running, break_both)


def test_an_encoder_that_grows_is_replaced_between_two_blocks(
    processes: Callable[..., EncoderProcesses], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    running = processes(warnings)
    expected = encode(running)
    before = children(os.getpid(), "tokens.serve")
    monkeypatch.setattr(pool, "MAX_GROWTH", -(1 << 40))
    assert [encode(running) for _ in range(3)] == [expected] * 3
    assert set(before).isdisjoint(children(os.getpid(), "tokens.serve"))
    assert not warnings
