"""The store of large orders: they are computed once on a machine, and then mapped.

    DIRECTORY/orders/<key>/sequences, ends, samples    the arrays of a PairOrder
    DIRECTORY/orders/<key>/order.json                  their lengths and dtypes, and hashes of some blocks

The key hashes the content of the `.idx` and everything else that determines the order, so an entry never becomes
invalid. The directory is that of `core.files.private_cache`, or the caller's. Without a usable directory an order is
computed in memory. Several processes of a machine that need one order wait for the first one to compute it.
"""

import contextlib
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.files.lease import heartbeat, remove_abandoned
from tokenmill.core.files.private_cache import open_cache, open_private
from tokenmill.core.files.tree import Tree, UnexpectedEntry
from tokenmill.core.machine import process_name
from tokenmill.core.typed_json import decode_json
from tokenmill.datasets.sampled_hash import hash_samples
from tokenmill.samples.pair_order import Allocate, PairOrder, allocate_memory

Array = npt.NDArray[Any]

MIN_SEQUENCES = 50_000
"""Sequences of an order that is stored; a smaller one is computed in a few milliseconds."""

MAX_BYTES = 64 << 30
"""Bytes of all stored orders; the least recently used ones are removed."""

NEW_PREFIX = ".new-"
"""Prefix of the directory in which a process builds a new entry."""

MAX_DESCRIPTION_BYTES = 64 << 10
"""Bytes of an order.json that are read; a description has less than 1 kB."""

HASHED_BLOCKS = 16
"""Blocks that show whether a stored array is complete."""


class _StoredArray(msgspec.Struct, frozen=True):
    length: int
    dtype: Annotated[str, msgspec.Meta(pattern="^<[iu][48]$")]
    hash: str


class _StoredOrder(msgspec.Struct, frozen=True):
    sequences: _StoredArray
    ends: _StoredArray
    samples: _StoredArray
    format: int = 1


def load_or_build(
    key: str, sequences: int, directory: Path | None, build: Callable[[Allocate], PairOrder]
) -> PairOrder:
    """Return the order with a key from the store, or build it, and store it if it has many sequences."""
    if sequences < MIN_SEQUENCES:
        return build(allocate_memory)
    root = _open_root(directory)
    if root is None:
        return build(allocate_memory)
    entry = root / key
    try:
        if (order := _load(entry)) is None:
            with lock(root / f"{key}.lock"):
                order = _load(entry) or _store(entry, build)
        return order
    except (OSError, UnexpectedEntry):  # a full disk, a read-only directory, or a lock that is not a file
        return build(allocate_memory)


def _open_root(directory: Path | None) -> Path | None:
    try:
        tree = open_private(directory, create=True) if directory else open_cache(create=True)
        if tree is None:
            return None
        root = Path(tree.root) / "orders"
        root.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return root


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; where the file system has no locks, several processes may do the same work."""
    with Tree(path.parent).open(path, "ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _load(entry: Path) -> PairOrder | None:
    """Map an entry; return None if it is missing or damaged."""
    tree = Tree(entry.parent)
    try:
        with tree.open(entry / "order.json") as file:
            stored = decode_json(file.read(MAX_DESCRIPTION_BYTES), _StoredOrder)
        arrays = [_map(tree, entry / name, getattr(stored, name)) for name in PairOrder._fields]
    except (OSError, ValueError, TypeError, UnexpectedEntry):
        return None
    complete = [array for array in arrays if array is not None]
    if len(complete) < len(arrays):
        return None
    with contextlib.suppress(OSError):
        os.utime(entry)
    return PairOrder(*complete)


def _map(tree: Tree, path: Path, stored: _StoredArray) -> Array | None:
    with tree.open(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != stored.length * np.dtype(stored.dtype).itemsize or not stored.length:
            return None
        # np.memmap takes 0.2 ms longer, for its path
        array = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), stored.dtype)
    return array if hash_samples(array, HASHED_BLOCKS) == stored.hash else None


def _store(entry: Path, build: Callable[[Allocate], PairOrder]) -> PairOrder:
    """Build an order in the files of a new entry."""
    root = entry.parent
    remove_abandoned(Tree(root), "")
    temporary = root / f"{NEW_PREFIX}{process_name()}.tmp"
    temporary.mkdir(mode=0o700)
    try:

        def allocate(name: str, length: int, dtype: npt.DTypeLike) -> Array:
            size = length * np.dtype(dtype).itemsize
            with (temporary / name).open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, max(size, 1))  # a full disk would end the process with SIGBUS
                return np.memmap(file, dtype, mode="r+", shape=(length,)).view(np.ndarray)

        with heartbeat(lambda: os.utime(temporary)):  # other machines see that this process is alive
            order = build(allocate)
        sequences, ends, samples = (
            _StoredArray(len(array), array.dtype.str, hash_samples(array, HASHED_BLOCKS)) for array in order
        )
        stored = _StoredOrder(sequences, ends, samples)
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # the hashes would not notice every block that a power failure lost
        (temporary / "order.json").write_bytes(msgspec.json.encode(stored))
        shutil.rmtree(entry, ignore_errors=True)  # a damaged entry
        temporary.rename(entry)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _prune(root, entry.name)
    return order


def _prune(root: Path, kept: str) -> None:
    """Remove the least recently used entries above MAX_BYTES."""
    entries = []
    for path in root.iterdir():
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.name.startswith(NEW_PREFIX):
                size = sum(file.stat().st_size for file in path.iterdir())
                entries.append((path.name == kept, path.stat().st_mtime, size, path))
    total = 0
    for _, _, size, path in sorted(entries, reverse=True):
        total += size
        if total > MAX_BYTES:
            shutil.rmtree(path, ignore_errors=True)
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
