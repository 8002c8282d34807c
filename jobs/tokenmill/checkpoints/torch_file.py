"""Checks whether a file that torch.save wrote is complete, without torch, and without running or building its content.

`torch_dist` calls it for common.pt. Since torch 1.6 such a file is a zip archive of uncompressed members
(caffe2/serialize/inline_container.cc), each with its size and CRC-32. The format before it
(`_use_new_zipfile_serialization=False`) is refused: no Megatron-LM since 0.14 writes it.
"""

import contextlib
import io
import os
import zipfile
from collections.abc import Iterator
from typing import IO

from tokenmill.checkpoints.metadata import Damage
from tokenmill.core.printing import MAX_NAME, printable

MAX_DIRECTORY_BYTES = 64 << 20
"""Maximum bytes of a zip archive's directory: more than half a million storages."""

CHUNK_BYTES = 1 << 20

_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of a file in the format before torch 1.6: the pickle of its magic number."""


def check_torch_file(file: IO[bytes], name: str) -> None:
    """Read a file that torch.save wrote, from its first to its last byte.

    Raises:
        Damage: the file is truncated, its bytes are not those that were written, or it has the format before torch 1.6.
    """
    if file.read(len(_LEGACY)) == _LEGACY:
        raise Damage(f"{name} has the format of torch.save before torch 1.6: load it with torch, and save it again")
    try:
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
