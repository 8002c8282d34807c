"""Cut a JSON file in any layout into records, without parsing them.

At most one record is in memory. `records.blocks` uses this module for --format json. The rules are:

- A file is a sequence of JSON values, with nothing or white space between them.
- An object is a record. Each element of an array is a record.
- The first value can be an object that wraps all records: it has an array of objects under `data`, `rows`, `records`,
  `examples` or `documents`, and no requested key before this array. The array's elements are then the records, and
  all other members of the object are ignored.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenmill.errors import InputError
from tokenmill.records.compression import COMPLETE_COPY
from tokenmill.records.unexpected_content import WRAPPER_KEYS

KEPT_BYTES = 64 << 10
"""Bytes that the cutter keeps of an oversized record, so that the user can identify the record."""

_OUTSIDE_TOKEN = re.compile(rb'["\[\]{},]')
_INSIDE_TOKEN = re.compile(rb'["\[\]{}]')
_NON_BLANK = re.compile(rb"\S")
_BLANK = b" \t\r\n"


class JsonValue(NamedTuple):
    """The bytes of a record and its size. For an oversized record, `data` contains only the start."""

    data: bytes
    size: int


class JsonCutter:
    """A cutter that receives a file's bytes in pieces and yields the complete records."""

    def __init__(self, keys: Sequence[str], max_record_bytes: int, display: str) -> None:
        """Initialize the cutter; it keeps only KEPT_BYTES of a record with more than `max_record_bytes`."""
        self._requested_keys = {name.encode() for key in keys for name in (key, key.partition(".")[0])}
        self._max_record_bytes = max_record_bytes
        self._display = display
        self._data = bytearray()  # the bytes from the start of the incomplete record
        self._data_offset = 0  # offset of `_data` in the file
        self._start = 0  # index in `_data` of the start of the record
        self._next = 0  # index in `_data` of the next byte to inspect
        self._in_string = False
        self._depth = 0
        self._record_depth = 0  # depth of records: 0, 1 in an array, 2 in an array in an object
        self._in_first_value = True  # the value that can contain all records
        self._in_wrapper_tail = False  # behind the array of such a value
        self._quote = 0  # index in `_data` of the start of the last string
        self._key = b""  # the last key of the first value
        self._head: bytes | None = None  # the start of an oversized record
        self._dropped = 0

    def feed(self, piece: bytes) -> Iterator[JsonValue]:
        """Add the file's next bytes, and yield the records that end in these bytes."""
        self._data += piece
        while self._step():
            yield from self._ended_records
        self._discard()

    def finish(self) -> Iterator[JsonValue]:
        """Yield the content after the last value; raise InputError when the file ends inside a value."""
        if self._in_string or self._depth:
            raise InputError(
                f"{self._display}: truncated JSON: the file ends inside the value that starts at byte "
                f"{self._data_offset + self._start:,}. Replace the file with {COMPLETE_COPY}"
            )
        yield from self._take_record(len(self._data))

    def _step(self) -> bool:
        """Process the next token; return False when the data has no further token."""
        self._ended_records: Iterator[JsonValue] | tuple[()] = ()
        data = self._data
        if self._in_string:
            return self._close_string()
        outside = self._depth == self._record_depth
        match = (_OUTSIDE_TOKEN if outside else _INSIDE_TOKEN).search(data, self._next)
        if match is None:
            self._next = len(data)
            return False
        index, token = match.start(), match.group()
        self._next = index + 1
        if token == b'"':
            self._in_string, self._quote = True, index
        elif token in b"[{":
            return self._open(index, token)
        elif token == b",":
            if self._record_depth:
                self._ended_records = self._take_record(index)
                self._start = index + 1
        elif outside:
            self._close_record_array(index, token)
        else:
            self._close_value(index)
        return True

    def _open(self, index: int, token: bytes) -> bool:
        """Enter an object or array; return False when more bytes are needed to detect a wrapper of the records."""
        if self._depth == 0:
            self._ended_records = self._take_record(index)
            if token == b"[":
                self._record_depth, self._in_first_value, self._start = 1, False, index + 1
        elif token == b"[" and self._in_first_value and self._depth == 1 and self._key in _WRAPPER_KEYS:
            non_blank = _NON_BLANK.search(self._data, index + 1)
            if non_blank is None:
                self._next = index
                return False
            if non_blank.group() == b"{":
                self._record_depth, self._in_first_value, self._start = 2, False, index + 1
        self._depth += 1
        return True

    def _close_value(self, index: int) -> None:
        """Leave an object or array that is a record or is part of one."""
        self._depth -= 1
        if self._depth == 0:
            self._in_first_value = False
            self._ended_records = () if self._in_wrapper_tail else self._take_record(index + 1)
            self._start, self._in_wrapper_tail = index + 1, False

    def _close_string(self) -> bool:
        data = self._data
        quote = data.find(b'"', self._next)
        if quote < 0:
            self._next = len(data)
            return False
        self._next = quote + 1
        slash = quote
        while slash > 0 and data[slash - 1] == 92:
            slash -= 1
        if (quote - slash) % 2 == 0:
            self._in_string = False
            if self._in_first_value and self._depth == 1:
                self._store_key(quote)
        return True

    def _store_key(self, quote: int) -> None:
        """Store the last string of the first value if it is a key."""
        before = self._quote - 1
        while before > 0 and self._data[before] in _BLANK:
            before -= 1
        if self._data[before] in b"{,":
            self._key = bytes(self._data[self._quote + 1 : min(quote, self._quote + 100)])
            self._in_first_value = self._key not in self._requested_keys

    def _close_record_array(self, index: int, token: bytes) -> None:
        """Leave the array that contains the records."""
        if token != b"]" or not self._record_depth:
            raise InputError(
                f"{self._display}: damaged JSON: {token.decode()!r} at byte {self._data_offset + index:,} has no "
                f"opening bracket. Replace the file with {COMPLETE_COPY}"
            )
        self._ended_records = self._take_record(index)
        self._depth -= 1
        self._in_wrapper_tail, self._record_depth, self._start = self._record_depth == 2, 0, index + 1

    def _take_record(self, end: int) -> Iterator[JsonValue]:
        """Return the record that ends at `end`, if there is one.

        Text between two values is also a record, unless it is blank.
        """
        data = bytes(self._data[self._start : end])
        self._start = end
        if self._head is not None:
            value = JsonValue(self._head, self._dropped + len(data))
            self._head, self._dropped = None, 0
            return iter((value,))
        data = data.strip()
        return iter((JsonValue(data, len(data)),) if data else ())

    def _discard(self) -> None:
        """Free the bytes of the records that were yielded, and most bytes of an oversized record."""
        end = self._start
        if (
            self._depth == self._record_depth
            and not self._in_string
            and _NON_BLANK.search(self._data, self._start) is None
        ):
            end = self._start = self._next
        elif self._in_wrapper_tail:
            end = self._start = self._find_inspected_end()
        elif len(self._data) - self._start > self._max_record_bytes or self._head is not None:
            end = self._find_inspected_end()
            if self._head is None:
                self._head, self._in_first_value = bytes(self._data[self._start : self._start + KEPT_BYTES]), False
            self._dropped += end - self._start
            self._start = end
        del self._data[:end]
        self._data_offset += end
        self._start -= end
        self._next -= end
        self._quote -= end

    def _find_inspected_end(self) -> int:
        """Return the end of the inspected bytes, without a backslash that escapes the next byte."""
        end = begin = self._next
        while self._in_string and begin > 0 and self._data[begin - 1] == 92:
            begin -= 1
        return end - (end - begin) % 2


_WRAPPER_KEYS = {key.encode() for key in WRAPPER_KEYS}
