"""Parse a block of complete records, and report each record that json.loads does not accept.

Second step of reading: `records.blocks` cuts a file into blocks. An encoder process
(`tokenize.workers.encoder_process`) then parses each block with this module: into the texts of some keys
(`parse_block`), or into complete records (`parse_records`). `records.readers` does the same in the current process.
"""

import json
import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from tokenmill.core.typed_json import JsonObject
from tokenmill.errors import RequestError
from tokenmill.records import unexpected_content
from tokenmill.records.block_kinds import LINES, OVERSIZED, ROWS, TEXT, TEXT_LINES
from tokenmill.records.records import BOM, CONTENT

if TYPE_CHECKING:
    import pyarrow as pa

_BLANK_LINES = re.compile(rb"(?:[ \t\r\v\f]*+\n)++")

Text = str | list[str]
_LineBytes = bytes | memoryview


class RejectedRecord(NamedTuple):
    """A bad record: its index among the records from 0, its line or Parquet row from 1, and the reason.

    Both numbers count from the start of the parsed data: a block, or a complete file. `raw` is the line without its
    newline, or the requested columns of a Parquet row as JSON. `code` is a short name of the reason, by which complete
    records are counted.
    """

    record: int
    line: int
    reason: str
    raw: bytes
    code: str = ""


class ParsedBlock:
    """Consecutive documents. `texts` has one list per key, and all lists have the documents in the same order.

    An entry is a text, or a list of texts that become one sequence each. `blank` counts blank lines, which are not
    records.
    """

    __slots__ = ("blank", "rejected", "texts")

    def __init__(self, texts: list[list[Text]]) -> None:
        """Initialize the block with these texts and no rejected record."""
        self.texts = texts
        self.blank = 0
        self.rejected: list[RejectedRecord] = []

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.texts[0])

    @property
    def records(self) -> int:
        """The number of records: documents and rejected records."""
        return len(self.texts[0]) + len(self.rejected)


class _BadRecord(Exception):
    """The reason why a record is rejected."""


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
    """Parse `data[start:end]`, a block whose kind is a constant of `records.block_kinds`."""
    if kind == LINES:
        return parse_lines(data, start, end, keys, begins_file=begins_file)
    if kind == ROWS:
        return parse_rows(data, start, end, keys, display)
    block = bytes(data[start:end])
    if kind in (TEXT, TEXT_LINES):
        return _parse_text(block.removeprefix(BOM) if begins_file else block, lines=kind == TEXT_LINES)
    if kind != OVERSIZED:
        raise ValueError(f"unknown kind of block: {kind!r}")
    parsed = ParsedBlock([[] for _ in keys])
    if block:
        reason, _, head = block.partition(b"\n")
        parsed.rejected.append(RejectedRecord(0, 1, reason.decode(), head))
    return parsed


def _parse_text(block: bytes, *, lines: bool) -> ParsedBlock:
    """Parse a block as one document, or each of its lines as one; ignore blank texts and line endings."""
    parsed = ParsedBlock([[]])
    documents = block.split(b"\n") if lines else [block]
    if not documents[-1]:  # after the last newline
        documents.pop()
    for document in documents:
        if CONTENT.search(document) is None:
            parsed.blank += 1
            continue
        try:
            parsed.texts[0].append((document.removesuffix(b"\r") if lines else document).decode())
        except UnicodeDecodeError as error:
            index = parsed.records
            reason = f"invalid UTF-8 at byte {error.start + 1:,} of the {'line' if lines else 'text'}"
            parsed.rejected.append(RejectedRecord(index, index + parsed.blank + 1, reason, document))
    return parsed


def parse_lines(
    data: "bytearray | mmap.mmap", start: int, end: int, keys: Sequence[str], *, begins_file: bool
) -> ParsedBlock:
    """Parse the lines in `data[start:end]`: complete lines, of which the last one of a file can lack its newline.

    A key is the name of a field of the record. If there is no such field, the key is a path into nested objects
    (`meta.text`). With `begins_file`, a byte-order mark at the start is ignored.
    """
    parsed = ParsedBlock([[] for _ in keys])
    with memoryview(data) as view:
        if begins_file and view[start : start + len(BOM)] == BOM:
            start += len(BOM)
        lines = (view[first:stop] for first, stop in _split_lines(data, view, start, end, parsed))
        parse = _parse_single_key if len(keys) == 1 and "." not in keys[0] else _parse_keys
        for line, reason in parse(lines, keys, parsed):
            index = parsed.records
            parsed.rejected.append(RejectedRecord(index, index + parsed.blank + 1, reason, bytes(line)))
    return parsed


def _split_lines(
    data: "bytearray | mmap.mmap", view: memoryview, start: int, end: int, parsed: "ParsedBlock | ParsedRecords"
) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each line that is not blank, one at a time, and count blank lines.

    The caller parses each line while the line is in the CPU cache.
    """
    find, blank = data.find, _BLANK_LINES.match
    while (stop := find(b"\n", start, end)) >= 0:
        if view[start] <= 32 and (run := blank(data, start, end)):
            parsed.blank += run.group().count(b"\n")
            start = run.end()
            continue
        yield start, stop
        start = stop + 1
    if start < end:
        yield start, end


def _parse_single_key(
    lines: Iterable[_LineBytes], keys: Sequence[str], parsed: ParsedBlock
) -> Iterator[tuple[_LineBytes, str]]:
    """Add the lines' texts to `parsed`; yield (line, reason) for each bad record, in the order of the lines."""
    (key,) = keys
    loads, append = orjson.loads, parsed.texts[0].append
    for line in lines:
        try:
            text = loads(line)[key]
        except (ValueError, KeyError, TypeError):
            text = None
        if type(text) is str:
            append(text)
        else:
            yield from _parse_keys((line,), keys, parsed)


def _parse_keys(
    lines: Iterable[_LineBytes], keys: Sequence[str], parsed: ParsedBlock
) -> Iterator[tuple[_LineBytes, str]]:
    """Do the work of `_parse_single_key` for several keys, for paths into nested objects, and for other values."""
    for line in lines:
        try:
            values = _parse_line(line, keys)
        except _BadRecord as bad:
            yield line, str(bad)
            continue
        if values is None:
            parsed.blank += 1
            continue
        for texts, value in zip(parsed.texts, values, strict=True):
            texts.append(value)


def _parse_line(line: _LineBytes, keys: Sequence[str]) -> list[Text] | None:
    """Return the texts of the keys in one line, or None for a blank line.

    orjson rejects some lines that json.loads accepts: NaN, Infinity, 1e400, lone surrogates, and nesting beyond 1,024
    levels. json.loads therefore parses the lines that orjson rejects. For all other lines, the texts are equal.
    """
    try:
        return [_convert_text(value, key) for key, value in _select_fields(orjson.loads(line), keys)]
    except orjson.JSONDecodeError:
        if CONTENT.search(line) is None:
            return None
    values = []
    for key, value in _select_fields(_load_json(line), keys):
        values.append(_convert_text(value, key))
        try:
            "".join(values[-1]).encode()
        except UnicodeEncodeError as error:
            raise _BadRecord(f"{key!r} contains a lone surrogate, which is not a character") from error
    return values


def _load_json(line: _LineBytes) -> object:
    """Parse a line that orjson rejects."""
    try:
        return json.loads(bytes(line).decode())
    except UnicodeDecodeError as error:
        raise _BadRecord(f"invalid UTF-8 at byte {error.start + 1:,} of the line") from error
    except json.JSONDecodeError as error:
        raise _BadRecord(
            f"invalid JSON at column {error.colno:,} ({error.msg}); each line must contain one record"
        ) from error
    except RecursionError as error:
        raise _BadRecord("the JSON is nested too deeply") from error
    except ValueError as error:  # an integer of more than 4,300 digits
        raise _BadRecord(f"Python does not accept the JSON ({error})") from error


def _select_fields(record: object, keys: Sequence[str]) -> Iterator[tuple[str, object]]:
    if not isinstance(record, dict):
        raise _BadRecord(f"the record is {_describe_type(record)}, not an object with the key {keys[0]!r}")
    for key in keys:
        if key in record:
            yield key, record[key]
            continue
        value: object = record
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                if chat := unexpected_content.find_chat_key(record):
                    raise _BadRecord(f"{chat!r} contains {unexpected_content.CHAT_UNSUPPORTED}")
                if wrapper := unexpected_content.find_wrapper_key(record):
                    raise _BadRecord(
                        f"there is no key {key!r}, but the record has an array of records under {wrapper!r}: "
                        f"{unexpected_content.USE_JSON}"
                    )
                raise _BadRecord(f"there is no key {key!r} (the keys are {list_names(record)})")
            value = value[part]
        yield key, value


def _convert_text(value: object, key: str) -> Text:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return _decode(value, key)
    if unexpected_content.is_chat(value):
        raise _BadRecord(f"{key!r} contains {unexpected_content.CHAT_UNSUPPORTED}")
    if not isinstance(value, list):
        raise _BadRecord(f"{key!r} is {_describe_type(value)}, not text")
    for item in value:
        if not isinstance(item, str | bytes):
            raise _BadRecord(f"{key!r} is a list that contains {_describe_type(item)}, not only text")
    return [_decode(item, key) if isinstance(item, bytes) else item for item in value]


def _decode(value: bytes, key: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise _BadRecord(f"{key!r} is invalid UTF-8 at byte {error.start + 1:,}") from error


def _describe_type(value: object) -> str:
    names = {
        type(None): "null",
        bool: "true or false",
        dict: "an object",
        list: "a list",
        str: "text",
    }
    return names.get(type(value), "a number")


def list_names(names: Iterable[str]) -> str:
    """Return names as a list for messages; of many names, only the first ones."""
    names = list(names)
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"


def parse_rows(data: "bytearray | mmap.mmap", start: int, end: int, keys: Sequence[str], display: str) -> ParsedBlock:
    """Parse `data[start:end]`, rows of Parquet or Arrow columns in Arrow's stream format."""
    import pyarrow as pa

    parsed = ParsedBlock([[] for _ in keys])
    if start == end:
        return parsed
    # Copy the bytes: Arrow's arrays would keep a reference to the buffer, and the buffer could not grow.
    with pa.ipc.open_stream(pa.py_buffer(bytes(data[start:end]))) as stream:
        paths = [find_column_path(stream.schema, key, display) for key in keys]
        for batch in stream:
            columns = [_read_column(batch, path) for path in paths]
            for values in zip(*columns, strict=True):
                _parse_row(values, keys, parsed)
    return parsed


def _parse_row(values: tuple[object, ...], keys: Sequence[str], parsed: ParsedBlock) -> None:
    try:
        texts = [_convert_text(value, key) for value, key in zip(values, keys, strict=True)]
    except _BadRecord as bad:
        index = parsed.records
        raw = json.dumps(dict(zip(keys, values, strict=True)), default=repr).encode()
        parsed.rejected.append(RejectedRecord(index, index + 1, str(bad), raw))
        return
    for column, text in zip(parsed.texts, texts, strict=True):
        column.append(text)


def find_column_path(schema: "pa.Schema", key: str, display: str) -> list[str]:
    """Return the path of a key's column: its name, or the names from a struct column to the field.

    Raises:
        RequestError: there is no such column, or the column does not contain text.
    """
    import pyarrow as pa

    path = [key] if key in schema.names else key.split(".")
    node: Any = schema
    for part in path:
        names = node.names if node is schema or pa.types.is_struct(node) else []
        if part not in names:
            if chat := _find_chat_column(schema):
                raise RequestError(
                    f"{display}: there is no column {key!r}, and {chat!r} contains "
                    f"{unexpected_content.CHAT_UNSUPPORTED}. Set --keys to a column of text."
                )
            raise RequestError(
                f"{display}: there is no column {key!r}; set --keys to one of {list_names(schema.names)}"
            )
        node = node.field(part).type
    text = node.value_type if _is_list(node) else node
    if pa.types.is_dictionary(text):
        text = text.value_type
    if not any(is_text(text) for is_text in _get_text_type_checks()):
        if _find_chat_column(schema) == key:
            raise RequestError(
                f"{display}: column {key!r} contains {unexpected_content.CHAT_UNSUPPORTED}. Set --keys to a column of "
                "text."
            )
        raise RequestError(
            f"{display}: column {key!r} has the type {node}, which is neither text nor a list of texts; set --keys to "
            "another column"
        )
    return path


def _is_list(kind: "pa.DataType") -> bool:
    import pyarrow.types as t

    checks = (t.is_list, t.is_large_list, t.is_fixed_size_list, t.is_list_view, t.is_large_list_view)
    return any(is_kind(kind) for is_kind in checks)


def _get_text_type_checks() -> tuple[Any, ...]:
    """Return the functions that detect a type with text. Binary columns count as UTF-8 text."""
    import pyarrow.types as t

    strings = (t.is_string, t.is_large_string, t.is_string_view)
    return (*strings, t.is_binary, t.is_large_binary, t.is_binary_view)


def _find_chat_column(schema: "pa.Schema") -> str:
    """Return the name of the column with the turns of conversations; empty if there is no such column."""
    import pyarrow.types as t

    for name in unexpected_content.CHAT_KEYS:
        kind = schema.field(name).type if name in schema.names else None
        turns = kind.value_type if kind is not None and _is_list(kind) else None
        if turns is not None and t.is_struct(turns) and {"role", "from"} & set(turns.names):
            return name
    return ""


def _read_column(batch: "pa.RecordBatch", path: list[str]) -> list[object]:
    """Return a column's values as Python objects, with bytes in place of each text that is invalid UTF-8."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array = batch.column(path[0])
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


INVALID_JSON, NO_OBJECT, INVALID_TEXT, TOO_LONG = "invalid_json", "no_object", "invalid_text", "too_long"
"""Codes of the reasons for which `parse_records` rejects a record."""


class ParsedRecords:
    """Consecutive complete records, as objects; `blank` counts blank lines, which are not records.

    `skipped` counts the records that the caller does not want; they are not parsed.
    """

    __slots__ = ("_data", "_numbers", "_spans", "blank", "rejected", "rows", "skipped")

    def __init__(self, data: "bytearray | mmap.mmap") -> None:
        """Initialize the records of a block in `data` without a record."""
        self.rows: list[JsonObject] = []
        self.rejected: list[RejectedRecord] = []
        self.blank = 0
        self.skipped = 0
        self._data = data
        self._numbers: list[tuple[int, int]] = []  # of each row: index of the record, and line
        self._spans: list[tuple[int, int]] = []  # of each row that is a line: start and end in `_data`

    @property
    def records(self) -> int:
        """The number of records: rows, rejected records and skipped ones."""
        return len(self.rows) + len(self.rejected) + self.skipped

    def add(self, row: JsonObject, span: tuple[int, int] | None = None) -> None:
        """Add the next record, which is the line `span`, or a row of a columnar file."""
        self._numbers.append((self.records, self.records + self.blank + 1))
        self.rows.append(row)
        if span is not None:
            self._spans.append(span)

    def reject(self, code: str, reason: str, raw: bytes) -> None:
        """Add the next record as a rejected one."""
        self.rejected.append(RejectedRecord(self.records, self.records + self.blank + 1, reason, raw, code))

    def get_record(self, number: int) -> int:
        """Return the index of a row among the records, from 0."""
        return self._numbers[number][0]

    def get_line(self, number: int) -> int:
        """Return the line of a row, counted from 1."""
        return self._numbers[number][1]

    def describe_rejected(self, number: int, code: str, reason: str) -> RejectedRecord:
        """Return a row as a record that the caller rejects."""
        if self._spans:
            start, end = self._spans[number]
            raw = bytes(self._data[start:end])
        else:
            raw = json.dumps(self.rows[number], default=repr).encode()
        return RejectedRecord(*self._numbers[number], reason, raw, code)


def parse_records(
    kind: str,
    data: "bytearray | mmap.mmap",
    start: int,
    end: int,
    columns: Sequence[str],
    *,
    begins_file: bool,
    wanted: Callable[[int], bool] | None = None,
) -> ParsedRecords:
    """Parse `data[start:end]`, a block whose kind is LINES, ROWS or OVERSIZED, into complete records.

    A line becomes its object with all fields; `columns` are the fields whose texts must be valid. A row of Parquet or
    Arrow becomes an object without its null columns; the block contains only the columns that the reader selected.
    `wanted` receives the index of each record in the block, from 0; other records are counted and not parsed.
    """
    parsed = ParsedRecords(data)
    if kind == LINES:
        with memoryview(data) as view:
            if begins_file and view[start : start + len(BOM)] == BOM:
                start += len(BOM)
            exact = wanted is not None or _has_long_number(data[start:end])
            for span in _split_lines(data, view, start, end, parsed):
                line = view[span[0] : span[1]]
                if wanted is None or wanted(parsed.records) or (span[1] == end and CONTENT.search(line) is None):
                    _parse_object(line, span, columns, parsed, exact=exact)
                else:
                    parsed.skipped += 1
    elif kind == ROWS:
        _parse_row_objects(bytes(data[start:end]), parsed, wanted)
    elif kind == OVERSIZED:
        if start < end and wanted is not None and not wanted(0):
            parsed.skipped += 1
        elif start < end:
            reason, _, head = bytes(data[start:end]).partition(b"\n")
            parsed.reject(TOO_LONG, reason.decode(), head)
    else:
        raise ValueError(f"a block of the kind {kind!r} has no objects")
    return parsed


_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER = b"0" * 19


def _has_long_number(text: bytes | bytearray) -> bool:
    """Return whether a text has so many consecutive digits that they may be an integer of more than 64 bits."""
    return _LONG_NUMBER in text.translate(_ZEROS)


def _parse_object(
    line: memoryview, span: tuple[int, int], columns: Sequence[str], parsed: ParsedRecords, *, exact: bool
) -> None:
    """Add the object of a line; with `exact`, keep integers of more than 64 bits, which orjson would round."""
    checked = True
    try:
        if exact and _has_long_number(bytes(line)):
            raise orjson.JSONDecodeError("a long integer", "", 0)
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        if CONTENT.search(line) is None:
            parsed.blank += 1
            return
        try:
            record, checked = _load_json(line), False
        except _BadRecord as bad:
            parsed.reject(INVALID_JSON, str(bad), bytes(line))
            return
    if not isinstance(record, dict):
        parsed.reject(NO_OBJECT, f"the record is {_describe_type(record)}, not an object", bytes(line))
        return
    if not checked:
        for name in _select_top_fields(columns, record):
            try:
                json.dumps(record[name], ensure_ascii=False).encode()
            except UnicodeEncodeError:
                reason = f"{name!r} contains a lone surrogate, which is not a character"
                parsed.reject(INVALID_TEXT, reason, bytes(line))
                return
            except RecursionError:
                parsed.reject(INVALID_JSON, f"{name!r} is nested too deeply", bytes(line))
                return
    parsed.add(record, span)


def _select_top_fields(columns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return those of the names that a column requests: by its complete name, or as the first part of a path."""
    requested = {name for column in columns for name in (column, column.partition(".")[0])}
    return [name for name in names if name in requested]


def _parse_row_objects(block: bytes, parsed: ParsedRecords, wanted: Callable[[int], bool] | None) -> None:
    import pyarrow as pa

    if not block:
        return
    with pa.ipc.open_stream(pa.py_buffer(block)) as stream:
        for all_rows in stream:
            batch, first, chosen = all_rows, parsed.records, list(range(all_rows.num_rows))
            if wanted is not None:
                chosen = [number for number in chosen if wanted(first + number)]
                batch = all_rows.take(pa.array(chosen, pa.int64()))
            try:
                rows = batch.to_pylist()
            except (UnicodeDecodeError, pa.ArrowException):
                rows = [_convert_row(batch.slice(number, 1)) for number in range(batch.num_rows)]
            for number, row in zip(chosen, rows, strict=True):
                parsed.skipped += first + number - parsed.records
                if isinstance(row, str):
                    parsed.reject(INVALID_TEXT, row, b"{}")
                else:
                    parsed.add({name: value for name, value in row.items() if value is not None})
            parsed.skipped += first + all_rows.num_rows - parsed.records


def _convert_row(row: "pa.RecordBatch") -> JsonObject | str:
    """Return a row as an object, or why it is rejected."""
    import pyarrow as pa

    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            column.to_pylist()
        except (UnicodeDecodeError, pa.ArrowException) as error:
            return f"{name!r} contains a text that is invalid UTF-8 ({error})"
    values: JsonObject = row.to_pylist()[0]
    return values


def find_record_columns(schema: "pa.Schema", columns: Sequence[str], display: str) -> list[str]:
    """Return the columns of a file with fields of `columns`; all columns if `columns` is empty.

    Raises:
        RequestError: the file has no such column.
    """
    if not columns:
        return list(schema.names)
    names = _select_top_fields(columns, schema.names)
    if not names:
        raise RequestError(
            f"{display}: none of the columns {list_names(columns)} exists (the columns are "
            f"{list_names(schema.names)}); set --messages to the column of the conversations"
        )
    return names
