"""The configuration, the blends and the file selection of `tokenmill.data_prep`: defaults, rules and messages."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.messages import REMEDY
from tokenmill.data_prep import (
    DataBlend,
    DataPrepConfig,
    Dataset,
    OutputConfig,
    PerSplitConfig,
    PipelineConfig,
    TokenizerConfig,
)
from tokenmill.data_prep.config import (
    BinIdxOutputConfig,
    ChatSftOutputConfig,
    InvalidField,
    JsonlOutputConfig,
    PackedOutputConfig,
)
from tokenmill.data_prep.sources import choose_files, normalize_path
from tokenmill.engine.selection import matches
from tokenmill.errors import RequestError

OUTPUT = OutputConfig(dir=Path("out"))
JSONL = OutputConfig(dir=Path("out"), format=JsonlOutputConfig())


def refused(message: str, make: Any) -> None:
    """Check that a call is refused with this text and a remedy."""
    with pytest.raises(InvalidField) as refusal:
        make()
    assert message in str(refusal.value)
    assert REMEDY.search(str(refusal.value)), str(refusal.value)
    assert isinstance(refusal.value, ValueError) and refusal.value.exit_code == 2


def test_defaults_are_the_documented_ones() -> None:
    config = DataPrepConfig()
    assert (config.blend_path, config.output_dir) == (Path("data_blend.json"), Path("output"))
    assert (config.num_shards, config.per_split) == (128, PerSplitConfig(enabled=True, valid_shards=1, test_shards=1))
    assert config.tokenizer_model == "nvidia/NVIDIA-Nemotron-Nano-9B-v2"
    assert (config.add_bos, config.add_eos, config.text_field, config.sample) == (False, True, "text", None)
    assert TokenizerConfig("x") == TokenizerConfig(model="x", type="huggingface", add_bos=False, add_eos=True)
    assert OUTPUT.format == BinIdxOutputConfig(shard_size="256MB", num_shards=None, dtype="int32")
    assert PackedOutputConfig().pack_size == ChatSftOutputConfig().pack_size == 2048
    assert PackedOutputConfig().algorithm == "first_fit_shuffle"
    chat = ChatSftOutputConfig()
    assert (chat.messages_field, chat.tools_field, chat.used_in_field) == ("messages", "tools", "used_in")
    assert (chat.chat_template, chat.used_in_filter) == (None, None)
    pipeline = PipelineConfig(output=JSONL)
    assert (pipeline.num_actors, pipeline.sample, pipeline.sample_seed, pipeline.force) == (4, None, 42, False)
    assert (pipeline.split, pipeline.per_split) == (None, None)


def test_a_number_of_shards_takes_precedence_over_the_default_size() -> None:
    for config in (BinIdxOutputConfig, JsonlOutputConfig, PackedOutputConfig, ChatSftOutputConfig):
        assert config(num_shards=64).num_shards == 64
        refused("num_shards is set, too (64)", lambda config=config: config(num_shards=64, shard_size="1G"))
        refused("set a size", lambda config=config: config(shard_size=None))


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("dtype is 'int8': choose one of int32", lambda: BinIdxOutputConfig(dtype="int8")),  # type: ignore[arg-type]
        ("invalid shard_size: '5Z'", lambda: BinIdxOutputConfig(shard_size="5Z")),
        ("shard_size is 0", lambda: BinIdxOutputConfig(shard_size=0)),
        ("num_shards is 0", lambda: BinIdxOutputConfig(num_shards=0)),
        ("compression is 'gzip'", lambda: JsonlOutputConfig(compression="gzip")),  # type: ignore[arg-type]
        ("transform is 'sft'", lambda: JsonlOutputConfig(transform="sft")),  # type: ignore[arg-type]
        ("pack_size is 1", lambda: PackedOutputConfig(pack_size=1)),
        ("pack_size is True", lambda: PackedOutputConfig(pack_size=True)),
        ("algorithm is 'best'", lambda: ChatSftOutputConfig(algorithm="best")),  # type: ignore[arg-type]
        ("messages_field is ''", lambda: ChatSftOutputConfig(messages_field="")),
        ("type is 'tiktoken'", lambda: TokenizerConfig("x", type="tiktoken")),
        ("trust_remote_code is True", lambda: TokenizerConfig("x", trust_remote_code=True)),
        ("model is ''", lambda: TokenizerConfig("")),
        ("max_doc_tokens is 5", lambda: OutputConfig(dir=Path("out"), max_doc_tokens=5)),
        ("max_doc_tokens is 5", lambda: DataPrepConfig(max_doc_tokens=5)),
        ("max_rows is 0", lambda: OutputConfig(dir=Path("out"), max_rows=0)),
        ("min_doc_chars is -1", lambda: OutputConfig(dir=Path("out"), min_doc_chars=-1)),
        ("format is 'jsonl'", lambda: OutputConfig(dir=Path("out"), format="jsonl")),  # type: ignore[arg-type]
        ("valid_shards is -1", lambda: PerSplitConfig(valid_shards=-1)),
        ("tokenizer is None", lambda: PipelineConfig(output=OUTPUT)),
        ("num_actors is 0", lambda: PipelineConfig(output=JSONL, num_actors=0)),
        ("sample is '0%'", lambda: PipelineConfig(output=JSONL, sample="0%")),
        ("sample is '101%'", lambda: PipelineConfig(output=JSONL, sample="101%")),
        ("sample is 'few'", lambda: PipelineConfig(output=JSONL, sample="few")),
        ("split is '99,1'", lambda: PipelineConfig(output=JSONL, split="99,1")),
        ("split is 'a,b,c'", lambda: DataPrepConfig(split="a,b,c")),
        ("sample is -1", lambda: DataPrepConfig(sample=-1)),
        ("text_field is ''", lambda: DataPrepConfig(text_field="")),
    ],
)
def test_an_invalid_field_is_refused_with_its_value(message: str, make: Any) -> None:
    refused(message, make)


def test_deprecated_fields_are_moved_into_the_format() -> None:
    with pytest.warns(DeprecationWarning, match="num_shards is deprecated; set it in format"):
        output = OutputConfig(dir=Path("out"), num_shards=7)
    assert output.format == BinIdxOutputConfig(num_shards=7)
    with pytest.warns(DeprecationWarning, match="dtype"):
        assert OutputConfig(dir=Path("out"), dtype="uint16").format == BinIdxOutputConfig(dtype="uint16")


# -- blends


def write(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_both_forms_of_a_blend_are_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wiki = {"name": "wiki", "path": "hf://org/wiki", "weight": 2, "split": "train", "colour": "blue"}
    blend = DataBlend.load(write(tmp_path / "a.json", {"datasets": [wiki], "note": "mine"}))
    assert blend.splits == {"all": [Dataset(name="wiki", path="hf://org/wiki", weight=2.0, split="train")]}
    assert not blend.is_per_split
    log = capfd.readouterr().err
    assert "ignoring the unknown keys note, datasets[0].colour" in log

    books = {"name": "books", "path": "books.jsonl", "text_field": "body"}
    blend = DataBlend.load(write(tmp_path / "b.json", {"train": [books], "valid": [books], "test": []}), text_field="t")
    assert blend.is_per_split and [*blend.splits] == ["train", "valid"]
    assert [item.text_field for item in blend.splits["train"]] == ["body"]
    assert DataBlend.from_datasets(Dataset(name="a", path="b")).splits["all"][0].text_field == "text"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ('{"a":' * 100_000, "is not JSON"),
        ([], "its content is []: it must be an object"),
        ({}, "has no dataset"),
        ({"datasets": []}, "has no dataset"),
        ({"datasets": {}}, "datasets is {}: it must be a list"),
        ({"datasets": ["x"]}, 'datasets[0] is "x": it must be an object'),
        ({"datasets": [{"name": "a"}]}, "datasets[0] has no path"),
        ({"valid": [{"path": "a"}]}, "valid[0] has no name"),
        ({"datasets": [{"name": "a", "path": "b", "weight": 0}]}, "datasets[0]: weight is 0"),
        ({"datasets": [{"name": "a", "path": "b", "weight": "1"}]}, "datasets[0]: weight is '1'"),
        ({"datasets": [{"name": " ", "path": "b"}]}, "datasets[0]: name is ' '"),
        ({"datasets": [{"name": "a", "path": "b", "split": 3}]}, "datasets[0]: split is 3"),
        ({"train": [{"name": "a", "path": "b"}, {"name": "a", "path": "c"}]}, "more than one dataset with the name"),
        ({"datasets": [{"name": "a", "path": "b"}], "train": [{"name": "a", "path": "b"}]}, "both datasets and train"),
    ],
)
def test_an_invalid_blend_is_refused_with_file_and_key(content: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "blend.json", content)
    refused(message, lambda: DataBlend.load(path))
    refused(str(path), lambda: DataBlend.load(path))


def test_a_missing_blend_is_refused(tmp_path: Path) -> None:
    refused("gone.json does not exist", lambda: DataBlend.load(tmp_path / "gone.json"))


# -- files


NAMES = [
    "data/train_sft-0.parquet",
    "data/train_gen-0.parquet",
    "data/test_sft-0.parquet",
    "en/train.jsonl",
    "en/test.jsonl",
    "de-en/train.jsonl",
]


@pytest.mark.parametrize(
    ("split", "subset", "expected_split", "expected"),
    [
        ("train", None, "train", NAMES),
        ("train_sft", None, "any", NAMES[:1]),
        ("gen", None, "any", NAMES[1:2]),
        ("train", "en", "train", NAMES[3:5]),
        ("sft", "data", "any", [NAMES[0], NAMES[2]]),
        ("validation", None, "validation", NAMES),
        (None, "de-en", None, NAMES[5:]),
    ],
)
def test_splits_and_subsets_are_words_in_the_names(
    split: str | None, subset: str | None, expected_split: str | None, expected: list[str]
) -> None:
    selection = choose_files(Dataset(name="d", path="hf://o/d", split=split, subset=subset), NAMES, [])
    assert selection.split == expected_split
    assert [name for name in NAMES if not selection.include or matches(name, selection.include)] == expected


def test_files_without_splits_in_their_names_are_training_data() -> None:
    assert choose_files(Dataset(name="d", path="hf://o/d", split="train"), ["a.jsonl"], []).split == "any"
    assert choose_files(Dataset(name="d", path="hf://o/d", split="train"), ["test/a.jsonl"], []).split == "train"


def test_a_word_that_no_file_has_is_refused_with_examples() -> None:
    with pytest.raises(RequestError, match=r"'chat' as a word in its path; its files are data/train_sft-0.parquet, .*"):
        choose_files(Dataset(name="d", path="hf://o/d", split="chat"), NAMES, [])


def test_a_name_on_the_hub_is_a_dataset() -> None:
    assert normalize_path("hf://org/name") == normalize_path("hf://datasets/org/name") == "hf://datasets/org/name"
    assert normalize_path("./a/b") == "./a/b"
    assert normalize_path("s3://bucket/a") == "s3://bucket/a"
