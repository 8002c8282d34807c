"""Checks whether a file that torch.save wrote is complete, without torch, and without running or building its content.

`torch_dist` calls it for common.pt. Since torch 1.6 such a file is a zip archive of uncompressed members
(caffe2/serialize/inline_container.cc), each with its size and CRC-32. Earlier, and with
`_use_new_zipfile_serialization=False`, it is five consecutive pickles: a magic number, a version, the sizes of C's
types, the object, the keys of its storages. For each storage, the number of its elements as an int64 and the elements
follow (torch/serialization.py, `_legacy_save`).
"""

import contextlib
import io
import os
import pickletools
import zipfile
from collections.abc import Iterator
from typing import IO, Any

from tokenmill.checkpoints.metadata import Damage
from tokenmill.core.files.pickles import MAX_OPCODES
from tokenmill.core.printing import MAX_NAME, printable

MAX_DIRECTORY_BYTES = 64 << 20
"""Maximum bytes of a zip archive's directory: more than half a million storages."""

CHUNK_BYTES = 1 << 20

_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_ELEMENT_BYTES = {"Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4}
_ELEMENT_BYTES |= {"Long": 8, "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16}
"""Bytes of an element, by the name of the storage's class without its suffix Storage."""


def check_torch_file(file: IO[bytes], name: str) -> None:
    """Read a file that torch.save wrote, from its first to its last byte.

    Raises:
        Damage: the file is truncated, or its bytes are not those that were written.
    """
    try:
        if file.read(len(_MAGIC)) == _MAGIC:
            _check_legacy(file)
        else:
            _check_archive(file)
    except Damage as problem:
        raise Damage(f"{name} is truncated or damaged: {printable(str(problem), MAX_NAME)}") from None


def _check_archive(file: IO[bytes]) -> None:
    size = os.fstat(file.fileno()).st_size
    with explain_archive_errors(), zipfile.ZipFile(BoundedFile(file, 0, size)) as archive:
        members = archive.infolist()
        if not any(member.filename.endswith("/data.pkl") for member in members):
            raise Damage("it has no data.pkl")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise Damage("it has compressed members, which torch does not write")
        if sum(member.file_size for member in members) > size:
            raise Damage("its members are larger than the file")
        for member in members:
            with archive.open(member) as part:
                while part.read(CHUNK_BYTES):
                    pass


@contextlib.contextmanager
def explain_archive_errors() -> Iterator[None]:
    """Convert the errors of zipfile for damaged input into Damage; errors of the file system stay as they are."""
    try:
        yield
    except Damage:
        raise
    except OSError as problem:
        if problem.errno:
            raise
        raise Damage(str(problem)) from None
    except Exception as problem:  # zipfile raises many kinds of exceptions for damaged input
        if isinstance(problem.__context__, OSError) and problem.__context__.errno:  # and also for an error of a read
            raise problem.__context__ from None
        raise Damage(str(problem) or "it is not an archive of torch.save") from None


class BoundedFile(io.RawIOBase):
    """A part of a file as a file, which refuses to read more than an archive's directory may have."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise Damage("its directory starts before the file")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        size = left if size < 0 else min(size, left)
        if size > MAX_DIRECTORY_BYTES:
            raise Damage("its directory is too large")
        self._file.seek(self._offset + self._position)
        data = self._file.read(size)
        self._position += len(data)
        return data


def _check_legacy(file: IO[bytes]) -> None:
    file.seek(0)
    try:
        for _ in range(3):
            for _ in _read_opcodes(file):
                pass
        storages = dict(_read_storages(file))
        keys = [argument for name, argument in _read_opcodes(file) if name.endswith("UNICODE")]
    except Damage:
        raise
    except Exception:
        raise Damage("a pickle in it is incomplete") from None
    end = os.fstat(file.fileno()).st_size
    for key in keys:
        count = file.read(8)
        element_bytes = storages.get(str(key))
        if element_bytes is None:  # a class that this module does not support: the rest is not checked
            return
        if len(count) < 8 or file.seek(int.from_bytes(count, "little") * element_bytes, os.SEEK_CUR) > end:
            raise Damage(f"it ends within the storage {ascii(key)[:100]}")


def _read_opcodes(file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """Yield the names and arguments of a pickle's opcodes; afterwards the file's position is behind the pickle."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        if count > MAX_OPCODES:
            raise Damage(f"it has more than {MAX_OPCODES:,} opcodes")
        yield opcode.name, argument


def _read_storages(file: IO[bytes]) -> Iterator[tuple[str, int]]:
    """Yield the key and the element size in bytes of the storage in each persistent id of the object.

    A persistent id is a tuple: "storage", its class, its key, its location, its number of elements.
    """
    memo: dict[int, Any] = {}
    pushed: list[Any] = []
    """Values that were pushed since the last mark: the items of a tuple."""
    for name, argument in _read_opcodes(file):
        if name == "MARK":
            pushed = []
        elif name in ("BINUNICODE", "GLOBAL"):
            pushed.append(argument)
        elif name in ("BINGET", "LONG_BINGET"):
            pushed.append(memo.get(argument))
        elif name in ("BINPUT", "LONG_BINPUT") and pushed:
            memo[argument] = pushed[-1]
        elif name == "BINPERSID" and pushed[:1] == ["storage"]:
            kind = str(pushed[1]).rpartition(" ")[2].removesuffix("Storage")
            if kind in _ELEMENT_BYTES:
                yield str(pushed[2]), _ELEMENT_BYTES[kind]
