"""pack under SIGKILL and SIGTERM, with any number of workers and processes, and replaced: the same bytes.

blend.json has absolute paths, so all runs of this module use the same output directory.
"""

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from support.chat import conversations, lines, make_tokenizer
from support.corpus import text
from support.runs import (
    Forge,
    assert_kept,
    assert_same_tree,
    kill_at,
    receipts,
    tokenmill,
    tree,
    wait_for_exit,
    wait_for_group_end,
)
from support.sweep import KILLS, SEED, drawn_counts

OPTIONS = ("--pack-size", 1024, "--shards", 7, "--valid-shards", 2, "--epochs", 2, "--cp", 2, "--rows-multiple-of", 3)
PACK = Path(".tokenmill/pack")


@pytest.fixture(scope="module")
def chatted(tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> Path:
    """Return a finished chat of three files, which no test changes."""
    root = tmp_path_factory.mktemp("chat")
    (root / "in").mkdir()
    for number, rows in enumerate((120, 40, 80)):
        (root / "in" / f"{number}.jsonl").write_bytes(lines(conversations(number, rows)))
    tokenizer = make_tokenizer(root / "tokenizer")
    options = ["--tokenizer", tokenizer, "--chat-template", "chatml", "--processes", 1]
    forge.complete(["chat", root / "in", root / "out", *options])
    return root / "out"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed") / "out"


@pytest.fixture
def output(place: Path) -> Path:
    """Return the path of the output, without an output of another test."""
    shutil.rmtree(place, ignore_errors=True)
    return place


@pytest.fixture(scope="module")
def expected(place: Path, forge: Forge, chatted: Path) -> dict[str, bytes]:
    """Return the tree of a run that is not killed."""
    shutil.rmtree(place, ignore_errors=True)
    forge.complete(["pack", chatted, place, *OPTIONS, "--processes", 1])
    assert len(list(place.glob("*/shard_*.parquet"))) == 12
    return tree(place)


def test_kills_and_resumes(forge: Forge, chatted: Path, expected: dict[str, bytes], output: Path) -> None:
    dice, kills = random.Random(SEED), 0
    command = ["pack", chatted, output, *OPTIONS]
    while kills < KILLS:
        shutil.rmtree(output, ignore_errors=True)
        for _ in range(dice.randint(1, 6)):
            before = receipts(output, "pack")
            workers = dice.choice((1, 1, 2, 3))
            runs = []
            for index in range(workers):
                share = ["--worker-index", index, "--workers", workers, "--processes", dice.choice((1, 1, 1, 2))]
                runs.append(forge.start([*command, *share], kill_at(output, count=dice.randint(1, 300))))
            for run in runs:
                assert run.wait() in (0, -signal.SIGKILL), run.output
                assert wait_for_group_end(run.pid), "child processes outlive their parent"
                kills += run.exit != 0
            assert_kept(before, receipts(output, "pack"))
        forge.complete([*command, "--processes", dice.choice((1, 2))])
        assert_same_tree(output, expected, f"after {kills} kills")


def test_a_kill_before_every_operation(forge: Forge, chatted: Path, output: Path) -> None:
    """Kill a small run just before each of its file system operations, each time from the beginning."""
    command = ["pack", chatted, output, "--pack-size", 1024, "--processes", 1]
    forge.complete(command)
    expected = tree(output)
    for count in drawn_counts():
        shutil.rmtree(output)
        run = forge.run(command, kill_at(output, count=count))
        if run.exit == 0:
            break
        assert run.exit == -signal.SIGKILL, run.output
        forge.complete(command)
        assert_same_tree(output, expected, f"killed before operation {count}")
    assert count > 20


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_workers_and_processes(
    forge: Forge, chatted: Path, expected: dict[str, bytes], output: Path, workers: int
) -> None:
    command = ["pack", chatted, output, *OPTIONS, "--workers", workers]
    runs = [forge.start([*command, "--worker-index", index, "--processes", 1 + index % 2]) for index in range(workers)]
    for run in runs:
        assert run.wait() == 0, run.output
    forge.complete([*command, "--worker-index", 0])
    assert_same_tree(output, expected)


def test_a_stopped_run_continues(forge: Forge, chatted: Path, expected: dict[str, bytes], output: Path) -> None:
    """SIGTERM after the first receipt: exit code 143, finished shards stay, and the rest is written later."""
    command = ["pack", chatted, output, *OPTIONS, "--processes", 1]
    process = tokenmill(*command)
    while not (done := receipts(output, "pack")) and process.poll() is None:
        pass
    process.send_signal(signal.SIGTERM)
    code, text = wait_for_exit(process)
    assert code in (0, 143), text
    before = receipts(output, "pack")
    assert_kept(done, before)
    forge.complete(command)
    assert_kept(before, receipts(output, "pack"))
    assert_same_tree(output, expected)


def test_replace_under_kills(forge: Forge, chatted: Path, expected: dict[str, bytes], output: Path) -> None:
    """Another seed replaces all shards; a kill at any time leaves an output that the command completes."""
    dice = random.Random(SEED)
    old = ["pack", chatted, output, *OPTIONS, "--seed", 5, "--shards", 9, "--processes", 1]
    new = ["pack", chatted, output, *OPTIONS, "--processes", 1]
    forge.complete(old)
    begin = output.with_name("begin")
    shutil.copytree(output, begin)
    refused = forge.run(new)
    assert refused.exit == 2 and "shards: 9 -> 7" in refused.output and "seed: 5 -> 42" in refused.output
    for _ in range(min(KILLS, 20)):
        shutil.rmtree(output)
        shutil.copytree(begin, output)
        run = forge.run([*new, "--replace"], kill_at(output, count=dice.randint(1, 300)))
        assert run.exit in (0, -signal.SIGKILL), run.output
        forge.complete([*new, "--replace"])
        assert_same_tree(output, expected)


def test_workers_of_a_replaced_plan_do_not_mix_rows(
    forge: Forge, chatted: Path, expected: dict[str, bytes], output: Path
) -> None:
    """The assignment on disk belongs to another plan: it is not used, and the rows stay those of the plan."""
    other = ["pack", chatted, output, *OPTIONS, "--seed", 5, "--processes", 1]
    forge.complete(other)
    stored = (output / PACK / "assignment.bin").read_bytes()
    shutil.rmtree(output)
    forge.complete(["pack", chatted, output, *OPTIONS, "--processes", 1])
    (output / "train/shard_000003.parquet").unlink()
    (output / PACK / "assignment.bin").write_bytes(stored)
    forge.complete(["pack", chatted, output, *OPTIONS, "--processes", 1])
    assert_same_tree(output, expected)


def test_packed_documents_under_kills(forge: Forge, output: Path, tmp_path: Path) -> None:
    """--format megatron with any number of workers: the pairs of a run that is not killed."""
    (tmp_path / "in").mkdir()
    for number in range(5):
        (tmp_path / "in" / f"{number}.jsonl").write_bytes(text(number, 200))
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    forge.complete(["preprocess", tmp_path / "in", tmp_path / "pairs", "--tokenizer", tokenizer, "--processes", 1])
    command = ["pack", tmp_path / "pairs", output, "--pack-size", 256, "--format", "megatron", "--shards", 4]
    forge.complete([*command, "--processes", 1])
    whole = tree(output)
    assert len([name for name in whole if name.endswith(".bin")]) == 4
    dice = random.Random(SEED)
    for _ in range(min(KILLS, 20)):
        shutil.rmtree(output)
        workers = dice.choice((1, 2))
        share = ["--workers", workers, "--processes", dice.choice((1, 2))]
        kills = [kill_at(output, count=dice.randint(1, 200)) for _ in range(workers)]
        runs = [forge.start([*command, *share, "--worker-index", i], kill) for i, kill in enumerate(kills)]
        for run in runs:
            assert run.wait() in (0, -signal.SIGKILL), run.output
        forge.complete([*command, "--processes", dice.choice((1, 2))])
        assert_same_tree(output, whole)


def test_a_damaged_input_fails_only_its_shards(forge: Forge, chatted: Path, tmp_path: Path) -> None:
    """An id outside the vocabulary fails the shards with its rows; after the repair, only these run."""
    source, output = tmp_path / "chat", tmp_path / "out"
    shutil.copytree(chatted, source)
    path = source / "1_chat_document.bin"
    original = path.read_bytes()
    path.write_bytes(b"\xff\xff" + original[2:])
    command: list[Any] = ["pack", source, output, "--pack-size", 1024, "--shards", 6, "--processes", 1]
    failed = forge.run(command)
    assert failed.exit == 2 and "the id 65535 of the record 0 of 1.jsonl" in failed.output
    before = receipts(output, "pack")
    assert len(before) == 6  # five shards, and the files that describe all shards
    path.write_bytes(original)
    forge.complete(command)
    assert_kept(before, receipts(output, "pack"))
    assert forge.complete(["verify", output]).exit == 0
    assert len(json.loads((output / "blend.json").read_text())["train"]) == 12
