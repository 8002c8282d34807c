"""Plans of shards: how many shards a dataset has, which files or rows each shard reads, and which shards form a split.

The stage `transform` and the Python interface plan with these functions. Each result is the one that nemotron's data
preparation computes for the same files (document 001), so that a dataset has the same shards from both tools.
"""

import hashlib
import heapq
import random
from collections.abc import Sequence
from typing import NamedTuple

from tokenmill.engine.options import parse_byte_size


class FileSlice(NamedTuple):
    """Rows of a file: those whose number, from 0 and without blank lines, modulo `modulus` is `remainder`."""

    path: str
    remainder: int = 0
    modulus: int = 1


class ShardFiles(NamedTuple):
    """The files that a shard reads, sorted by path, and their size in bytes; a part of a file counts in proportion."""

    slices: list[FileSlice]
    bytes: int


def count_shards(total: int, shard_size: str | float) -> int:
    """Return the number of shards of at most `shard_size` for `total` bytes: at least 1.

    Raises:
        ValueError: the shard size is 0, or not a size.
    """
    size = parse_byte_size(shard_size)
    if size <= 0:
        raise ValueError(f"a shard size of {shard_size!r} is 0 bytes, and a shard needs at least 1; raise it")
    return max(1, -(-total // size))


def assign_files(files: Sequence[tuple[str, int]], shards: int) -> list[ShardFiles]:
    """Assign (path, bytes) of files to shards of about equal size; a shard may get no file.

    The largest file comes first, and each file goes to the smallest shard so far. If there are fewer files than shards,
    each file is cut by its rows into shards in proportion to its size. Files whose sizes are all 0 are not cut.

    Raises:
        ValueError: the number of shards is not positive.
    """
    if shards < 1:
        raise ValueError(f"{shards} shards are too few; request at least 1")
    largest_first = sorted(files, key=lambda file: (-file[1], file[0]))
    if len(files) < shards and any(size for _, size in files):
        return _cut_files(largest_first, shards)
    members: list[list[FileSlice]] = [[] for _ in range(shards)]
    sizes = [0] * shards
    heap = [(0, shard) for shard in range(shards)]
    # Without any size, this weight makes the shards equal in their number of files.
    weightless = not any(size for _, size in files)
    for path, size in largest_first:
        load, shard = heap[0]
        heapq.heapreplace(heap, (load + (1 if weightless else size), shard))
        members[shard].append(FileSlice(path))
        sizes[shard] += size
    return [ShardFiles(sorted(slices), size) for slices, size in zip(members, sizes, strict=True)]


def _cut_files(files: Sequence[tuple[str, int]], shards: int) -> list[ShardFiles]:
    """Cut files into more shards than files: each gets its proportion, rounded by the largest remainder, at least 1."""
    total = sum(size for _, size in files)
    exact = [size / total * shards for _, size in files]
    counts = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(files)), key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: max(0, shards - sum(counts))]:
        counts[index] += 1
    while sum(counts) > shards:  # tiny files have taken more than their proportion
        counts[max(range(len(files)), key=lambda index: (counts[index], -index))] -= 1
    return [
        ShardFiles([FileSlice(path, remainder, count)], size // count)
        for (path, size), count in zip(files, counts, strict=True)
        for remainder in range(count)
    ]


def sample_shards(shards: int, dataset: str, sample: str | int, seed: int = 42) -> list[int]:
    """Return the indices of the shards in a sample, such as `10%` or 5 shards, in ascending order.

    A percentage selects at least one shard. The choice depends on the seed and the name of the dataset only.

    Raises:
        ValueError: the sample is not a number or a percentage.
    """
    text = str(sample).strip()
    try:
        count = max(1, int(shards * float(text[:-1]) / 100)) if text.endswith("%") else int(text)
    except ValueError as error:
        raise ValueError(f"{sample!r} is not a sample; write a number of shards, or a share such as 10%") from error
    digest = hashlib.sha256(f"{seed}:{dataset}".encode()).hexdigest()
    dice = random.Random(int(digest[:8], 16))
    return sorted(dice.sample(range(shards), max(0, min(count, shards))))
