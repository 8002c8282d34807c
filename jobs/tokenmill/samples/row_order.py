"""The order of packed rows: the loaders read it, and Megatron-LM reads it from a sample index that is made beforehand.

A packed pair (`stages.pack.documents`) has a document for each row, and a sequence for each document of the row and for
its padding. Every epoch has all rows once, in an order of its own.

GPTDataset reads three arrays if its cache has them (megatron/core/datasets/gpt_dataset.py):

    document_index  int32 (n,)        the numbers of sequences, in the order of reading
    sample_index    int32 (m + 1, 2)  the start of each sample: a place in document_index, and a token there
    shuffle_index   uint32 (m,)       the number of each sample, in the order of training

A sample has the tokens up to the start of the next sample, and one more, which is its last label. So a sample that
starts where a row starts is that row, and its last label is the first token of the row that is stored after it.
"""

from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.samples.pair_order import MAX_UINT32, Allocate, allocate_memory, fill_numbers

Array = npt.NDArray[Any]

MAX_INT32 = 2**31 - 1


def find_rows(document_indices: Array, first: int, end: int) -> tuple[int, int]:
    """Return the range of rows, as documents of the pair, that are completely in a range of sequences."""
    low = bisect_left(document_indices, first)
    return low, max(low, bisect_right(document_indices, end) - 1)


def count_row_epochs(rows: int, samples: int | None) -> int:
    """Return the epochs that a number of samples needs; None is one epoch."""
    return 1 if samples is None else max(1, -(-samples // rows))


def shuffle_rows(rows: int, epochs: int, seed: int, allocate: Allocate = allocate_memory) -> Array:
    """Return the order of training, shape (epochs x rows,): row r of epoch e is the number e x rows + r."""
    random = np.random.RandomState(seed)
    count = epochs * rows
    order = allocate("samples", count, np.uint32 if count < MAX_UINT32 - 1 else np.int64)
    fill_numbers(order, 0)
    for epoch in range(epochs):
        random.shuffle(order[epoch * rows : (epoch + 1) * rows])
    return order


class RowIndex(NamedTuple):
    """The arrays of Megatron-LM's sample index, as the module describes them."""

    document_index: Array
    sample_index: Array
    shuffle_index: Array


def build_row_index(bounds: Array, epochs: int, seed: int, allocate: Allocate = allocate_memory) -> RowIndex:
    """Return the sample index with which Megatron-LM reads packed rows in the order of the loaders.

    Args:
        bounds: the first sequence of each row, and the end of the last one: a part of the pair's document indices.
        epochs: how often each row is read, from `count_row_epochs`.
        seed: the seed of the run, Megatron-LM's --seed.
        allocate: returns memory for an array with the name of a field of RowIndex, such as a mapped file. That of
            `sample_index` is flat.
    """
    rows, first, sequences = len(bounds) - 1, int(bounds[0]), int(bounds[-1]) - int(bounds[0])
    # The last row of an epoch needs the first sequence of the next one; the last epoch, that of the first row.
    documents = allocate("document_index", epochs * sequences + 1, np.int32)
    dtype = np.int32 if len(documents) <= MAX_INT32 else np.int64
    samples = allocate("sample_index", 2 * (epochs * rows + 1), dtype).reshape(-1, 2)
    for epoch in range(epochs):
        fill_numbers(documents[epoch * sequences : (epoch + 1) * sequences], first)
        np.subtract(bounds[:-1], first - epoch * sequences, out=samples[epoch * rows : (epoch + 1) * rows, 0])
    documents[-1], samples[-1, 0] = first, epochs * sequences
    samples[:, 1] = 0
    shuffled = shuffle_rows(rows, epochs, seed, lambda _, length, kind: allocate("shuffle_index", length, kind))
    return RowIndex(documents, samples, shuffled)
