"""Read documents out of JSON lines, plain or compressed, and Parquet.

The first half of preprocess: texts go from here to the encoder, batch by batch. What Megatron-LM's
tools/preprocess_data.py would read with `json.loads` is read with the same result; what it would crash
on is a bad record. This is the hot path: for one key of text a document costs one `orjson.loads`, one
dictionary look-up and one type check, and everything else happens only where those fail. Only workers
import this module.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

from tokenmill.corpus.compression import REMEDY, open_decompressed
from tokenmill.corpus.records import BOM, CONTENT
from tokenmill.errors import InputError, RequestError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

OnBad = Literal["fail", "quarantine"]
Text = str | list[str]
_Line = bytes | bytearray


@dataclass(slots=True)
class Rejected:
    """A bad record: its ordinal among the file's records from 0, its line or Parquet row from 1, and why.

    `raw` is the line without its newline, or a Parquet row's wanted columns as JSON.
    """

    record: int
    line: int
    reason: str
    raw: bytes


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
    rejected: list[Rejected] = field(default_factory=list)
    bytes: int = 0
    compressed: int = 0


class _BadRecord(Exception):
    """Why a record cannot be taken."""


def read_documents(
    path: Path, keys: Sequence[str], *, display: str, batch_bytes: int = 4 << 20, on_bad: OnBad
) -> Iterator[Batch]:
    """Read the documents of one file in batches of about `batch_bytes`, in order.

    A key names a field of the record or, where there is none of that name, a path into nested objects
    (`meta.text`). A batch exceeds its size by at most one record and one block of 1 MB.

    Raises InputError for damaged input and, with `on_bad` = "fail", at the first bad record; RequestError
    for a Parquet column that is missing or holds no text.
    """
    if path.name.lower().endswith(".parquet"):
        return _read_parquet(path, keys, display, batch_bytes, on_bad)
    return _read_lines(path, keys, display, batch_bytes, on_bad)


def first_documents(path: Path, key: str, count: int, max_bytes: int, *, display: str | None = None) -> list[str]:
    """Give a file's first texts for the parity gate: at most `count`, cut at `max_bytes` characters in all.

    Bad records and damage are passed over; the run itself reports them.
    """
    texts: list[str] = []
    batches = read_documents(path, [key], display=display or str(path), batch_bytes=256 << 10, on_bad="quarantine")
    with suppress(InputError):
        for batch in batches:
            for value in batch.texts[0]:
                for text in (value,) if isinstance(value, str) else value:
                    if len(texts) >= count or max_bytes <= 0:
                        return texts
                    texts.append(text[:max_bytes])
                    max_bytes -= len(text)
    return texts


def _read_lines(path: Path, keys: Sequence[str], display: str, batch_bytes: int, on_bad: OnBad) -> Iterator[Batch]:
    batch = Batch([[] for _ in keys])
    compressed = records = lines = 0  # of the file, before this batch
    take = _take_one if len(keys) == 1 and "." not in keys[0] else _take_many
    begin = True
    rest = bytearray()  # the line that the last block left open; growing in place, a long line costs no joins

    with open_decompressed(path, display=display) as blocks:
        while True:
            block = next(blocks, b"")
            batch.bytes += len(block)
            end = block.find(b"\n")
            if block and end < 0:
                rest += block
                continue
            rest += block[: max(end, 0)]
            if begin and rest.startswith(BOM):
                del rest[: len(BOM)]
            begin = False
            whole = chain((rest,) if block or rest else (), _lines(block, end + 1))
            for line, reason in take(whole, keys, batch):
                done = len(batch.texts[0]) + len(batch.rejected)
                number = lines + done + batch.blank + 1
                if on_bad == "fail":
                    raise _bad(display, f"line {number:,}", reason)
                batch.rejected.append(Rejected(records + done, number, reason, bytes(line)))
            rest = bytearray(block[block.rfind(b"\n") + 1 :])
            if batch.bytes >= batch_bytes or not block:
                batch.documents = len(batch.texts[0])
                batch.records = batch.documents + len(batch.rejected)
                batch.compressed = blocks.compressed_read - compressed
                compressed += batch.compressed
                records += batch.records
                lines += batch.records + batch.blank
                if batch.bytes or batch.compressed or batch.records or batch.blank:
                    yield batch
                if not block:
                    return
                batch = Batch([[] for _ in keys])


def _lines(block: bytes, start: int) -> Iterator[_Line]:
    """Yield the lines that end in the block, one by one: while one is in the cache, its text is taken."""
    find = block.find
    while (end := find(b"\n", start)) >= 0:
        yield block[start:end]
        start = end + 1


def _take_one(lines: Iterable[_Line], keys: Sequence[str], batch: Batch) -> Iterator[tuple[_Line, str]]:
    """Put the lines' texts into the batch; yield (line, reason) for each bad record in its turn."""
    (key,) = keys
    loads = orjson.loads
    append = batch.texts[0].append
    for line in lines:
        try:
            text = loads(line)[key]
        except (ValueError, KeyError, TypeError):
            text = None
        if type(text) is str:
            append(text)
        else:
            yield from _take_many((line,), keys, batch)


def _take_many(lines: Iterable[_Line], keys: Sequence[str], batch: Batch) -> Iterator[tuple[_Line, str]]:
    """Do the same for several keys, for a path into nested objects, and for what is no plain text."""
    for line in lines:
        try:
            values = _parse(line, keys)
        except _BadRecord as bad:
            yield line, str(bad)
            continue
        if values is None:
            batch.blank += 1
            continue
        for texts, value in zip(batch.texts, values, strict=True):
            texts.append(value)


def _parse(line: _Line, keys: Sequence[str]) -> list[Text] | None:
    """Read one line: the keys' texts, or None for a blank one.

    orjson refuses some lines that json.loads takes (NaN, Infinity, 1e400, lone surrogates, nesting beyond
    1,024), so its refusal is not the last word. Where it does not refuse, the texts are equal.
    """
    try:
        return [_text(value, key) for key, value in _fields(orjson.loads(line), keys)]
    except orjson.JSONDecodeError:
        if CONTENT.search(line) is None:
            return None
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _BadRecord(f"invalid UTF-8 at byte {error.start + 1:,} of the line") from error
    except json.JSONDecodeError as error:
        raise _BadRecord(
            f"broken JSON at column {error.colno:,} ({error.msg}); each line must be one record"
        ) from error
    except RecursionError as error:
        raise _BadRecord("JSON that is nested too deeply") from error
    except ValueError as error:  # an integer of more than 4,300 digits
        raise _BadRecord(f"JSON that Python does not take ({error})") from error
    values = []
    for key, value in _fields(record, keys):
        values.append(_text(value, key))
        try:
            "".join(values[-1]).encode()
        except UnicodeEncodeError as error:
            raise _BadRecord(f"a lone surrogate in {key!r}, which is no character") from error
    return values


def _fields(record: object, keys: Sequence[str]) -> Iterator[tuple[str, object]]:
    if not isinstance(record, dict):
        raise _BadRecord(f"{_kind(record)} where an object with the key {keys[0]!r} is wanted")
    for key in keys:
        if key in record:
            yield key, record[key]
            continue
        value: object = record
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                raise _BadRecord(f"no key {key!r} (there is {_listing(record)})")
            value = value[part]
        yield key, value


def _text(value: object, key: str) -> Text:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _BadRecord(f"{key!r} is {_kind(value)}, not text")
    for item in value:
        if not isinstance(item, str):
            raise _BadRecord(f"{key!r} is a list that holds {_kind(item)}, not only text")
    return value


def _kind(value: object) -> str:
    names = {
        type(None): "null",
        bool: "true or false",
        dict: "an object",
        list: "a list",
        str: "text",
        bytes: "invalid UTF-8",
    }
    return names.get(type(value), "a number")


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"


def _bad(display: str, place: str, reason: str) -> InputError:
    return InputError(
        f"{display}, {place}: {reason}. Correct the record and run the same command again, or keep such records "
        "aside with --on-bad-record=quarantine."
    )


def _read_parquet(path: Path, keys: Sequence[str], display: str, batch_bytes: int, on_bad: OnBad) -> Iterator[Batch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = path.stat().st_size
    if size == 0:
        return
    row = read = 0
    try:
        # Column chunks are read through a buffer rather than whole: a row group may be larger than memory.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True) as file:
            paths = [_parquet_path(file.schema_arrow, key, display) for key in keys]
            names = [".".join(path) for path in paths]
            chunks = file.iter_batches(
                _parquet_rows(file.metadata, names, batch_bytes), columns=names, use_threads=False
            )
            for chunk in chunks:
                step = max(1, chunk.num_rows * batch_bytes // max(chunk.nbytes, 1))
                for start in range(0, chunk.num_rows, step):
                    part = chunk.slice(start, step)
                    batch = Batch([[] for _ in keys], records=part.num_rows, bytes=part.nbytes)
                    columns = [_parquet_values(part, path) for path in paths]
                    for offset, values in enumerate(zip(*columns, strict=True)):
                        try:
                            texts = [_text(value, key) for value, key in zip(values, keys, strict=True)]
                        except _BadRecord as bad:
                            if on_bad == "fail":
                                raise _bad(display, f"row {row + offset + 1:,}", str(bad)) from bad
                            raw = json.dumps(dict(zip(keys, values, strict=True)), default=repr).encode()
                            batch.rejected.append(Rejected(row + offset, row + offset + 1, str(bad), raw))
                            continue
                        for column, text in zip(batch.texts, texts, strict=True):
                            column.append(text)
                    row += part.num_rows
                    batch.documents = len(batch.texts[0])
                    batch.compressed = size * row // file.metadata.num_rows - read
                    read += batch.compressed
                    yield batch
            if row == 0:
                yield Batch([[] for _ in keys], compressed=size)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(f"{display}: damaged Parquet after row {row:,}: {error}. {REMEDY}") from error


def _parquet_path(schema: "pa.Schema", key: str, display: str) -> list[str]:
    """Find a key's column, or its place inside a struct column; refuse one that holds no text."""
    import pyarrow as pa

    path = [key] if key in schema.names else key.split(".")
    node: Any = schema
    for part in path:
        names = node.names if node is schema or pa.types.is_struct(node) else []
        if part not in names:
            raise RequestError(f"{display}: no column {key!r}; there is {_listing(schema.names)}. Choose with --keys.")
        node = node.field(part).type
    text = node
    if pa.types.is_list(node) or pa.types.is_large_list(node) or pa.types.is_fixed_size_list(node):
        text = node.value_type
    if pa.types.is_dictionary(text):
        text = text.value_type
    if not (pa.types.is_string(text) or pa.types.is_large_string(text) or pa.types.is_string_view(text)):
        raise RequestError(
            f"{display}: column {key!r} is {node}, neither text nor a list of texts. Choose with --keys."
        )
    return path


def _parquet_rows(metadata: "pq.FileMetaData", names: Sequence[str], batch_bytes: int) -> int:
    """Choose how many rows to decode at a time: about `batch_bytes`, by the file's average.

    Few at most, because a dictionary-encoded column may decode to far more than the metadata says.
    """
    total = 0
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names):
                total += column.total_uncompressed_size
    rows: int = batch_bytes * metadata.num_rows // max(total, 1)
    return max(1, min(1024, rows))


def _parquet_values(part: "pa.RecordBatch", path: list[str]) -> list[object]:
    """Give a column's values as Python objects; bytes stand where the text is invalid UTF-8."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array = part.column(path[0])
    if len(path) > 1:
        array = pc.struct_field(array, path[1:])
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    values: list[object]
    try:
        if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
            values = array.to_numpy(zero_copy_only=False).tolist()  # several times faster than to_pylist
        else:
            values = array.to_pylist()
    except (UnicodeDecodeError, pa.ArrowException):
        values = []
        for scalar in array:
            try:
                values.append(scalar.as_py())
            except UnicodeDecodeError:
                values.append(bytes(scalar.as_buffer()) if hasattr(scalar, "as_buffer") else b"")
    return values
