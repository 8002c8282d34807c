"""The token ranges of a pair that are still to be drawn.

A range is a part of one sequence: the byte offset of its first token in the `.bin`, and its length in tokens. A token
that was only the label of a sample is still to be drawn as an input.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.samples.pair_order import BLOCK, PairOrder, release

Array = npt.NDArray[Any]

SPILLED = 1 << 22
"""Ranges that are in memory together; more are in files."""


class Ranges(NamedTuple):
    """Ranges of a `.bin`: int64 offsets in bytes, int32 lengths in tokens."""

    offsets: Array
    lengths: Array

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return sum(int(part.lengths.sum(dtype=np.int64)) for part in self.blocks())

    def blocks(self) -> Iterator["Ranges"]:
        """Yield the ranges in parts, of which one is in memory at a time."""
        for start in range(0, len(self.lengths), BLOCK):
            yield Ranges(self.offsets[start : start + BLOCK], self.lengths[start : start + BLOCK])
            release(self.offsets, self.lengths)


class RangesBuilder:
    """Collects ranges: in memory, or, if there are many, in files of a directory, which are removed at the end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: list[Ranges] = []
        self._count = 0
        self._files: tuple[Any, Any] | None = None

    def add(self, ranges: Ranges) -> None:
        """Append ranges."""
        self._parts.append(Ranges(ranges.offsets.astype("<i8"), ranges.lengths.astype("<i4")))
        self._count += len(ranges.lengths)
        if sum(len(part.lengths) for part in self._parts) >= SPILLED:
            self._spill()

    def finish(self) -> Ranges:
        """Return all ranges."""
        if self._files is None:
            if not self._parts:
                return Ranges(np.empty(0, "<i8"), np.empty(0, "<i4"))
            offsets, lengths = zip(*self._parts, strict=True)
            return Ranges(np.concatenate(offsets), np.concatenate(lengths))
        self._spill()
        mapped = []
        for file, dtype in zip(self._files, ("<i8", "<i4"), strict=True):
            file.flush()
            mapped.append(np.memmap(file, dtype, "r", shape=(self._count,)).view(np.ndarray))
            file.close()  # the file has no name; its map keeps it
        return Ranges(*mapped)

    def _spill(self) -> None:
        if self._files is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            offsets, lengths = (tempfile.TemporaryFile(dir=self._directory) for _ in range(2))  # noqa: SIM115
            self._files = offsets, lengths
        for part in self._parts:
            for file, array in zip(self._files, part, strict=True):
                array.tofile(file)
        self._parts = []


def join(directory: Path, *parts: Ranges) -> Ranges:
    """Return the ranges of several lists."""
    builder = RangesBuilder(directory)
    for part in parts:
        for block in part.blocks():
            builder.add(block)
    return builder.finish()


def find_left(
    order: PairOrder,
    drawn: int,
    seq_length: int,
    offsets: Array,
    size: int,
    directory: Path,
    until: int | None = None,
) -> Ranges:
    """Return the ranges that the first `drawn` samples of an order have not drawn, in the order of reading.

    Args:
        order: the order of the entry that drew.
        drawn: how many of its samples were drawn.
        seq_length: the inputs of a sample.
        offsets: the offset of each sequence of the entry in the `.bin`, in bytes.
        size: bytes of a token.
        directory: directory for the files of many ranges.
        until: leave out what the samples from this number on draw, and the tokens after all samples.
    """
    was_drawn = np.zeros(len(order.samples) + 1, bool)  # the last element stands for the tokens after all samples
    was_drawn[order.samples[:drawn]] = True
    if until is not None:
        was_drawn[order.samples[until:]] = was_drawn[-1] = True
    builder = RangesBuilder(directory)
    release(*order)
    before = 0
    for start in range(0, len(order.ends), BLOCK):
        ends, sequences = order.ends[start : start + BLOCK], order.sequences[start : start + BLOCK]
        if int(ends[-1]) > before:
            pieces = _find_pieces(was_drawn, seq_length, before, ends)
            builder.add(Ranges(offsets[sequences[pieces.sequences]] + pieces.offsets * size, pieces.lengths))
        before = int(ends[-1])
        release(order.ends, order.sequences, offsets)
    return builder.finish()


class _Pieces(NamedTuple):
    """Undrawn parts of sequences: the place of each sequence in its block, the first token in it, the tokens."""

    sequences: Array
    offsets: Array
    lengths: Array


def _find_pieces(was_drawn: Array, seq_length: int, before: int, ends: Array) -> _Pieces:
    """Return the undrawn parts of consecutive sequences, which begin at the token `before` of the order."""
    first, last = before // seq_length, min((int(ends[-1]) - 1) // seq_length, len(was_drawn) - 1)
    drawn = was_drawn[first : last + 1]
    edges = np.concatenate([[0], np.flatnonzero(drawn[1:] != drawn[:-1]) + 1, [len(drawn)]]).astype(np.int64)
    starts, stops = (edges[:-1] + first) * seq_length, (edges[1:] + first) * seq_length
    if last == len(was_drawn) - 1:
        stops[-1] = ends[-1]
    undrawn = ~drawn[edges[:-1]]
    starts = np.maximum(starts[undrawn], before)
    stops = np.minimum(stops[undrawn], ends[-1])
    kept = stops > starts
    starts, stops = starts[kept], stops[kept]
    places = ends.searchsorted(starts, "right")
    counts = ends.searchsorted(stops, "left") - places + 1
    interval = np.arange(len(counts)).repeat(counts)
    sequences = np.arange(len(interval)) + (places - counts.cumsum() + counts).repeat(counts)
    begins = np.where(sequences > 0, ends[sequences - 1], before)
    piece_starts = np.maximum(begins, starts[interval])
    lengths = np.minimum(ends[sequences], stops[interval]) - piece_starts
    some = lengths > 0
    return _Pieces(sequences[some], (piece_starts - begins)[some], lengths[some])
