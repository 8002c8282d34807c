"""Ask for the ranges of the samples that a process reads next, from their numbers: its steps have equal distances.

A loader, or a worker process of one, reads a batch of each of its steps, so the next numbers are known from the last
two batches.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.core.buckets.range_cache import find_cache_size
from tokenmill.core.buckets.remote_array import RemoteArray
from tokenmill.samples.draws import Draws
from tokenmill.samples.pair_samples import PairSamples

Array = npt.NDArray[Any]

AHEAD_BYTES, AHEAD_PART = 16 << 20, 16
"""Bytes of ids that a process asks for before it reads them, and the part of the cache that they may fill."""


class ReadAhead:
    """The samples of pairs in buckets that were asked for; threads may share it."""

    def __init__(self, parts: Sequence[PairSamples], draws: Draws | None, count: int, sample_bytes: int) -> None:
        """Start; there are `count` samples of `sample_bytes` bytes."""
        self._parts, self._draws, self._count, self._sample_bytes = parts, draws, count, sample_bytes
        self._bytes = min(AHEAD_BYTES, find_cache_size() // AHEAD_PART)
        self._lock = threading.Lock()
        self._last: Array = np.empty(0, np.int64)
        self._step = 0
        self._asked = 0
        """Steps after the last one that were asked for."""

    def follow(self, numbers: Array) -> None:
        """Ask for the samples of this batch, and of those that follow it."""
        with self._lock:
            step = int(numbers[0] - self._last[0]) if len(numbers) == len(self._last) else 0
            if step <= 0 or step != self._step:
                self._step, self._asked = max(step, 0), 0
                self._ask(numbers)
            else:
                self._asked -= 1
            self._last = numbers
            if self._step and step == self._step:
                self._continue(numbers)

    def _continue(self, numbers: Array) -> None:
        wanted = max(self._bytes // (self._sample_bytes * len(numbers)), 1)
        if self._asked > wanted // 2:
            return
        steps = np.arange(max(self._asked, 0) + 1, wanted + 1) * self._step
        following = (steps[:, None] + numbers[None, :]).ravel()
        self._ask(following[following < self._count])
        self._asked = wanted

    def _ask(self, numbers: Array) -> None:
        if not len(numbers):
            return
        if self._draws is None:
            self._parts[0].read_ahead(numbers)
            return
        draw = self._draws.get(numbers)
        for dataset in np.unique(draw.datasets).tolist():
            self._parts[dataset].read_ahead(draw.samples[draw.datasets == dataset])


def is_remote(part: PairSamples) -> bool:
    """Return whether the ids of a pair are in a bucket."""
    return isinstance(part.pair.ids, RemoteArray)
