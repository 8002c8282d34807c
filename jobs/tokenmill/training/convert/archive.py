"""A tensor in the format of torch.save, written as a stream and read without executing its pickle.

A torch_dist checkpoint stores each part of a tensor as one such archive: a zip file with the members data.pkl, which
describes the tensor, and data/0, its bytes, uncompressed. `importer` writes archives one after the other into a file,
`exporter` reads them. Like torch, the writer puts checksums and sizes behind each member (zip's data descriptors), so
that the bytes of a tensor pass once.
Sources: torch/serialization.py, caffe2/serialize/inline_container.cc, PKWARE's APPNOTE 6.3.
"""

import io
import math
import os
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

from tokenmill.training.checkpoints.metadata import Damage
from tokenmill.training.checkpoints.torch_file import explain_archive_errors
from tokenmill.training.convert.opcodes import write_integer, write_text, write_tuple
from tokenmill.training.convert.safetensors import ELEMENT_BYTES

TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""torch's name of a dtype, by the name in safetensors."""

_STORAGES = {"F32": "FloatStorage", "BF16": "BFloat16Storage", "F16": "HalfStorage"}
_DTYPES = {storage: dtype for dtype, storage in _STORAGES.items()}
_DESCRIPTOR_FLAGS = 0x808  # sizes and checksum follow the data; names are UTF-8
_MAX_PICKLE_BYTES = 1 << 16
_BLOCK_BYTES = 8 << 20
_OPCODES = {
    *("PROTO", "GLOBAL", "MARK", "STOP", "REDUCE", "BINPERSID", "BINUNICODE", "NEWFALSE", "NEWTRUE", "NONE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
}
"""Opcodes of the description of a tensor; none of them hashes a value."""


def encode_tensor(dtype: str, shape: tuple[int, ...], blocks: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the archive of a tensor whose bytes are `blocks`, in C order."""
    yield from _encode_archive(_describe(dtype, shape), blocks, math.prod(shape) * ELEMENT_BYTES[dtype])


def encoded_length(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of the archive of a tensor."""
    members = _list_members(_describe(dtype, shape), (), math.prod(shape) * ELEMENT_BYTES[dtype])
    names = sum(len(name) for name, _, _ in members)
    return sum(length for _, _, length in members) + 2 * names + len(members) * (30 + 24 + 46 + 28) + 56 + 20 + 22


def encode_value(value: object) -> bytes:
    """Return the archive of a value without tensors, of None, numbers, text, lists and dictionaries."""
    return b"".join(bytes(part) for part in _encode_archive(pickle.dumps(value, 2), None, 0))


def _encode_archive(description: bytes, blocks: Iterable[memoryview] | None, size: int) -> Iterator[bytes | memoryview]:
    members: list[tuple[bytes, int, int, int]] = []
    position = 0
    for name, content, length in _list_members(description, blocks, size):
        start = position
        header = (
            struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 45, _DESCRIPTOR_FLAGS, 0, 0, 0, 0, 0, 0, len(name), 0) + name
        )
        yield header
        checksum = written = 0
        for block in content:
            checksum, written = zlib.crc32(block, checksum), written + len(block)
            yield block
        if written != length:
            raise ValueError(f"{written} of {length} bytes of a tensor")
        descriptor = b"PK\x07\x08" + struct.pack("<IQQ", checksum, length, length)
        yield descriptor
        position += len(header) + length + len(descriptor)
        members.append((name, checksum, length, start))
    directory = b"".join(_directory_entry(*member) for member in members)
    yield directory
    yield _end_of_directory(len(members), len(directory), position)


def _list_members(
    description: bytes, blocks: Iterable[memoryview] | None, size: int
) -> list[tuple[bytes, Iterable[bytes | memoryview], int]]:
    """Return name, content and length of each member; without `blocks` there is no storage."""
    return [
        (b"archive/data.pkl", [description], len(description)),
        (b"archive/byteorder", [b"little"], 6),
        *([(b"archive/data/0", blocks, size)] if blocks is not None else []),
        (b"archive/version", [b"3\n"], 2),
    ]


def _directory_entry(name: bytes, checksum: int, length: int, start: int) -> bytes:
    extra = struct.pack("<HHQQQ", 1, 24, length, length, start)
    fixed = ("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 45, 45, _DESCRIPTOR_FLAGS, 0, 0, 0, checksum)
    limit = 0xFFFFFFFF
    return struct.pack(*fixed, limit, limit, len(name), len(extra), 0, 0, 0, 0, limit) + name + extra


def _end_of_directory(count: int, size: int, start: int) -> bytes:
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
    return (
        end64 + locator + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, size & 0xFFFFFFFF, 0xFFFFFFFF, 0)
    )


def _describe(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the opcodes for a contiguous tensor: torch._utils._rebuild_tensor_v2 with the storage 0."""
    count = math.prod(shape)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    storage = (
        write_text("storage")
        + b"ctorch\n"
        + _STORAGES[dtype].encode()
        + b"\n"
        + write_text("0")
        + write_text("cpu")
        + write_integer(count)
    )
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(("
        + storage
        + b"tQ"
        + write_integer(0)
        + write_tuple(shape)
        + write_tuple(strides)
        + b"\x89ccollections\nOrderedDict\n)RtR."
    )


class StoredArray(NamedTuple):
    """A contiguous tensor in an archive; `start` is the position of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int
    checksum: int
    """CRC-32 of the whole storage."""


def locate_tensor(file: IO[bytes], offset: int, length: int) -> StoredArray:
    """Return the tensor of the archive in a part of a file, without reading its bytes.

    Raises:
        Damage: the part is not an archive of one contiguous tensor of a supported dtype.
    """
    window = _Window(file, offset, length)
    with explain_archive_errors(), zipfile.ZipFile(window) as archive:
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        description = members.get("data.pkl")
        if description is None or description.file_size > _MAX_PICKLE_BYTES:
            raise Damage("it has no description of a tensor")
        dtype, key, shape, strides, first = _read_description(archive.read(description))
        member = members.get(f"data/{key}")
        if member is None or member.compress_type != zipfile.ZIP_STORED:
            raise Damage("it has no uncompressed bytes of a tensor")
        window.seek(member.header_offset)
        names, extra = struct.unpack("<26xHH", window.read(30))
    size = math.prod(shape) * ELEMENT_BYTES[dtype]
    contiguous = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if first or size != member.file_size or (size and not _same_order(shape, strides, contiguous)):
        raise Damage(f"its tensor of shape {list(shape)} is not contiguous, or not all of its storage")
    start = offset + member.header_offset + 30 + names + extra
    if start + size > offset + length:
        raise Damage("it is truncated")
    return StoredArray(dtype, shape, start, size, member.CRC)


def read_bytes(file: IO[bytes], start: int, buffer: memoryview) -> None:
    """Fill a buffer with the bytes of a file from a position on.

    Raises:
        Damage: the file ends before.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(file.fileno(), [buffer[done:]], start + done)
        if not count:
            raise Damage("it is truncated")
        done += count


def compute_checksum(file: IO[bytes], stored: StoredArray) -> int:
    """Return the CRC-32 of the bytes of a tensor, read in blocks.

    Raises:
        Damage: the file ends before the tensor.
    """
    checksum, buffer = 0, memoryview(bytearray(min(stored.bytes, _BLOCK_BYTES)))
    for done in range(0, stored.bytes, _BLOCK_BYTES):
        block = buffer[: stored.bytes - done]
        read_bytes(file, stored.start + done, block)
        checksum = zlib.crc32(block, checksum)
    return checksum


def _same_order(shape: tuple[int, ...], strides: tuple[int, ...], contiguous: tuple[int, ...]) -> bool:
    """Return whether strides are those of C order; the stride of an axis of one element has no meaning."""
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, contiguous, strict=True))


class _Storage(NamedTuple):
    dtype: str
    key: str


class _DescriptionReader(pickle.Unpickler):
    """Reads data.pkl: it names two functions and a storage class, and none of them is called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return _nothing
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise Damage(f"its description names {module[:100]}.{name[:100]}, which a tensor does not need: do not load it")

    def persistent_load(self, identifier: Any) -> _Storage:
        kind, dtype, key = identifier[:3]
        if kind != "storage" or dtype not in ELEMENT_BYTES or not (isinstance(key, str) and key.isdigit()):
            raise Damage("its description names another storage than that of a tensor")
        return _Storage(dtype, key)


def _rebuild(storage: Any, first: Any, shape: Any, strides: Any, *_: Any) -> tuple[Any, ...]:
    return storage, first, shape, strides


def _nothing(*_: Any) -> None:
    """Stand for an empty OrderedDict."""


def _read_description(data: bytes) -> tuple[str, str, tuple[int, ...], tuple[int, ...], int]:
    for opcode, _, _ in pickletools.genops(data):
        if opcode.name not in _OPCODES:
            raise Damage(f"its description has the opcode {opcode.name}, which a tensor does not need: do not load it")
    value = _DescriptionReader(io.BytesIO(data)).load()
    if not isinstance(value, tuple) or len(value) != 4 or not isinstance(value[0], _Storage):
        raise Damage("it does not contain one tensor")
    storage, first, shape, strides = value
    numbers = (first, *shape, *strides)
    if len(shape) != len(strides) or any(type(number) is not int or number < 0 for number in numbers):
        raise Damage("its tensor has an invalid shape")
    return storage.dtype, storage.key, tuple(shape), tuple(strides), first


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise Damage("its directory starts before it")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        size = left if size < 0 else min(size, left)
        if size > 1 << 26:
            raise Damage("its directory is too large")
        self._file.seek(self._offset + self._position)
        data = self._file.read(size)
        self._position += len(data)
        return data
