"""Which documents made a step of a run, and which steps read a document."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

import tokenmill.data
from support.commandline import run_in_process
from support.commandline import tokenmill as command
from support.corpus import TOKENIZER, text
from tokenmill.samples.run_record import write_record

SEQ_LENGTH, BATCH, SAMPLES = 64, 4, 40


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make two datasets, and the record of a run that blends them."""
    directory = tmp_path_factory.mktemp("steps")
    for name in ("web", "code"):
        (directory / f"{name}.jsonl").write_bytes(text(len(name), 60))
        done = command("preprocess", directory / f"{name}.jsonl", directory / name, "--tokenizer", TOKENIZER)
        assert done.code == 0, done.err
    blend = [(0.7, directory / "web"), (0.3, directory / "code")]
    samples = tokenmill.data.open(blend, seq_length=SEQ_LENGTH, samples=SAMPLES, seed=3, split="90,5,5")
    write_record(directory / "run", samples.identity, BATCH)
    return directory


@pytest.mark.slow
def test_a_step_and_its_documents_find_each_other(directory: Path) -> None:
    run = directory / "run"
    blend = [(0.7, directory / "web"), (0.3, directory / "code")]
    samples = tokenmill.data.open(blend, seq_length=SEQ_LENGTH, samples=SAMPLES, seed=3, split="90,5,5")
    readers: dict[tuple[str, int], set[int]] = defaultdict(set)
    for iteration in range(1, SAMPLES // BATCH + 1):
        step = run_in_process("inspect", run, "--iteration", iteration, "--json").result
        assert (step["first_sample"], step["samples"]) == ((iteration - 1) * BATCH, BATCH)
        for number in range(step["first_sample"], iteration * BATCH):
            parts = [part for part in step["parts"] if part["sample"] == number]
            origins = samples.origin(number)
            assert [(p["pair"], p["document"], p["token"], p["tokens"], p["file"], p["record"]) for p in parts] == [
                (o.path, o.document, o.offset, o.length, o.file, o.record) for o in origins
            ]
            inputs = SEQ_LENGTH
            for origin in origins:
                assert origin.document is not None
                if inputs > 0:  # the last token is only a label
                    readers[origin.path, origin.document].add(iteration)
                inputs -= origin.length
    assert len(readers) > 20
    for (pair, document), iterations in list(readers.items())[::5]:
        found = run_in_process("inspect", Path(pair).parent, "--document", document, "--run", run, "--json").result
        assert found["iterations"] == sorted(iterations)
    text_output = command("inspect", directory / "web", "--document", 0, "--run", run).out
    assert "document 0 of" in text_output


@pytest.mark.slow
def test_a_rank_has_its_part_of_a_step(directory: Path) -> None:
    step = run_in_process(
        "inspect", directory / "run", "--iteration", 2, "--rank", 1, "--ranks", 2, "--micro-batch", 1, "--json"
    ).result
    assert {part["sample"] for part in step["parts"]} == {5, 7}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--iteration", 11], "the run has 10 iterations of 4 samples"),
        (["web", "--iteration", 1], "has no record of its data"),
        (["run", "--iteration", 1, "--rank", 0], "--rank needs --ranks"),
        (["run", "--iteration", 1, "--rank", 3, "--ranks", 3, "--micro-batch", 1], "must be from 0 to 2"),
        (["run", "--iteration", 1, "--rank", 0, "--ranks", 2], "add --micro-batch"),
        (["web", "--run", "run"], "add --document"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], message: str, directory: Path) -> None:
    paths = [directory / word if word in ("run", "web") else word for word in arguments]
    ended = command("inspect", *paths)
    assert ended.code == 2 and message in " ".join(ended.err.split()), ended.err


@pytest.mark.slow
def test_data_that_changed_is_refused(directory: Path, tmp_path: Path) -> None:
    record = json.loads((directory / "run/tokenmill-data.json").read_text())
    record["identity"]["sources"][0]["path"] = str(directory / "code")
    (tmp_path / "tokenmill-data.json").write_text(json.dumps(record))
    ended = command("inspect", tmp_path, "--iteration", 1)
    assert ended.code == 2 and "was changed since the run" in ended.err
