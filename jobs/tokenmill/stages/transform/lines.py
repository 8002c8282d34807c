"""Write records as lines of JSON: compact, in UTF-8, and with the values that they had.

orjson writes almost every record. It writes NaN as null, and refuses integers of more than 64 bits, keys that are not
texts, and deep nesting. The json module of Python writes those records.
"""

import dataclasses
import json
import math
from datetime import date, time
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import orjson

from tokenmill.engine.workspace import OutputFile
from tokenmill.stages.transform.types import Record, RejectedRow

Compressor = Any
"""zstandard.ZstdCompressionObj, which its type stubs do not export."""

ZSTD_LEVEL = 3
"""The level of zstd itself; together with one thread and no other parameter it determines the compressed bytes."""


def encode_line(record: Record) -> bytes:
    """Return a record as a line of JSON, without its newline.

    Raises:
        RejectedRow: JSON has no form for a value of the record.
    """
    try:
        line = orjson.dumps(record, _convert, orjson.OPT_PASSTHROUGH_DATACLASS)
    except TypeError:  # of which orjson.JSONEncodeError is a subclass
        return _encode_with_json(record)
    return _encode_with_json(record) if b"null" in line and _has_infinite_number(record) else line


def _encode_with_json(record: Record) -> bytes:
    try:
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=_convert)
        _check_keys(record)
    except RecursionError as error:
        raise RejectedRow("the result is nested too deeply") from error
    except (TypeError, ValueError) as error:  # ValueError: an object that contains itself
        raise RejectedRow(f"the result is not JSON: {error}") from error
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        name = next((key for key, value in record.items() if _has_surrogate({key: value})), "a key")
        raise RejectedRow(f"{name!r} contains a lone surrogate, which is not a character") from error


def _has_surrogate(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, default=_convert).encode()
    except UnicodeEncodeError:
        return True
    return False


def _has_infinite_number(record: Record) -> bool:
    """Return whether a record contains NaN or an infinite number."""
    values: list[object] = [record]
    while values:
        value = values.pop()
        if value is None or isinstance(value, str | int):
            continue
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, float):
            if not math.isfinite(value):
                return True
        elif dataclasses.is_dataclass(value):
            values.append(_convert(value))
    return False


def _check_keys(record: Record) -> None:
    """Raise ValueError for an object with two keys that JSON writes in the same way, such as 1 and "1"."""
    values: list[object] = [record]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
            names = [key if isinstance(key, str) else json.dumps(key) for key in value]
            if len(set(names)) < len(names):
                raise ValueError(f"two keys of an object are {max(names, key=names.count)!r} as text")
        elif isinstance(value, list | tuple):
            values += value


def _convert(value: object) -> object:
    """Return a value of Parquet, Arrow or Python that JSON does not have as a text."""
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError as error:
            raise TypeError("binary data that is not UTF-8") from error
    if isinstance(value, date | time):  # datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal | UUID):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"a value of the type {type(value).__name__}")


def remove_nulls(value: Any) -> Any:
    """Return a value without the fields of its objects that are null.

    Parquet and Arrow store null for a field that a record lacks and another record has.
    """
    if isinstance(value, dict):
        return {key: remove_nulls(field) for key, field in value.items() if field is not None}
    if isinstance(value, list | tuple):
        return [remove_nulls(item) for item in value]
    return value


class JsonlShard:
    """A shard of lines; `compression` has the values of --compression."""

    def __init__(self, output: OutputFile, compression: str) -> None:
        self._output = output
        self._compressor = None if compression == "none" else make_compressor()

    def write(self, data: bytes) -> None:
        """Write complete lines."""
        self._output.write(self._compressor.compress(data) if self._compressor else data)

    def finish(self) -> None:
        """Write the end of the compressed data."""
        if self._compressor:
            self._output.write(self._compressor.flush())


def make_compressor() -> Compressor:
    """Return a compressor that gives the same bytes for the same data on every machine."""
    import zstandard

    parameters = zstandard.ZstdCompressionParameters.from_level(
        ZSTD_LEVEL, threads=0, write_checksum=True, write_content_size=False
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compressobj()
