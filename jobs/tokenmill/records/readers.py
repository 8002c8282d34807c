"""Read the documents of one file in the current process, for planning and for tools that need the texts.

preprocess executes the same two steps in different processes: `records.blocks` cuts the file into blocks, and
`records.parse` parses each block.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from tokenmill.core.typed_json import JsonObject
from tokenmill.errors import InputError
from tokenmill.records.block_kinds import LINES, ROWS, ReadSettings
from tokenmill.records.blocks import detect_format, open_blocks
from tokenmill.records.parse import RejectedRecord, Text, parse_block, parse_records
from tokenmill.records.unexpected_content import UnexpectedContent, describe_mismatch

OnBad = Literal["fail", "quarantine"]


@dataclass(slots=True)
class TextBatch:
    """Consecutive documents of one file, with counts of the input that was read for them.

    `texts` has one list per key, and all lists have the documents in the same order. An entry is a text, or a list of
    texts that become one sequence each. `records` = `documents` + len(`rejected`). `blank` counts blank lines, which
    are not records. The sums of `bytes` (uncompressed) and `compressed` over a file's batches are the file's sizes. For
    Parquet, `bytes` counts the decoded bytes of the requested columns.
    """

    texts: list[list[Text]]
    documents: int = 0
    records: int = 0
    blank: int = 0
    rejected: list[RejectedRecord] = field(default_factory=list)
    bytes: int = 0
    compressed: int = 0
    kind: str = LINES


class MemoryBuffer:
    """A buffer for blocks in the memory of the current process."""

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
    settings: ReadSettings = ReadSettings(),  # noqa: B008 - it is immutable
) -> Iterator[TextBatch]:
    """Yield the documents of one file in batches of about `batch_bytes`, in order.

    A key is the name of a field of the record. If there is no such field, the key is a path into nested objects
    (`meta.text`). A batch exceeds `batch_bytes` by at most one record and one decompression step.

    Raises:
        InputError: the input is damaged, or a record is bad and `on_bad` is "fail".
        RequestError: a Parquet or Arrow column is missing or does not contain text.
    """
    buffer = MemoryBuffer()
    compressed = records = lines = 0  # of the file, before this batch
    begins_file = True
    with closing(open_blocks(path, keys, display=display, settings=settings)) as blocks:
        while not blocks.finished:
            end = blocks.fill(buffer, 0, batch_bytes)
            parsed = parse_block(blocks.kind, buffer.data, 0, end, keys, begins_file=begins_file, display=display)
            if records == 0:
                reject_mismatch(path, settings, display, blocks.kind, parsed.documents, parsed.rejected)
            begins_file = False
            rejected = [bad._replace(record=records + bad.record, line=lines + bad.line) for bad in parsed.rejected]
            if rejected and on_bad == "fail":
                raise make_bad_record_error(display, get_record_unit(path, settings, blocks.kind), rejected[0])
            yield TextBatch(
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


def reject_mismatch(
    path: Path, settings: ReadSettings, display: str, kind: str, documents: int, rejected: Sequence[RejectedRecord]
) -> None:
    """Raise UnexpectedContent when a file's first records show a layout other than one record per line."""
    if kind != LINES or not rejected or rejected[0].record or detect_format(path, settings.format) != "jsonl":
        return
    if hint := describe_mismatch(rejected[0].raw, no_documents=not documents):
        raise UnexpectedContent(f"{display}: {hint}")


def get_record_unit(path: Path, settings: ReadSettings, kind: str) -> str:
    """Return the unit that messages use to number the records of a file: row, line or record."""
    if kind == ROWS:
        return "row"
    file_format = detect_format(path, settings.format)
    by_line = file_format == "jsonl" or (file_format == "txt" and settings.document_per_line)
    return "line" if by_line else "row" if file_format in ("parquet", "arrow") else "record"


MAX_SEARCH_BYTES = 64 << 20
"""Bytes that a search for a file's first documents reads at most: a large file can consist of blank lines only."""


def first_documents(
    path: Path,
    key: str,
    count: int,
    max_bytes: int,
    *,
    display: str | None = None,
    settings: ReadSettings = ReadSettings(),  # noqa: B008 - it is immutable
) -> list[str]:
    """Return a file's first texts for the parity gate: at most `count` texts of `max_bytes` characters in total.

    Bad records and damaged data are ignored here; the run itself reports them.
    """
    texts: list[str] = []
    name, search_bytes = display or str(path), MAX_SEARCH_BYTES
    batches = read_documents(path, [key], display=name, batch_bytes=256 << 10, on_bad="quarantine", settings=settings)
    with suppress(InputError):
        for batch in batches:
            search_bytes -= batch.bytes
            for value in batch.texts[0]:
                for text in (value,) if isinstance(value, str) else value:
                    if len(texts) >= count or max_bytes <= 0:
                        return texts
                    texts.append(text[:max_bytes])
                    max_bytes -= len(text)
            if search_bytes <= 0:
                break
    return texts


class FirstRow(NamedTuple):
    """A complete record near the start of a file, and its line, row or record number, counted from 1."""

    line: int
    row: JsonObject


def first_rows(
    path: Path,
    columns: Sequence[str],
    count: int,
    max_bytes: int,
    *,
    settings: ReadSettings = ReadSettings(),  # noqa: B008 - it is immutable
) -> tuple[list[FirstRow], RejectedRecord | None]:
    """Return a file's first complete records: at most `count`, from blocks of at most `max_bytes`.

    The second value is the first rejected record if none of the records before it is valid. Damaged data is ignored
    here; the run itself reports it.

    Raises:
        UnexpectedContent: the file does not contain records.
        RequestError: a columnar file has none of the columns.
    """
    rows: list[FirstRow] = []
    display, buffer, lines, search_bytes, rejected = str(path), MemoryBuffer(), 0, MAX_SEARCH_BYTES, None
    with closing(open_blocks(path, columns, display=display, settings=settings, complete=True)) as blocks:
        begins_file = True
        while not blocks.finished and len(rows) < count and rejected is None and search_bytes > 0:
            end = blocks.fill(buffer, 0, max_bytes)
            parsed = parse_records(blocks.kind, buffer.data, 0, end, columns, begins_file=begins_file)
            begins_file = False
            reject_mismatch(path, settings, display, blocks.kind, len(parsed.rows), parsed.rejected)
            rows += [FirstRow(lines + parsed.get_line(number), row) for number, row in enumerate(parsed.rows)]
            if parsed.rejected and not rows:
                rejected = parsed.rejected[0]._replace(line=lines + parsed.rejected[0].line)
            lines += parsed.records + parsed.blank
            search_bytes -= end
    return rows[:count], rejected


def make_bad_record_error(display: str, unit: str, bad: RejectedRecord, correct: str = "") -> InputError:
    """Return the error for a bad record when on_bad is "fail".

    `correct` describes how to correct the record, for a file that the user should not edit.
    """
    option = "--on-bad-record=quarantine (in a chart: --set onBadRecord=quarantine)"
    remedy = f"correct the file and run the same command again, or use {option}"
    if correct:
        remedy = f"use {option}, or {correct}"
    return InputError(f"{display}, {unit} {bad.line:,}: {bad.reason}. Correct or quarantine the record: {remedy}.")
