"""The options of `tokenmill transform`."""

from dataclasses import dataclass
from typing import Annotated

from tokenmill.core.machine import available_memory
from tokenmill.engine.options import InvalidOption, Option, Panel, parse_byte_size, parse_size_limit
from tokenmill.records.block_kinds import DEFAULT_ZSTD_WINDOW, MAX_RECORD_BYTES, MEMORY_PER_RECORD_BYTE, ReadSettings
from tokenmill.sources.options import RecordOptions
from tokenmill.stages.transform import shards
from tokenmill.stages.transform.call import TransformCall, parse_call

DEFAULT_SHARD_SIZE = "256MB"
"""Size of the input of a shard if neither a size nor a number of shards is requested."""

NONE, ZSTD = "none", "zstd"
"""The values of --compression."""

JSONL, PARQUET = "jsonl", "parquet"
"""The values of --output-format."""


@dataclass(frozen=True, kw_only=True)
class TransformOptions(RecordOptions):
    """The options that determine the records and the shards."""

    panel = Panel.TRANSFORM

    transform: Annotated[
        str,
        Option(
            "Built-in transform, such as sft, or module:function; with arguments as 'sft(input=question)'.",
            show_default=False,
            chart="function.name",
        ),
    ]
    set: Annotated[
        list[str] | None,
        Option(
            "An argument of the transform, such as input=question; repeatable.",
            metavar="NAME=VALUE",
            show_default=False,
            chart="function.arguments",
            usual=True,
        ),
    ] = None
    shard_size: Annotated[
        int | None,
        Option(
            f"Size of the input of each shard; MB is MiB. Default: {DEFAULT_SHARD_SIZE}.",
            metavar="SIZE",
            parse=parse_size_limit,
            chart="shards.size",
            panel=Panel.OUTPUT,
        ),
    ] = None
    shards: Annotated[
        int | None,
        Option(
            "Number of shards.", minimum=1, maximum=1_000_000, chart="shards.number", panel=Panel.OUTPUT, usual=True
        ),
    ] = None
    output_format: Annotated[
        str,
        Option(
            "Format of the shards; verl and TRL read parquet.",
            choices=(JSONL, PARQUET),
            chart="shards.format",
            panel=Panel.OUTPUT,
            usual=True,
        ),
    ] = JSONL
    compression: Annotated[
        str,
        Option("Compression of the shards.", choices=(NONE, ZSTD), chart="shards.compression", panel=Panel.OUTPUT),
    ] = NONE
    format: Annotated[
        str | None,
        Option(
            "Read all files in this format. Default: by file name.",
            choices=("jsonl", "json", "parquet", "arrow"),
            chart="dataset.format",
            panel=Panel.INPUT,
            usual=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raise InvalidOption for a text that is not a transform, and for options that exclude each other."""
        if self.shards is not None and self.shard_size is not None:
            raise InvalidOption(
                "--shard-size", "it cannot be combined with --shards, which sets the number; remove one of them"
            )
        try:
            self.call  # noqa: B018 - raises for an invalid text
        except ValueError as error:
            raise InvalidOption("--transform", str(error)) from error

    @property
    def call(self) -> TransformCall:
        """The name and the arguments of the transform."""
        return parse_call(self.transform, self.set or ())

    def sharding(self) -> dict[str, int]:
        """Return the number of shards, or their size in bytes, for the plan."""
        if self.shards is not None:
            return {"shards": self.shards}
        return {"shard_size": self.shard_size or parse_byte_size(DEFAULT_SHARD_SIZE)}

    def count_shards(self, total: int) -> int:
        """Return the number of shards for an input of `total` bytes."""
        sharding = self.sharding()
        return sharding["shards"] if "shards" in sharding else shards.count_shards(total, sharding["shard_size"])

    @property
    def suffix(self) -> str:
        """The end of the name of a shard."""
        if self.output_format == PARQUET:
            return ".parquet"
        return ".jsonl.zst" if self.compression == ZSTD else ".jsonl"

    def output(self) -> dict[str, str]:
        """Return the format of the output for the plan, or no field for JSONL."""
        return {} if self.output_format == JSONL else {"output_format": self.output_format}

    def reading(self) -> ReadSettings:
        """Return the settings to read files with; the memory of this machine limits the size of a record."""
        limit = self.max_record_size or min(MAX_RECORD_BYTES, available_memory() // MEMORY_PER_RECORD_BYTE)
        return ReadSettings(self.format, zstd_window=self.zstd_window or DEFAULT_ZSTD_WINDOW, max_record_bytes=limit)
