"""From a block of whole records to texts: what json.loads reads, and a named place for all that it does not.

Second step of reading: `corpus.blocks` cuts a file into blocks, an encoder process (`tokens.workers.encoder_process`)
takes the texts out of each with this, and so does `corpus.readers` for who wants the texts in this process.
"""

import json
import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from tokenmill.corpus import unexpected_content
from tokenmill.corpus.block_kinds import LINES, ROWS, TEXT, TEXT_LINES, TOO_LONG
from tokenmill.corpus.records import BOM, CONTENT
from tokenmill.errors import RequestError

if TYPE_CHECKING:
    import pyarrow as pa

_BLANK_LINES = re.compile(rb"(?:[ \t\r\v\f]*+\n)++")

Text = str | list[str]
_Line = bytes | memoryview


class RejectedRecord(NamedTuple):
    """A bad record: its ordinal among the records from 0, its line or Parquet row from 1, and why.

    Both count from the beginning of what was parsed: a block, or a whole file. `raw` is the line without its
    newline, or a Parquet row's wanted columns as JSON.
    """

    record: int
    line: int
    reason: str
    raw: bytes


class ParsedBlock:
    """Consecutive documents. `texts` has one list per key, aligned by document.

    An entry is a text, or the list of texts that become one sequence each. `blank` lines are no records.
    """

    __slots__ = ("blank", "rejected", "texts")

    def __init__(self, texts: list[list[Text]]) -> None:
        """Begin with these."""
        self.texts = texts
        self.blank = 0
        self.rejected: list[RejectedRecord] = []

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


def parse_block(
    kind: str,
    data: "bytearray | mmap.mmap",
    start: int,
    end: int,
    keys: Sequence[str],
    *,
    begins_file: bool,
    display: str = "",
) -> ParsedBlock:
    """Take the texts out of `data[start:end]`, a block of a kind that `corpus.block_kinds` names."""
    if kind == LINES:
        return parse_lines(data, start, end, keys, begins_file=begins_file)
    if kind == ROWS:
        return parse_rows(data, start, end, keys, display)
    block = bytes(data[start:end])
    if kind in (TEXT, TEXT_LINES):
        return _parse_text(block.removeprefix(BOM) if begins_file else block, lines=kind == TEXT_LINES)
    if kind != TOO_LONG:
        raise ValueError(f"no block holds {kind!r}")
    parsed = ParsedBlock([[] for _ in keys])
    if block:
        reason, _, head = block.partition(b"\n")
        parsed.rejected.append(RejectedRecord(0, 1, reason.decode(), head))
    return parsed


def _parse_text(block: bytes, *, lines: bool) -> ParsedBlock:
    """Take a block as one document, or each of its lines without what ends it; what is blank is none."""
    parsed = ParsedBlock([[]])
    documents = block.split(b"\n") if lines else [block]
    if not documents[-1]:  # behind the last newline
        documents.pop()
    for document in documents:
        if CONTENT.search(document) is None:
            parsed.blank += 1
            continue
        try:
            parsed.texts[0].append((document.removesuffix(b"\r") if lines else document).decode())
        except UnicodeDecodeError as error:
            done = parsed.records
            reason = f"invalid UTF-8 at byte {error.start + 1:,} of the {'line' if lines else 'text'}"
            parsed.rejected.append(RejectedRecord(done, done + parsed.blank + 1, reason, document))
    return parsed


def parse_lines(
    data: "bytearray | mmap.mmap", start: int, end: int, keys: Sequence[str], *, begins_file: bool
) -> ParsedBlock:
    """Take the texts out of the lines in `data[start:end]`, whole lines, the last of a file perhaps without newline.

    A key names a field of the record or, where there is none of that name, a path into nested objects
    (`meta.text`). With `begins_file` a byte-order mark is passed over.
    """
    parsed = ParsedBlock([[] for _ in keys])
    with memoryview(data) as view:
        if begins_file and view[start : start + len(BOM)] == BOM:
            start += len(BOM)
        if len(keys) == 1 and "." not in keys[0]:
            taking = _take_one(data, view, start, end, keys, parsed)
        else:
            taking = _take_many(_lines(data, view, start, end, parsed), keys, parsed)
        for line, reason in taking:
            done = parsed.records
            parsed.rejected.append(RejectedRecord(done, done + parsed.blank + 1, reason, bytes(line)))
    return parsed


def _lines(
    data: "bytearray | mmap.mmap", view: memoryview, start: int, end: int, parsed: ParsedBlock
) -> Iterator[memoryview]:
    """Yield the lines one by one: while one is in the cache, its text is taken. Count those that are blank."""
    find, blank = data.find, _BLANK_LINES.match
    while (stop := find(b"\n", start, end)) >= 0:
        if view[start] <= 32 and (run := blank(data, start, end)):
            parsed.blank += run.group().count(b"\n")
            start = run.end()
            continue
        yield view[start:stop]
        start = stop + 1
    if start < end:
        yield view[start:end]


def _take_one(
    data: "bytearray | mmap.mmap", view: memoryview, start: int, end: int, keys: Sequence[str], parsed: ParsedBlock
) -> Iterator[tuple[_Line, str]]:
    """Put the lines' texts into `parsed`; yield (line, reason) for each bad record in its turn."""
    (key,) = keys
    loads, find, append = orjson.loads, data.find, parsed.texts[0].append
    blank = _BLANK_LINES.match
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
        elif run := blank(data, start - len(line) - 1, end):  # a gigabyte of newlines is two million in each block
            parsed.blank += run.group().count(b"\n")
            start = run.end()
        else:
            yield from _take_many((line,), keys, parsed)


def _take_many(lines: Iterable[_Line], keys: Sequence[str], parsed: ParsedBlock) -> Iterator[tuple[_Line, str]]:
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
                if chat := unexpected_content.chat_key(record):
                    raise _BadRecord(f"{chat!r} holds {unexpected_content.CHAT}")
                if wrapper := unexpected_content.wrapped(record):
                    raise _BadRecord(
                        f"no key {key!r}, but an array of records, {wrapper!r}: {unexpected_content.AS_JSON}"
                    )
                raise _BadRecord(f"no key {key!r} (there is {_listing(record)})")
            value = value[part]
        yield key, value


def _text(value: object, key: str) -> Text:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return _decoded(value, key)
    if unexpected_content.is_chat(value):
        raise _BadRecord(f"{key!r} holds {unexpected_content.CHAT}")
    if not isinstance(value, list):
        raise _BadRecord(f"{key!r} is {_kind(value)}, not text")
    for item in value:
        if not isinstance(item, str | bytes):
            raise _BadRecord(f"{key!r} is a list that holds {_kind(item)}, not only text")
    return [_decoded(item, key) if isinstance(item, bytes) else item for item in value]


def _decoded(value: bytes, key: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise _BadRecord(f"{key!r} is invalid UTF-8 at byte {error.start + 1:,}") from error


def _kind(value: object) -> str:
    names = {
        type(None): "null",
        bool: "true or false",
        dict: "an object",
        list: "a list",
        str: "text",
    }
    return names.get(type(value), "a number")


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"


def parse_rows(data: "bytearray | mmap.mmap", start: int, end: int, keys: Sequence[str], display: str) -> ParsedBlock:
    """Take the texts out of `data[start:end]`, rows of Parquet columns in Arrow's stream format."""
    import pyarrow as pa

    parsed = ParsedBlock([[] for _ in keys])
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


def _take_row(values: tuple[object, ...], keys: Sequence[str], parsed: ParsedBlock) -> None:
    try:
        texts = [_text(value, key) for value, key in zip(values, keys, strict=True)]
    except _BadRecord as bad:
        done = parsed.records
        raw = json.dumps(dict(zip(keys, values, strict=True)), default=repr).encode()
        parsed.rejected.append(RejectedRecord(done, done + 1, str(bad), raw))
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
            if chat := _chat_column(schema):
                raise RequestError(f"{display}: no column {key!r}; {chat!r} holds {unexpected_content.CHAT}.")
            raise RequestError(f"{display}: no column {key!r}; there is {_listing(schema.names)}. Choose with --keys.")
        node = node.field(part).type
    text = node.value_type if _is_list(node) else node
    if pa.types.is_dictionary(text):
        text = text.value_type
    if not any(holds(text) for holds in _texts()):
        if _chat_column(schema) == key:
            raise RequestError(f"{display}: column {key!r} holds {unexpected_content.CHAT}.")
        raise RequestError(
            f"{display}: column {key!r} is {node}, neither text nor a list of texts. Choose with --keys."
        )
    return path


def _is_list(kind: "pa.DataType") -> bool:
    import pyarrow.types as t

    kinds = (t.is_list, t.is_large_list, t.is_fixed_size_list, t.is_list_view, t.is_large_list_view)
    return any(is_kind(kind) for is_kind in kinds)


def _texts() -> tuple[Any, ...]:
    """Return what tells of a type that it holds text; binary columns are taken as UTF-8."""
    import pyarrow.types as t

    strings = (t.is_string, t.is_large_string, t.is_string_view)
    return (*strings, t.is_binary, t.is_large_binary, t.is_binary_view)


def _chat_column(schema: "pa.Schema") -> str:
    """Name the column that holds the turns of conversations; empty where there is none."""
    import pyarrow.types as t

    for name in unexpected_content.CHATS:
        kind = schema.field(name).type if name in schema.names else None
        turns = kind.value_type if kind is not None and _is_list(kind) else None
        if turns is not None and t.is_struct(turns) and {"role", "from"} & set(turns.names):
            return name
    return ""


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
