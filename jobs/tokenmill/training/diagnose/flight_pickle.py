"""A pickle of plain values, read without Python's unpickler; `flight_records` reads flight-recorder dumps with it.

torch's flight recorder writes a pickle of dictionaries, lists, tuples, texts, numbers, booleans and None. Python's
unpickler would run every function that a pickle names, hash nested tuples for years, and allocate memory for any index
of the memo. The machine below supports only the opcodes of these values (pickletools documents all of them). It calls
nothing, and uses only texts as keys.
"""

import struct
from typing import Any

MAX_INTEGER_BYTES = 9
"""Maximum bytes of an integer: those of 64 bits without a sign, and the byte of the sign."""

MAX_VALUES = 5_000_000
"""Maximum texts and collections: 100,000 operations with 20 calls each have half as many."""


class UnreadableFile(Exception):
    """A file is truncated, damaged, too large, or of another kind; the message is the reason."""


def load_plain(data: bytes) -> Any:
    """Return the value of a pickle that contains only plain values.

    Raises:
        UnreadableFile: the pickle is truncated or damaged, or names code.
    """
    try:
        return _run(data)
    except (IndexError, KeyError, struct.error, TypeError):  # an empty stack, a missing memo entry, a missing end
        raise UnreadableFile("it is truncated, or not a pickle of plain values") from None


def _run(data: bytes) -> Any:  # noqa: PLR0912, PLR0915 - one branch for each opcode
    position, end = 0, len(data)
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[int, Any] = {}
    values = 0
    while position < end:
        code = data[position]
        position += 1
        if code == 0x68:  # BINGET, half of all opcodes
            stack.append(memo[data[position]])
            position += 1
            continue
        if code in _NEW_VALUES:
            values += 1
            if values > MAX_VALUES:
                raise UnreadableFile(f"it has more than {MAX_VALUES:,} values, which no flight recorder writes")
        if code == 0x6A:  # LONG_BINGET
            stack.append(memo[_unsigned(data, position, 4)])
            position += 4
        elif code == 0x71:  # BINPUT
            memo[data[position]] = stack[-1]
            position += 1
        elif code == 0x72:  # LONG_BINPUT
            memo[_unsigned(data, position, 4)] = stack[-1]
            position += 4
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code in _TEXT_LENGTHS:  # SHORT_BINUNICODE, BINUNICODE
            width = _TEXT_LENGTHS[code]
            start = position + width
            position = start + _unsigned(data, position, width)
            if position > end:
                raise IndexError
            stack.append(data[start:position].decode(errors="replace"))
        elif code in _INTEGERS:  # BININT1, BININT2, BININT
            width, signed = _INTEGERS[code]
            stack.append(int.from_bytes(_take(data, position, width), "little", signed=signed))
            position += width
        elif code == 0x8A:  # LONG1
            width = data[position]
            if width > MAX_INTEGER_BYTES:
                raise UnreadableFile(f"it has an integer of {width} bytes, which no flight recorder writes")
            stack.append(int.from_bytes(_take(data, position + 1, width), "little", signed=True))
            position += 1 + width
        elif code == 0x28:  # MARK
            marks.append(stack)
            stack = []
        elif code == 0x65:  # APPENDS
            items, stack = stack, marks.pop()
            _check(stack[-1], list).extend(items)
        elif code == 0x61:  # APPEND
            item = stack.pop()
            _check(stack[-1], list).append(item)
        elif code == 0x75:  # SETITEMS
            items, stack = stack, marks.pop()
            for index in range(0, len(items), 2):
                _check(stack[-1], dict)[_check(items[index], str)] = items[index + 1]
        elif code == 0x73:  # SETITEM
            item, key = stack.pop(), stack.pop()
            _check(stack[-1], dict)[_check(key, str)] = item
        elif code == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif code == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif code == 0x74:  # TUPLE
            items, stack = stack, marks.pop()
            stack.append(tuple(items))
        elif code == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif code in (0x85, 0x86, 0x87):  # TUPLE1, TUPLE2, TUPLE3
            count = code - 0x84
            if len(stack) < count:
                raise IndexError
            stack[-count:] = [tuple(stack[-count:])]
        elif code in _CONSTANTS:  # NONE, NEWTRUE, NEWFALSE
            stack.append(_CONSTANTS[code])
        elif code == 0x47:  # BINFLOAT
            stack.append(struct.unpack_from(">d", data, position)[0])
            position += 8
        elif code == 0x80:  # PROTO
            position += 1
        elif code == 0x95:  # FRAME
            position += 8
        elif code == 0x2E:  # STOP
            return stack.pop()
        else:
            name = f"{chr(code)!r}" if 0x20 < code < 0x7F else f"{code:#x}"
            raise UnreadableFile(f"it has the opcode {name}, which plain values do not need: it may run code")
    raise IndexError


_NEW_VALUES = frozenset((0x8C, 0x58, 0x7D, 0x5D, 0x74, 0x85, 0x86, 0x87, 0x47))
"""Opcodes of which each makes an object: texts, collections and floating-point numbers."""
_TEXT_LENGTHS = {0x8C: 1, 0x58: 4}
_INTEGERS = {0x4B: (1, False), 0x4D: (2, False), 0x4A: (4, True)}
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}


def _take(data: bytes, position: int, width: int) -> bytes:
    piece = data[position : position + width]
    if len(piece) < width:
        raise IndexError
    return piece


def _unsigned(data: bytes, position: int, width: int) -> int:
    return int.from_bytes(_take(data, position, width), "little")


def _check(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value
