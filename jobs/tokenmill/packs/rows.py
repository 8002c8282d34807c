"""Rows of packed sequences, as writers receive them."""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


class Rows(NamedTuple):
    """Consecutive rows.

    Attributes:
        ids: the ids of all rows, int32.
        mask: the shifted mask of all rows, uint8.
        sequences: the first position of each sequence in `ids`.
        row_sequences: for each row, the number of its first sequence; then the number of sequences.
        bounds: for each row, the position of its first id in `ids`; then the number of ids.
        source: the number of the source file of each sequence.
        record: the record of each sequence in its source file.
    """

    ids: "Array"
    mask: "Array"
    sequences: "Array"
    row_sequences: "Array"
    bounds: "Array"
    source: "Array"
    record: "Array"

    def part(self, first: int, end: int) -> "Rows":
        """Return the rows `first` to `end`, with positions and numbers that start at 0."""
        start, stop = self.bounds[first], self.bounds[end]
        head, tail = self.row_sequences[first], self.row_sequences[end]
        return Rows(
            self.ids[start:stop],
            self.mask[start:stop],
            self.sequences[head:tail] - start,
            self.row_sequences[first : end + 1] - head,
            self.bounds[first : end + 1] - start,
            self.source[head:tail],
            self.record[head:tail],
        )

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return len(self.bounds) - 1

    def to_columns(self) -> "Iterator[dict[str, list[int]]]":
        """Yield the columns of each row that all formats have."""
        starts = self.starts_in_rows
        for (begin, end), (first, last) in zip(pairwise(self.bounds), pairwise(self.row_sequences), strict=True):
            yield {
                "input_ids": self.ids[begin:end].tolist(),
                "loss_mask": self.mask[begin:end].tolist(),
                "seq_start_id": starts[first:last].tolist(),
            }

    @property
    def starts_in_rows(self) -> "Array":
        """The first position of each sequence in its row, int32."""
        import numpy as np

        starts: Array = self.sequences - np.repeat(self.bounds[:-1], np.diff(self.row_sequences))
        return starts.astype("<i4")
