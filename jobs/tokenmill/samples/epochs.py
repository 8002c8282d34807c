"""The number of epochs and samples of one split of a pair, with Megatron-LM's arithmetic.

Megatron-LM reads a split in complete epochs. A sample has `seq_length` inputs and one more token, because the labels
are the inputs shifted by one; the next sample starts with that token (megatron/core/datasets/gpt_dataset.py,
helpers.cpp). `pair_samples` uses this module.
"""

import math
from typing import NamedTuple

SEPARATE_BELOW = 0.80
"""The last epoch is shuffled on its own if less than this part of its samples is requested."""


class Epochs(NamedTuple):
    """The epochs of a split.

    Attributes:
        number: how often each sequence is read.
        samples: the number of samples of all epochs.
        shuffled_first: the number of samples that are shuffled together. The others, those of the last epoch, follow.
    """

    number: int
    samples: int
    shuffled_first: int

    @property
    def separate(self) -> bool:
        """Whether the last epoch is shuffled on its own."""
        return self.shuffled_first < self.samples


def count_epochs(tokens: int, requested: int | None, seq_length: int, *, keep_partial: bool = False) -> Epochs:
    """Return the epochs that `requested` samples need; without a request, one epoch.

    Args:
        tokens: the number of tokens of one epoch, at least 1.
        requested: the number of samples that the run requests from this split.
        seq_length: the number of inputs of a sample.
        keep_partial: keep the tokens after the last complete sample as a padded sample.
    """
    count = 1 if requested is None else max(1, -(-(requested * seq_length + 1) // tokens))
    total = count * tokens - 1
    samples = _round_up(total, seq_length) if keep_partial else total // seq_length
    if requested is None or count == 1:
        return Epochs(count, samples, samples)
    before_last = ((count - 1) * tokens - 1) // seq_length
    samples_per_epoch = (tokens - 1) // seq_length
    separate = requested - before_last < int(SEPARATE_BELOW * samples_per_epoch)
    return Epochs(count, samples, before_last if separate else samples)


def _round_up(total: int, seq_length: int) -> int:
    """Divide and round up, with the 32-bit floating-point numbers of Megatron-LM's helper."""
    import numpy as np

    return math.ceil(np.float32(total) / np.float32(seq_length))
