"""Cut JSON that is not one record a line into records, without parsing any of it or holding more than one.

The rule for --format json: a file is a sequence of JSON values with nothing or white space between them. An object is a
record, and of an array each element is one. Where the first value is an object that has an array of objects under
`data`, `rows`, `records`, `examples` or `documents`, and none of the wanted keys before it, the array's elements are
the records, and nothing else of this object is.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenmill.corpus.compression import REMEDY
from tokenmill.corpus.unexpected_content import WRAPPERS
from tokenmill.errors import InputError

KEPT = 64 << 10
"""Bytes of a record that is too long which are kept, to show what it is."""

_BETWEEN = re.compile(rb'["\[\]{},]')
_WITHIN = re.compile(rb'["\[\]{}]')
_SOLID = re.compile(rb"\S")
_BLANK = b" \t\r\n"


class JsonValue(NamedTuple):
    """A record as it stands in the file, and its size; of one that is too long only the beginning is there."""

    data: bytes
    size: int


class JsonCutter:
    """Take a file's bytes piece by piece, and give the records that are whole."""

    def __init__(self, keys: Sequence[str], most: int, display: str) -> None:
        """Cut at records; of one with more than `most` bytes little is kept."""
        self._wanted = {name.encode() for key in keys for name in (key, key.partition(".")[0])}
        self._most = most
        self._display = display
        self._data = bytearray()  # from the record that is not whole yet
        self._before = 0  # bytes of the file before it
        self._start = 0  # of the record
        self._next = 0  # to be looked at
        self._string = False
        self._depth = 0
        self._level = 0  # at which records stand: 0, 1 in an array, 2 in an array in an object
        self._first = True  # the first value, which may hold all records
        self._tail = False  # the rest of such a value
        self._quote = 0  # where the last string begins
        self._key = b""  # the last key of the first value
        self._head: bytes | None = None  # of a record that is too long
        self._dropped = 0

    def feed(self, piece: bytes) -> Iterator[JsonValue]:
        """Take the file's next bytes, and yield the records that end in them."""
        self._data += piece
        while self._step():
            yield from self._ended
        self._forget()

    def finish(self) -> Iterator[JsonValue]:
        """Yield what stands behind the last value; refuse a file that ends inside one."""
        if self._string or self._depth:
            raise InputError(
                f"{self._display}: the JSON is cut short: the file ends inside the value that begins at byte "
                f"{self._before + self._start:,}. {REMEDY}"
            )
        yield from self._value(len(self._data))

    def _step(self) -> bool:
        """Go on to the next byte that matters; False where there is none."""
        self._ended: Iterator[JsonValue] | tuple[()] = ()
        data = self._data
        if self._string:
            return self._close_string()
        outside = self._depth == self._level
        match = (_BETWEEN if outside else _WITHIN).search(data, self._next)
        if match is None:
            self._next = len(data)
            return False
        at, token = match.start(), match.group()
        self._next = at + 1
        if token == b'"':
            self._string, self._quote = True, at
        elif token in b"[{":
            return self._open(at, token)
        elif token == b",":
            if self._level:
                self._ended = self._value(at)
                self._start = at + 1
        elif outside:
            self._close_level(at, token)
        else:
            self._close_value(at)
        return True

    def _open(self, at: int, token: bytes) -> bool:
        """Go into an object or array; False where more bytes must say whether it holds the records."""
        if self._depth == 0:
            self._ended = self._value(at)
            if token == b"[":
                self._level, self._first, self._start = 1, False, at + 1
        elif token == b"[" and self._first and self._depth == 1 and self._key in _WRAPPED:
            solid = _SOLID.search(self._data, at + 1)
            if solid is None:
                self._next = at
                return False
            if solid.group() == b"{":
                self._level, self._first, self._start = 2, False, at + 1
        self._depth += 1
        return True

    def _close_value(self, at: int) -> None:
        """Go out of an object or array that is a record or lies in one."""
        self._depth -= 1
        if self._depth == 0:
            self._first = False
            self._ended = () if self._tail else self._value(at + 1)
            self._start, self._tail = at + 1, False

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
            self._string = False
            if self._first and self._depth == 1:
                self._note_key(quote)
        return True

    def _note_key(self, quote: int) -> None:
        """Keep a string of the first value where it is a key."""
        before = self._quote - 1
        while before > 0 and self._data[before] in _BLANK:
            before -= 1
        if self._data[before] in b"{,":
            self._key = bytes(self._data[self._quote + 1 : min(quote, self._quote + 100)])
            self._first = self._key not in self._wanted

    def _close_level(self, at: int, token: bytes) -> None:
        """End the array that the records stand in."""
        if token != b"]" or not self._level:
            raise InputError(
                f"{self._display}: damaged JSON: {token.decode()!r} at byte {self._before + at:,} closes nothing. "
                f"{REMEDY}"
            )
        self._ended = self._value(at)
        self._depth -= 1
        self._tail, self._level, self._start = self._level == 2, 0, at + 1

    def _value(self, end: int) -> Iterator[JsonValue]:
        """Give the record that ends here, if there is any; what lies between two values and is not blank is one."""
        data = bytes(self._data[self._start : end])
        self._start = end
        if self._head is not None:
            value = JsonValue(self._head, self._dropped + len(data))
            self._head, self._dropped = None, 0
            return iter((value,))
        data = data.strip()
        return iter((JsonValue(data, len(data)),) if data else ())

    def _forget(self) -> None:
        """Let go of the bytes that are behind: the records that were given, and of one that is too long nearly all."""
        end = self._start
        if self._depth == self._level and not self._string and _SOLID.search(self._data, self._start) is None:
            end = self._start = self._next
        elif self._tail:
            end = self._start = self._after_pairs()
        elif len(self._data) - self._start > self._most or self._head is not None:
            end = self._after_pairs()
            if self._head is None:
                self._head, self._first = bytes(self._data[self._start : self._start + KEPT]), False
            self._dropped += end - self._start
            self._start = end
        del self._data[:end]
        self._before += end
        self._start -= end
        self._next -= end
        self._quote -= end

    def _after_pairs(self) -> int:
        """Return the end of what was looked at, less a backslash that escapes what follows."""
        end = begin = self._next
        while self._string and begin > 0 and self._data[begin - 1] == 92:
            begin -= 1
        return end - (end - begin) % 2


_WRAPPED = {name.encode() for name in WRAPPERS}
