"""What a block holds, from `corpus.blocks`, which cuts it, to `corpus.parse`, which takes the texts out of it."""

from typing import NamedTuple

from tokenmill.machine import memory_words

FORMATS = ("jsonl", "txt", "json", "parquet", "arrow")
"""What a file can be read as, whatever its name says."""

ZSTD_WINDOW = 128 << 20
"""Largest window of a zstd frame unless the user names another: the decoder allocates it; `zstd -d` has this limit."""
ZSTD_WINDOW_MOST = 2 << 30
"""What the decoder can take at most: `zstd --long=31`."""

LINES = "lines"
"""A JSON record a line."""
ROWS = "rows"
"""Rows of the wanted columns, in Arrow's stream format."""
TEXT = "text"
"""A text that is one document."""
TEXT_LINES = "text lines"
"""A document a line."""
TOO_LONG = "too long"
"""In place of a record that is too long: a line that says why it is not taken, and the beginning of the record."""

MEMORY = 40
"""Bytes of memory for each byte of a record: measured are 10 with a fast encoder, 33 for a text without spaces."""
EXACT_MEMORY = 200
"""The same where Hugging Face's own tokenizer encodes: measured are 170, with little more than a byte to a token."""


MOST = 1 << 30
"""Bytes of a record that are taken at most where the memory does not say less."""


class ReadSettings(NamedTuple):
    """How files are read: `format` is one of FORMATS, None is what each file's name or content says.

    With `lines` a document of txt is a line, else a file. A record with more than `most` bytes is not taken, nor
    is a zstd frame with a window larger than `window`.
    """

    format: str | None = None
    lines: bool = False
    window: int = ZSTD_WINDOW
    most: int = MOST


def too_long(size: int, most: int, head: bytes) -> bytes:
    """Word why a record is not taken, in front of its beginning."""
    reason = (
        f"a record of {size:,} bytes, and at most {most:,} are taken ({memory_words()}): cut it into several, or raise "
        "--max-record-size (in a chart: --set dataset.maxRecordSize=...), for which memory is to be "
        f"{MEMORY} times as much, with --encoder hf {EXACT_MEMORY} times"
    )
    return reason.encode() + b"\n" + head
