"""Ask for the ranges of the samples that a process reads next, from their numbers: its steps have equal distances.

A loader, or a worker process of one, reads a batch of each of its steps, so the next numbers are known from the last
two batches.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.core.buckets.remote_array import RemoteArray
from tokenmill.samples.draws import Draws
from tokenmill.samples.pair_samples import PairSamples

Array = npt.NDArray[Any]

AHEAD_BYTES, AHEAD_PART = 16 << 20, 16
"""Bytes of ids that a process asks for before it reads them, and the part of the cache that they may fill."""


class _FollowedBatch(NamedTuple):
    """The numbers of the last batch, the distance of batches, and the batches after it that were asked for."""

    last: Array
    step: int
    requested: int


class ReadAhead:
    """The samples of pairs in buckets that were asked for.

    Threads may share it: at worst they ask for samples again. It has no lock, which a fork could inherit while a thread
    of its parent has it.
    """

    def __init__(
        self, parts: Sequence[PairSamples], draws: Draws | None, count: int, sample_bytes: int, cache_bytes: int
    ) -> None:
        """Start; there are `count` samples of `sample_bytes` bytes."""
        self._parts, self._draws, self._count, self._sample_bytes = parts, draws, count, sample_bytes
        self._bytes = min(AHEAD_BYTES, cache_bytes // AHEAD_PART)
        self._state = _FollowedBatch(np.empty(0, np.int64), 0, 0)

    def follow(self, numbers: Array) -> None:
        """Ask for the samples of this batch, and of those that follow it."""
        last, known, requested = self._state
        step = int(numbers[0] - last[0]) if len(numbers) == len(last) else 0
        if step <= 0 or step != known:
            self._state = _FollowedBatch(numbers, max(step, 0), 0)
            self._ask(numbers)
            return
        requested -= 1
        wanted = max(self._bytes // (self._sample_bytes * len(numbers)), 1)
        following = np.empty(0, np.int64)
        if requested < 0:
            following = numbers
        if requested <= wanted // 2:
            steps = np.arange(max(requested, 0) + 1, wanted + 1) * step
            following = np.concatenate([following, (steps[:, None] + numbers[None, :]).ravel()])
            requested = wanted
        self._state = _FollowedBatch(numbers, step, requested)
        self._ask(following[following < self._count])

    def _ask(self, numbers: Array) -> None:
        if not len(numbers):
            return
        if self._draws is None:
            self._parts[0].read_ahead(numbers)
            return
        draw = self._draws.get(numbers)
        for dataset in np.unique(draw.datasets).tolist():
            self._parts[dataset].read_ahead(draw.samples[draw.datasets == dataset])


def find_remote(parts: Sequence[PairSamples]) -> tuple[PairSamples, RemoteArray] | None:
    """Return the first pair whose ids are in a bucket, and its ids."""
    for part in parts:
        if isinstance(part.pair.ids, RemoteArray):
            return part, part.pair.ids
    return None
