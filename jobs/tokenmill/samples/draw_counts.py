"""Store the number of draws of each dataset of a blend before each block, for `draws`.

DIRECTORY/draws/<key>    int64, shape (blocks, datasets), and the xxh3-128 of these bytes
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.core.files.lease import remove_abandoned
from tokenmill.core.files.private_cache import open_cache, open_private
from tokenmill.errors import RequestError

Array = npt.NDArray[Any]

HASH_BYTES = 16

MAX_BYTES = 1 << 30
"""Bytes of the largest file that is read."""


class CountStore:
    """The counts of one blend in a directory; without a usable directory nothing is stored."""

    def __init__(self, key: str, directory: Path | None) -> None:
        """Name the blend by the hash of everything that determines its draws."""
        self.directory = directory
        self._name = f"draws/{key}"

    def load(self, datasets: int) -> list[Array]:
        """Return the counts before each stored block; none if there are none, or if they are damaged."""
        import xxhash

        try:
            tree = open_private(self.directory) if self.directory else open_cache()
            if tree is None or not 0 < (tree.size(self._name) or 0) <= MAX_BYTES:
                return []
            data = tree.read(self._name) or b""
        except (OSError, RequestError):
            return []
        content, digest = data[:-HASH_BYTES], data[-HASH_BYTES:]
        if xxhash.xxh3_128_digest(content) != digest or len(content) % (8 * datasets):
            return []
        return list(np.frombuffer(content, "<i8").reshape(-1, datasets))

    def save(self, counts: list[Array]) -> None:
        """Store the counts before each block."""
        import xxhash

        content = np.array(counts, "<i8").tobytes()
        try:
            tree = open_private(self.directory, create=True) if self.directory else open_cache(create=True)
            if tree is not None and (tree.size(self._name) or 0) < len(content):
                remove_abandoned(tree, "draws")
                tree.write_atomic(self._name, content + xxhash.xxh3_128_digest(content))
        except (OSError, RequestError):
            return
