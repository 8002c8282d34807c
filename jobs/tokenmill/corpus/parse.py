"""From a block of whole records to texts: what json.loads reads, and a named place for all that it does not.

Second step of reading: `corpus.blocks` cuts a file into blocks, an encoder process (`tokens.serve`) takes the texts
out of each with this, and so does `corpus.readers` for who wants the texts in this process.
"""

import json
import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from tokenmill.corpus.records import BOM, CONTENT
from tokenmill.errors import RequestError

if TYPE_CHECKING:
    import pyarrow as pa

Text = str | list[str]
_Line = bytes | memoryview


class Rejected(NamedTuple):
    """A bad record: its ordinal among the records from 0, its line or Parquet row from 1, and why.

    Both count from the beginning of what was parsed: a block, or a whole file. `raw` is the line without its
    newline, or a Parquet row's wanted columns as JSON.
    """

    record: int
    line: int
    reason: str
    raw: bytes


class Parsed:
    """Consecutive documents. `texts` has one list per key, aligned by document.

    An entry is a text, or the list of texts that become one sequence each. `blank` lines are no records.
    """

    __slots__ = ("blank", "rejected", "texts")

    def __init__(self, texts: list[list[Text]]) -> None:
        """Begin with these."""
        self.texts = texts
        self.blank = 0
        self.rejected: list[Rejected] = []

    @property
    def documents(self) -> int:
        """Count the documents."""
        return len(self.texts[0])

    @property
    def records(self) -> int:
        """Count the records: the documents and what was rejected."""
        return len(self.texts[0]) + len(self.rejected)


class _BadRecord(Exception):
    """Why a record cannot be taken."""


def parse_lines(
    data: "bytearray | mmap.mmap", start: int, end: int, keys: Sequence[str], *, begins_file: bool
) -> Parsed:
    """Take the texts out of the lines in `data[start:end]`, whole lines, the last of a file perhaps without newline.

    A key names a field of the record or, where there is none of that name, a path into nested objects
    (`meta.text`). With `begins_file` a byte-order mark is passed over.
    """
    parsed = Parsed([[] for _ in keys])
    with memoryview(data) as view:
        if begins_file and view[start : start + len(BOM)] == BOM:
            start += len(BOM)
        if len(keys) == 1 and "." not in keys[0]:
            taking = _take_one(data, view, start, end, keys, parsed)
        else:
            taking = _take_many(_lines(data, view, start, end), keys, parsed)
        for line, reason in taking:
            done = parsed.records
            parsed.rejected.append(Rejected(done, done + parsed.blank + 1, reason, bytes(line)))
    return parsed


def _lines(data: "bytearray | mmap.mmap", view: memoryview, start: int, end: int) -> Iterator[memoryview]:
    """Yield the lines one by one: while one is in the cache, its text is taken."""
    find = data.find
    while (stop := find(b"\n", start, end)) >= 0:
        yield view[start:stop]
        start = stop + 1
    if start < end:
        yield view[start:end]


def _take_one(
    data: "bytearray | mmap.mmap", view: memoryview, start: int, end: int, keys: Sequence[str], parsed: Parsed
) -> Iterator[tuple[_Line, str]]:
    """Put the lines' texts into `parsed`; yield (line, reason) for each bad record in its turn."""
    (key,) = keys
    loads, find, append = orjson.loads, data.find, parsed.texts[0].append
    while start < end:  # as _lines does it: a tenth of a microsecond less for each
        stop = find(b"\n", start, end)
        line = view[start : stop if stop >= 0 else end]
        start += len(line) + 1
        try:
            text = loads(line)[key]
        except (ValueError, KeyError, TypeError):
            text = None
        if type(text) is str:
            append(text)
        else:
            yield from _take_many((line,), keys, parsed)


def _take_many(lines: Iterable[_Line], keys: Sequence[str], parsed: Parsed) -> Iterator[tuple[_Line, str]]:
    """Do the same for several keys, for a path into nested objects, and for what is no plain text."""
    for line in lines:
        try:
            values = _parse(line, keys)
        except _BadRecord as bad:
            yield line, str(bad)
            continue
        if values is None:
            parsed.blank += 1
            continue
        for texts, value in zip(parsed.texts, values, strict=True):
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
        record = json.loads(bytes(line).decode())
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


def parse_rows(data: "bytearray | mmap.mmap", start: int, end: int, keys: Sequence[str], display: str) -> Parsed:
    """Take the texts out of `data[start:end]`, rows of Parquet columns in Arrow's stream format."""
    import pyarrow as pa

    parsed = Parsed([[] for _ in keys])
    if start == end:
        return parsed
    # A copy: Arrow's arrays would hold on to the memory, which must be free to grow.
    with pa.ipc.open_stream(pa.py_buffer(bytes(data[start:end]))) as stream:
        paths = [column_path(stream.schema, key, display) for key in keys]
        for batch in stream:
            columns = [_values(batch, path) for path in paths]
            for values in zip(*columns, strict=True):
                _take_row(values, keys, parsed)
    return parsed


def _take_row(values: tuple[object, ...], keys: Sequence[str], parsed: Parsed) -> None:
    try:
        texts = [_text(value, key) for value, key in zip(values, keys, strict=True)]
    except _BadRecord as bad:
        done = parsed.records
        raw = json.dumps(dict(zip(keys, values, strict=True)), default=repr).encode()
        parsed.rejected.append(Rejected(done, done + 1, str(bad), raw))
        return
    for column, text in zip(parsed.texts, texts, strict=True):
        column.append(text)


def column_path(schema: "pa.Schema", key: str, display: str) -> list[str]:
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


def _values(part: "pa.RecordBatch", path: list[str]) -> list[object]:
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
