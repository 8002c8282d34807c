"""An array in an object of a bucket, of which only the requested ranges are read."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.core.buckets.explain import explain_requests
from tokenmill.core.buckets.fetcher import RemoteObject
from tokenmill.core.buckets.mirror import find_root, show_addresses
from tokenmill.core.buckets.range_cache import find_cache_size
from tokenmill.core.buckets.ranges import read_ahead, read_ranges
from tokenmill.errors import TransientError

Array = npt.NDArray[Any]


class RemoteArray:
    """A version of an object as a one-dimensional array; also processes after a fork may read it.

    It has those attributes of an array that readers of pairs use, so that they read a mapped file and an object with
    the same code. Slices are copies.
    """

    def __init__(self, path: Path, name: RemoteObject, dtype: npt.DTypeLike) -> None:
        """Describe an object, without a request; `path` stands for it."""
        self._path, self._name = path, name
        self.dtype = np.dtype(dtype)
        self.itemsize = self.dtype.itemsize
        self.size, self.bytes = name.size // self.itemsize, name.size

    @property
    def cache_bytes(self) -> int:
        """The size of the cache of the process that reads this object (RequestError)."""
        return find_cache_size(find_root(self._path))

    def view(self, kind: object) -> "RemoteArray":
        """Return the same object with another dtype; any other class of arrays is this one."""
        return self if kind is np.ndarray else RemoteArray(self._path, self._name, kind)  # type: ignore[arg-type]

    def __getitem__(self, places: slice | Array) -> Array:
        """Return a range, or the values at some places."""
        if not isinstance(places, slice):
            return self.gather(places, places + 1)
        start, stop, _ = places.indices(self.size)
        return self.gather(np.array([start]), np.array([max(start, stop)]))

    @property
    def data(self) -> memoryview:
        """All bytes."""
        return self[:].data

    def gather(self, starts: Array, stops: Array) -> Array:
        """Return ranges, one after the other.

        Raises:
            TransientError: the store does not answer, or the object was replaced.
            BucketUnavailable: the store refuses the credentials.
        """
        kept = stops > starts
        try:
            with explain_requests(self._path):
                data = read_ranges(find_root(self._path), self._name, *self._scale(starts[kept], stops[kept]))
        except FileNotFoundError as error:
            name = show_addresses(str(self._path))
            raise TransientError(f"{name} was deleted while it was read; run the same command again") from error
        return data.view(self.dtype)

    def read_ahead(self, starts: Array, stops: Array) -> None:
        """Begin to fetch ranges that are read soon, in their order."""
        with explain_requests(self._path):
            read_ahead(find_root(self._path), self._name, *self._scale(starts, stops))

    def _scale(self, starts: Array, stops: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return starts.astype(np.int64) * self.itemsize, stops.astype(np.int64) * self.itemsize
