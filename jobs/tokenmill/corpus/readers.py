"""Read the documents of one file in this process: what planning looks at, and whoever wants the texts themselves.

preprocess goes the same way with its two steps in different processes: `corpus.blocks` cuts the file,
`corpus.parse` takes the texts out of each block.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tokenmill.corpus.block_kinds import LINES, ROWS, ReadSettings
from tokenmill.corpus.blocks import format_of, open_blocks
from tokenmill.corpus.parse import RejectedRecord, Text, parse_block
from tokenmill.corpus.unexpected_content import UnexpectedContent, misread
from tokenmill.errors import InputError

OnBad = Literal["fail", "quarantine"]


@dataclass(slots=True)
class Batch:
    """Consecutive documents of one file, and what was read to get them.

    `texts` has one list per key, aligned by document; an entry is a text, or the list of texts that become
    one sequence each. `records` = `documents` + len(`rejected`); `blank` lines are no records. `bytes`
    (uncompressed) and `compressed` add up over a file's batches to its sizes; for Parquet `bytes` counts
    what the wanted columns decode to.
    """

    texts: list[list[Text]]
    documents: int = 0
    records: int = 0
    blank: int = 0
    rejected: list[RejectedRecord] = field(default_factory=list)
    bytes: int = 0
    compressed: int = 0
    kind: str = LINES


class _BlockMemory:
    """Room for blocks in this process."""

    def __init__(self) -> None:
        self.data = bytearray()

    def grow(self, size: int) -> None:
        self.data.extend(bytes(max(0, size - len(self.data))))


def read_documents(
    path: Path,
    keys: Sequence[str],
    *,
    display: str,
    batch_bytes: int = 4 << 20,
    on_bad: OnBad,
    reading: ReadSettings = ReadSettings(),  # noqa: B008 - it is immutable
) -> Iterator[Batch]:
    """Read the documents of one file in batches of about `batch_bytes`, in order.

    A key names a field of the record or, where there is none of that name, a path into nested objects
    (`meta.text`). A batch exceeds its size by at most one record and one step of decompression.

    Raises InputError for damaged input and, with `on_bad` = "fail", at the first bad record; RequestError
    for a Parquet column that is missing or holds no text.
    """
    room = _BlockMemory()
    compressed = records = lines = 0  # of the file, before this batch
    begins = True
    with closing(open_blocks(path, keys, display=display, reading=reading)) as blocks:
        while not blocks.finished:
            end = blocks.fill(room, 0, batch_bytes)
            parsed = parse_block(blocks.kind, room.data, 0, end, keys, begins_file=begins, display=display)
            if records == 0:
                refuse_misread(path, reading, display, blocks.kind, parsed.documents, parsed.rejected)
            begins = False
            rejected = [bad._replace(record=records + bad.record, line=lines + bad.line) for bad in parsed.rejected]
            if rejected and on_bad == "fail":
                raise bad_record(display, unit_of(path, reading, blocks.kind), rejected[0])
            yield Batch(
                parsed.texts,
                parsed.documents,
                parsed.records,
                parsed.blank,
                rejected,
                bytes=end,
                compressed=blocks.compressed - compressed,
                kind=blocks.kind,
            )
            compressed = blocks.compressed
            records += parsed.records
            lines += parsed.records + parsed.blank


def refuse_misread(
    path: Path, reading: ReadSettings, display: str, kind: str, documents: int, rejected: Sequence[RejectedRecord]
) -> None:
    """Refuse a file whose first records show that it is not one record a line. Raises ForeignContent."""
    if kind != LINES or not rejected or rejected[0].record or format_of(path, reading.format) != "jsonl":
        return
    if hint := misread(rejected[0].raw, alone=not documents):
        raise UnexpectedContent(f"{display}: {hint}")


def unit_of(path: Path, reading: ReadSettings, kind: str) -> str:
    """Return how messages count in a file: by row, line or record."""
    if kind == ROWS:
        return "row"
    wanted = format_of(path, reading.format)
    by_line = wanted == "jsonl" or (wanted == "txt" and reading.lines)
    return "line" if by_line else "row" if wanted in ("parquet", "arrow") else "record"


LOOK_BYTES = 64 << 20
"""Bytes that are read of a file for its first documents: one of blank lines alone is not read to its end for them."""


def first_documents(
    path: Path,
    key: str,
    count: int,
    max_bytes: int,
    *,
    display: str | None = None,
    reading: ReadSettings = ReadSettings(),  # noqa: B008 - it is immutable
) -> list[str]:
    """Give a file's first texts for the parity gate: at most `count`, cut at `max_bytes` characters in all.

    Bad records and damage are passed over; the run itself reports them.
    """
    texts: list[str] = []
    name, look = display or str(path), LOOK_BYTES
    batches = read_documents(path, [key], display=name, batch_bytes=256 << 10, on_bad="quarantine", reading=reading)
    with suppress(InputError):
        for batch in batches:
            look -= batch.bytes
            for value in batch.texts[0]:
                for text in (value,) if isinstance(value, str) else value:
                    if len(texts) >= count or max_bytes <= 0:
                        return texts
                    texts.append(text[:max_bytes])
                    max_bytes -= len(text)
            if look <= 0:
                break
    return texts


def bad_record(display: str, unit: str, bad: RejectedRecord, correct: str = "") -> InputError:
    """Word the end of a run at a bad record; `correct` says how, of a file that is not the user's own to edit."""
    how = "--on-bad-record=quarantine (in a chart: --set onBadRecord=quarantine)"
    remedy = f"Correct the record and run the same command again, or keep such records aside with {how}"
    if correct:
        remedy = f"Keep such records aside with {how}, or {correct}"
    return InputError(f"{display}, {unit} {bad.line:,}: {bad.reason}. {remedy}.")
