"""Views and pairs without forgotten documents, the runs that read them, and the record."""

import hashlib
import json
import random
import shutil
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import tokenmill.data
from support.commandline import run_in_process
from support.commandline import tokenmill as command
from support.corpus import TOKENIZER
from support.torchdist import save
from tokenmill.datasets.formats.indexed.reader import IndexedReader
from tokenmill.engine.contract import Part
from tokenmill.engine.lineage import find_ordinals, locate, select
from tokenmill.errors import RequestError
from tokenmill.pipelines import forget
from tokenmill.samples.run_record import write_record
from tokenmill.train.data.blend import collect_datasets
from tokenmill.train.identity import build_identity
from tokenmill.train.settings import DatasetSettings

pytestmark = pytest.mark.slow

FORGOTTEN = {"a": [0, 4, 5, 17, 18, 39], "b": [2, 24]}
BATCH = 4


def make_records() -> dict[str, list[dict[str, Any]]]:
    """Return records with a text, several texts, or an empty text."""
    dice = random.Random(3)
    records: dict[str, list[dict[str, Any]]] = {}
    for name, count in (("a", 40), ("b", 25)):
        records[name] = []
        for number in range(count):
            text: Any = " ".join(dice.choices(["the", "of", "was", "with"], k=dice.randint(1, 50))) + f" {name}{number}"
            text = [text, "second", f"third {name}"] if number % 4 == 0 else "" if number % 11 == 6 else text
            records[name].append({"text": text, "title": f"title {number}"})
    return records


def write_corpus(directory: Path, records: dict[str, list[dict[str, Any]]]) -> Path:
    directory.mkdir(parents=True)
    for name, rows in records.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def preprocess(corpus: Path, output: Path, *options: str) -> Path:
    ended = command("preprocess", corpus, output, "--tokenizer", TOKENIZER, *options)
    assert ended.code == 0, ended.err
    return output


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("forget")
    return preprocess(write_corpus(directory / "corpus", make_records()), directory / "out")


def write_list(directory: Path, lines: Sequence[str] = ()) -> Path:
    file = directory / "documents.txt"
    numbers = [f"{name}_text_document:{number}" for name, chosen in FORGOTTEN.items() for number in chosen]
    file.write_text("".join(f"{line}\n" for line in lines or numbers))
    return file


def read_documents(prefix: Path) -> list[list[list[int]]]:
    """Return the sequences of each document of a pair, from its index alone."""
    reader = IndexedReader(prefix)
    ends = reader.document_indices.tolist()
    return [[reader.sequence(number).tolist() for number in range(first, end)] for first, end in pairwise(ends)]


def find_views(output: Path) -> dict[str, Path]:
    return {file.name.split("_")[0]: file.with_suffix("") for file in sorted(output.glob("*.idx"))}


def test_views_and_written_pairs_have_the_documents_that_are_left(dataset: Path, tmp_path: Path) -> None:
    file, views = write_list(tmp_path), tmp_path / "views"
    done = run_in_process("forget", dataset, views, "--documents", file)
    assert (done.code, "no run was searched; add --run" in done.out) == (0, True), done.err
    for name, prefix in find_views(views).items():
        kept = [
            document
            for number, document in enumerate(read_documents(dataset / f"{name}_text_document"))
            if number not in FORGOTTEN[name]
        ]
        assert read_documents(prefix) == kept
        assert {0, 1, 3} <= {len(document) for document in kept}
    clean = tmp_path / "clean"
    assert command("forget", dataset, clean, "--documents", file, "--rewrite").code == 0
    records = make_records()
    left = {
        name: [row for number, row in enumerate(rows) if number not in FORGOTTEN[name]]
        for name, rows in records.items()
    }
    expected = preprocess(write_corpus(tmp_path / "left", left), tmp_path / "expected")
    for path in expected.rglob("*"):
        if path.is_file() and ".tokenmill" not in path.parts:
            other = clean / path.relative_to(expected)
            assert other.read_bytes() == path.read_bytes() and not other.is_symlink(), path
    assert [command("verify", output).code for output in (views, clean)] == [0, 0]
    for seed in (1, 2):
        opened = [
            tokenmill.data.open(source, seq_length=32, samples=90, seed=seed, split="80,10,10")
            for source in (views, clean, expected)
        ]
        assert len({samples.digest() for samples in opened}) == 1
        origins = [[origin[1:7] for origin in opened[n].origin(11)] for n in (0, 1)]
        assert origins[0] == origins[1]
        assert all(record not in FORGOTTEN[str(file)[0]] for *_, file, record in origins[0])
    assert command("inspect", clean, "--document", 1).out.split("\n")[1].startswith("from record 2 ")
    shown = command("inspect", views, "--document", 1)
    assert shown.code == 2 and f"specify {dataset}" in shown.err


def test_a_document_has_several_names(dataset: Path, tmp_path: Path) -> None:
    shown = {
        number: json.loads(run_in_process("inspect", dataset, "--document", number, "--json").out)
        for number in (4, 5, 18)
    }
    digest = hashlib.sha256(shown[18]["text"].encode()).hexdigest()
    names = [
        str(dataset / "a_text_document:0"),
        json.dumps(shown[4]),
        json.dumps({"file": "a.jsonl", "record": 5}),
        "",
        f"sha256:{digest}",
        json.dumps({"sha256": digest}),
        "a.jsonl#17",
        "a.jsonl#39",
        "b_text_document:2",
        "b.jsonl#24",
        "b.jsonl#24",
    ]
    output = tmp_path / "views"
    record = run_in_process("forget", dataset, output, "--documents", write_list(tmp_path, names), "--json").result
    assert {pair["prefix"][0]: pair["documents"] for pair in record["pairs"]} == FORGOTTEN
    assert record["documents"] == 8
    by_number = run_in_process("forget", dataset, output, "--documents", write_list(tmp_path), "--json").result
    assert by_number == record  # the same documents are the same request


@pytest.mark.parametrize("seed", range(20))
def test_a_record_is_found_where_it_is_located(seed: int) -> None:
    """Also in parts with steps and bitmaps, and twice in a file with two copies of it."""
    dice = random.Random(seed)
    parts = [Part(name, dice.randint(0, 5), 60, dice.randint(1, 3)) for name in "abca"]
    records = 240
    for step in (1, 2):
        kept = [number for number in range(0, records, step) if dice.random() < 0.6]
        parts = select(parts, records, sum(1 << number // step for number in kept), step=step)
        records = len(kept)
    located: dict[tuple[str, int], list[int]] = defaultdict(list)
    for ordinal in range(records):
        place = locate(parts, ordinal)
        assert place is not None
        located[place].append(ordinal)
    wanted = {name: range(250) for name in "abcd"}
    pairs: dict[tuple[str, int], list[int]] = defaultdict(list)
    for source, number, ordinal in find_ordinals(parts, wanted):
        pairs[source, number].append(ordinal)
    assert pairs == located


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a_text_document", "line 2: 'a_text_document' is not the name of a document; write PAIR:NUMBER"),
        ("a_text_document:x", "line 2: 'a_text_document:x' is not"),
        ("sha256:abc", "line 2: 'sha256:abc' is not"),
        ("{", "line 2 is not JSON"),
        ('{"pair": "a_text_document"}', "line 2 has no name of a document; write pair and document"),
        ('{"sha256": "abc"}', "line 2 has no name of a document"),
        ("a_text_document:40", "does not have: a_text_document:40; correct them, or add --allow-missing"),
        ("c.jsonl#0", "does not have: c.jsonl#0"),
        (f"sha256:{'0' * 64}", f"does not have: sha256:{'0' * 64}"),
    ],
)
def test_a_wrong_name_is_shown_and_nothing_is_written(line: str, message: str, dataset: Path, tmp_path: Path) -> None:
    file, output = write_list(tmp_path, ["a_text_document:1", line]), tmp_path / "views"
    ended = run_in_process("forget", dataset, output, "--documents", file)
    assert ended.code == 2 and message in ended.err, ended.err
    assert not output.exists()
    if "allow-missing" in message:
        done = run_in_process("forget", dataset, output, "--documents", file, "--allow-missing", "--json")
        assert done.result["documents"] == 1


def test_documents_of_several_keys_are_forgotten_together(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", make_records())
    dataset = preprocess(corpus, tmp_path / "out", "--keys", "text,title")
    digest = hashlib.sha256(b"title 7").hexdigest()
    file = write_list(tmp_path, ["b_title_document:2", f"sha256:{digest}"])
    views, clean = tmp_path / "views", tmp_path / "clean"
    assert command("forget", dataset, views, "--documents", file).code == 0
    assert command("forget", dataset, clean, "--documents", file, "--rewrite").code == 0
    record = json.loads((views / "forget.json").read_bytes())
    assert [(pair["prefix"], pair["documents"]) for pair in record["pairs"]] == [
        (f"{name}_{key}_document", numbers)
        for name, numbers in (("a", [7]), ("b", [2, 7]))
        for key in ("text", "title")
    ]
    digests = {
        (key, tokenmill.data.open(source, seq_length=16, key=key).digest())
        for source in (views, clean)
        for key in ("text", "title")
    }
    assert len(digests) == 2
    with pytest.raises(RequestError, match="has the keys text, title; choose the key"):
        tokenmill.data.open(views, seq_length=16)


def test_the_runs_that_read_the_documents_are_listed(dataset: Path, tmp_path: Path) -> None:
    samples = tokenmill.data.open(dataset, seq_length=32, samples=80, seed=7)
    run, file, output = tmp_path / "run", write_list(tmp_path), tmp_path / "views"
    write_record(run, samples.identity, BATCH)
    readers: set[int] = set()
    for number in range(80):
        inputs = 32
        for origin in samples.origin(number):
            if inputs > 0 and origin.document in FORGOTTEN[Path(origin.path).name[0]]:
                readers.add(number // BATCH + 1)
            inputs -= origin.length
    arguments = ["forget", dataset, output, "--documents", file]
    use = run_in_process(*arguments, "--run", run, "--json").result["runs"]
    assert use == [{"run": str(run), "iterations": sorted(readers), "checkpoints": [], "clean_checkpoint": None}]
    assert f"run {run}: iterations that read them: {min(readers)}, " in run_in_process(*arguments, "--run", run).out
    other = tmp_path / "other"
    write_record(other, tokenmill.data.open(output, seq_length=32, samples=80).identity, BATCH)
    uses = run_in_process(*arguments, "--run", other, "--json").result["runs"]
    assert [(use["run"], use["iterations"] == []) for use in uses] == [(str(run), False), (str(other), True)]
    mixed = tmp_path / "mixed"
    write_record(mixed, tokenmill.data.open("synthetic:100", seq_length=32, samples=8).identity, BATCH)
    ended = run_in_process(*arguments, "--run", mixed)
    assert ended.code == 2 and "shows no documents" in ended.err


def test_all_data_of_a_run_is_searched_and_its_checkpoints(dataset: Path, tmp_path: Path) -> None:
    """A run that continues on the views has read the documents before."""
    run, file, output = tmp_path / "run", write_list(tmp_path, ["a_text_document:12"]), tmp_path / "views"
    run_in_process("forget", dataset, output, "--documents", file)
    record = run / ".tokenmill/train/identity.json"
    record.parent.mkdir(parents=True)
    (run / "args.json").write_text(json.dumps({"global_batch_size": BATCH, "train_iters": 30}))
    events, readers = list[dict[str, Any]](), list[list[int]]()
    for iteration, path in ((0, dataset), (6, output)):
        data = collect_datasets(DatasetSettings(path=str(path), split="8,1,1"), tmp_path)
        flags = ["--split", "8,1,1", "--seq-length", "32", "--seed", "7"]
        identity = msgspec.to_builtins(build_identity(data, flags, []))
        events.append({"iteration": iteration, "time": 1.0, "identity": identity})
        record.write_text(json.dumps({"events": [events[-1] | {"iteration": 0}]}))
        steps = [run_in_process("inspect", run, "--iteration", i, "--json") for i in range(1, 31)]
        assert steps[0].code == 0, steps[0].err
        shown = [step.result["parts"] for step in steps]
        readers.append(
            [i for i, parts in enumerate(shown, 1) if any((p["file"], p["record"]) == ("a.jsonl", 12) for p in parts)]
        )
    expected = [number for number in readers[0] if number <= 6]
    assert readers[1] == [] and expected[0] > 1 and readers[0][-1] > 6
    for iteration in (1, 5, 9):
        save(run, iteration)
    for adopted, clean in ((False, 1), (True, None)):
        first = events[0] | ({"iteration": 1, "adopted": True} if adopted else {})
        record.write_text(json.dumps({"events": [first, events[1]]}))
        done = run_in_process("forget", dataset, output, "--documents", file, "--run", run, "--json")
        (use,) = done.result["runs"]
        assert (use["iterations"], use["clean_checkpoint"]) == (expected, clean)
        assert use["checkpoints"] == [number for number in (1, 5, 9) if number >= expected[0]]
        assert ("no record of its data before iteration 1" in use.get("unknown", "")) == adopted


def test_a_run_on_views_is_searched_by_the_documents_of_the_dataset(dataset: Path, tmp_path: Path) -> None:
    """Also in a run with phases, whose views are ranges of these views."""
    output = tmp_path / "views"
    run_in_process("forget", dataset, output, "--documents", write_list(tmp_path))
    phase = {"samples": 20, "blend": [{"path": str(output), "weight": 1}]}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"phases": [phase, phase]}))
    for samples in (tokenmill.data.open(output, seq_length=16), tokenmill.data.open(phases=plan, seq_length=16)):
        for name, numbers in FORGOTTEN.items():
            found = samples.find_document(dataset / f"{name}_text_document", numbers)
            assert found is not None and not found.size
        kept = [1, 2, 3, 19]
        found = samples.find_document(dataset / "a_text_document", kept)
        assert found is not None and found.size
        for number in range(len(samples)):
            origins = samples.origin(number)[:-1] or samples.origin(number)
            if any(str(origin.file) == "a.jsonl" and origin.record in kept for origin in origins):
                assert number in found


def test_views_are_used_in_place_of_the_dataset(dataset: Path, tmp_path: Path) -> None:
    output = tmp_path / "views"
    run_in_process("forget", dataset, output, "--documents", write_list(tmp_path))
    views = find_views(output)
    done = run_in_process("blend", tmp_path / "blend.txt", f"{output}=1", f"{dataset}=1", "--split", "8,1,1")
    assert done.code == 0 and str(views["a"]) in (tmp_path / "blend.txt").read_text()
    checked = command("check-data", output, "--seq-length", 32)
    assert checked.code == 0 and "no differences" in checked.out, checked.out
    data = collect_datasets(DatasetSettings(path=str(output), split="8,1,1"), tmp_path)
    (source,) = data.train
    assert [pair.prefix for pair in source.pairs] == list(map(str, views.values()))
    assert (source.documents, data.tokenizer) == (65 - 8, dataset / "tokenizer")
    assert source.tokens == sum(int(IndexedReader(view).lengths.sum()) for view in views.values())
    single = tokenmill.data.open([(1, views["b"]), (2, views["a"])], seq_length=16, samples=40)
    assert {origin.file for number in range(40) for origin in single.origin(number)} == {"a.jsonl", "b.jsonl"}
    (tmp_path / "moved").mkdir()
    shutil.copytree(dataset, tmp_path / "moved/out")
    record = json.loads((output / "forget.json").read_bytes())
    moved = tmp_path / "moved/below/views"
    assert command("forget", tmp_path / "moved/out", moved, "--documents", write_list(tmp_path)).code == 0
    assert json.loads((moved / "forget.json").read_bytes())["dataset"] == "../../out" != record["dataset"]
    shutil.move(tmp_path / "moved", tmp_path / "place")
    again = tokenmill.data.open(tmp_path / "place/below/views", seq_length=16)
    assert again.digest() == tokenmill.data.open(output, seq_length=16).digest()


def test_a_stopped_command_continues(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, output = write_list(tmp_path), tmp_path / "views"
    write, calls = forget.write_view, list[Path]()

    def stop_at_second(directory: Path, *arguments: Any) -> Any:
        calls.append(directory)
        if len(calls) == 2:
            raise RuntimeError
        return write(directory, *arguments)

    monkeypatch.setattr(forget, "write_view", stop_at_second)
    with pytest.raises(RuntimeError):
        run_in_process("forget", dataset, output, "--documents", file)
    with pytest.raises(RequestError, match="is not finished; run the same tokenmill forget again"):
        tokenmill.data.open(output, seq_length=16)
    assert "of a command that was stopped" in command("verify", output).out
    other = write_list(tmp_path, ["a_text_document:1"])
    ended = run_in_process("forget", dataset, output, "--documents", other)
    assert ended.code == 2 and "has the output of another tokenmill forget" in ended.err
    assert run_in_process("forget", dataset, output, "--documents", write_list(tmp_path)).code == 0
    files = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in output.iterdir()}
    assert run_in_process("forget", dataset, output, "--documents", file).code == 0
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in output.iterdir()} == files
    fresh = tmp_path / "fresh"
    assert run_in_process("forget", dataset, fresh, "--documents", file).code == 0
    assert {path.name: path.read_bytes() for path in fresh.iterdir() if path.name != "forget.json"} == {
        name: content for name, (content, _) in files.items() if name != "forget.json"
    }
    assert not any(word in (output / "forget.json").read_text() for word in ("second", "third"))


@pytest.mark.parametrize("damage", ["index", "documents", "link", "record", "missing"])
def test_damaged_views_are_noticed_and_made_again(damage: str, dataset: Path, tmp_path: Path) -> None:
    file, output = write_list(tmp_path), tmp_path / "views"
    run_in_process("forget", dataset, output, "--documents", file)
    before = tokenmill.data.open(output, seq_length=16).digest()
    prefix = find_views(output)["a"]
    index, view = Path(f"{prefix}.idx"), Path(f"{prefix}.view.json")
    data = bytearray(index.read_bytes())
    if damage == "link":
        Path(f"{prefix}.bin").unlink()
        Path(f"{prefix}.bin").symlink_to(dataset / "b_text_document.bin")
    elif damage == "missing":
        view.unlink()
    elif damage == "record":
        view.write_text(json.dumps(json.loads(view.read_bytes()) | {"content": "0" * 32}))
    else:
        data[{"index": 34, "documents": len(data) - 16}[damage]] ^= 1
        index.write_bytes(data)
    ended = command("verify", output)
    assert ended.code == 2 and "problem: " in ended.out
    if damage in ("index", "documents"):
        index.unlink()
    assert run_in_process("forget", dataset, output, "--documents", file).code == 0
    assert command("verify", output).code == 0
    assert tokenmill.data.open(output, seq_length=16).digest() == before


def test_a_dataset_that_changed_and_a_wrong_directory_are_refused(dataset: Path, tmp_path: Path) -> None:
    copy, file = tmp_path / "out", write_list(tmp_path)
    shutil.copytree(dataset, copy)
    output = tmp_path / "views"
    run_in_process("forget", copy, output, "--documents", file)
    for place, message in (
        ([output, tmp_path / "v"], f"run tokenmill forget on {copy} with all documents"),
        ([copy, copy / "v"], "contain each other"),
        ([copy, tmp_path], "contain each other"),
        ([copy, dataset.parent / "corpus"], "has other files and no forget.json"),
    ):
        ended = run_in_process("forget", *place, "--documents", file)
        assert ended.code == 2 and message in ended.err, ended.err
    everything = [f"{name}_text_document:{n}" for name, count in (("a", 40), ("b", 25)) for n in range(count)]
    ended = run_in_process("forget", copy, tmp_path / "v", "--documents", write_list(tmp_path, everything))
    assert ended.code == 2 and "names all documents" in ended.err
    with (copy / "a_text_document.bin").open("r+b") as data:
        data.write(bytes(2))
    ended = command("forget", copy, tmp_path / "clean", "--documents", write_list(tmp_path), "--rewrite")
    assert ended.code == 2 and "a_text_document.bin is damaged: its hash differs" in ended.err
    shutil.rmtree(copy)
    preprocess(dataset.parent / "corpus", copy, "--no-append-eod")
    with pytest.raises(RequestError, match="was made again since; run tokenmill forget again"):
        tokenmill.data.open(output, seq_length=16)


def test_a_written_dataset_is_a_dataset(dataset: Path, tmp_path: Path) -> None:
    """Documents of it can be forgotten again, and it needs the first one no more."""
    source, first, second = tmp_path / "out", tmp_path / "first", tmp_path / "second"
    shutil.copytree(dataset, source)
    assert command("forget", source, first, "--documents", write_list(tmp_path), "--rewrite").code == 0
    shutil.rmtree(source)
    names = write_list(tmp_path, ["a.jsonl#1", "a_text_document:1"])  # records 1 and 2
    assert command("forget", first, second, "--documents", names, "--rewrite").code == 0
    assert command("verify", second).code == 0
    assert command("inspect", second, "--document", 0).out.split("\n")[1].startswith("from record 3 ")
    both = tmp_path / "both"
    lines = [f"{name}.jsonl#{number}" for name, numbers in FORGOTTEN.items() for number in numbers]
    names = write_list(tmp_path, [*lines, "a.jsonl#1", "a.jsonl#2"])
    assert run_in_process("forget", dataset, both, "--documents", names).code == 0
    assert np.array_equal(
        tokenmill.data.open(second, seq_length=16).batch(range(20)).tokens,
        tokenmill.data.open(both, seq_length=16).batch(range(20)).tokens,
    )
