"""A pickle, read as data: nothing that it names is imported, and only functions of its reader are called.

Checkpoints of torch and dumps of its flight recorder are pickles of an unknown origin. A reader lists the names that
its pickles may contain, and gets dictionaries, lists, tuples, texts, numbers, and an InertObject for each object.

Python's own unpickler is not safe, even if it refuses all names: it hashes and compares every key, and 80 bytes of
tuples within tuples keep it busy for years. It also allocates memory for any index of the memo, and copies the
arguments of each call. A child process with limits would contain it, but whether a checkpoint is damaged, and is moved
aside, would then depend on the speed of the machine. The loop below does an amount of work for each opcode that is
bounded by the items on the stack, and hashes only texts. It supports the opcodes that picklers write in protocols 2 to
5 (pickletools in the standard library documents all of them).
"""

import struct
from collections.abc import Callable
from typing import Any

from tokenmill.core.printing import MAX_NAME, printable

MAX_OPCODES = 100_000_000
"""Maximum opcodes of a pickle. A checkpoint of 400 billion parameters has 80,000 shards of 120 opcodes each."""

MAX_VALUES = 40_000_000
"""Maximum texts, collections and objects, each about 70 bytes in memory: a shard takes 40."""

MAX_DEPTH = 1000
"""Maximum depth of nested collections that are being filled: a checkpoint needs 10."""

MAX_INTEGER_BYTES = 16
"""Maximum bytes of an integer; a larger one is neither a size nor an offset."""


class DamagedPickle(Exception):
    """A pickle is truncated, or contradicts itself; the message is a sentence about `it`."""


class RefusedPickle(Exception):
    """A pickle has something that its reader does not support; the message is like `names os.system`."""


class InertObject:
    """Stands for an object of a class that is not imported."""

    __slots__ = ("state",)

    def __init__(self, _arguments: tuple[Any, ...] = ()) -> None:
        self.state: Any = None
        """Usually the attributes by name."""


def load_pickle(
    data: bytes,
    find_name: Callable[[str], Any] | None = None,
    *,
    find_storage: Callable[[Any], Any] | None = None,
    text_errors: str = "surrogatepass",
    max_values: int | None = None,
) -> Any:
    """Return the value of a pickle; sets become lists, and keys that are neither texts nor objects become anonymous.

    Args:
        data: the pickle; bytes after its end are ignored.
        find_name: returns what stands for a class, a function or a constant, None if the pickle may not name it. For a
            class or a function it is a callable, which gets the arguments as a tuple. Without `find_name` the pickle
            may have no names.
        find_storage: returns what stands for a persistent id.
        text_errors: how bytes that are not UTF-8 are decoded.
        max_values: maximum texts, collections and objects; MAX_VALUES by default.

    Raises:
        DamagedPickle: the pickle is truncated, or not a pickle.
        RefusedPickle: the pickle has a name, an opcode or an amount of values that no such pickle needs.
    """
    try:
        return _execute(data, find_name, find_storage, text_errors, max_values or MAX_VALUES)
    except (LookupError, ValueError):  # an empty stack, a missing memo entry, a missing end, invalid UTF-8
        raise DamagedPickle("it is truncated, or not a pickle") from None


_ARGUMENT_BYTES = {
    **dict.fromkeys(b"\x80qKC\x8a\x8c", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"jrJXB\x8b", 4),
    **dict.fromkeys(b"\x95G\x8d\x8e\x96", 8),
}
"""Bytes of the number after an opcode: an integer, an index of the memo, or the length of what follows."""
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()}
_ITEM_COUNTS = {**dict.fromkeys(b"a\x85", 1), **dict.fromkeys(b"s\x86", 2), 0x87: 3, **dict.fromkeys(b"1teu\x90\x91")}
"""Number of items that an opcode takes from the stack, None for all items up to the mark."""
_NEW_VALUES = b"\x8cX\x8dCB\x8e\x96G}]\x8ft\x85\x86\x87\x91R\x81\x92Q"
"""Opcodes of which each makes an object in memory."""


def _execute(  # noqa: PLR0912, PLR0915 - one branch for each opcode
    data: bytes,
    find_name: Callable[[str], Any] | None,
    find_storage: Callable[[Any], Any] | None,
    text_errors: str,
    max_values: int,
) -> Any:
    position = values = argument = 0
    stack: list[Any] = []
    outer_stacks: list[list[Any]] = []
    """The stacks of the collections that enclose the current one."""
    memo: dict[int, Any] = {}
    for _ in range(MAX_OPCODES):
        code = data[position]  # fails after an argument that is truncated
        position += 1
        # The most frequent opcodes come first: the two below are half of all.
        if code == 0x68:  # BINGET
            stack.append(memo[data[position]])
            position += 1
            continue
        if code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
            continue
        if width := _ARGUMENT_BYTES.get(code):
            argument = int.from_bytes(data[position : position + width], "little")
            position += width
        if code in _NEW_VALUES:
            values += 1
            if values > max_values:
                raise RefusedPickle(f"has more than {max_values:,} values")
        if code == 0x6A:  # LONG_BINGET
            stack.append(memo[argument])
        elif code in b"qr":  # BINPUT, LONG_BINPUT
            memo[argument] = stack[-1]
        elif code in b"KM":  # BININT1, BININT2
            stack.append(argument)
        elif code == 0x28:  # MARK
            if len(outer_stacks) >= MAX_DEPTH:
                raise RefusedPickle(f"has more than {MAX_DEPTH:,} nested collections")
            outer_stacks.append(stack)
            stack = []
        elif code in _ITEM_COUNTS:
            if count := _ITEM_COUNTS[code]:
                items = [stack.pop() for _ in range(count)][::-1]
            else:
                items, stack = stack, outer_stacks.pop()
            if code in b"t\x85\x86\x87":  # TUPLE, TUPLE1, TUPLE2, TUPLE3
                stack.append(tuple(items))
            elif code in b"us":  # SETITEMS, SETITEM
                _set_items(stack[-1], items)
            elif code in b"ea\x90":  # APPENDS, APPEND, ADDITEMS
                if type(stack[-1]) is not list:
                    raise DamagedPickle("it appends to a value that is not a list")
                stack[-1].extend(_check_hashable(items) if code == 0x90 else items)
            elif code == 0x91:  # FROZENSET; the remaining opcode is POP_MARK
                stack.append(_check_hashable(items))
        elif code in _CONSTANTS:  # NONE, NEWTRUE, NEWFALSE, EMPTY_TUPLE
            stack.append(_CONSTANTS[code])
        elif code in b"\x8cX\x8d":  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
            stack.append(data[position : position + argument].decode(errors=text_errors))
            position += argument
        elif code == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif code in b"R\x81\x92":  # REDUCE, NEWOBJ, NEWOBJ_EX
            if code == 0x92:
                stack.pop()
            arguments, function = stack.pop(), stack.pop()
            if not callable(function) or type(arguments) is not tuple:  # only find_name returns callables
                raise DamagedPickle("it calls a value that is not a class")
            stack.append(function(arguments))
        elif code == 0x62:  # BUILD
            state = stack.pop()
            if type(stack[-1]) is not InertObject:
                raise DamagedPickle("it sets the state of a value that has no state")
            stack[-1].state = state
        elif code == 0x4A:  # BININT
            stack.append(argument - (argument >> 31 << 32))
        elif code in b"\x8a\x8b":  # LONG1, LONG4
            if argument > MAX_INTEGER_BYTES:
                raise RefusedPickle(f"has an integer of {argument:,} bytes")
            stack.append(int.from_bytes(data[position : position + argument], "little", signed=True))
            position += argument
        elif code in b"]\x8f":  # EMPTY_LIST, EMPTY_SET
            stack.append([])
        elif code in b"c\x93" and find_name:  # GLOBAL, STACK_GLOBAL
            if code == 0x93:
                name, module = stack.pop(), stack.pop()
            else:
                end = data.index(b"\n", data.index(b"\n", position) + 1)
                module, name = data[position:end].decode().split("\n")
                position = end + 1
            if type(module) is not str or type(name) is not str:
                raise DamagedPickle("the name of a class is not text")
            if (value := find_name(f"{module}.{name}")) is None:
                raise RefusedPickle(f"names {printable(f'{module}.{name}', MAX_NAME)}")
            stack.append(value)
        elif code == 0x51 and find_storage:  # BINPERSID
            stack.append(find_storage(stack.pop()))
        elif code == 0x47:  # BINFLOAT
            stack.append(struct.unpack(">d", argument.to_bytes(8, "little"))[0])
        elif code in b"CB\x8e\x96":  # SHORT_BINBYTES, BINBYTES, BINBYTES8, BYTEARRAY8
            stack.append(data[position : position + argument])
            position += argument
        elif code == 0x30:  # POP
            stack.pop()
        elif code == 0x32:  # DUP
            stack.append(stack[-1])
        elif code == 0x80:  # PROTO
            if argument > 5:
                raise DamagedPickle(f"it has the unsupported pickle protocol {argument}")
        elif code == 0x2E:  # STOP
            return stack.pop()
        elif code != 0x95:  # FRAME
            raise RefusedPickle(f"has the opcode {chr(code)!r}")
    raise RefusedPickle(f"has more than {MAX_OPCODES:,} opcodes")


def _set_items(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or len(items) % 2:
        raise DamagedPickle("it sets items of a value that is not a dictionary")
    for key, value in zip(_check_hashable(items[::2]), items[1::2], strict=True):
        target[key if type(key) in (str, InertObject) else object()] = value


def _check_hashable(items: list[Any]) -> list[Any]:
    """Return keys or items of a set, none of which is a collection: Python would hash all of its content."""
    if any(type(item) in (tuple, list, dict) for item in items):
        raise RefusedPickle("has a collection as a key or in a set")
    return items
