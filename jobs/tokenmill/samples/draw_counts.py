"""Store the number of draws of each group of a blend at regular places, for `draws`.

DIRECTORY/draws/<key>    records, one for each place: int64, shape (groups,), and the xxh3-128 of its number and these

A record has its place in the file, and its content is determined by the key. So a process reads only the record from
which it continues, and processes that write the same record do not harm each other.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.core.files.private_cache import open_cache, open_private
from tokenmill.core.files.tree import Tree
from tokenmill.errors import RequestError
from tokenmill.samples.order_store import lock

Array = npt.NDArray[Any]

HASH_BYTES = 16


class CountStore:
    """The counts of one blend in a directory; without a usable directory nothing is stored."""

    def __init__(self, key: str, groups: int, directory: Path | None) -> None:
        """Name the blend by the hash of everything that determines its draws."""
        self.directory = directory
        self._name = f"draws/{key}"
        self._record_bytes = 8 * groups + HASH_BYTES

    def load(self, number: int) -> tuple[int, Array] | None:
        """Return the last intact record up to a number, and its number; None if there is none."""
        with contextlib.suppress(OSError, RequestError):
            tree = self._open()
            if tree is None:
                return None
            with tree.open(self._name) as file:
                stored = file.seek(0, 2) // self._record_bytes
                for place in range(min(number, stored - 1), -1, -1):
                    file.seek(place * self._record_bytes)
                    record = file.read(self._record_bytes)
                    if record[-HASH_BYTES:] == _digest(place, record[:-HASH_BYTES]):
                        return place, np.frombuffer(record[:-HASH_BYTES], "<i8").astype(np.int64)
        return None

    def save(self, number: int, counts: Array) -> None:
        """Store a record."""
        content = counts.astype("<i8").tobytes()
        with contextlib.suppress(OSError, RequestError):
            tree = self._open(create=True)
            if tree is None:
                return
            tree.open(self._name, "ab").close()
            with tree.open(self._name, "r+b") as file:
                file.seek(number * self._record_bytes)
                file.write(content + _digest(number, content))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Let other processes wait, which then read what this one stores."""
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError, RequestError):
                tree = self._open(create=True)
                if tree is not None:
                    held.enter_context(lock(Path(tree.root) / f"{self._name}.lock"))
            yield

    def _open(self, *, create: bool = False) -> Tree | None:
        tree = open_private(self.directory, create=create) if self.directory else open_cache(create=create)
        if tree is not None and create:
            tree.make_directory("draws")
        return tree


def _digest(number: int, content: bytes) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest(number.to_bytes(8, "little") + content)
