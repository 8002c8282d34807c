"""Ranges of objects on the local disk, in a file of a given size whose oldest ranges are overwritten."""

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

from tokenmill.errors import RequestError

SIZE_VARIABLE = "TOKENMILL_BUCKET_CACHE_BYTES"
"""Environment variable with the size of the cache."""
DEFAULT_BYTES = 4 << 30
"""Size of the cache without this variable, at most half of the free space."""


def find_cache_size(directory: Path | None = None) -> int:
    """Return the size of the cache in bytes.

    Raises:
        RequestError: the environment variable is not a number of bytes.
    """
    text = os.environ.get(SIZE_VARIABLE)
    if not text:
        return min(DEFAULT_BYTES, shutil.disk_usage(directory).free // 2) if directory else DEFAULT_BYTES
    if not text.isdecimal() or not int(text):
        raise RequestError(f"invalid {SIZE_VARIABLE} {text!r}: it must be a number of bytes; set it to 10000000000")
    return int(text)


class RangeCache:
    """Bytes by a key, in a file without a name, which vanishes with the process; threads need a lock."""

    def __init__(self, directory: Path, size: int) -> None:
        """Make the file of `size` bytes."""
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - open as long as this object
        self.size = size
        self._next = 0
        self._entries: deque[tuple[Hashable, int, int]] = deque()
        self._places: dict[Hashable, int] = {}

    def get(self, key: Hashable, start: int, stop: int) -> bytes | None:
        """Return a part of the bytes of a key; None if they are not there, or not there any more."""
        place = self._places.get(key)
        if place is None:
            return None
        data = os.pread(self._file.fileno(), stop - start, place + start)
        return data if len(data) == stop - start else None

    def __contains__(self, key: Hashable) -> bool:
        """Return whether the bytes of a key are there."""
        return key in self._places

    def put(self, key: Hashable, data: bytes) -> None:
        """Keep bytes until newer ones need their place; a full disk keeps none."""
        if key in self._places or not data or len(data) > self.size:
            return
        if self._next + len(data) > self.size:
            self._drop(self._next, self.size)
            self._next = 0
        start = self._next
        self._drop(start, start + len(data))
        with suppress(OSError):
            if os.pwrite(self._file.fileno(), data, start) == len(data):
                self._next = start + len(data)
                self._entries.append((key, start, len(data)))
                self._places[key] = start

    def _drop(self, start: int, stop: int) -> None:
        """Forget the oldest entries from `start` to `stop`, which are the next ones in the file."""
        while self._entries:
            key, begin, length = self._entries[0]
            if begin >= stop or begin + length <= start:
                return
            self._entries.popleft()
            del self._places[key]
