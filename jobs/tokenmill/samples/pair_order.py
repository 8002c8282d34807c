"""The order in which Megatron-LM reads one split of a pair: its sequences, and the samples cut from them.

Megatron-LM shuffles the sequences, cuts them into samples, and shuffles the samples. All permutations come from one
`numpy.random.RandomState`, so the order of the draws matters: sequences first, then samples, each with the last epoch
apart if `Epochs.separate` (megatron/core/datasets/gpt_dataset.py, `_build_document_index`, `_build_shuffle_index`).

Megatron-LM also stores where each sample starts. That is not needed here: `ends` has the running number of tokens, and
a binary search finds the sequence of any position. `order_store` keeps large orders in files.
"""

import mmap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.samples.epochs import Epochs

Array = npt.NDArray[Any]

MAX_UINT32 = 2**32 - 1

BLOCK = 1 << 20
"""Sequences or samples that are in memory together."""


RELEASED = BLOCK * 8
"""Sequences after which the map of an array that is read at random places is released."""


class PairOrder(NamedTuple):
    """The order of a split of a pair.

    Attributes:
        sequences: int32, shape (epochs x sequences,): the number of each sequence in the pair, in the order of reading.
        ends: int64, same shape: the number of tokens up to the end of that sequence.
        samples: uint32 or int64, shape (samples,): the position of each sample, in samples from the first token.
    """

    sequences: Array
    ends: Array
    samples: Array


Allocate = Callable[[str, int, npt.DTypeLike], Array]
"""Returns an array of a length and a dtype for the field of PairOrder with the name."""


def allocate_memory(_: str, length: int, dtype: npt.DTypeLike) -> Array:
    """Return an array in memory."""
    return np.empty(length, dtype)


def release(*arrays: Array) -> None:
    """Let the system take back the memory of maps of files; they are read again when they are needed."""
    for array in arrays:
        base: Any = array
        while isinstance(base, np.ndarray) and base.base is not None:
            base = base.base
        base = base.obj if isinstance(base, memoryview) else base
        if isinstance(base, mmap.mmap):
            base.madvise(mmap.MADV_DONTNEED)


def build_order(
    lengths: Array, first: int, end: int, epochs: Epochs, seed: int, allocate: Allocate = allocate_memory
) -> PairOrder:
    """Return the order of the sequences `first` to `end` of a pair, whose lengths in tokens are `lengths`."""
    random = np.random.RandomState(seed)
    sequences = shuffle_sequences(first, end, epochs, random, allocate)
    ends = allocate("ends", len(sequences), np.int64)
    for start, block in iterate_ends(lengths, sequences):
        ends[start : start + len(block)] = block
        release(ends)
    return PairOrder(sequences, ends, shuffle_samples(epochs, random, allocate))


def shuffle_sequences(first: int, end: int, epochs: Epochs, random: np.random.RandomState, allocate: Allocate) -> Array:
    """Return the sequences of a PairOrder, the first array for which random numbers are drawn."""
    count = end - first
    sequences = allocate("sequences", epochs.number * count, np.int32)
    for start, stop in _ranges(epochs):
        part = sequences[start * count : stop * count]
        for epoch in part.reshape(stop - start, count):
            fill_numbers(epoch, first)
        random.shuffle(part)
    return sequences


def iterate_ends(lengths: Array, sequences: Array) -> Iterator[tuple[int, Array]]:
    """Yield the ends of a PairOrder in blocks: the number of the first sequence, and the ends (int64)."""
    total = 0
    for start in range(0, len(sequences), BLOCK):
        block = np.cumsum(lengths[sequences[start : start + BLOCK]], dtype=np.int64)
        block += total
        total = int(block[-1])
        yield start, block
        if start % RELEASED == 0:
            release(lengths)


def shuffle_samples(epochs: Epochs, random: np.random.RandomState, allocate: Allocate) -> Array:
    """Return the samples of a PairOrder, the second array for which random numbers are drawn."""
    samples = allocate("samples", epochs.samples, np.uint32 if epochs.samples < MAX_UINT32 - 1 else np.int64)
    fill_numbers(samples, 0)
    random.shuffle(samples[: epochs.shuffled_first])
    if epochs.separate:
        random.shuffle(samples[epochs.shuffled_first :])
    return samples


def fill_numbers(array: Array, first: int) -> None:
    """Write the numbers from `first` on, in blocks: an array of all numbers would not be in a file."""
    for start in range(0, len(array), BLOCK):
        stop = min(start + BLOCK, len(array))
        array[start:stop] = np.arange(first + start, first + stop, dtype=array.dtype)


def _ranges(epochs: Epochs) -> list[tuple[int, int]]:
    """Return the ranges of epochs whose sequences are shuffled together."""
    last = epochs.number - 1
    return [(0, last), (last, epochs.number)] if epochs.separate else [(0, epochs.number)]
