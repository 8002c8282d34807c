"""The samples of one split of a pair, with the ids that Megatron-LM's GPTDataset reads from it.

`samples` draws from several of these objects, and turns ids into batches.
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.core.buckets.remote_array import RemoteArray
from tokenmill.datasets.formats.indexed.reader import DamagedPair, IndexedReader
from tokenmill.samples.epochs import Epochs
from tokenmill.samples.pair_order import PairOrder

Array = npt.NDArray[Any]

PADDING = -1
"""The id of positions after the end of the data, in the last sample of a split that keeps its partial sample."""

SHORT_PIECE = 48
"""Mean tokens of a piece below which all pieces are gathered in one indexed read instead of one copy for each."""


class Pieces(NamedTuple):
    """The pieces of sequences of which some samples consist, in order.

    Attributes:
        rows: int64: the place of the piece's sample among the samples.
        sequences: int32: the number of the sequence in the pair.
        offsets: int64: the first token of the piece in its sequence.
        lengths: int64: the number of tokens, at least 1.
    """

    rows: Array
    sequences: Array
    offsets: Array
    lengths: Array


class PairSamples:
    """The samples of one split of one pair; each has `seq_length` + 1 ids."""

    def __init__(
        self, prefix: Path, pair: IndexedReader, epochs: Epochs, seq_length: int, load: Callable[[], PairOrder]
    ) -> None:
        """Prepare the samples; `load` returns the order when the first sample is read."""
        self.prefix, self.epochs, self.pair = prefix, epochs, pair
        self._seq_length = seq_length
        self._load = load
        self._ids = pair.ids.view(np.ndarray)  # a slice of a memmap takes a microsecond longer
        self._pointers = pair.pointers.view(np.ndarray)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.epochs.samples

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Open the files again in another process, instead of copying ids and order there."""
        return PairSamples, (self.prefix, self.pair, self.epochs, self._seq_length, self._load)

    @property
    def bytes(self) -> int:
        """The bytes of the ids of a sample."""
        return (self._seq_length + 1) * self.pair.dtype.itemsize

    @cached_property
    def order(self) -> PairOrder:
        """The order of the sequences and samples.

        Raises:
            DamagedPair: the `.idx` has sequences of a negative length.
        """
        order = self._load()
        if len(order.ends) and (order.ends[0] < 0 or order.ends[-1] <= 0):
            raise DamagedPair(Path(f"{self.prefix}.idx"), "the length of a sequence is negative")
        return order

    def locate(self, numbers: Array) -> Pieces:
        """Return the pieces of the samples with these numbers."""
        order = self.order
        ends = order.ends
        starts = order.samples[numbers].astype(np.int64)
        starts *= self._seq_length
        stops = np.minimum(starts + (self._seq_length + 1), ends[-1])
        first = ends.searchsorted(starts, "right")
        counts = ends.searchsorted(stops, "left")
        counts -= first
        counts += 1
        np.maximum(counts, 0, out=counts)
        if len(counts) == 1:
            rows = np.zeros(counts[0], np.int64)
            places = np.arange(first[0], first[0] + counts[0])
        else:
            rows = np.arange(len(counts)).repeat(counts)
            places = np.arange(len(rows))
            places += (first - counts.cumsum() + counts).repeat(counts)
        piece_ends = ends[places]
        begins = ends[places - 1]
        begins[places == 0] = 0
        piece_starts = np.maximum(begins, starts[rows])
        lengths = np.minimum(piece_ends, stops[rows])
        lengths -= piece_starts
        sequences = order.sequences[places]
        piece_starts -= begins
        if (lengths <= 0).any():  # sequences without tokens
            kept = lengths > 0
            rows, sequences, piece_starts, lengths = rows[kept], sequences[kept], piece_starts[kept], lengths[kept]
        return Pieces(rows, sequences, piece_starts, lengths)

    def find_sequences(self, numbers: Array) -> Array:
        """Return the numbers of the samples whose inputs have tokens of some sequences, ascending (int64)."""
        if not numbers.size:
            return np.empty(0, np.int64)
        order = self.order
        places = np.flatnonzero(np.isin(order.sequences, numbers))
        starts = np.where(places > 0, order.ends[places - 1], 0)
        stops = order.ends[places]
        kept = stops > starts
        wanted = [
            np.arange(start // self._seq_length, (stop - 1) // self._seq_length + 1)
            for start, stop in zip(starts[kept].tolist(), stops[kept].tolist(), strict=True)
        ]
        if not wanted:
            return np.empty(0, np.int64)
        return np.flatnonzero(np.isin(order.samples, np.concatenate(wanted)))

    def read(self, pieces: Pieces, out: Array, rows: Array | None = None) -> None:
        """Write the ids of located samples into int64 `out`, shape (rows, seq_length + 1).

        Args:
            pieces: the pieces of the samples.
            out: the rows; a sample fills the row with its place, or with the number that `rows` has at its place.
            rows: the row of each sample.

        Raises:
            DamagedPair: a piece is outside the `.bin`.
        """
        width = out.shape[1]
        starts, stops = self._find_places(pieces)
        ends = pieces.lengths.cumsum()
        begins = ends - pieces.lengths
        if ends[-1] < width * (len(out) if rows is None else len(rows)):
            _pad(pieces, out, rows)
        begins -= begins[pieces.rows.searchsorted(pieces.rows)]
        begins += (pieces.rows if rows is None else rows[pieces.rows]) * width
        flat, ids = out.reshape(-1), self._ids
        if isinstance(ids, RemoteArray):
            ids, starts, stops = ids.gather(starts, stops), ends - pieces.lengths, ends
        if len(pieces.rows) * SHORT_PIECE > ends[-1]:
            within = np.arange(ends[-1]) - (ends - pieces.lengths).repeat(pieces.lengths)
            flat[begins.repeat(pieces.lengths) + within] = ids[starts.repeat(pieces.lengths) + within]
            return
        for begin, start, stop in zip(begins.tolist(), starts.tolist(), stops.tolist(), strict=True):
            flat[begin : begin + stop - start] = ids[start:stop]

    def read_ahead(self, numbers: Array) -> None:
        """Begin to fetch the ids of samples from a bucket, in their order."""
        ids = self.pair.ids
        if isinstance(ids, RemoteArray):
            ids.read_ahead(*self._find_places(self.locate(numbers)))

    def _find_places(self, pieces: Pieces) -> tuple[Array, Array]:
        """Return the places in the `.bin` at which pieces begin and end, in ids (DamagedPair)."""
        size = self._ids.itemsize
        starts = self._pointers[pieces.sequences]
        if (starts % size).any():
            raise DamagedPair(Path(f"{self.prefix}.idx"), "a sequence begins between two ids")
        starts //= size
        starts += pieces.offsets
        stops = starts + pieces.lengths
        if starts.min() < 0 or stops.max() > self._ids.size:
            raise DamagedPair(Path(f"{self.prefix}.idx"), "a sequence is outside the .bin file")
        return starts, stops


def _pad(pieces: Pieces, out: Array, rows: Array | None) -> None:
    """Mark the positions of samples after the end of the data."""
    places = np.arange(len(out)) if rows is None else rows
    counts = np.bincount(pieces.rows, weights=pieces.lengths, minlength=len(places)).astype(np.int64)
    for place in np.flatnonzero(counts < out.shape[1]).tolist():
        out[places[place], counts[place] :] = PADDING
