"""Is a file that torch.save wrote whole? Answered without torch, and without running or building anything of it.

Since torch 1.6 it is a zip archive of uncompressed members (caffe2/serialize/inline_container.cc), each with its size
and CRC-32. Before, and with `_use_new_zipfile_serialization=False`, it is five pickles one after another (a magic
number, a version, sizes of C's types, the object, the keys of its storages), then, for each storage, the number of its
elements as an int64 and the elements (torch/serialization.py, `_legacy_save`).
"""

import io
import os
import pickletools
import zipfile
from collections.abc import Iterator
from typing import IO, Any

from tokenmill.training.checkpoints.metadata import OPERATIONS, Damage, shown

DIRECTORY = 64 << 20
"""Bytes of a zip archive's directory at most: more than half a million storages."""

CHUNK = 1 << 20

_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_ELEMENTS = {"Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4}
_ELEMENTS |= {"Long": 8, "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16}
"""Bytes of an element of a storage's class, whose name ends in Storage."""


def check_whole(file: IO[bytes], name: str) -> None:
    """Read a file that torch.save wrote, from its first byte to its last.

    Raises:
        Damage: it is cut off, or its bytes are not those that were written.
    """
    try:
        if file.read(len(_MAGIC)) == _MAGIC:
            _check_legacy(file)
        else:
            _check_archive(file)
    except Damage as problem:
        raise Damage(f"{name} is cut off or damaged: {shown(str(problem))}") from None


def _check_archive(file: IO[bytes]) -> None:
    size = os.fstat(file.fileno()).st_size
    try:
        with zipfile.ZipFile(_Bounded(file)) as archive:
            members = archive.infolist()
            if not any(member.filename.endswith("/data.pkl") for member in members):
                raise Damage("it has no data.pkl")
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise Damage("it has compressed parts, which torch does not write")
            if sum(member.file_size for member in members) > size:
                raise Damage("its parts are larger than all of it")
            for member in members:
                with archive.open(member) as part:
                    while part.read(CHUNK):
                        pass
    except Damage:
        raise
    except OSError as problem:
        if problem.errno:
            raise
        raise Damage(str(problem)) from None
    except Exception as problem:  # zipfile raises almost anything at damaged input
        raise Damage(str(problem) or "no archive of torch.save") from None


class _Bounded(io.RawIOBase):
    """A file of which no read takes more than an archive's directory may have."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET and offset < 0:
            raise Damage("its directory begins before it")
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        if size > DIRECTORY:
            raise Damage("its directory is too large")
        return self._file.read(DIRECTORY if size < 0 else size)  # all that is left where a comment would be, 64 KiB


def _check_legacy(file: IO[bytes]) -> None:
    file.seek(0)
    try:
        for _ in range(3):
            for _ in _opcodes(file):
                pass
        storages = dict(_storages(file))
        keys = [argument for name, argument in _opcodes(file) if name.endswith("UNICODE")]
    except Damage:
        raise
    except Exception:
        raise Damage("a pickle in it has no end") from None
    end = os.fstat(file.fileno()).st_size
    for key in keys:
        count = file.read(8)
        element = storages.get(str(key))
        if element is None:  # of a class that is not known here
            return
        if len(count) < 8 or file.seek(int.from_bytes(count, "little") * element, os.SEEK_CUR) > end:
            raise Damage(f"it ends in the storage {ascii(key)[:100]}")


def _opcodes(file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """Yield the names and arguments of a pickle's opcodes; the file is behind it then."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        if count > OPERATIONS:
            raise Damage(f"it has more than {OPERATIONS:,} opcodes")
        yield opcode.name, argument


def _storages(file: IO[bytes]) -> Iterator[tuple[str, int]]:
    """Yield a storage's key and the bytes of its elements for each persistent id of the object.

    An id is a tuple: "storage", its class, its key, where it was, how many elements it has.
    """
    memo: dict[int, Any] = {}
    recent: list[Any] = []
    """What was pushed since the last mark, a tuple's items."""
    for name, argument in _opcodes(file):
        if name == "MARK":
            recent = []
        elif name in ("BINUNICODE", "GLOBAL"):
            recent.append(argument)
        elif name in ("BINGET", "LONG_BINGET"):
            recent.append(memo.get(argument))
        elif name in ("BINPUT", "LONG_BINPUT") and recent:
            memo[argument] = recent[-1]
        elif name == "BINPERSID" and recent[:1] == ["storage"]:
            kind = str(recent[1]).rpartition(" ")[2].removesuffix("Storage")
            if kind in _ELEMENTS:
                yield str(recent[2]), _ELEMENTS[kind]
