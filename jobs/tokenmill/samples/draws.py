"""The draws of a blend: which dataset each sample comes from, and which of its samples it is.

Megatron-LM draws each sample from the dataset that is furthest behind its share (megatron/core/datasets/helpers.cpp,
`build_blending_indices`, `build_exhaustive_blending_indices`). Each draw depends on all draws before it. They are
computed in blocks, when a block is first needed. The number of draws of each dataset before a block is kept, and also
stored in the cache, so that a run that resumes late computes one block.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.core.files.codec import content_id
from tokenmill.samples.draw_counts import CountStore

Array = npt.NDArray[Any]

BLOCK = 1 << 16
"""Draws of a block: about 0.05 s of work for a few datasets."""

KEPT_BLOCKS = 64
"""Computed blocks in memory, with 10 bytes a draw."""

STORED_BLOCKS = 4
"""The counts are stored each time so many blocks were computed."""

MANY_DATASETS = 48
"""Number of datasets from which numpy finds the dataset furthest behind faster than a loop."""


class Draw(NamedTuple):
    """Some draws of a blend.

    Attributes:
        datasets: int16: the number of the dataset.
        samples: int64, same shape: the number of the sample in the dataset.
    """

    datasets: Array
    samples: Array


def normalize(weights: Sequence[float]) -> list[float]:
    """Divide weights by their sum, with Megatron-LM's arithmetic (megatron/core/datasets/utils.py, `normalize`)."""
    array = np.array(weights, np.float64)
    normalized: list[float] = (array / np.sum(array)).tolist()
    return normalized


class BlendPlan(NamedTuple):
    """The samples that a blend with weights requests from each dataset, and the draws from them."""

    requested: list[int]
    draws: "Draws"


def plan_blend(weights: Sequence[float], samples: int, surplus: float, directory: Path | None = None) -> BlendPlan:
    """Return what Megatron-LM builds for `samples` of a blend: shares rounded up, and `surplus` more of each.

    The arithmetic is that of `_get_size_per_split_per_dataset` (megatron/core/datasets/
    blended_megatron_dataset_builder.py); BlendedDataset normalizes the weights a second time.
    """
    shares = normalize(weights)
    targets = [math.ceil(samples * share) for share in shares]
    requested = [math.ceil(target * (1 + surplus)) for target in targets]
    return BlendPlan(requested, Draws(normalize(shares), sum(targets), directory=directory))


class Draws:
    """The draws of a blend of `size` samples in proportion to `shares`, which add up to 1."""

    def __init__(
        self,
        shares: Sequence[float],
        size: int,
        sizes: Sequence[int] | None = None,
        directory: Path | None = None,
    ) -> None:
        """Prepare the draws.

        Args:
            shares: the share of each dataset.
            size: the number of draws.
            sizes: the number of samples of each dataset, after which it is not drawn any more; None for no end.
            directory: directory of the stored counts; None for that of `core.files.private_cache`.
        """
        self.size = size
        self.shares = list(shares)
        self._sizes = list(sizes) if sizes is not None else None
        self.counts = [np.zeros(len(shares), np.int64)]
        """The number of draws of each dataset before each block that is known."""
        self._blocks: OrderedDict[int, Draw] = OrderedDict()
        self._lock = threading.RLock()
        self._store = (
            CountStore(content_id([shares, size, sizes]), directory) if size > 2 * STORED_BLOCKS * BLOCK else None
        )

    @classmethod
    def of_everything(cls, sizes: Sequence[int], directory: Path | None = None) -> "Draws":
        """Return the draws of each sample of each dataset once, in proportion to the sizes of the datasets."""
        total = sum(sizes)
        return cls([size / total for size in sizes], total, sizes, directory)

    def get(self, numbers: Array) -> Draw:
        """Return the draws with these numbers."""
        blocks = numbers // BLOCK
        wanted = np.unique(blocks).tolist()
        if len(wanted) == 1:
            block, within = self._get_block(wanted[0]), numbers - wanted[0] * BLOCK
            return Draw(block.datasets[within], block.samples[within])
        drawn = Draw(np.empty(len(numbers), np.int16), np.empty(len(numbers), np.int64))
        for number in wanted:
            chosen = blocks == number
            block, within = self._get_block(number), numbers[chosen] - number * BLOCK
            drawn.datasets[chosen], drawn.samples[chosen] = block.datasets[within], block.samples[within]
        return drawn

    def find(self, dataset: int, samples: Array) -> Array:
        """Return the numbers of the draws of these samples of a dataset; this computes the draws up to the last one."""
        numbers = [np.empty(0, np.int64)]
        left = len(samples)
        for block in range(-(-self.size // BLOCK)):
            if not left:
                break
            drawn = self._get_block(block)
            places = np.flatnonzero((drawn.datasets == dataset) & np.isin(drawn.samples, samples))
            numbers.append(places + block * BLOCK)
            left -= len(places)
        return np.concatenate(numbers)

    @property
    def bounds(self) -> list[int]:
        """The largest number of draws of each dataset, without computing them.

        Before each draw the chosen dataset is below its share, so after it the dataset is at most one above.
        """
        return [math.floor(share * self.size) + 1 for share in self.shares]

    def count_all(self) -> Array:
        """Return how many samples are drawn from each dataset, int64; this computes all draws."""
        return self.count_first(self.size)

    def count_first(self, number: int) -> Array:
        """Return how many of the first `number` draws are from each dataset, int64; this computes them."""
        last = max(number - 1, 0) // BLOCK
        datasets = self._get_block(last).datasets[: number - last * BLOCK]
        return self.counts[last] + np.bincount(datasets, minlength=len(self.shares))

    def __reduce__(self) -> tuple[object, ...]:
        """Compute the draws again in another process, instead of copying them there."""
        return Draws, (self.shares, self.size, self._sizes, self._store.directory if self._store else None)

    def _get_block(self, number: int) -> Draw:
        with self._lock:
            if number in self._blocks:
                self._blocks.move_to_end(number)
                return self._blocks[number]
            if number >= len(self.counts) and self._store is not None:
                self.counts = max(self.counts, self._store.load(len(self.shares)), key=len)
            for preceding in range(len(self.counts) - 1, number):
                self._compute(preceding)
            self._blocks[number] = block = self._compute(number)
            if len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
            return block

    def _compute(self, number: int) -> Draw:
        """Compute a block whose preceding counts are known, and note the counts after it."""
        first, last = number * BLOCK, min((number + 1) * BLOCK, self.size)
        drawn = self.counts[number].tolist()
        if len(drawn) >= MANY_DATASETS:
            datasets = _draw_of_many(np.array(self.shares), drawn, first, last, self._sizes)
        else:
            datasets = _draw(self.shares, drawn, first, last, self._sizes)
        if number + 1 == len(self.counts) and last < self.size:
            self.counts.append(self.counts[number] + np.bincount(datasets, minlength=len(drawn)))
            if self._store is not None and len(self.counts) % STORED_BLOCKS == 0:
                self._store.save(self.counts)
        return Draw(datasets, _count_occurrences(datasets, self.counts[number]))


def _draw(
    shares: Sequence[float], drawn: list[int], first: int, last: int, sizes: Sequence[int] | None
) -> npt.NDArray[np.int16]:
    datasets = np.empty(last - first, np.int16)
    left = [dataset for dataset in range(len(shares)) if sizes is None or drawn[dataset] < sizes[dataset]]
    for number in range(first, last):
        position = float(number) if number > 1 else 1.0
        chosen, largest = -1, -math.inf
        for dataset in left:
            behind = shares[dataset] * position - drawn[dataset]
            if behind > largest:
                chosen, largest = dataset, behind
        datasets[number - first] = chosen
        drawn[chosen] += 1
        if sizes is not None and drawn[chosen] == sizes[chosen]:
            left.remove(chosen)
    return datasets


def _draw_of_many(
    shares: Array, drawn: Sequence[int], first: int, last: int, sizes: Sequence[int] | None
) -> npt.NDArray[np.int16]:
    datasets = np.empty(last - first, np.int16)
    counts, behind = np.array(drawn, np.float64), np.empty(len(shares))
    left = np.full(len(shares), np.inf) if sizes is None else np.array(sizes) - counts
    counts[left == 0] = np.inf
    for number in range(first, last):
        np.multiply(shares, max(number, 1), out=behind)
        np.subtract(behind, counts, out=behind)
        chosen = behind.argmax()
        datasets[number - first] = chosen
        counts[chosen] += 1
        left[chosen] -= 1
        if left[chosen] == 0:
            counts[chosen] = np.inf
    return datasets


def _count_occurrences(datasets: Array, before: Array) -> Array:
    """Return for each draw how often its dataset was drawn earlier."""
    samples = np.empty(len(datasets), np.int64)
    order = np.argsort(datasets, kind="stable")
    counts = np.bincount(datasets, minlength=len(before))
    starts = np.cumsum(counts) - counts
    grouped = datasets[order]
    samples[order] = np.arange(len(datasets)) - starts[grouped] + before[grouped]
    return samples
