"""Which bytes of which file a torch_dist checkpoint needs: its .metadata, read without torch and without trusting it.

.metadata is a pickle of torch.distributed.checkpoint's Metadata. Megatron-LM runs whatever it names; here nothing is
run, so that refusing it also protects the run. `torch_dist` compares the answer with what lies there.

Python's own unpickler is not used: it hashes and compares whatever a pickle makes a key, and tuples within tuples of
80 bytes keep it busy for years. The machine below knows the opcodes that Python's picklers write in protocols 2 to 5
(pickletools has them all), does little for each of them, hashes no key but a text, compares no values, and keeps
only what the answer needs.
"""

import re
from collections.abc import Callable
from typing import Any

OPERATIONS = 100_000_000
"""Opcodes at most. A shard of a tensor takes 60 of them, and a run of 400 billion parameters has 80,000 shards."""

OBJECTS = 10_000_000
"""Dictionaries and objects at most, which are kept until the end: a shard takes 6 of some 200 bytes each."""

DEPTH = 1000
"""Collections within each other at most, while they are being filled: Metadata needs 10."""

NUMBER_BYTES = 16
"""Bytes of an integer beyond which it is no offset, and is not made."""


class Damage(Exception):
    """Why a checkpoint is not whole, in words."""


def shown(name: str) -> str:
    """Return a name that came from a file as it may be printed."""
    return name if name.isprintable() and len(name) <= 100 else ascii(name[:100])


def extents(data: bytes) -> dict[str, int]:
    """Return the bytes that every data file must have at least, by its path in the checkpoint.

    Raises:
        Damage: it is cut off or damaged, or asks for what no checkpoint needs.
    """
    try:
        metadata = _Machine(data).run()
    except Damage:
        raise
    except (IndexError, ValueError):  # an empty stack, a memo that is not there, no end, no UTF-8
        raise Damage(".metadata is damaged: it is cut off, or no pickle") from None
    storage = metadata.state.get("storage_data") if isinstance(metadata, _Object) else None
    if not isinstance(storage, _Dict) or not storage.size:
        raise Damage(".metadata names no data")
    needed: dict[str, int] = {}
    for stretch in storage.objects:
        path, offset, length = (stretch.state.get(name) for name in ("relative_path", "offset", "length"))
        if not (isinstance(path, str) and type(offset) is int and type(length) is int and min(offset, length) >= 0):
            raise Damage(".metadata is damaged: an entry names no stretch of a file")
        needed[path] = max(needed.get(path, 0), offset + length)
    if len(storage.objects) < storage.size:
        raise Damage(".metadata is damaged: an entry names no stretch of a file")
    return needed


# -- what a pickle makes


class _Dict:
    """Stands for a dictionary: how many items it has, those under names that matter, and objects among its values."""

    __slots__ = ("named", "objects", "size")

    def __init__(self) -> None:
        self.size = 0
        self.named: dict[str, Any] = {}
        self.objects: list[_Object] = []

    def put(self, key: Any, value: Any) -> None:
        if key is _COLLECTION or key is _ENUM_ARGUMENTS:  # torch would hash whatever is in it
            raise Damage(".metadata has a collection for a key, which no checkpoint needs: do not load it")
        self.size += 1
        if type(key) is str and key in _NAMES:
            self.named[key] = value
        if type(value) is _Object:
            self.objects.append(value)


class _Object:
    """Stands for Metadata and for _StorageInfo, a stretch of a data file."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}


class _Class:
    """Stands for a class or a function that .metadata may name, and makes what stands for its instances."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


_NAMES = {"storage_data", "relative_path", "offset", "length"}
_OPAQUE = object()
"""Stands for every value that the answer does not need."""
_COLLECTION = object()
"""Stands for a tuple, a list or a set, whatever is in it."""
_ENUM_ARGUMENTS = object()
"""Stands for a tuple of two whose first is an enum."""
_INERT = _Class(lambda: _OPAQUE)
_DICT = _Class(_Dict)
_KEPT = _Class(_Object)
_ENUM = _Class(lambda: _OPAQUE)
_MEMBER = _Class(lambda: _OPAQUE)
"""getattr, with which early Python 3.11 pickles an enum's members; of anything else it is refused."""

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_STANDS_FOR = {
    (_METADATA, "Metadata"): _KEPT,
    (_MEGATRON, "MCoreMetadata"): _KEPT,  # its subclass, in checkpoints of Megatron Core 0.14 and 0.15
    (_MEGATRON, "MCoreSavePlan"): _INERT,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _KEPT,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): _INERT,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _ENUM,
    **{(_METADATA, f"{name}StorageMetadata"): _INERT for name in ("Bytes", "Chunk", "Tensor")},
    **{(_METADATA, name): _INERT for name in ("MetadataIndex", "StorageMeta", "TensorProperties")},
    # Megatron-LM adds every rank's plan.
    (_PLANNER, "WriteItemType"): _ENUM,
    **{(_PLANNER, name): _INERT for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem")},
    ("torch", "Size"): _INERT,
    ("torch.serialization", "_get_layout"): _INERT,
    ("collections", "OrderedDict"): _DICT,
    ("builtins", "getattr"): _MEMBER,
    **{(module, "PosixPath"): _INERT for module in ("pathlib", "pathlib._local")},
}
_DTYPE = re.compile(r"bool|(b?float|complex|q?u?int|bits)\d[0-9a-z_]*")


def _class_of(module: Any, name: Any) -> _Class:
    """Return what stands for a name; one that no checkpoint needs is refused.

    What Megatron-LM itself would do with it later is to run it.
    """
    if type(module) is not str or type(name) is not str:
        raise Damage(".metadata is damaged: it names what is no name")
    stand_in = _STANDS_FOR.get((module, name))
    if stand_in is None and module == "torch" and len(name) < 100 and _DTYPE.fullmatch(name):
        stand_in = _INERT
    if stand_in is None:
        raise Damage(f".metadata names {shown(f'{module}.{name}')}, which no checkpoint needs: do not load it")
    return stand_in


# -- the machine


class _Machine:
    """Carries out a pickle's opcodes on stand-ins; no opcode takes longer than what it takes from the stack."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        """The stacks of the collections around the one that is being filled."""
        self.memo: list[Any] = []
        self.objects = 0

    def run(self) -> Any:
        """Return what the pickle makes."""
        data = self.data
        for _ in range(OPERATIONS):
            code = data[self.at]
            self.at += 1
            if code == STOP:
                return self.stack.pop()
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise Damage(f".metadata is damaged: no checkpoint needs the opcode {bytes([code])!r}")
            operation(self)
        raise Damage(f".metadata has more than {OPERATIONS:,} opcodes, which no checkpoint needs")

    # -- reading

    def take(self, count: int) -> bytes:
        """Read so many bytes of an argument."""
        taken = self.data[self.at : self.at + count]
        if len(taken) < count:
            raise Damage(".metadata is damaged: it is cut off")
        self.at += count
        return taken

    def count(self, size: int) -> int:
        """Read a number of so many bytes."""
        return int.from_bytes(self.take(size), "little")

    def line(self) -> str:
        """Read a line."""
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    # -- values

    def push_number(self, size: int, *, signed: bool) -> None:
        self.stack.append(int.from_bytes(self.take(size), "little", signed=signed))

    def push_long(self, size: int) -> None:
        data = self.take(self.count(size))
        self.stack.append(int.from_bytes(data, "little", signed=True) if len(data) <= NUMBER_BYTES else _OPAQUE)

    def push_text(self, size: int) -> None:
        self.stack.append(self.take(self.count(size)).decode(errors="surrogatepass"))

    def skip(self, size: int) -> None:
        """Read bytes, which say nothing."""
        self.take(self.count(size))
        self.stack.append(_OPAQUE)

    def make(self, kind: _Class) -> None:
        made = kind.make()
        if made is not _OPAQUE:
            self.objects += 1
            if self.objects > OBJECTS:
                raise Damage(f".metadata has more than {OBJECTS:,} objects, which no checkpoint needs")
        self.stack.append(made)

    # -- collections

    def mark(self) -> None:
        if len(self.below) >= DEPTH:
            raise Damage(f".metadata has more than {DEPTH:,} collections within each other, which no checkpoint needs")
        self.below.append(self.stack)
        self.stack = []

    def to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def push_tuple(self, items: list[Any]) -> None:
        self.stack.append(_ENUM_ARGUMENTS if len(items) == 2 and items[0] is _ENUM else _COLLECTION)

    def tuple_of(self, count: int) -> None:
        items = [self.stack.pop() for _ in range(count)]
        self.push_tuple(items[::-1])

    def put(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not _Dict or len(items) % 2:
            raise Damage(".metadata is damaged: it sets items of what has none")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target.put(key, value)

    def put_one(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.put([key, value])

    def drop(self, items: object) -> None:
        """Leave out what a list or a set gets; there must be one."""
        if self.stack[-1] is not _COLLECTION:
            raise Damage(".metadata is damaged: it adds to what is no list")

    # -- memo

    def memoize(self, index: int | None = None) -> None:
        if index is None or index == len(self.memo):
            self.memo.append(self.stack[-1])
        else:  # picklers number without gaps, so that nothing beyond is ever made room for
            self.memo[index] = self.stack[-1]

    def get(self, size: int) -> None:
        self.stack.append(self.memo[self.count(size)])

    # -- classes

    def name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(_class_of(module, name))

    def call(self, *, keywords: bool = False) -> None:
        """Stand for an instance: of a class, or of what a function returns."""
        if keywords:
            self.stack.pop()
        arguments, kind = self.stack.pop(), self.stack.pop()
        if type(kind) is not _Class:
            raise Damage(".metadata is damaged: it calls what is no class")
        if kind is _MEMBER and arguments is not _ENUM_ARGUMENTS:
            raise Damage(".metadata takes attributes of what is no enum: do not load it")
        self.make(kind)

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is _Object and type(state) is _Dict:
            target.state = state.named
        elif type(target) is not _Object and target is not _OPAQUE:
            raise Damage(".metadata is damaged: it gives a state to what has none")


def _protocol(machine: _Machine) -> None:
    if (version := machine.count(1)) > 5:
        raise Damage(f".metadata is damaged: there is no pickle protocol {version}")


STOP = ord(".")
_OPERATIONS: dict[int, Callable[[_Machine], Any]] = {
    code[0]: operation
    for code, operation in {
        b"\x80": _protocol,
        b"\x95": lambda m: m.take(8),  # FRAME: where the next read of the file would begin
        # None, True, False, numbers, texts, bytes
        b"N": lambda m: m.stack.append(None),
        b"\x88": lambda m: m.stack.append(True),
        b"\x89": lambda m: m.stack.append(False),
        b"J": lambda m: m.push_number(4, signed=True),
        b"K": lambda m: m.push_number(1, signed=False),
        b"M": lambda m: m.push_number(2, signed=False),
        b"\x8a": lambda m: m.push_long(1),
        b"\x8b": lambda m: m.push_long(4),
        b"G": lambda m: m.stack.append(m.take(8) and _OPAQUE),
        b"\x8c": lambda m: m.push_text(1),
        b"X": lambda m: m.push_text(4),
        b"\x8d": lambda m: m.push_text(8),
        b"C": lambda m: m.skip(1),
        b"B": lambda m: m.skip(4),
        b"\x8e": lambda m: m.skip(8),
        b"\x96": lambda m: m.skip(8),
        # the stack
        b"(": _Machine.mark,
        b"0": lambda m: m.stack.pop(),
        b"1": _Machine.to_mark,
        b"2": lambda m: m.stack.append(m.stack[-1]),
        # collections
        b")": lambda m: m.push_tuple([]),
        b"\x85": lambda m: m.tuple_of(1),
        b"\x86": lambda m: m.tuple_of(2),
        b"\x87": lambda m: m.tuple_of(3),
        b"t": lambda m: m.push_tuple(m.to_mark()),
        b"]": lambda m: m.stack.append(_COLLECTION),
        b"a": lambda m: m.drop(m.stack.pop()),
        b"e": lambda m: m.drop(m.to_mark()),
        b"}": lambda m: m.make(_DICT),
        b"s": _Machine.put_one,
        b"u": lambda m: m.put(m.to_mark()),
        b"\x8f": lambda m: m.stack.append(_COLLECTION),
        b"\x90": lambda m: m.drop(m.to_mark()),
        b"\x91": lambda m: m.push_tuple(m.to_mark()),
        # the memo
        b"\x94": _Machine.memoize,
        b"q": lambda m: m.memoize(m.count(1)),
        b"r": lambda m: m.memoize(m.count(4)),
        b"h": lambda m: m.get(1),
        b"j": lambda m: m.get(4),
        # classes and their instances
        b"c": lambda m: m.stack.append(_class_of(m.line(), m.line())),
        b"\x93": _Machine.name,
        b"R": _Machine.call,
        b"\x81": _Machine.call,
        b"\x92": lambda m: m.call(keywords=True),
        b"b": _Machine.build,
    }.items()
}
