"""The configuration of a data preparation: plain dataclasses that check their values when they are made.

The names, fields and defaults are those of the data preparation module of NVIDIA's Nemotron recipes, so that code
written for that module runs with this one. docs/data-prep.md lists the differences. `data_prep.run` turns a
configuration into the options of the stages.
"""

import math
import warnings
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tokenmill.core.files.user_path import local_path
from tokenmill.engine.options import parse_byte_size
from tokenmill.errors import RequestError
from tokenmill.stages.transform.types import Transform

DEFAULT_SHARD_SIZE = "256MB"
"""Bytes of input for a shard, unless the configuration sets a number of shards."""

Compression = Literal["none", "zstd"]
OnBadRecord = Literal["fail", "quarantine"]
Algorithm = Literal["first_fit_shuffle", "first_fit_decreasing", "concatenative"]
TokenType = Literal["int32", "int64", "uint16"]


class InvalidField(RequestError, ValueError):
    """A field of a configuration or of a blend has an invalid value; the message contains the rule and the remedy."""


def require(condition: bool, owner: object, name: str, rule: str) -> None:
    """Raise InvalidField unless the condition holds; the message names the field `name` of `owner` and its value."""
    if not condition:
        raise InvalidField(f"{type(owner).__name__}.{name} is {getattr(owner, name)!r}: {rule}")


def _set_path(config: object, name: str) -> None:
    """Convert a field to a `Path`; refuse the address of a bucket (InvalidField)."""
    try:
        object.__setattr__(config, name, local_path(getattr(config, name), f"{type(config).__name__}.{name}"))
    except RequestError as error:
        raise InvalidField(str(error)) from None


def parse_shard_size(size: str | int) -> int:
    """Return the bytes of a size such as 256MB, 1G or 500MiB; a unit is a power of 1024 (InvalidField)."""
    try:
        return parse_byte_size(size)
    except ValueError as error:
        raise InvalidField(f"invalid shard_size: {error}") from error


def _check_choices(config: Any) -> None:
    """Check each field whose type is a Literal, and each number that must be positive."""
    hints = get_type_hints(type(config))
    for item in fields(config):
        if get_origin(hints[item.name]) is Literal:
            choices = get_args(hints[item.name])
            require(getattr(config, item.name) in choices, config, item.name, f"choose one of {', '.join(choices)}")


def _check_counts(config: Any, *names: str, minimum: int = 1) -> None:
    for name in names:
        value = getattr(config, name)
        valid = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= minimum)
        require(valid, config, name, f"it must be an integer of {minimum} or more; set another number")


def _check_shards(config: Any) -> None:
    """Check the number and the size of shards; the number takes precedence over the default size."""
    _check_counts(config, "num_shards")
    size, count = config.shard_size, config.num_shards
    if size is not None and parse_shard_size(size) < 1:
        require(False, config, "shard_size", "a shard must have at least one byte; set a larger size")
    require(size is not None or count is not None, config, "shard_size", "set a size such as 256MB, or set num_shards")
    require(
        count is None or size in (None, DEFAULT_SHARD_SIZE),
        config,
        "shard_size",
        f"num_shards is set, too ({count}); leave out one of the two",
    )


def _check_packing(config: Any) -> None:
    _check_shards(config)
    _check_counts(config, "pack_size", minimum=2)
    require(config.dtype == "int32", config, "dtype", "packed ids are int32; leave out dtype")


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer of a data preparation.

    `model` is a directory or a name on the Hub. `add_bos` and `add_eos` put the tokenizer's BOS before each document
    and its EOS after it.
    """

    model: str
    type: Literal["huggingface", "sentencepiece", "tiktoken"] = "huggingface"
    add_bos: bool = False
    add_eos: bool = True
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Refuse tokenizers that tokenmill does not load."""
        object.__setattr__(self, "model", str(self.model))
        require(bool(self.model), self, "model", "set a directory, or a name on the Hub")
        _check_choices(self)
        require(
            self.type != "tiktoken",
            self,
            "type",
            "tokenmill reads tokenizers of Hugging Face and SentencePiece; convert it to a tokenizer.json",
        )
        require(
            not self.trust_remote_code,
            self,
            "trust_remote_code",
            "tokenmill never runs code of a tokenizer; set False, and use a tokenizer with a tokenizer.json",
        )


@dataclass(frozen=True)
class BinIdxOutputConfig:
    """Pairs of .bin and .idx, as Megatron-LM reads them.

    As in Megatron-LM, the ids are uint16 if the vocabulary permits it, and int32 otherwise. `dtype` uint16 refuses a
    larger vocabulary.
    """

    format: Literal["binidx"] = "binidx"
    shard_size: str | int | None = DEFAULT_SHARD_SIZE
    num_shards: int | None = None
    dtype: TokenType = "int32"

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_choices(self)
        _check_shards(self)
        require(
            self.dtype != "int64",
            self,
            "dtype",
            "tokenmill writes uint16 or int32, as Megatron-LM does for the vocabulary; leave out dtype",
        )


@dataclass(frozen=True)
class JsonlOutputConfig:
    """JSONL files of the records that `transform` returns."""

    format: Literal["jsonl"] = "jsonl"
    shard_size: str | int | None = DEFAULT_SHARD_SIZE
    num_shards: int | None = None
    transform: Transform | None = None
    compression: Compression = "none"

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_choices(self)
        _check_shards(self)
        require(
            self.transform is None or callable(self.transform),
            self,
            "transform",
            "it must be a function of one record; set a function, or leave it out",
        )


@dataclass(frozen=True)
class PackedOutputConfig:
    """Rows of at most `pack_size` tokens, made of whole documents, in `.npy` or Parquet files.

    `writer` selects the files; it is an addition to the original interface.
    """

    format: Literal["packed"] = "packed"
    shard_size: str | int | None = DEFAULT_SHARD_SIZE
    num_shards: int | None = None
    dtype: TokenType = "int32"
    pack_size: int = 2048
    algorithm: Algorithm = "first_fit_shuffle"
    writer: Literal["npy", "parquet"] = field(default="npy", kw_only=True)

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_choices(self)
        _check_packing(self)


@dataclass(frozen=True)
class ChatSftOutputConfig:
    """Packed conversations with a loss mask: 1 where the token is trained.

    `chat_template` is the name of a built-in template, the path of a .jinja file, or the text of a template; None uses
    the tokenizer's own. `used_in_filter` keeps only records whose field `used_in_field` has this value, or has a list
    that contains it.
    """

    format: Literal["chat_sft"] = "chat_sft"
    shard_size: str | int | None = DEFAULT_SHARD_SIZE
    num_shards: int | None = None
    dtype: TokenType = "int32"
    chat_template: str | None = None
    messages_field: str = "messages"
    tools_field: str = "tools"
    pack_size: int = 2048
    algorithm: Algorithm = "first_fit_shuffle"
    used_in_filter: str | None = None
    used_in_field: str = "used_in"
    writer: Literal["npy", "parquet"] = field(default="npy", kw_only=True)

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_choices(self)
        _check_packing(self)
        for name in ("messages_field", "tools_field", "used_in_field"):
            require(bool(getattr(self, name)), self, name, "it must be the key of a field; set a key")


OutputFormat = BinIdxOutputConfig | JsonlOutputConfig | PackedOutputConfig | ChatSftOutputConfig


@dataclass(frozen=True)
class OutputConfig:
    """The output directory, the format of the output, and the rows that are left out.

    `min_doc_chars` leaves out texts with fewer characters, and `max_rows` limits the rows of each shard. `num_shards`
    and `dtype` are deprecated: set them in `format`.
    """

    dir: Path
    format: OutputFormat = field(default_factory=BinIdxOutputConfig)
    min_doc_chars: int | None = None
    max_doc_tokens: int | None = None
    max_rows: int | None = None
    num_shards: int | None = None
    dtype: TokenType | None = None

    def __post_init__(self) -> None:
        """Check the fields, and move the deprecated ones into the format."""
        _set_path(self, "dir")
        require(
            isinstance(self.format, OutputFormat),
            self,
            "format",
            "set a BinIdxOutputConfig, JsonlOutputConfig, PackedOutputConfig or ChatSftOutputConfig",
        )
        _check_counts(self, "min_doc_chars", minimum=0)
        _check_counts(self, "max_doc_tokens", "max_rows", "num_shards")
        _refuse_max_doc_tokens(self)
        require(
            self.min_doc_chars is None or isinstance(self.format, BinIdxOutputConfig | PackedOutputConfig),
            self,
            "min_doc_chars",
            f"the format {self.format.format} has no texts to measure; leave it out, or use a transform",
        )
        for name in ("num_shards", "dtype"):
            if getattr(self, name) is not None:
                warnings.warn(f"OutputConfig.{name} is deprecated; set it in format", DeprecationWarning, stacklevel=3)
        if self.num_shards is not None:
            self._set_in_format(num_shards=self.num_shards)
        if self.dtype is not None and not isinstance(self.format, JsonlOutputConfig):
            self._set_in_format(dtype=self.dtype)

    def _set_in_format(self, **values: Any) -> None:
        object.__setattr__(self, "format", replace(self.format, **values))


@dataclass(frozen=True)
class PerSplitConfig:
    """Separate outputs for training, validation and test: the numbers of shards that the last two get."""

    enabled: bool = True
    valid_shards: int = 1
    test_shards: int = 1

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_counts(self, "valid_shards", "test_shards", minimum=0)


@dataclass(frozen=True)
class PipelineConfig:
    """The configuration of `last_mile_process`.

    `num_actors` is the number of processes. `sample` selects some of the shards: "10%" or a number; `sample_seed`
    selects which. `force` makes all files again. `split` has the shares of training, validation and test, by which
    Megatron-LM divides the data, and `per_split` writes separate outputs instead. `on_bad_record` quarantine copies bad
    records to `rejected/` in the directories of the datasets instead of failing; it is an addition.
    """

    output: OutputConfig
    tokenizer: TokenizerConfig | None = None
    num_actors: int = 4
    sample: str | int | None = None
    sample_seed: int = 42
    force: bool = False
    split: str | None = None
    per_split: PerSplitConfig | None = None
    on_bad_record: OnBadRecord = field(default="fail", kw_only=True)

    def __post_init__(self) -> None:
        """Check the fields, and that a format with tokens has a tokenizer."""
        _check_choices(self)
        if self.tokenizer is not None and isinstance(self.output.format, ChatSftOutputConfig):
            require(
                not self.tokenizer.add_bos and self.tokenizer.add_eos,
                self.tokenizer,
                "add_bos" if self.tokenizer.add_bos else "add_eos",
                "the chat template writes the tokens around conversations; leave it out, or change the template",
            )
        _check_counts(self, "num_actors")
        require(
            self.tokenizer is not None or isinstance(self.output.format, JsonlOutputConfig),
            self,
            "tokenizer",
            f"the format {self.output.format.format} needs one; set TokenizerConfig(model=...)",
        )
        if self.sample is not None:
            _check_sample(self)
        _check_split(self)

    @property
    def splits_by_shard(self) -> bool:
        """Whether shards are divided between training, validation and test."""
        return self.per_split is not None and self.per_split.enabled


@dataclass(frozen=True)
class DataPrepConfig:
    """The configuration of `run_data_prep`, which writes pairs for Megatron-LM.

    `sample` is a number of rows of each dataset. `text_field` is the key of datasets that set no key. The other fields
    are those of `PipelineConfig` and its parts; `num_actors` None uses all CPUs.
    """

    blend_path: Path = Path("data_blend.json")
    output_dir: Path = Path("./output")
    num_shards: int = 128
    split: str | None = None
    per_split: PerSplitConfig | None = field(default_factory=PerSplitConfig)
    tokenizer_model: str = "nvidia/NVIDIA-Nemotron-Nano-9B-v2"
    add_bos: bool = False
    add_eos: bool = True
    text_field: str = "text"
    min_doc_chars: int | None = None
    max_doc_tokens: int | None = None
    sample: int | None = None
    num_actors: int | None = None
    force: bool = False
    artifact_name: str | None = None
    on_bad_record: OnBadRecord = field(default="fail", kw_only=True)

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_choices(self)
        _set_path(self, "blend_path")
        _set_path(self, "output_dir")
        _check_counts(self, "num_shards", "sample", "num_actors", "max_doc_tokens")
        _refuse_max_doc_tokens(self)
        require(bool(self.text_field), self, "text_field", "it must be the key of a field; set a key")
        _check_split(self)


def _refuse_max_doc_tokens(config: OutputConfig | DataPrepConfig) -> None:
    require(
        config.max_doc_tokens is None,
        config,
        "max_doc_tokens",
        "tokenmill does not cut documents; leave it out, or shorten the texts with a transform first",
    )


def _check_sample(config: PipelineConfig) -> None:
    """Check a number of shards, as a number or as a share in percent."""
    text = str(config.sample).strip()
    try:
        value = float(text[:-1]) if text.endswith("%") else int(text)
    except ValueError:
        value = math.nan
    limit = 100 if text.endswith("%") else math.inf
    require(
        0 < value <= limit and not isinstance(config.sample, bool),
        config,
        "sample",
        'it must be a number of shards, or a share of them of up to 100%; set "5" or "10%"',
    )


def _check_split(config: PipelineConfig | DataPrepConfig) -> None:
    """Check the shares of the splits, and that no other field divides the data."""
    if config.split is None:
        return
    require(
        config.per_split is None or not config.per_split.enabled,
        config,
        "split",
        "per_split already writes separate outputs; leave out split, or set per_split=None",
    )
    try:
        shares = [float(part) for part in config.split.split(",")]
    except ValueError:
        shares = []
    require(
        len(shares) == 3 and min(shares) >= 0 and 0 < sum(shares) < math.inf,
        config,
        "split",
        "it must have the shares of training, validation and test; set it as 990,9,1",
    )
