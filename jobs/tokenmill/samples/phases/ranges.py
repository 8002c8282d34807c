"""The token ranges of a pair that are still to be drawn.

A range is a part of one sequence: the byte offset of its first token in the `.bin`, and its length in tokens. A token
that was only the label of a sample is still to be drawn as an input.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.samples.pair_order import PairOrder

Array = npt.NDArray[Any]

MAX_LENGTH = 2**31 - 1
"""Tokens of a sequence in an `.idx`."""


class Ranges(NamedTuple):
    """Ranges of a `.bin`: int64 offsets in bytes, int32 lengths in tokens."""

    offsets: Array
    lengths: Array

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return int(self.lengths.sum(dtype=np.int64))


def join(*parts: Ranges) -> Ranges:
    """Return the ranges of several lists."""
    return Ranges(np.concatenate([part.offsets for part in parts]), np.concatenate([part.lengths for part in parts]))


def find_left(order: PairOrder, drawn: int, seq_length: int, offsets: Array, lengths: Array, size: int) -> Ranges:
    """Return the ranges that the first `drawn` samples of an order have not drawn, ordered by their offsets.

    Args:
        order: the order of the entry that drew.
        drawn: how many of its samples were drawn.
        seq_length: the inputs of a sample.
        offsets: the offset of each sequence of the entry in the `.bin`, in bytes.
        lengths: the length of each sequence, in tokens.
        size: bytes of a token.
    """
    was_drawn = np.zeros(len(order.samples) + 1, bool)  # the last element stands for the tokens after all samples
    was_drawn[order.samples[:drawn]] = True
    changes = np.flatnonzero(was_drawn[1:] != was_drawn[:-1]) + 1
    edges = np.concatenate([[0], changes, [len(was_drawn)]]).astype(np.int64)
    total = int(order.ends[-1])
    starts, stops = edges[:-1] * seq_length, edges[1:] * seq_length
    starts, stops = starts[~was_drawn[edges[:-1]]], np.minimum(stops[~was_drawn[edges[:-1]]], total)
    first = order.ends.searchsorted(starts, "right")
    counts = order.ends.searchsorted(stops, "left") - first + 1
    kept = stops > starts
    first, counts, starts, stops = first[kept], counts[kept], starts[kept], stops[kept]
    interval = np.arange(len(counts)).repeat(counts)
    places = np.arange(len(interval)) + (first - counts.cumsum() + counts).repeat(counts)
    begins = np.where(places > 0, order.ends[places - 1], 0)
    piece_starts = np.maximum(begins, starts[interval])
    piece_lengths = np.minimum(order.ends[places], stops[interval]) - piece_starts
    sequences = order.sequences[places]
    pieces = Ranges(offsets[sequences] + (piece_starts - begins) * size, piece_lengths.astype(np.int32))
    some = piece_lengths > 0
    by_offset = np.argsort(pieces.offsets[some], kind="stable")
    return Ranges(pieces.offsets[some][by_offset], pieces.lengths[some][by_offset])
