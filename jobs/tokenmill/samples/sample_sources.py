"""The sources of samples: one or several pairs, and random tokens.

A source knows nothing about batches except their tokens, labels, loss mask and starts of documents; `samples` does the
rest. `packed_samples` has the source of packed rows.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.datasets.formats.indexed.reader import list_origins, map_pair
from tokenmill.samples.batch import Batch
from tokenmill.samples.draws import Draws
from tokenmill.samples.pair_samples import PADDING, PairSamples, Pieces
from tokenmill.samples.read_ahead import ReadAhead, find_remote

Array = npt.NDArray[Any]


class Piece(NamedTuple):
    """A part of a sample: tokens of one sequence of a pair, or of one packed row.

    Attributes:
        source: the number of the pair, or of the shard.
        sequence: the number of the sequence in the pair, or of the row in the shard.
        offset: the first token in the sequence.
        length: the number of tokens.
    """

    source: int
    sequence: int
    offset: int
    length: int


class SampleSource(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def fill(self, numbers: Array, batch: Batch) -> None:
        """Write samples into a batch: tokens, labels, loss mask, and the starts of documents if it has them."""

    def locate(self, number: int) -> list[Piece]:
        """Return the pieces of a sample; together they have its tokens and the last label."""


class PairSource:
    """Samples of pairs: all samples of one pair, or draws from several."""

    def __init__(self, parts: Sequence[PairSamples], draws: Draws | None = None) -> None:
        self.parts = list(parts)
        self.draws = draws
        self._scratch = threading.local()
        self._ahead = self._follow_reads()

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.draws.size if self.draws else len(self.parts[0])

    def _follow_reads(self) -> ReadAhead | None:
        remote = find_remote(self.parts)
        if remote is None:
            return None
        part, ids = remote
        return ReadAhead(self.parts, self.draws, len(self), part.bytes, ids.cache_bytes)

    def fill(self, numbers: Array, batch: Batch) -> None:
        """Write samples into a batch."""
        if self._ahead is not None:
            self._ahead.follow(numbers)
        ids = self._buffer(*batch.tokens.shape)
        if batch.starts is not None:
            batch.starts[:] = False
        if self.draws is None:
            self._read(self.parts[0], numbers, ids, None, batch.starts)
        else:
            draw = self.draws.get(numbers)
            first = int(draw.datasets[0])
            if (draw.datasets == first).all():
                self._read(self.parts[first], draw.samples, ids, None, batch.starts)
            else:
                for dataset in np.unique(draw.datasets).tolist():
                    rows = np.flatnonzero(draw.datasets == dataset)
                    self._read(self.parts[dataset], draw.samples[rows], ids, rows, batch.starts)
        batch.tokens[:], batch.labels[:] = ids[:, :-1], ids[:, 1:]
        batch.loss_mask.fill(1)

    def _read(self, part: PairSamples, numbers: Array, ids: Array, rows: Array | None, starts: Array | None) -> None:
        pieces = part.locate(numbers)
        part.read(pieces, ids, rows)
        if starts is not None:
            _mark_starts(pieces, starts, rows)

    def _buffer(self, count: int, seq_length: int) -> Array:
        """Return memory for ids, which a thread uses again for the next batch of the same shape."""
        buffer: Array | None = getattr(self._scratch, "ids", None)
        if buffer is None or buffer.shape != (count, seq_length + 1):
            buffer = self._scratch.ids = np.empty((count, seq_length + 1), np.int64)
        return buffer

    def locate(self, number: int) -> list[Piece]:
        """Return the pieces of a sample."""
        dataset, sample = 0, number
        if self.draws is not None:
            draw = self.draws.get(np.array([number]))
            dataset, sample = int(draw.datasets[0]), int(draw.samples[0])
        pieces = self.parts[dataset].locate(np.array([sample]))
        columns = zip(pieces.sequences.tolist(), pieces.offsets.tolist(), pieces.lengths.tolist(), strict=True)
        return [Piece(dataset, *column) for column in columns]

    def find_documents(self, prefix: Path, documents: Array) -> Array | None:
        """Return the numbers of the samples with tokens of documents of a pair, None if the pair is not read."""
        samples = {
            place: numbers
            for place, part in enumerate(self.parts)
            if (numbers := find_in_part(part, prefix, documents)) is not None
        }
        return self.number(samples) if samples else None

    def number(self, samples: Mapping[int, Array]) -> Array:
        """Return the numbers here of samples of pairs, by the place of the pair, ascending."""
        numbers = [part if self.draws is None else self.draws.find(place, part) for place, part in samples.items()]
        return np.unique(np.concatenate(numbers))

    def __getstate__(self) -> dict[str, object]:
        """Return the fields for another process, which reads other samples, and has its own memory."""
        return {name: value for name, value in vars(self).items() if name not in ("_scratch", "_ahead")}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Set the fields of a process."""
        vars(self).update(state, _scratch=threading.local())
        self._ahead = self._follow_reads()


def find_in_part(part: PairSamples, prefix: Path, documents: Array) -> Array | None:
    """Return the samples of a pair or a view that have tokens of documents of the pair with this prefix.

    The numbers of the documents are ascending. None if it is neither this pair nor a view of it.
    """
    pair = os.path.realpath(prefix)
    if os.path.realpath(part.prefix) == pair:
        return part.find_sequences(part.pair.list_sequences(documents))
    if pair not in map(os.path.realpath, list_origins(part.prefix)):
        return None
    reader, pointers = map_pair(prefix), part.pair.pointers
    first, end = reader.document_indices[documents], reader.document_indices[documents + 1]
    first, last = first[first < end], end[first < end] - 1
    if not first.size:
        return np.empty(0, np.int64)
    stops = reader.pointers[last] + reader.lengths[last].astype(np.int64) * reader.dtype.itemsize
    places = reader.pointers[first].searchsorted(pointers, "right") - 1
    return part.find_sequences(np.flatnonzero((places >= 0) & (pointers < stops[places])))


def _mark_starts(pieces: Pieces, starts: Array, rows: Array | None) -> None:
    """Mark the first position of each piece, and of padding; the last id of a sample is only a label."""
    width = starts.shape[1]
    begins = pieces.lengths.cumsum() - pieces.lengths
    begins -= begins[pieces.rows.searchsorted(pieces.rows)]
    ends = begins + pieces.lengths
    places = pieces.rows if rows is None else rows[pieces.rows]
    for positions in (begins, ends):
        inside = positions < width
        starts[places[inside], positions[inside]] = True


class SyntheticSource:
    """Random tokens, which depend only on the seed, the sample's number and the vocabulary."""

    def __init__(self, vocabulary: int, samples: int, seed: int) -> None:
        self._vocabulary, self._samples, self._seed = vocabulary, samples, seed

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._samples

    def fill(self, numbers: Array, batch: Batch) -> None:
        """Write samples into a batch."""
        width = batch.tokens.shape[1] + 1
        for row, number in enumerate(numbers.tolist()):
            generator = np.random.Generator(np.random.Philox(key=[self._seed, number]))
            ids = generator.integers(0, self._vocabulary, width)
            batch.tokens[row], batch.labels[row] = ids[:-1], ids[1:]
        batch.loss_mask.fill(1)
        if batch.starts is not None:
            batch.starts[:] = False

    def locate(self, number: int) -> list[Piece]:
        """Return no piece: the tokens are from no source."""
        return []


def mask_padding(batch: Batch, pad: int | None) -> None:
    """Replace padding by 0 and do not train it, as Megatron-LM does with `pad` and with positions after the data."""
    for name in (PADDING, pad):
        if name is not None:
            batch.loss_mask[batch.labels == name] = 0
            batch.tokens[batch.tokens == name] = 0
            batch.labels[batch.labels == name] = 0
