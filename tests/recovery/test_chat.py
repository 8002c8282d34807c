"""chat under SIGKILL, with any number of workers and processes, from any kind of input: the same bytes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from support.chat import conversations, lines, make_tokenizer
from support.hub import Hub
from support.runs import (
    Forge,
    assert_kept,
    assert_same_tree,
    children,
    environment,
    kill_at,
    receipts,
    tree,
    wait_for_group_end,
)
from support.sweep import KILLS, SEED

REPOSITORY = "org/chat"
KILLED = """
import os, signal
import tokenmill.tokenize.unit_tokenizer as unit
from tokenmill.cli import main

unit.JOURNAL_SECONDS = unit.JOURNAL_FACTOR = 0.0
write, written = unit.UnitTokenizer._write_journal, []

def write_and_kill(self):
    write(self)
    written.append(self.done)
    if len(written) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

unit.UnitTokenizer._write_journal = write_and_kill
main()
"""
"""A run that writes its journal after each block that ends a file, and dies after the second one."""

SIZES = (40, 300, 90, 20, 160, 60)


@pytest.fixture(scope="module")
def rows() -> list[list[dict[str, Any]]]:
    """Return the rows of each file; one row in 40 has no answer."""
    files = [conversations(seed, count) for seed, count in enumerate(SIZES)]
    for values in files:
        for value in values[::40]:
            value["messages"] = value["messages"][:1]
    return files


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, rows: list[list[dict[str, Any]]]) -> Path:
    """Write the files: compressed, plain and Parquet."""
    directory = tmp_path_factory.mktemp("chat") / "source"
    directory.mkdir()
    for number, values in enumerate(rows):
        if number % 3 == 0:
            (directory / f"{number}.jsonl.zst").write_bytes(zstandard.compress(lines(values)))
        elif number % 3 == 1:
            (directory / f"{number}.jsonl").write_bytes(lines(values))
        else:
            pq.write_table(pa.Table.from_pylist(values), directory / f"{number}.parquet", row_group_size=50)
    return directory


@pytest.fixture(scope="module")
def hub(source: Path) -> Iterator[Hub]:
    """Serve the files."""
    with Hub() as hub:
        hub.add_dataset(REPOSITORY, {f"data/{path.name}": path.read_bytes() for path in source.iterdir()})
        yield hub


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "chatml")
    return ["--tokenizer", tokenizer, "--chat-template", "chatml", "--on-bad-record", "quarantine"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, forge: Forge, source: Path, options: list[Any]) -> Path:
    """Return the output of a run that is not killed: four units of six files."""
    output = tmp_path_factory.mktemp("expected") / "out"
    forge.complete(["chat", source, output, *options, "--target-files", 4, "--processes", 1])
    return output


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, expected: Path) -> Path:
    """Return an output that has only its tokenizer and verdict, so that planning there is fast."""
    output = tmp_path_factory.mktemp("prepared") / "out"
    for part in ("tokenizer", ".tokenmill/chat/encoders"):
        shutil.copytree(expected / part, output / part)
    return output


def pairs(output: Path) -> dict[str, bytes]:
    """Return the pairs, and the rejected rows without the names of their files."""
    return {path.name: path.read_bytes() for path in output.glob("*_document.*")}


def test_kills_and_resumes(
    forge: Forge, source: Path, options: list[Any], expected: Path, prepared: Path, tmp_path: Path
) -> None:
    dice, output, kills = random.Random(SEED), tmp_path / "out", 0
    command = ["chat", source, output, *options, "--target-files", 4]
    while kills < KILLS:
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(prepared, output)
        for _ in range(dice.randint(1, 4)):
            before = receipts(output, "chat")
            processes = dice.choice((1, 2))
            trigger = kill_at(output, count=dice.randint(1, 150))
            run = forge.run([*command, "--processes", processes], trigger)
            assert run.exit in (0, -signal.SIGKILL), run.output
            assert wait_for_group_end(run.pid), "encoder processes outlive their parent"
            kills += run.exit != 0
            assert_kept(before, receipts(output, "chat"))
        forge.complete([*command, "--processes", dice.choice((1, 2))])
        assert_same_tree(output, tree(expected), f"after {kills} kills")


def test_a_unit_continues_at_its_first_unfinished_file(
    forge: Forge, source: Path, options: list[Any], prepared: Path, tmp_path: Path
) -> None:
    """With the journal, the files that were finished are not read again; both pairs continue."""
    output, reference = (Path(shutil.copytree(prepared, tmp_path / name)) for name in ("out", "reference"))
    more = [*options, "--target-files", 1, "--processes", 1]
    forge.complete(["chat", source, reference, *more])
    command = ["chat", source, output, *more]
    killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, command)], env=environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    journals = list(output.glob(".tokenmill/chat/attempts/*/journal.json"))
    assert len(journals) == 1 and json.loads(journals[0].read_bytes())["done"] == 3
    opened = tmp_path / "opened"
    forge.complete(command, watch=str(source), opened=str(opened))
    files = sorted(source.iterdir())
    assert str(files[-1]) in opened.read_text() and str(files[0]) not in opened.read_text()
    assert_same_tree(output, tree(reference))


@pytest.mark.parametrize("name", ["bin-0", "bin-1", "idx-0.lengths", "rejected"])
def test_a_resumed_unit_keeps_only_the_bytes_that_were_written(
    forge: Forge, source: Path, options: list[Any], prepared: Path, tmp_path: Path, name: str
) -> None:
    """A file of the killed attempt has other bytes than its journal records, so the unit starts again."""
    output, reference = (Path(shutil.copytree(prepared, tmp_path / name)) for name in ("out", "reference"))
    more = [*options, "--target-files", 1, "--processes", 1]
    forge.complete(["chat", source, reference, *more])
    command = ["chat", source, output, *more]
    killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, command)], env=environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    (kept,) = output.glob(f".tokenmill/chat/attempts/*/{name}")
    data = bytearray(kept.read_bytes())
    data[7] ^= 1
    kept.write_bytes(data)
    forge.complete(command)
    assert_same_tree(output, tree(reference))


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_workers_and_processes(
    forge: Forge, source: Path, options: list[Any], expected: Path, prepared: Path, tmp_path: Path, workers: int
) -> None:
    output = Path(shutil.copytree(prepared, tmp_path / "out"))
    command = ["chat", source, output, *options, "--target-files", 4, "--workers", workers]
    runs = [forge.start([*command, "--worker-index", index, "--processes", 1 + index % 2]) for index in range(workers)]
    for run in runs:
        assert run.wait() == 0, run.output
    assert_same_tree(output, tree(expected))


def test_a_streamed_source_gives_the_same_bytes(
    forge: Forge, hub: Hub, source: Path, options: list[Any], prepared: Path, tmp_path: Path
) -> None:
    outputs = [Path(shutil.copytree(prepared, tmp_path / name)) for name in ("streamed", "downloaded")]
    uri, endpoint = f"hf://datasets/{REPOSITORY}", ["--endpoint", hub.endpoint]
    scratch = tmp_path / "scratch"
    forge.complete(["chat", uri, outputs[0], *options, *endpoint, "--scratch", scratch, "--processes", 2])
    forge.complete(["download", uri, tmp_path / "corpus", *endpoint])
    forge.complete(["chat", tmp_path / "corpus", outputs[1], *options, "--processes", 1])
    assert pairs(outputs[0]) and pairs(outputs[0]) == pairs(outputs[1])
    assert not any(scratch.iterdir())
    shown = forge.complete(["status", outputs[0]]).output
    assert "complete" in shown and "bad records (" in shown


def test_a_crash_of_an_encoder_process_changes_no_byte(
    forge: Forge, tmp_path: Path, options: list[Any], prepared: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(conversations(77, 12_000)))
    output, reference = (Path(shutil.copytree(prepared, tmp_path / name)) for name in ("out", "reference"))
    command = ["chat", tmp_path / "a.jsonl", output, *options, "--processes", 1]
    forge.complete(["chat", tmp_path / "a.jsonl", reference, *options, "--processes", 1])
    run = forge.start(command)
    while not (files := list(output.glob(".tokenmill/chat/attempts/*/bin-0"))) or not files[0].stat().st_size:
        assert run.poll(0.002) is None, run.output
    (encoder,) = children(run.pid, "tokenize.workers.encoder_process")
    os.kill(encoder, signal.SIGKILL)
    assert run.wait() == 0, run.output
    assert "was killed (SIGKILL); Hugging Face encodes its records" in run.output
    assert pairs(output) == pairs(reference)


def test_replace_keeps_equal_units(
    forge: Forge, source: Path, options: list[Any], prepared: Path, tmp_path: Path
) -> None:
    output, reference = (Path(shutil.copytree(prepared, tmp_path / name)) for name in ("out", "reference"))
    corpus = Path(shutil.copytree(source, tmp_path / "source"))
    forge.complete(["chat", corpus, output, *options, "--processes", 1])
    before = receipts(output, "chat")
    (corpus / "9.jsonl").write_bytes(lines(conversations(9, 50)))
    command = ["chat", corpus, output, *options, "--processes", 1]
    forge.complete(command)
    after = receipts(output, "chat")
    assert len(after) == len(before) + 1
    assert {name: times[2] for name, times in after.items() if name in before} == {
        name: times[2] for name, times in before.items()
    }, "the pairs of equal units were written again"
    forge.complete(["chat", corpus, reference, *options, "--processes", 1])
    assert pairs(output) == pairs(reference)
    refused = forge.run([*command, "--train", "last"])
    assert refused.exit == 2 and "--replace" in refused.output
    forge.complete([*command, "--train", "last", "--replace"])
    assert pairs(output) != pairs(reference)
