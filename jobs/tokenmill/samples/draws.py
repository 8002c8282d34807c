"""The draws of a blend: which dataset each sample comes from, and which of its samples it is.

Megatron-LM draws each sample from the dataset that is furthest behind its share (megatron/core/datasets/helpers.cpp,
`build_blending_indices`, `build_exhaustive_blending_indices`). Each draw depends on all draws before it. They are
computed in blocks, when a block is first needed (`draw_loop`). At each STRIDE the counts before it are stored in the
cache, so that a run that resumes late, or another process, computes less than a stride.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.core.files.codec import content_id
from tokenmill.samples.draw_counts import CountStore
from tokenmill.samples.draw_loop import Groups, draw

Array = npt.NDArray[Any]

BLOCK = 1 << 16
"""Draws of a block: 0.005 s of work with numba, and 0.2 s without."""

KEPT_BLOCKS = 64
"""Computed blocks in memory, with 10 bytes a draw."""

STRIDE = 16
"""Blocks between two stored counts."""


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


class BlendSizes(NamedTuple):
    """The sizes of a blend with weights: the samples requested from each dataset, its share, and all draws."""

    requested: list[int]
    shares: list[float]
    size: int


def size_blend(weights: Sequence[float], samples: int, surplus: float) -> BlendSizes:
    """Return what Megatron-LM builds for `samples` of a blend: shares rounded up, and `surplus` more of each.

    The arithmetic is that of `_get_size_per_split_per_dataset` (megatron/core/datasets/
    blended_megatron_dataset_builder.py); BlendedDataset normalizes the weights a second time.
    """
    shares = normalize(weights)
    targets = [math.ceil(samples * share) for share in shares]
    requested = [math.ceil(target * (1 + surplus)) for target in targets]
    return BlendSizes(requested, normalize(shares), sum(targets))


class BlendPlan(NamedTuple):
    """The samples that a blend with weights requests from each dataset, and the draws from them."""

    requested: list[int]
    draws: "Draws"


def plan_blend(weights: Sequence[float], samples: int, surplus: float, directory: Path | None = None) -> BlendPlan:
    """Return the samples that a blend requests, and its draws."""
    sizes = size_blend(weights, samples, surplus)
    return BlendPlan(sizes.requested, Draws(sizes.shares, sizes.size, directory=directory))


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
        self._groups = Groups.build(shares, sizes)
        self._known: tuple[int, Array] = (0, np.zeros(len(self._groups.shares), np.int64))
        """The last computed place: a number of blocks, and the draws of each group before it."""
        self._blocks: OrderedDict[int, tuple[Array, Draw]] = OrderedDict()
        """For the number of a block the draws of each group before it, and its draws."""
        self._lock = threading.RLock()
        self._store: CountStore | None = None
        if size > STRIDE * BLOCK:
            self._store = CountStore(content_id(["groups", shares, size, sizes]), len(self._groups.shares), directory)

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
        with self._lock:
            block = self._get_block(last)
            before, _ = self._blocks[last]
        datasets = block.datasets[: number - last * BLOCK]
        return self._groups.count_members(before) + np.bincount(datasets, minlength=len(self.shares))

    def iterate(self) -> Iterator[tuple[int, Draw]]:
        """Yield all draws in parts: the number of the first draw, and the draws."""
        drawn = np.zeros(len(self._groups.shares), np.int64)
        for place in range(0, -(-self.size // BLOCK), STRIDE):
            yield place * BLOCK, self._draw(place, place + STRIDE, drawn)

    def __reduce__(self) -> tuple[object, ...]:
        """Compute the draws again in another process, instead of copying them there."""
        return Draws, (self.shares, self.size, self._sizes, self._store.directory if self._store else None)

    def _get_block(self, number: int) -> Draw:
        with self._lock:
            if number in self._blocks:
                self._blocks.move_to_end(number)
                return self._blocks[number][1]
            place, drawn = self._find_counts(number)
            if number - place < STRIDE or self._store is None:
                self._advance(place, number, drawn)
            else:
                with self._store.computing():
                    place, drawn = self._find_counts(number)  # another process may have computed them
                    self._advance(place, number, drawn)
            before = drawn.copy()
            block = self._compute(number, number + 1, drawn)
            self._blocks[number] = before, block
            if len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
            return block

    def _find_counts(self, number: int) -> tuple[int, Array]:
        """Return the last known place up to a block, and a copy of the draws of each group before it."""
        place, drawn = self._known
        if place > number:
            place, drawn = 0, np.zeros_like(drawn)
        if number - place >= STRIDE and self._store is not None and (stored := self._store.load(number // STRIDE)):
            place, drawn = max((place, drawn), (stored[0] * STRIDE, stored[1]), key=itemgetter(0))
        return place, drawn.copy()

    def _advance(self, place: int, number: int, drawn: Array) -> None:
        """Compute the draws from one block up to another one, and add them to those of each group."""
        while place < number:
            stop = min((place // STRIDE + 1) * STRIDE, number)
            self._compute(place, stop, drawn)
            place = stop

    def _compute(self, place: int, stop: int, drawn: Array) -> Draw:
        """Compute blocks, add their draws to those of each group, and store these at each stride."""
        block = self._draw(place, stop, drawn)
        if self._store is not None and stop % STRIDE == 0:
            self._store.save(stop // STRIDE, drawn)
        self._known = stop, drawn.copy()
        return block

    def _draw(self, place: int, stop: int, drawn: Array) -> Draw:
        """Compute blocks, and add their draws to those of each group."""
        first = place * BLOCK
        number = min(stop * BLOCK, self.size) - first
        block = Draw(np.empty(number, np.int16), np.empty(number, np.int64))
        draw(self._groups, drawn, first, *block, compiled=self._store is not None)
        return block
