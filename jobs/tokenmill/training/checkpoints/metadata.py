"""Which bytes of which file a torch_dist checkpoint needs: its .metadata, read without torch and without trusting it.

.metadata is a pickle of torch.distributed.checkpoint's Metadata. Megatron-LM runs every function that the pickle names.
This module runs none of them, so a refusal here also protects the run. `torch_dist` compares the result with the files.

Python's own unpickler is not safe: it hashes and compares every key of a pickle, and 80 bytes of tuples within tuples
keep it busy for years. The machine below supports the opcodes that Python's picklers write in protocols 2 to 5
(pickletools documents all of them). It does little for each opcode, hashes only text keys, compares no values, and
keeps only the values that the result needs.
"""

import re
from collections.abc import Callable
from typing import Any

MAX_OPCODES = 100_000_000
"""Maximum opcodes of a pickle. A tensor's shard takes 60, and a run of 400 billion parameters has 80,000 shards."""

MAX_OBJECTS = 10_000_000
"""Maximum dictionaries and objects, which stay in memory to the end: a shard takes 6 of about 200 bytes each."""

MAX_DEPTH = 1000
"""Maximum depth of nested collections that are being filled: Metadata needs 10."""

MAX_INTEGER_BYTES = 16
"""Maximum bytes of an integer; a larger one cannot be an offset, and is not built."""


class Damage(Exception):
    """A checkpoint is incomplete or damaged; the message is the reason."""


def printable_name(name: str) -> str:
    """Return a name that was read from a file, escaped and shortened for a message."""
    return name if name.isprintable() and len(name) <= 100 else ascii(name[:100])


def read_extents(data: bytes) -> dict[str, int]:
    """Return the minimum size in bytes of every data file, by its path in the checkpoint.

    Raises:
        Damage: the pickle is truncated or damaged, or contains something that no checkpoint needs.
    """
    try:
        metadata = _Machine(data).run()
    except Damage:
        raise
    except (IndexError, ValueError):  # an empty stack, a missing memo entry, a missing end, invalid UTF-8
        raise Damage(".metadata is damaged: it is truncated, or not a pickle") from None
    storage = metadata.state.get("storage_data") if isinstance(metadata, _Object) else None
    if not isinstance(storage, _Dict) or not storage.size:
        raise Damage(".metadata lists no data files")
    needed_bytes: dict[str, int] = {}
    for extent in storage.objects:
        path, offset, length = (extent.state.get(name) for name in ("relative_path", "offset", "length"))
        if not (isinstance(path, str) and type(offset) is int and type(length) is int and min(offset, length) >= 0):
            raise Damage(".metadata is damaged: an entry does not name an extent of a file")
        needed_bytes[path] = max(needed_bytes.get(path, 0), offset + length)
    if len(storage.objects) < storage.size:
        raise Damage(".metadata is damaged: an entry does not name an extent of a file")
    return needed_bytes


# -- values on the stack


class _Dict:
    """Stands for a dictionary: its number of items, the items with a key in _FIELD_NAMES, the objects in its values."""

    __slots__ = ("named_items", "objects", "size")

    def __init__(self) -> None:
        self.size = 0
        self.named_items: dict[str, Any] = {}
        self.objects: list[_Object] = []

    def put(self, key: Any, value: Any) -> None:
        if key is _COLLECTION or key is _ENUM_ARGUMENTS:  # torch would hash all of its content
            raise Damage(".metadata has a collection as a key, which no checkpoint needs: do not load it")
        self.size += 1
        if type(key) is str and key in _FIELD_NAMES:
            self.named_items[key] = value
        if type(value) is _Object:
            self.objects.append(value)


class _Object:
    """Stands for Metadata, and for _StorageInfo, an extent of a data file."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}


class _Class:
    """Stands for a class or a function that .metadata may name; `make` creates the stand-in of an instance."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


_FIELD_NAMES = {"storage_data", "relative_path", "offset", "length"}
_OPAQUE = object()
"""Stands for every value that the result does not need."""
_COLLECTION = object()
"""Stands for a tuple, a list or a set, with any content."""
_ENUM_ARGUMENTS = object()
"""Stands for a tuple of two items, of which the first is an enum."""
_OPAQUE_CLASS = _Class(lambda: _OPAQUE)
_DICT_CLASS = _Class(_Dict)
_OBJECT_CLASS = _Class(_Object)
_ENUM_CLASS = _Class(lambda: _OPAQUE)
_GETATTR = _Class(lambda: _OPAQUE)
"""getattr: early Python 3.11 pickles the members of an enum with it. For other arguments it is refused."""

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_STAND_INS = {
    (_METADATA, "Metadata"): _OBJECT_CLASS,
    (_MEGATRON, "MCoreMetadata"): _OBJECT_CLASS,  # subclass of Metadata in checkpoints of Megatron Core 0.14 and 0.15
    (_MEGATRON, "MCoreSavePlan"): _OPAQUE_CLASS,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _OBJECT_CLASS,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): _OPAQUE_CLASS,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _ENUM_CLASS,
    **{(_METADATA, f"{name}StorageMetadata"): _OPAQUE_CLASS for name in ("Bytes", "Chunk", "Tensor")},
    **{(_METADATA, name): _OPAQUE_CLASS for name in ("MetadataIndex", "StorageMeta", "TensorProperties")},
    # Megatron-LM adds the save plan of every rank.
    (_PLANNER, "WriteItemType"): _ENUM_CLASS,
    **{(_PLANNER, name): _OPAQUE_CLASS for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem")},
    ("torch", "Size"): _OPAQUE_CLASS,
    ("torch.serialization", "_get_layout"): _OPAQUE_CLASS,
    ("collections", "OrderedDict"): _DICT_CLASS,
    ("builtins", "getattr"): _GETATTR,
    **{(module, "PosixPath"): _OPAQUE_CLASS for module in ("pathlib", "pathlib._local")},
}
_DTYPE_NAME = re.compile(r"bool|(b?float|complex|q?u?int|bits)\d[0-9a-z_]*")


def _find_class(module: Any, name: Any) -> _Class:
    """Return the stand-in of a class or function.

    Raises:
        Damage: no checkpoint needs this name. Megatron-LM itself would run the function later.
    """
    if type(module) is not str or type(name) is not str:
        raise Damage(".metadata is damaged: the name of a class is not text")
    stand_in = _STAND_INS.get((module, name))
    if stand_in is None and module == "torch" and len(name) < 100 and _DTYPE_NAME.fullmatch(name):
        stand_in = _OPAQUE_CLASS
    if stand_in is None:
        raise Damage(f".metadata names {printable_name(f'{module}.{name}')}, which no checkpoint needs: do not load it")
    return stand_in


# -- the machine


class _Machine:
    """Executes a pickle's opcodes on stand-ins; the time of an opcode is bounded by its items on the stack."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.outer_stacks: list[list[Any]] = []
        """The stacks of the collections that enclose the current one."""
        self.memo: list[Any] = []
        self.objects = 0

    def run(self) -> Any:
        """Return the stand-in of the pickle's value."""
        data = self.data
        for _ in range(MAX_OPCODES):
            code = data[self.position]
            self.position += 1
            if code == STOP:
                return self.stack.pop()
            handler = _OPCODE_HANDLERS.get(code)
            if handler is None:
                raise Damage(f".metadata is damaged: it has the opcode {bytes([code])!r}, which no checkpoint needs")
            handler(self)
        raise Damage(f".metadata has more than {MAX_OPCODES:,} opcodes, which no checkpoint needs")

    # -- arguments of opcodes

    def read_bytes(self, count: int) -> bytes:
        """Read `count` bytes of an argument."""
        data = self.data[self.position : self.position + count]
        if len(data) < count:
            raise Damage(".metadata is damaged: it is truncated")
        self.position += count
        return data

    def read_integer(self, size: int) -> int:
        """Read an unsigned integer of `size` bytes."""
        return int.from_bytes(self.read_bytes(size), "little")

    def read_line(self) -> str:
        """Read a line without its newline."""
        end = self.data.index(b"\n", self.position)
        return self.read_bytes(end + 1 - self.position)[:-1].decode()

    # -- values

    def push_number(self, size: int, *, signed: bool) -> None:
        self.stack.append(int.from_bytes(self.read_bytes(size), "little", signed=signed))

    def push_long(self, size: int) -> None:
        data = self.read_bytes(self.read_integer(size))
        self.stack.append(int.from_bytes(data, "little", signed=True) if len(data) <= MAX_INTEGER_BYTES else _OPAQUE)

    def push_text(self, size: int) -> None:
        self.stack.append(self.read_bytes(self.read_integer(size)).decode(errors="surrogatepass"))

    def push_opaque(self, size: int) -> None:
        """Skip bytes that the result does not need."""
        self.read_bytes(self.read_integer(size))
        self.stack.append(_OPAQUE)

    def push_new(self, kind: _Class) -> None:
        instance = kind.make()
        if instance is not _OPAQUE:
            self.objects += 1
            if self.objects > MAX_OBJECTS:
                raise Damage(f".metadata has more than {MAX_OBJECTS:,} objects, which no checkpoint needs")
        self.stack.append(instance)

    # -- collections

    def push_mark(self) -> None:
        if len(self.outer_stacks) >= MAX_DEPTH:
            raise Damage(f".metadata has more than {MAX_DEPTH:,} nested collections, which no checkpoint needs")
        self.outer_stacks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer_stacks.pop()
        return items

    def push_tuple(self, items: list[Any]) -> None:
        self.stack.append(_ENUM_ARGUMENTS if len(items) == 2 and items[0] is _ENUM_CLASS else _COLLECTION)

    def push_tuple_of(self, count: int) -> None:
        items = [self.stack.pop() for _ in range(count)]
        self.push_tuple(items[::-1])

    def put_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not _Dict or len(items) % 2:
            raise Damage(".metadata is damaged: it sets items of a value that is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target.put(key, value)

    def put_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.put_items([key, value])

    def append_items(self, items: object) -> None:
        """Drop the new items of a list or a set, after a check that the value is one."""
        if self.stack[-1] is not _COLLECTION:
            raise Damage(".metadata is damaged: it appends to a value that is not a list")

    def check_set_items(self, items: list[Any]) -> list[Any]:
        """Return the items of a set, after a check that none is a collection: Python would hash all of its content."""
        if any(item is _COLLECTION or item is _ENUM_ARGUMENTS for item in items):
            raise Damage(".metadata has a collection in a set, which no checkpoint needs: do not load it")
        return items

    # -- memo

    def memoize(self, index: int | None = None) -> None:
        if index is None or index == len(self.memo):
            self.memo.append(self.stack[-1])
        else:  # picklers number without gaps, so the memo never grows by more than one
            self.memo[index] = self.stack[-1]

    def push_memo(self, size: int) -> None:
        self.stack.append(self.memo[self.read_integer(size)])

    # -- classes

    def push_class(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(_find_class(module, name))

    def push_instance(self, *, keywords: bool = False) -> None:
        """Push the stand-in of an instance of a class, or of the result of a function."""
        if keywords:
            self.stack.pop()
        arguments, kind = self.stack.pop(), self.stack.pop()
        if type(kind) is not _Class:
            raise Damage(".metadata is damaged: it calls a value that is not a class")
        if kind is _GETATTR and arguments is not _ENUM_ARGUMENTS:
            raise Damage(".metadata reads an attribute of a value that is not an enum: do not load it")
        self.push_new(kind)

    def set_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is _Object and type(state) is _Dict:
            target.state = state.named_items
        elif type(target) is not _Object and target is not _OPAQUE:
            raise Damage(".metadata is damaged: it sets the state of a value that has no state")


def _protocol(machine: _Machine) -> None:
    if (version := machine.read_integer(1)) > 5:
        raise Damage(f".metadata is damaged: it has the unsupported pickle protocol {version}")


STOP = ord(".")
_OPCODE_HANDLERS: dict[int, Callable[[_Machine], Any]] = {
    code[0]: handler
    for code, handler in {
        b"\x80": _protocol,
        b"\x95": lambda m: m.read_bytes(8),  # FRAME: the length of the following frame
        # None, True, False, numbers, text, bytes
        b"N": lambda m: m.stack.append(None),
        b"\x88": lambda m: m.stack.append(True),
        b"\x89": lambda m: m.stack.append(False),
        b"J": lambda m: m.push_number(4, signed=True),
        b"K": lambda m: m.push_number(1, signed=False),
        b"M": lambda m: m.push_number(2, signed=False),
        b"\x8a": lambda m: m.push_long(1),
        b"\x8b": lambda m: m.push_long(4),
        b"G": lambda m: m.stack.append(m.read_bytes(8) and _OPAQUE),
        b"\x8c": lambda m: m.push_text(1),
        b"X": lambda m: m.push_text(4),
        b"\x8d": lambda m: m.push_text(8),
        b"C": lambda m: m.push_opaque(1),
        b"B": lambda m: m.push_opaque(4),
        b"\x8e": lambda m: m.push_opaque(8),
        b"\x96": lambda m: m.push_opaque(8),
        # the stack
        b"(": _Machine.push_mark,
        b"0": lambda m: m.stack.pop(),
        b"1": _Machine.pop_mark,
        b"2": lambda m: m.stack.append(m.stack[-1]),
        # collections
        b")": lambda m: m.push_tuple([]),
        b"\x85": lambda m: m.push_tuple_of(1),
        b"\x86": lambda m: m.push_tuple_of(2),
        b"\x87": lambda m: m.push_tuple_of(3),
        b"t": lambda m: m.push_tuple(m.pop_mark()),
        b"]": lambda m: m.stack.append(_COLLECTION),
        b"a": lambda m: m.append_items(m.stack.pop()),
        b"e": lambda m: m.append_items(m.pop_mark()),
        b"}": lambda m: m.push_new(_DICT_CLASS),
        b"s": _Machine.put_item,
        b"u": lambda m: m.put_items(m.pop_mark()),
        b"\x8f": lambda m: m.stack.append(_COLLECTION),
        b"\x90": lambda m: m.append_items(m.check_set_items(m.pop_mark())),
        b"\x91": lambda m: m.push_tuple(m.check_set_items(m.pop_mark())),
        # the memo
        b"\x94": _Machine.memoize,
        b"q": lambda m: m.memoize(m.read_integer(1)),
        b"r": lambda m: m.memoize(m.read_integer(4)),
        b"h": lambda m: m.push_memo(1),
        b"j": lambda m: m.push_memo(4),
        # classes and their instances
        b"c": lambda m: m.stack.append(_find_class(m.read_line(), m.read_line())),
        b"\x93": _Machine.push_class,
        b"R": _Machine.push_instance,
        b"\x81": _Machine.push_instance,
        b"\x92": lambda m: m.push_instance(keywords=True),
        b"b": _Machine.set_state,
    }.items()
}
