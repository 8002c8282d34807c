"""The sample index of Megatron-LM for a pair and for a blend, as the `.npy` files that it maps.

`GPTDataset` reads three files for each split of a pair: the sequences in their order (document_index), where each
sample starts in it (sample_index), and the order of the samples (shuffle_index). `BlendedDataset` reads two: the pair
of each sample (dataset_index), and its number there (dataset_sample_index). The files are mapped while they are
written, so memory does not grow with them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tokenmill.samples.draws import Draws
from tokenmill.samples.epochs import Epochs
from tokenmill.samples.pair_order import BLOCK, iterate_ends, release, shuffle_samples, shuffle_sequences
from tokenmill.samples.row_order import build_row_index

Array = npt.NDArray[Any]

MAX_INT32 = 2**31 - 1


def write_pair_index(
    lengths: Array, first: int, end: int, epochs: Epochs, seed: int, seq_length: int, locate: Callable[[str], Path]
) -> None:
    """Write the index of the sequences `first` to `end` of a pair.

    Args:
        lengths: int32, shape (sequences,): the lengths of all sequences of the pair, in tokens.
        first: the first sequence of the split.
        end: the sequence after the last one of the split.
        epochs: the epochs and samples of the split.
        seed: Megatron-LM's --seed.
        seq_length: the number of inputs of a sample.
        locate: returns the path for one of the three names.
    """
    random = np.random.RandomState(seed)
    names = {"sequences": "document_index", "samples": "shuffle_index"}

    def allocate(name: str, length: int, dtype: npt.DTypeLike) -> Array:
        return create_npy(locate(names[name]), (length,), dtype)

    sequences = shuffle_sequences(first, end, epochs, random, allocate)
    dtype = np.int32 if len(sequences) <= MAX_INT32 else np.int64
    starts = create_npy(locate("sample_index"), (epochs.samples + 1, 2), dtype)
    _locate_samples(lengths, sequences, seq_length, starts)
    release(sequences, starts, shuffle_samples(epochs, random, allocate))


def write_row_index(bounds: Array, epochs: int, seed: int, locate: Callable[[str], Path]) -> None:
    """Write the index of packed rows; `locate` returns the path for one of the three names (`build_row_index`)."""

    def allocate(name: str, length: int, dtype: npt.DTypeLike) -> Array:
        shape = (length // 2, 2) if name == "sample_index" else (length,)
        return create_npy(locate(name), shape, dtype).reshape(-1)

    release(*build_row_index(bounds, epochs, seed, allocate))


def write_blend_index(draws: Draws, locate: Callable[[str], Path]) -> Array:
    """Write the index of a blend, whose draws are those of `draws`; return the draws of each dataset, int64."""
    counts = np.zeros(len(draws.shares), np.int64)
    datasets = create_npy(locate("dataset_index"), (draws.size,), np.int16)
    samples = create_npy(locate("dataset_sample_index"), (draws.size,), np.int64)
    for first, block in draws.iterate():
        datasets[first : first + len(block.datasets)], samples[first : first + len(block.samples)] = block
        counts += np.bincount(block.datasets, minlength=len(counts))
        release(datasets, samples)
    return counts


def create_npy(path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return a new `.npy` file, mapped; OSError if the file system has no space for it."""
    array = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)  # a full disk would end the process with SIGBUS
    return cast(Array, array.view(np.ndarray))


def _locate_samples(lengths: Array, sequences: Array, seq_length: int, out: Array) -> None:
    """Write the sequence and the offset in it at which each sample starts, and at which the last one ends."""
    out[0] = 0  # also where the first sequence is empty
    done, total = 1, 0
    for first, ends in iterate_ends(lengths, sequences):
        stop = min(len(out), (int(ends[-1]) - 1) // seq_length + 1)
        while done < stop:
            following = min(done + BLOCK, stop)
            starts = np.arange(done, following, dtype=np.int64) * seq_length
            places = ends.searchsorted(starts, "right")
            starts -= np.where(places, ends[places - 1], total)
            out[done:following, 0], out[done:following, 1] = first + places, starts
            done = following
        total = int(ends[-1])
        release(out)
