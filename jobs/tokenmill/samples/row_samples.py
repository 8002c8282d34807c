"""The samples of a packed pair: each is a row, with the ids that Megatron-LM's GPTDataset reads by a `row_order`."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.datasets.formats.indexed.reader import IndexedReader
from tokenmill.samples.epochs import Epochs
from tokenmill.samples.pair_order import PairOrder
from tokenmill.samples.pair_samples import PairSamples, Pieces
from tokenmill.samples.row_order import shuffle_rows

Array = npt.NDArray[Any]


class RowSamples(PairSamples):
    """The samples of some rows: the ids of the row, and the first id of the row that is stored after it."""

    def __init__(
        self, prefix: Path, pair: IndexedReader, rows: tuple[int, int], epochs: int, seed: int, seq_length: int
    ) -> None:
        """Prepare the samples of `rows`, a range of the documents of the pair."""
        self._rows, self._seed = rows, seed
        self._bounds = pair.document_indices[rows[0] : rows[1] + 1]
        samples = epochs * (rows[1] - rows[0])
        super().__init__(prefix, pair, Epochs(epochs, samples, samples), seq_length, self._shuffle)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Open the files again in another process."""
        return RowSamples, (self.prefix, self.pair, self._rows, self.epochs.number, self._seed, self._seq_length)

    def _shuffle(self) -> PairOrder:
        rows, nothing = len(self._bounds) - 1, np.empty(0, np.int64)
        return PairOrder(nothing, nothing, shuffle_rows(rows, self.epochs.number, self._seed))

    def locate(self, numbers: Array) -> Pieces:
        """Return the pieces of the samples with these numbers; the last piece of each is its last label."""
        count = len(self._bounds) - 1
        rows = self.order.samples[numbers] % count
        first, end = self._bounds[rows], self._bounds[rows + 1]
        sizes = end - first + 1
        ends = sizes.cumsum()
        sequences = np.arange(ends[-1]) + (first - ends + sizes).repeat(sizes)
        sequences[ends - 1] = np.where(rows + 1 < count, end, self._bounds[0])
        lengths = self.pair.lengths[sequences].astype(np.int64)
        lengths[ends - 1] = 1
        return Pieces(np.arange(len(rows)).repeat(sizes), sequences, np.zeros(len(sequences), np.int64), lengths)

    def find_sequences(self, numbers: Array) -> Array:
        """Return the numbers of the samples whose rows have some sequences, ascending (int64)."""
        rows = np.unique(np.asarray(self._bounds).searchsorted(numbers, "right") - 1)
        return np.flatnonzero(np.isin(self.order.samples % (len(self._bounds) - 1), rows))
