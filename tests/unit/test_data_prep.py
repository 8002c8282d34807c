"""`run_data_prep` and `last_mile_process` with real files: splits, weights, formats, filters, resume and refusals."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from support import stages
from support.chat import conversations, lines, make_tokenizer
from support.corpus import TOKENIZER, text
from support.hub import Hub
from support.messages import REMEDY
from support.packing import read_output
from tokenmill import data_prep
from tokenmill.data_prep import (
    DataBlend,
    DataPrepConfig,
    Dataset,
    OutputConfig,
    PerSplitConfig,
    PipelineConfig,
    PipelineResult,
    TokenizerConfig,
    last_mile_process,
    run_data_prep,
)
from tokenmill.data_prep.config import (
    BinIdxOutputConfig,
    ChatSftOutputConfig,
    InvalidField,
    JsonlOutputConfig,
    OutputFormat,
    PackedOutputConfig,
)
from tokenmill.data_prep.formats.transforms import rename, select
from tokenmill.data_prep.layout import PlacedFile, finish_record, place_files, write_blend
from tokenmill.data_prep.shards import DatasetShard, assign_splits, weigh_shards
from tokenmill.datasets.dataset import find_dataset, find_document, verify_outputs
from tokenmill.datasets.formats.indexed.reader import IndexedReader
from tokenmill.engine.progress import Reporter
from tokenmill.engine.selection import Selection
from tokenmill.engine.signals import STOP
from tokenmill.engine.stage import StageRun
from tokenmill.errors import InputError, RequestError
from tokenmill.stages.registry import KINDS

pytestmark = pytest.mark.slow

VECTORS = json.loads((Path(__file__).parents[1] / "conformance/sft/shard_plans.json").read_bytes())["HEAD"]
EOD = 0


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a directory with two corpora, conversations, and two tokenizers."""
    monkeypatch.chdir(tmp_path)
    Path("wiki.jsonl").write_bytes(text(1, 60))
    Path("books.jsonl").write_bytes(text(2, 20))
    for number in range(3):
        Path(f"chat{number}.jsonl").write_bytes(lines(conversations(number, 20)))
    shutil.copytree(TOKENIZER, "tiny")
    make_tokenizer(Path("chatty"))
    return tmp_path


def blend_of(*names: str, **weights: float) -> DataBlend:
    return DataBlend.from_datasets(
        *(Dataset(name=name, path=f"{name}.jsonl", weight=weights.get(name, 1.0)) for name in names)
    )


def save_blend(value: Any) -> Path:
    Path("blend.json").write_text(json.dumps(value))
    return Path("blend.json")


def prepare(**fields: Any) -> data_prep.DataBlendsArtifact:
    """Tokenize wiki and books with run_data_prep."""
    blend = {"datasets": [{"name": "wiki", "path": "wiki.jsonl"}, {"name": "books", "path": "books.jsonl"}]}
    settings = {"output_dir": Path("out"), "tokenizer_model": "tiny", "num_shards": 4, "num_actors": 1}
    return run_data_prep(DataPrepConfig(blend_path=save_blend(blend), **settings | fields))


def process(blend: DataBlend, output_format: OutputFormat, *, tokenizer: str = "tiny", **fields: Any) -> PipelineResult:
    """Prepare a blend in a format in `out`; `fields` are those of PipelineConfig and OutputConfig."""
    output = {name: fields.pop(name) for name in ("min_doc_chars", "max_rows", "dir") if name in fields}
    config = PipelineConfig(
        output=OutputConfig(**{"dir": Path("out"), **output}, format=output_format),
        tokenizer=None if isinstance(output_format, JsonlOutputConfig) else TokenizerConfig(tokenizer),
        num_actors=1,
        **fields,
    )
    return last_mile_process(blend, config)


def listed(path: Path) -> dict[str, list[str]]:
    """Return the paths of each split of a blend.json, which has flat lists or null."""
    content = json.loads(path.read_bytes())
    assert [*content] == ["train", "valid", "test"]
    for paths in content.values():
        assert paths is None or (paths and all(isinstance(item, str) for item in paths))
    return {name: paths[1::2] for name, paths in content.items() if paths}


def weights_of(path: Path, split: str) -> list[float]:
    return [float(weight) for weight in json.loads(path.read_bytes())[split][::2]]


def lengths(prefixes: list[str]) -> list[int]:
    """Return the lengths of all documents of some pairs."""
    return [length for prefix in prefixes for length in IndexedReader(Path(prefix)).lengths.tolist()]


def documents(prefixes: list[str]) -> Counter[tuple[int, ...]]:
    readers = [IndexedReader(Path(prefix)) for prefix in prefixes]
    return Counter(tuple(reader.document(number).tolist()) for reader in readers for number in range(reader.documents))


def rows(paths: list[str]) -> list[dict[str, Any]]:
    """Return the records of JSONL files."""
    values = []
    for path in map(Path, paths):
        data = path.read_bytes()
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data) if path.suffix == ".zst" else data
        values += [json.loads(line) for line in data.splitlines()]
    return values


def states(output: Path = Path("out")) -> dict[str, int]:
    """Return the times of the stages' files."""
    return {str(path): path.stat().st_mtime_ns for path in (output / "datasets").rglob("*") if path.is_file()}


def problems(path: str) -> list[str]:
    return verify_outputs(Path(path), KINDS, full=True)[1]


def refused(message: str, call: Callable[[], object], error: type[Exception] = RequestError) -> None:
    with pytest.raises(error) as refusal:
        call()
    assert message in str(refusal.value)
    assert REMEDY.search(str(refusal.value)), str(refusal.value)


# -- pairs


def test_every_document_is_in_one_split() -> None:
    artifact = prepare()
    assert artifact.path == artifact.blend_path == Path("out/blend.json").absolute()
    paths = listed(artifact.path)
    assert [len(paths[split]) for split in ("train", "valid", "test")] == [6, 1, 1]
    root = Path("out").absolute()
    assert paths["train"] == [f"{root}/train/shard_{number:06d}" for number in range(6)]
    assert paths["valid"] == [f"{root}/valid/shard_000000"]
    whole = process(blend_of("wiki", "books"), BinIdxOutputConfig(num_shards=1), dir=Path("whole"))
    assert documents([path for split in paths.values() for path in split]) == documents(
        listed(whole.blend_path)["train"]
    )
    assert artifact.total_sequences == 80 and artifact.num_shards == 8
    assert artifact.total_tokens == sum(lengths([path for split in paths.values() for path in split]))
    assert artifact.train_tokens == sum(lengths(paths["train"]))
    assert json.loads(str(artifact))["path"] == str(artifact.path)
    assert problems("out/datasets") == []


def test_weights_are_those_of_datasets_and_not_of_shards() -> None:
    result = process(blend_of("wiki", "books", wiki=3.0), BinIdxOutputConfig(num_shards=4), per_split=PerSplitConfig())
    train = result.splits["train"]
    sizes = [sum(lengths([path])) for path in train.data_paths[1::2]]
    shares = [float(weight) for weight in train.data_paths[::2]]
    sources = [os.stat(f"{path}.bin").st_ino for path in train.data_paths[1::2]]
    wiki = {path.stat().st_ino for path in Path("out/datasets").glob("wiki-*/preprocessed/*.bin")}
    assert sum(share for share, inode in zip(shares, sources, strict=True) if inode in wiki) == pytest.approx(3)
    assert sum(share for share, inode in zip(shares, sources, strict=True) if inode not in wiki) == pytest.approx(1)
    for share, size, inode in zip(shares, sizes, sources, strict=True):  # a token of a dataset has the same weight
        first = sources.index(next(other for other in sources if (other in wiki) == (inode in wiki)))
        assert share / size == pytest.approx(shares[first] / sizes[first])


def test_more_shards_than_rows_gives_no_empty_shard(capfd: pytest.CaptureFixture[str]) -> None:
    Path("few.jsonl").write_bytes(text(3, 5))
    result = process(blend_of("few"), BinIdxOutputConfig(num_shards=128), per_split=PerSplitConfig())
    assert "dataset few: 5 shards instead of 128" in capfd.readouterr().err
    paths = listed(result.blend_path)
    assert {split: len(items) for split, items in paths.items()} == {"train": 3, "valid": 1, "test": 1}
    assert all(lengths([path]) for split in paths.values() for path in split)


def test_too_few_shards_for_the_splits_are_refused() -> None:
    Path("few.jsonl").write_bytes(text(3, 2))
    refused(
        "there are 2 shards with rows, and PerSplitConfig holds out 2",
        lambda: process(blend_of("few"), BinIdxOutputConfig(num_shards=8), per_split=PerSplitConfig()),
    )
    assert not Path("out/blend.json").exists()


def test_a_shard_size_makes_enough_shards_for_the_splits() -> None:
    result = process(blend_of("wiki"), BinIdxOutputConfig(), per_split=PerSplitConfig())
    assert [split.num_shards for split in result.splits.values()] == [1, 1, 1]
    assert result.is_per_split and result.splits["train"].output_dir == Path("out/train").absolute()
    large = process(blend_of("wiki"), BinIdxOutputConfig(shard_size="2KB"), dir=Path("sized"))
    assert large.num_shards == -(-Path("wiki.jsonl").stat().st_size // 2048)


def test_without_splits_all_is_training_data_or_has_a_ratio() -> None:
    result = process(blend_of("wiki"), BinIdxOutputConfig(num_shards=2))
    assert [*result.splits] == ["all"] and not result.is_per_split
    assert [*listed(result.blend_path)] == ["train"]
    ratio = process(blend_of("wiki"), BinIdxOutputConfig(num_shards=2), dir=Path("ratio"), split="990,9,1")
    content = json.loads(ratio.blend_path.read_bytes())
    assert content == {"data_paths": ratio.splits["all"].data_paths, "split": "990,9,1"}
    words = Path("ratio/blend.txt").read_text().split()
    assert words == content["data_paths"] and ratio.split_ratio == "990,9,1"


def test_files_are_linked_or_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    process(blend_of("books"), BinIdxOutputConfig(num_shards=1))
    assert Path("out/all/shard_000000.bin").stat().st_nlink == 2

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    process(blend_of("books"), BinIdxOutputConfig(num_shards=1), dir=Path("copied"))
    assert Path("copied/all/shard_000000.bin").stat().st_nlink == 1
    for suffix in ("bin", "idx"):
        assert (
            Path(f"copied/all/shard_000000.{suffix}").read_bytes()
            == Path(f"out/all/shard_000000.{suffix}").read_bytes()
        )


def test_files_of_the_user_are_never_replaced() -> None:
    Path("out/all").mkdir(parents=True)
    Path("out/all/shard_000000.bin").write_text("mine")
    call = lambda: process(blend_of("books"), BinIdxOutputConfig(num_shards=1))  # noqa: E731
    refused("out/all/shard_000000.bin exists, and no record shows", call, InvalidField)
    assert Path("out/all/shard_000000.bin").read_text() == "mine"
    Path("out/all/shard_000000.bin").unlink()
    assert call().num_shards == 1


@pytest.mark.parametrize("name", ["binidx", "chat_sft"])
def test_a_blend_of_the_user_is_never_replaced(name: str) -> None:
    Path("out").mkdir()
    Path("out/blend.json").write_text("mine")
    dataset = "chat0" if name == "chat_sft" else "wiki"
    refused("blend.json", lambda: process(blend_of(dataset), FORMATS[name], tokenizer="chatty"))
    assert Path("out/blend.json").read_text() == "mine"


def test_another_kind_of_format_needs_another_directory() -> None:
    process(blend_of("wiki"), FORMATS["binidx"])
    refused("blend.json", lambda: process(blend_of("wiki"), FORMATS["packed"]))
    process(blend_of("wiki"), FORMATS["packed"], dir=Path("packed"))
    refused("blend.json", lambda: process(blend_of("wiki"), FORMATS["jsonl"], dir=Path("packed")))


def test_a_later_call_replaces_the_files_of_an_earlier_one() -> None:
    prepare()
    Path("out/train/notes.txt").write_text("mine")
    artifact = prepare(num_shards=2)
    names = {path.name for path in Path("out/train").iterdir()}
    assert names == {"shard_000000.bin", "shard_000000.idx", "shard_000001.bin", "shard_000001.idx", "notes.txt"}
    assert len(listed(artifact.path)["train"]) == 2


def test_a_call_that_was_killed_can_be_repeated() -> None:
    """Kill a process at each change of a directory while it replaces the files of an earlier call."""
    old, new = [Path("wiki.jsonl"), Path("books.jsonl")], [Path("chat0.jsonl")]

    def place(sources: list[Path], root: Path) -> None:
        files = [PlacedFile(f"train/shard_{number:06d}.jsonl", path) for number, path in enumerate(sources)]
        place_files(root, files)
        write_blend(root, {"train": ["1.0", str(root / files[0].path)]}, None)
        finish_record(root, files, None)

    kills = 0
    for number in range(100):
        root = Path(f"killed{number}").absolute()
        place(old, root)
        child = os.fork()
        if not child:
            exit_at_change(number)
            place(new, root)
            os._exit(0)
        killed = os.waitpid(child, 0)[1] != 0
        kills += killed
        blend = root / "blend.json"
        assert not blend.exists() or all(Path(path).exists() for path in json.loads(blend.read_bytes())["train"][1::2])
        place(new, root)
        assert sorted(path.name for path in root.rglob("[!.]*")) == [
            "blend.json",
            "data_prep",
            "files.json",
            "shard_000000.jsonl",
            "train",
        ]
        assert (root / "train/shard_000000.jsonl").read_bytes() == new[0].read_bytes()
        if not killed:
            break
    assert kills > 5


def exit_at_change(number: int) -> None:
    """End this process before its change number `number` of a directory, as SIGKILL does."""
    changes = iter(range(number + 1))

    def check(event: str, _arguments: object) -> None:
        if event in ("os.rename", "os.remove", "os.link") and next(changes, None) == number:
            os._exit(1)

    sys.addaudithook(check)


# -- one run after the other


def test_the_same_call_does_nothing_and_another_weight_tokenizes_nothing() -> None:
    first = process(blend_of("wiki", "books"), BinIdxOutputConfig(num_shards=3))
    before = states()
    second = process(blend_of("wiki", "books"), BinIdxOutputConfig(num_shards=3))
    third = process(blend_of("wiki", "books", wiki=2.0), BinIdxOutputConfig(num_shards=3))
    assert (first.from_cache, second.from_cache, third.from_cache) == (False, True, True)
    assert first.run_hash == second.run_hash != third.run_hash
    assert states() == before
    assert sum(weights_of(third.blend_path, "train")) == pytest.approx(3)


def test_other_parameters_have_other_files() -> None:
    def run(transform: Any, **fields: Any) -> list[dict[str, Any]]:
        return rows(
            listed(process(blend_of("books"), JsonlOutputConfig(transform=transform), **fields).blend_path)["train"]
        )

    assert set(run(select("n"))[0]) == {"n"}
    assert set(run(rename(body="text"))[0]) == {"body"}
    assert run(lambda row: {"n": row["n"]} if row["n"] > 17 else None) == [{"n": 18}, {"n": 19}]
    assert run(lambda row: {"n": row["n"]} if row["n"] > 18 else None) == [{"n": 19}]
    assert len(run(select("n"), max_rows=3)) == 3


def test_force_makes_all_files_again() -> None:
    process(blend_of("books"), BinIdxOutputConfig(num_shards=2))
    before = states()
    result = process(blend_of("books"), BinIdxOutputConfig(num_shards=2), force=True)
    assert not result.from_cache
    changed = {Path(path).suffix for path, time in states().items() if time != before.get(path)}
    assert {".bin", ".idx", ".zst"} <= changed
    packed = ChatSftOutputConfig(chat_template="chatml", pack_size=512)
    process(blend_of("chat0"), packed, tokenizer="chatty", dir=Path("packed"))
    assert process(blend_of("chat0"), packed, tokenizer="chatty", dir=Path("packed")).from_cache
    assert not process(blend_of("chat0"), packed, tokenizer="chatty", dir=Path("packed"), force=True).from_cache


def test_changed_input_is_read_again() -> None:
    prepare()
    Path("books.jsonl").write_bytes(text(5, 30))
    assert prepare().total_sequences == 90


def test_a_damaged_file_is_made_again() -> None:
    artifact = prepare()
    before = documents(listed(artifact.path)["train"])
    (victim,) = Path("out/datasets").glob("wiki-*/preprocessed/shard_000000*.bin")
    victim.unlink()
    assert documents(listed(prepare().path)["train"]) == before
    assert problems("out/datasets") == []


# -- lists for each split


FORMATS: dict[str, OutputFormat] = {
    "binidx": BinIdxOutputConfig(num_shards=2),
    "jsonl": JsonlOutputConfig(num_shards=2),
    "packed": PackedOutputConfig(pack_size=128, num_shards=2),
    "chat_sft": ChatSftOutputConfig(pack_size=512, num_shards=2, chat_template="chatml"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_has_lists_for_each_split(name: str) -> None:
    names = ("chat0", "chat1", "chat2") if name == "chat_sft" else ("wiki", "books", "more")
    Path("more.jsonl").write_bytes(text(4, 10))
    train, valid, test = (Dataset(name=item, path=f"{item}.jsonl") for item in names)
    result = process(DataBlend(train=[train], valid=[valid], test=[test]), FORMATS[name], tokenizer="chatty")
    paths = listed(result.blend_path)
    assert [*paths] == [*result.splits] == ["train", "valid", "test"] and result.is_per_split
    for split, items in paths.items():
        assert result.splits[split].data_paths[1::2] == items
        assert len(items) == result.splits[split].num_shards > 0
        files = [Path(item if name != "binidx" else f"{item}.bin") for item in items]
        assert all(file.parent.name == split and file.stat().st_size for file in files)
    assert result.total_sequences == (90 if name in ("binidx", "jsonl") else result.total_sequences)


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_divided_by_shards(name: str) -> None:
    dataset = "chat0" if name == "chat_sft" else "wiki"
    output_format = FORMATS[name]
    result = process(
        blend_of(dataset),
        type(output_format)(**{**vars(output_format), "num_shards": 4, "shard_size": None}),
        tokenizer="chatty",
        per_split=PerSplitConfig(valid_shards=1, test_shards=1),
    )
    paths = listed(result.blend_path)
    assert [len(paths[split]) for split in ("train", "valid", "test")] == [2, 1, 1]
    if name == "jsonl":
        numbers = [row["n"] for split in paths.values() for row in rows(split)]
        assert sorted(numbers) == list(range(60))


def test_a_dataset_in_two_lists_is_refused() -> None:
    item = Dataset(name="a", path="wiki.jsonl")
    refused(
        "the dataset b in valid has the path, split and subset of a in train",
        lambda: process(
            DataBlend(train=[item], valid=[Dataset(name="b", path="wiki.jsonl")]), BinIdxOutputConfig(num_shards=2)
        ),
        InvalidField,
    )


def test_a_ratio_for_lists_is_refused() -> None:
    blend = DataBlend(train=[Dataset(name="a", path="wiki.jsonl")])
    refused(
        "the blend has a list for each split", lambda: process(blend, JsonlOutputConfig(), split="9,1,0"), InvalidField
    )


# -- shards


@pytest.mark.parametrize("case", VECTORS["split_shards"])
def test_splits_are_those_of_the_vectors(case: Any) -> None:
    (paths, count, valid, test), expected = case
    if len(paths) // 2 * count <= valid + test:
        refused(
            "so that train has no rows",
            lambda: assign_splits([count] * (len(paths) // 2), PerSplitConfig(True, valid, test)),
        )
        return
    weighted = list(zip(paths[::2], paths[1::2], strict=True))
    assigned = assign_splits([count] * len(weighted), PerSplitConfig(True, valid, test))
    actual = {
        split: [
            text
            for shard in shards
            for text in (weighted[shard.dataset][0], f"{weighted[shard.dataset][1]}_{shard.number:06d}")
        ]
        for split, shards in assigned.items()
    }
    assert actual == expected


def test_weight_is_divided_by_size() -> None:
    sizes = {DatasetShard(0, 0): 30, DatasetShard(0, 1): 10, DatasetShard(1, 0): 5}
    assert [*weigh_shards([2.0, 1.0], sizes).values()] == [1.5, 0.5, 1.0]


@pytest.mark.parametrize(("spec", "numbers"), [("10%", [1]), ("5", [2, 4, 6, 7, 9]), (5, [2, 4, 6, 7, 9])])
def test_a_sample_reads_the_shards_of_the_vectors(spec: str | int, numbers: list[int]) -> None:
    shutil.copy("wiki.jsonl", "pile.jsonl")
    result = process(blend_of("pile"), JsonlOutputConfig(num_shards=10), sample=spec)
    values = sorted(row["n"] for row in rows(listed(result.blend_path)["train"]))
    chosen = {number % 10 for number in values}
    assert len(chosen) == len(numbers) == result.num_shards and len(values) == 6 * len(numbers)
    if len(numbers) > 1:
        assert sorted(chosen) == numbers
    other = process(blend_of("pile"), JsonlOutputConfig(num_shards=10), sample=spec, sample_seed=7, dir=Path("other"))
    assert {row["n"] % 10 for row in rows(listed(other.blend_path)["train"])} != chosen


# -- rows


def test_rows_are_limited_by_shard_or_in_total() -> None:
    Path("large.jsonl").write_bytes(text(9, 5000, 200))  # more than a block of a unit
    result = process(blend_of("large"), JsonlOutputConfig(num_shards=4), max_rows=3)
    assert sorted(row["n"] for row in rows(listed(result.blend_path)["train"])) == list(range(12))
    blend = save_blend({"datasets": [{"name": "large", "path": "large.jsonl"}]})
    artifact = run_data_prep(
        DataPrepConfig(blend_path=blend, output_dir=Path("sampled"), tokenizer_model="tiny", sample=7, num_actors=1)
    )
    assert artifact.total_sequences == 7 and artifact.num_shards == 3
    whole = run_data_prep(
        DataPrepConfig(
            blend_path=blend, output_dir=Path("one"), tokenizer_model="tiny", sample=7, num_actors=1, per_split=None
        )
    )
    assert whole.total_sequences == 7 and whole.num_shards == 1
    assert documents([p for s in listed(artifact.path).values() for p in s]) == documents(listed(whole.path)["train"])


def test_a_limited_read_keeps_the_source_of_each_document() -> None:
    stages.concatenate(
        Path("."),
        Path("joined"),
        StageRun(Reporter(), processes=1),
        target_files=1,
        selection=Selection(["[wb]*.jsonl"]),
    )
    for path, expected in (("wiki.jsonl", "wiki.jsonl"), ("joined", "books.jsonl")):
        blend = DataBlend.from_datasets(Dataset(name="a", path=path))
        process(blend, BinIdxOutputConfig(num_shards=3), max_rows=2, dir=Path(f"from-{expected}"))
        (output,) = Path(f"from-{expected}/datasets").glob("*/preprocessed")
        dataset = find_dataset(output)
        sources = [find_document(dataset, number, key=None, prefix=None).source for number in range(6)]
        assert sources == [(expected, row) for row in (0, 3, 1, 4, 2, 5)]
        assert problems(str(output)) == []


def test_a_call_after_an_interrupted_one_runs() -> None:
    STOP.set()  # the handler of Ctrl-C does this
    assert prepare().total_sequences == 80


def test_short_texts_are_left_out() -> None:
    Path("mixed.jsonl").write_text('{"text": "long enough"}\n{"text": "short"}\n{"text": ["two", " texts."]}\n')
    result = process(blend_of("mixed"), BinIdxOutputConfig(num_shards=1), min_doc_chars=10)
    assert result.total_sequences == 2
    for output_format in (JsonlOutputConfig(), ChatSftOutputConfig()):
        refused(
            "min_doc_chars",
            lambda f=output_format: OutputConfig(dir=Path("out"), format=f, min_doc_chars=1),
            InvalidField,
        )  # type: ignore[misc]


def test_a_filter_selects_conversations() -> None:
    values = conversations(1, 12)
    for number, value in enumerate(values):
        value.update(
            [{"used_in": ["nano_v3", "other"]}, {"used_in": "nano_v3"}, {"used_in": ["other"]}, {}][number % 4]
        )
    Path("used.jsonl").write_bytes(lines(values))
    config = {"chat_template": "chatml", "pack_size": 4096}
    filtered = process(blend_of("used"), ChatSftOutputConfig(**config, used_in_filter="nano_v3"), tokenizer="chatty")
    everything = process(blend_of("used"), ChatSftOutputConfig(**config), tokenizer="chatty", dir=Path("everything"))
    assert (filtered.total_sequences, everything.total_sequences) == (6, 12)


def test_the_key_of_the_text_can_be_set_for_each_dataset() -> None:
    Path("a.jsonl").write_text('{"body": "one"}\n')
    Path("b.jsonl").write_text('{"content": "two"}\n')
    blend = save_blend(
        {"datasets": [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl", "text_field": "content"}]}
    )
    artifact = run_data_prep(
        DataPrepConfig(
            blend_path=blend,
            output_dir=Path("out"),
            tokenizer_model="tiny",
            num_shards=1,
            text_field="body",
            per_split=None,
        )
    )
    assert artifact.total_sequences == 2


def test_eos_and_bos_are_those_of_the_configuration() -> None:
    with_eos = process(blend_of("books"), BinIdxOutputConfig(num_shards=1))
    assert all(document[-1] == EOD for document in documents(listed(with_eos.blend_path)["train"]))
    config = PipelineConfig(
        output=OutputConfig(dir=Path("plain"), format=BinIdxOutputConfig(num_shards=1)),
        tokenizer=TokenizerConfig("tiny", add_eos=False),
    )
    plain = last_mile_process(blend_of("books"), config)
    assert plain.total_tokens == with_eos.total_tokens - 20
    refused("add_bos is True, but the tokenizer", lambda: prepare(add_bos=True), InvalidField)
    refused(
        "dtype is 'uint16'",
        lambda: OutputConfig(dir=Path("x"), format=PackedOutputConfig(dtype="uint16")),
        InvalidField,
    )


@pytest.mark.parametrize("field", [{"add_bos": True}, {"add_eos": False}])
def test_the_template_decides_the_tokens_around_conversations(field: dict[str, bool]) -> None:
    output = OutputConfig(dir=Path("out"), format=ChatSftOutputConfig())
    refused(*field, lambda: PipelineConfig(output=output, tokenizer=TokenizerConfig("tiny", **field)), InvalidField)


def test_bos_is_added_if_the_tokenizer_adds_it() -> None:
    path = Path("tiny/tokenizer.json")
    value = json.loads(path.read_bytes())
    bos = {"id": EOD, "type_id": 0}
    special = value["added_tokens"][0]["content"]
    value["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": special, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {special: {"id": special, "ids": [bos["id"]], "tokens": [special]}},
    }
    path.write_text(json.dumps(value))
    settings = json.loads(Path("tiny/tokenizer_config.json").read_bytes())
    Path("tiny/tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": special}))
    artifact = prepare(add_bos=True, add_eos=False)
    found = documents(listed(artifact.path)["train"])
    assert found and all(document[0] == EOD != document[-1] for document in found)
    assert all(document[0] != EOD for document in documents(listed(prepare().path)["train"]))


def test_a_bad_row_fails_or_is_quarantined() -> None:
    Path("bad.jsonl").write_text('{"text": "one"}\n{"txt": "two"}\n{"text": "three"}\n')
    refused("'text'", lambda: process(blend_of("bad"), BinIdxOutputConfig(num_shards=1)), InputError)
    result = process(blend_of("bad"), BinIdxOutputConfig(num_shards=1), on_bad_record="quarantine")
    assert result.total_sequences == 2
    assert [path.read_text() for path in Path("out/datasets").rglob("rejected/*.jsonl")] != []


# -- transforms and packed formats


def test_transforms_write_compressed_json_lines() -> None:
    Path("qa.jsonl").write_text('{"q": "What?", "a": "This."}\n{"q": "Who?"}\n')
    result = process(blend_of("qa"), JsonlOutputConfig(transform=rename(input="q", output="a"), compression="zstd"))
    (path,) = listed(result.blend_path)["train"]
    assert path.endswith("all/shard_000000.jsonl.zst")
    assert rows([path])[0] == {"input": "What?", "output": "This."}
    assert result.total_tokens == 0


def test_conversations_train_the_answers_and_nothing_else() -> None:
    result = process(
        blend_of("chat0"), ChatSftOutputConfig(chat_template="chatml", pack_size=2048, num_shards=1), tokenizer="chatty"
    )
    (path,) = listed(result.blend_path)["train"]
    assert path.endswith(".npy")
    packed = np.load(path, allow_pickle=True)
    answers = sum(len([m for m in row["messages"] if m["role"] == "assistant"]) for row in conversations(0, 20))
    mark = 1 + max(json.loads(Path("chatty/tokenizer.json").read_bytes())["model"]["vocab"].values())
    trained = 0
    for row in packed:
        ids, mask, starts = (np.array(row[name]) for name in ("input_ids", "loss_mask", "seq_start_id"))
        assert len(ids) == len(mask) <= 2048 and starts[0] == 0 and set(mask.tolist()) == {0, 1}
        assert all(mask[end - 1] == 0 for end in [*starts[1:], len(ids)])  # the mask is shifted inside each sequence
        trained += int(((ids[1:] == mark + 1) & (mask[:-1] == 1)).sum())
    assert trained == answers, "the stop token of each answer is trained, and no other one"
    assert json.loads(Path("out/metadata.json").read_bytes())[0]["pack_size"] == 2048
    assert problems("out") == []


def test_another_pack_size_tokenizes_nothing() -> None:
    for size in (512, 1024):
        config = ChatSftOutputConfig(chat_template="chatml", pack_size=size)
        result = process(blend_of("chat0", "chat1"), config, tokenizer="chatty")
        if size == 512:
            before = states()
    assert states() == before and not result.from_cache


def test_weights_of_packed_datasets_repeat_rows() -> None:
    config = PackedOutputConfig(pack_size=256, writer="parquet", num_shards=1)
    result = process(blend_of("wiki", "books", books=3.0), config)
    (metadata,) = json.loads(Path("out/metadata.json").read_bytes())
    used = {item["name"]: item["trained_tokens"] * item["repetitions"] for item in metadata["datasets"]}
    assert used["books"] / used["wiki"] == pytest.approx(3, rel=0.05)
    assert len(read_output(Path("out"))) == metadata["rows"]
    assert result.splits["all"].total_tokens == metadata["stored_tokens"]


def test_long_documents_are_divided_and_not_cut() -> None:
    result = process(blend_of("wiki"), PackedOutputConfig(pack_size=32, algorithm="concatenative"))
    pairs = process(blend_of("wiki"), BinIdxOutputConfig(num_shards=1), dir=Path("pairs"))
    (metadata,) = json.loads(Path("out/metadata.json").read_bytes())
    # Each piece but the first of a document repeats one token, so that each token is a label once.
    assert result.total_tokens - (metadata["sequences"] - 60) == pairs.total_tokens


TEMPLATE = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_template_can_be_a_text_or_a_file() -> None:
    inline = process(blend_of("chat0"), ChatSftOutputConfig(chat_template=TEMPLATE), tokenizer="chatty")
    Path("mine.jinja").write_text(TEMPLATE)
    from_file = process(
        blend_of("chat0"), ChatSftOutputConfig(chat_template="mine.jinja"), tokenizer="chatty", dir=Path("file")
    )
    assert inline.total_tokens == from_file.total_tokens
    Path("mine.jinja").write_text(TEMPLATE.replace("<|im_end|>\n", "<|im_end|>\n\n"))
    assert not process(
        blend_of("chat0"), ChatSftOutputConfig(chat_template="mine.jinja"), tokenizer="chatty", dir=Path("file")
    ).from_cache
    refused(
        "chat template",
        lambda: process(blend_of("chat0"), ChatSftOutputConfig(), tokenizer="chatty", dir=Path("missing")),
    )


# -- sources


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        server.add_dataset(
            "org/corpus",
            {
                f"{folder}/{split}-{number}.jsonl": text(number, 10)
                for folder in ("en", "de")
                for split in ("train", "test")
                for number in range(2)
            },
        )
        server.add_dataset("org/plain", {"data.jsonl": text(7, 12)})
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def test_datasets_of_the_hub_are_streamed_or_divided(hub: Hub) -> None:
    blend = {"datasets": [{"name": "c", "path": "hf://org/corpus", "split": "train", "subset": "en"}]}
    config = DataPrepConfig(
        blend_path=save_blend(blend), output_dir=Path("out"), tokenizer_model="tiny", num_shards=2, per_split=None
    )
    assert run_data_prep(config).total_sequences == 20
    assert not [*Path("out/datasets").rglob("*.jsonl*")], "two shards of two files need no copy of the files"
    divided = DataBlend.from_datasets(Dataset(name="p", path="hf://org/plain", split="train"))
    result = process(divided, BinIdxOutputConfig(num_shards=3), dir=Path("divided"))
    assert result.num_shards == 3 and result.total_sequences == 12
    requests = len(hub.requests)
    assert process(divided, BinIdxOutputConfig(num_shards=3), dir=Path("divided")).from_cache
    assert len(hub.requests) == requests, "a finished run needs no network"
    limited = process(divided, JsonlOutputConfig(num_shards=1), dir=Path("limited"), max_rows=5)
    assert limited.total_sequences == 5
    refused(
        "dataset d: ",
        lambda: process(
            DataBlend.from_datasets(Dataset(name="d", path="hf://org/corpus", split="validation")),
            JsonlOutputConfig(),
            dir=Path("none"),
        ),
    )


def test_a_pattern_selects_files() -> None:
    result = process(
        DataBlend.from_datasets(Dataset(name="all", path="chat*.jsonl")), JsonlOutputConfig(transform=select("n"))
    )
    assert result.total_sequences == 60
    refused(
        "is a pattern",
        lambda: process(
            DataBlend.from_datasets(Dataset(name="all", path="chat*.jsonl", subset="x")), JsonlOutputConfig()
        ),
        InvalidField,
    )
    refused("dataset gone: ", lambda: process(blend_of("gone"), JsonlOutputConfig()))


SCRIPT = """
from tokenmill.data_prep import DataBlend, Dataset, OutputConfig, PipelineConfig, last_mile_process
from tokenmill.data_prep.config import JsonlOutputConfig
from tokenmill.data_prep.formats.transforms import select

print("started")

def double(row):
    return {"n": 2 * row["n"]}

for name, transform in (("double", double), ("select", select("n"))):
    config = PipelineConfig(
        output=OutputConfig(dir=name, format=JsonlOutputConfig(num_shards=4, transform=transform)), num_actors=2
    )
    result = last_mile_process(DataBlend.from_datasets(Dataset(name="wiki", path="wiki.jsonl")), config)
    print(result.total_sequences)
"""


def test_a_script_needs_no_guard_for_child_processes() -> None:
    Path("script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["started", "60", "60"]
    assert {row["n"] for row in rows([str(path) for path in Path("double/all").iterdir()])} == set(range(0, 120, 2))


def test_deprecated_name_and_other_artifacts() -> None:
    with pytest.warns(DeprecationWarning, match="use last_mile_process"):
        data_prep.tokenize(
            blend_of("books"), PipelineConfig(output=OutputConfig(dir=Path("out"), format=JsonlOutputConfig()))
        )
    blend = save_blend({"datasets": [{"name": "books", "path": "books.jsonl"}]})
    config = DataPrepConfig(
        blend_path=blend,
        output_dir=Path("pairs"),
        tokenizer_model="tiny",
        per_split=None,
        num_shards=1,
        artifact_name="mine",
    )
    fields = run_data_prep(config, artifact_class=dict)
    assert fields["path"] == Path("pairs/blend.json").absolute() and fields["name"] == "mine"
    assert fields["source_datasets"] == ["books.jsonl"] and fields["tokenizer_uri"] == "tiny"
