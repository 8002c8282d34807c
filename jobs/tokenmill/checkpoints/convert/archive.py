"""A tensor in the format of torch.save, written as a stream and read without executing its pickle.

A torch_dist checkpoint stores each part of a tensor as one such archive: a zip file with the members data.pkl, which
describes the tensor, and data/0, its bytes, uncompressed. `importer` writes archives one after the other into a file,
`exporter` reads them. Like torch, the writer puts checksums and sizes behind each member (zip's data descriptors), so
that the bytes of a tensor pass once.
Sources: torch/serialization.py, caffe2/serialize/inline_container.cc, PKWARE's APPNOTE 6.3.
"""

import math
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

from tokenmill.checkpoints.convert.opcodes import write_integer, write_text, write_tuple
from tokenmill.checkpoints.convert.safetensors import DTYPES, MAX_DIMENSIONS
from tokenmill.checkpoints.metadata import Damage
from tokenmill.checkpoints.torch_file import BoundedFile, explain_archive_errors
from tokenmill.core.files.pickles import DamagedPickle, RefusedPickle, load_pickle

_DESCRIPTOR_FLAGS = 0x808  # sizes and checksum follow the data; names are UTF-8
_MAX_PICKLE_BYTES = 1 << 16
_BLOCK_BYTES = 8 << 20


def encode_tensor(dtype: str, shape: tuple[int, ...], blocks: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the archive of a tensor whose bytes are `blocks`, in C order."""
    yield from _encode_archive(_describe(dtype, shape), blocks, math.prod(shape) * DTYPES[dtype].bytes)


def encoded_length(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of the archive of a tensor."""
    members = _list_members(_describe(dtype, shape), (), math.prod(shape) * DTYPES[dtype].bytes)
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
    storage = (
        write_text("storage")
        + b"ctorch\n"
        + DTYPES[dtype].storage.encode()
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
        + write_tuple(_list_strides(shape))
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
    window = BoundedFile(file, offset, length)
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
    size = math.prod(shape) * DTYPES[dtype].bytes
    if first or size != member.file_size or (size and not _has_c_order(shape, strides)):
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


def _list_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of C order, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _has_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether strides are those of C order; the stride of an axis of one element has no meaning."""
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, _list_strides(shape), strict=True))


class _Storage(NamedTuple):
    dtype: str
    key: str


_NAMES: dict[str, str | Callable[[tuple[Any, ...]], Any]] = {
    "torch._utils._rebuild_tensor_v2": lambda arguments: arguments,
    "collections.OrderedDict": lambda _: {},
    **{f"torch.{dtype.storage}": name for name, dtype in DTYPES.items()},
}
"""What stands for the names in the description of a tensor; a storage's class is the name of its dtype."""


def _find_storage(identifier: Any) -> _Storage:
    """Return the storage of a persistent id: "storage", its class, its key, its location, its number of elements."""
    kind, dtype, key = identifier[:3]
    is_text = isinstance(dtype, str) and isinstance(key, str)  # a tuple within tuples must not be hashed
    if kind != "storage" or not is_text or dtype not in DTYPES or not key.isdigit():
        raise Damage("its description names another storage than that of a tensor")
    return _Storage(dtype, key)


def _read_description(data: bytes) -> tuple[str, str, tuple[int, ...], tuple[int, ...], int]:
    try:
        value = load_pickle(data, _NAMES.get, find_storage=_find_storage)
    except DamagedPickle as problem:
        raise Damage(f"its description is damaged: {problem}") from None
    except RefusedPickle as problem:
        raise Damage(f"its description {problem}, which a tensor does not need: do not load it") from None
    if not isinstance(value, tuple) or len(value) < 4 or not isinstance(value[0], _Storage):
        raise Damage("it does not contain one tensor")
    storage, first, shape, strides = value[:4]
    numbers = (first, *shape, *strides)
    is_long = len(shape) > MAX_DIMENSIONS
    if is_long or len(shape) != len(strides) or any(type(number) is not int or number < 0 for number in numbers):
        raise Damage("its tensor has an invalid shape")
    return storage.dtype, storage.key, tuple(shape), tuple(strides), first
