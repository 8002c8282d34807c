"""Check the mask of a pair: a second pair with the same sequences, whose uint8 values mark the loss tokens.

The check maps both indexes and reads the mask as a stream. It reports every kind of problem once, with the first place.
"""

from bisect import bisect_right
from pathlib import Path

import numpy as np

from tokenmill.datasets.formats.base import REMAKE, Problem
from tokenmill.datasets.formats.indexed.reader import Array, DamagedPair, Index, IndexedReader, open_index

CHUNK = 1 << 20
"""Index entries that are checked at a time."""

BATCH_BYTES = 8 << 20
"""Bytes of the mask in memory at a time; a longer sequence is read at once."""


def check_mask(prefix: Path, mask_prefix: Path, *, full: bool) -> list[Problem]:
    """Return the problems of the mask `mask_prefix` of the pair `prefix`.

    Both pairs must have the same lengths and documents, the mask must have the dtype uint8. If `full` is true, each of
    its values must be 0 or 1, and each sequence must have a 1. Damage that `check_pair` reports is ignored here.
    """
    index_path = Path(f"{mask_prefix}.idx")
    try:
        index, mask = open_index(Path(f"{prefix}.idx")), open_index(index_path)
    except DamagedPair:
        return []
    if mask.dtype != np.uint8:
        description = f"the values of the mask are {mask.dtype.name}, not uint8"
        return [Problem(index_path, description, REMAKE)]
    different = f"it is not the mask of {prefix.name}"
    if (sequence := _find_difference(index.lengths, mask.lengths)) is not None:
        counts = f"it has {len(mask.lengths):,} sequences, the tokens {len(index.lengths):,}"
        return [Problem(index_path, f"{different}: {counts}, and sequence {sequence} differs in length", REMAKE)]
    if (entry := _find_difference(index.document_indices, mask.document_indices)) is not None:
        counts = f"it has {len(mask.document_indices) - 1:,} documents, the tokens {len(index.document_indices) - 1:,}"
        description = f"{different}: {counts}, and document {max(0, entry - 1)} has other sequences"
        return [Problem(index_path, description, REMAKE)]
    return _check_values(mask_prefix, mask) if full else []


def _find_difference(first: Array, second: Array) -> int | None:
    """Return the first index at which two arrays differ, or None if they are equal."""
    shortest = min(len(first), len(second))
    for begin in range(0, shortest, CHUNK):
        end = min(begin + CHUNK, shortest)
        if (bad := first[begin:end] != second[begin:end]).any():
            return begin + int(bad.argmax())
    return None if len(first) == len(second) else shortest


def _check_values(mask_prefix: Path, index: Index) -> list[Problem]:
    """Check the values of a mask whose index is that of the tokens; ignore them if the index is damaged."""
    try:
        values = IndexedReader(mask_prefix).ids
    except DamagedPair:
        return []
    wrong, untrained = _Places(), _Places()
    first = 0
    while first < len(index.lengths):
        # bisect: numpy's own search would first copy the array, which is not aligned in the file.
        last = bisect_right(index.pointers, int(index.pointers[first]) + BATCH_BYTES, first + 1) - 1
        last = max(first + 1, last if last < len(index.lengths) - 1 else len(index.lengths))
        lengths = index.lengths[first:last].astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        begin, size = int(index.pointers[first]), int(lengths.sum())
        if (lengths < 1).any() or begin < 0 or begin + size > len(values):
            return []
        part = np.asarray(values[begin : begin + size])
        if (bad := np.flatnonzero(part > 1)).size:
            sequence = int(np.searchsorted(starts, bad[0], "right")) - 1
            token, value = int(bad[0] - starts[sequence]), int(part[bad[0]])
            wrong.add(bad.size, first + sequence, f"token {token} of {{}} has the value {value}, neither 0 nor 1")
        if (bad := np.flatnonzero(np.maximum.reduceat(part, starts) == 0)).size:
            untrained.add(bad.size, first + int(bad[0]), "no token of {} is trained")
        first = last
    path = Path(f"{mask_prefix}.bin")
    return [Problem(path, places.describe(index), REMAKE) for places in (wrong, untrained) if places.count]


class _Places:
    """The number of places with one kind of problem, and the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self._first = (0, "")

    def add(self, count: int, sequence: int, description: str) -> None:
        """Count places; the description of the first one has {} for the name of its sequence."""
        if not self.count:
            self._first = sequence, description
        self.count += count

    def describe(self, index: Index) -> str:
        """Describe the first place."""
        sequence, description = self._first
        document = bisect_right(index.document_indices, sequence) - 1
        text = description.format(f"sequence {sequence} (document {document})")
        return text if self.count == 1 else f"{text}, the first of {self.count:,} such places"
