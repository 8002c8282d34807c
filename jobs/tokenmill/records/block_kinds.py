"""Constants and settings of blocks: `records.blocks` writes blocks, `records.parse` parses them."""

from typing import NamedTuple

from tokenmill.core.machine import describe_memory

FORMATS = ("jsonl", "txt", "json", "parquet", "arrow")
"""The values of --format. The option overrides the format that the file name implies."""

DEFAULT_ZSTD_WINDOW = 128 << 20
"""Bytes of the largest accepted zstd window, the limit of `zstd -d`: the decoder allocates the window in memory."""
MAX_ZSTD_WINDOW = 2 << 30
"""Bytes of the largest window that the decoder supports: `zstd --long=31`."""

LINES = "lines"
"""Kind of a block with one JSON record per line."""
ROWS = "rows"
"""Kind of a block with rows of the requested columns, in Arrow's stream format."""
TEXT = "text"
"""Kind of a block with one text, which is one document."""
TEXT_LINES = "text lines"
"""Kind of a block with one document per line."""
OVERSIZED = "too long"
"""Kind of a block that replaces an oversized record: one line with the reason, then the start of the record."""

MEMORY_PER_RECORD_BYTE = 100
"""Bytes of memory per byte of a record: measured are 10 with a fast encoder, and 80 for random letters without spaces.

The second number is the library's: the text and its ids in this package take about 7.
"""
MEMORY_PER_RECORD_BYTE_HF = 200
"""The same with Hugging Face's own tokenizer: measured are 170 for a text with little more than one byte per token."""


MAX_RECORD_BYTES = 1 << 30
"""Bytes of the largest accepted record. A memory limit can reduce this number."""


class ReadSettings(NamedTuple):
    """Settings for reading input files.

    `format` is one of FORMATS; None selects the format by the name or the content of each file.
    With `document_per_line`, each line of a txt file is a document; otherwise each file is one document.
    Readers reject a record of more than `max_record_bytes` bytes, and a zstd frame with a window of more than
    `zstd_window` bytes.
    """

    format: str | None = None
    document_per_line: bool = False
    zstd_window: int = DEFAULT_ZSTD_WINDOW
    max_record_bytes: int = MAX_RECORD_BYTES


def describe_oversized(size: int, max_record_bytes: int, head: bytes) -> bytes:
    """Return the content of an OVERSIZED block: the reason, a newline, and the start of the record."""
    reason = (
        f"record of {size:,} bytes: the limit is {max_record_bytes:,} bytes ({describe_memory()}); split the record, "
        "or raise --max-record-size (in a chart: --set dataset.maxRecordSize=...), which requires memory of "
        f"{MEMORY_PER_RECORD_BYTE} times its value, or {MEMORY_PER_RECORD_BYTE_HF} times with --encoder hf"
    )
    return reason.encode() + b"\n" + head
