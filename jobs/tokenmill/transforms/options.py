"""The options of `tokenmill transform`."""

from dataclasses import dataclass
from typing import Annotated

from tokenmill.corpus.block_kinds import (
    DEFAULT_ZSTD_WINDOW,
    MAX_RECORD_BYTES,
    MEMORY_PER_RECORD_BYTE,
    ReadSettings,
)
from tokenmill.corpus.options import WindowOptions
from tokenmill.machine import available_memory
from tokenmill.options import InvalidOption, Option, parse_byte_size
from tokenmill.transforms import shards
from tokenmill.transforms.builtin import BUILTIN
from tokenmill.transforms.call import TransformCall, parse_call

DEFAULT_SHARD_SIZE = "256MB"
"""Size of the input of a shard if neither a size nor a number of shards is requested."""

MAX_SHARD_SIZE = 1 << 60
"""The largest size of a shard: a plan stores numbers of 64 bits."""

NONE, ZSTD = "none", "zstd"
"""The values of --compression."""


def _parse_shard_size(text: str) -> int:
    size = shards.parse_byte_size(text)
    if not 1 <= size <= MAX_SHARD_SIZE:
        raise ValueError(f"{text!r} is not between 1 byte and 1 EB; write a size such as {DEFAULT_SHARD_SIZE}")
    return size


@dataclass(frozen=True, kw_only=True)
class TransformOptions(WindowOptions):
    """The options that determine the records and the shards, and how bad records are treated."""

    transform: Annotated[
        str,
        Option(
            f"{', '.join(BUILTIN)}, or module:function of yours; with arguments as 'sft(input=question)'.",
            show_default=False,
        ),
    ]
    set: Annotated[
        list[str] | None, Option("An argument of the transform, as input=question; repeatable.", show_default=False)
    ] = None
    shard_size: Annotated[
        int | None,
        Option(f"Size of the input of each shard; KB is 1024. Default: {DEFAULT_SHARD_SIZE}.", parse=_parse_shard_size),
    ] = None
    shards: Annotated[int | None, Option("Number of shards.", minimum=1, maximum=1_000_000)] = None
    compression: Annotated[str, Option("none, or zstd.", choices=(NONE, ZSTD))] = NONE
    format: Annotated[
        str | None,
        Option(
            "Read files with any name as jsonl, json (arrays, or objects over several lines), parquet or arrow. "
            "Default: by file name.",
            choices=("jsonl", "json", "parquet", "arrow"),
        ),
    ] = None
    max_record_size: Annotated[
        int | None,
        Option(
            "Largest accepted record, such as 64MiB. Default: limited by the available memory.", parse=parse_byte_size
        ),
    ] = None
    on_bad_record: Annotated[
        str,
        Option(
            "fail, or quarantine: copy bad records to the directory rejected/ of the output, and continue.",
            choices=("fail", "quarantine"),
        ),
    ] = "fail"
    max_bad_records: Annotated[
        int, Option("With quarantine: maximum number of bad records of each output.", minimum=0)
    ] = 1000

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
        return {"shard_size": self.shard_size or shards.parse_byte_size(DEFAULT_SHARD_SIZE)}

    def count_shards(self, total: int) -> int:
        """Return the number of shards for an input of `total` bytes."""
        sharding = self.sharding()
        return sharding["shards"] if "shards" in sharding else shards.count_shards(total, sharding["shard_size"])

    @property
    def suffix(self) -> str:
        """The end of the name of a shard."""
        return ".jsonl.zst" if self.compression == ZSTD else ".jsonl"

    def reading(self) -> ReadSettings:
        """Return the settings to read files with; the memory of this machine limits the size of a record."""
        limit = self.max_record_size or min(MAX_RECORD_BYTES, available_memory() // MEMORY_PER_RECORD_BYTE)
        return ReadSettings(self.format, zstd_window=self.zstd_window or DEFAULT_ZSTD_WINDOW, max_record_bytes=limit)
