"""The division of a list of datasets into train, validation and test, exactly as Megatron-LM computes it."""

import math
from collections.abc import Sequence
from itertools import pairwise

from tokenmill.errors import RequestError

SPLITS = ("train", "validation", "test")
"""The splits, in Megatron-LM's order; Megatron-LM calls the second one valid."""

FILE_NAMES = {"train": "train", "valid": "validation", "test": "test"}
"""The splits by their names in files: in blends, as Megatron-LM and Megatron-Bridge read them, and in packs."""


class DatasetLabels:
    """The names of the dataset options in messages: keys of the settings, unless a command has its own options."""

    stage = "preprocess"
    pairs = "pairs"
    number_option = "--target-files"
    key = "dataset.key"
    split = "dataset.split"
    separate_splits = "in dataset.blend"

    def part(self, name: str, number: int | None = None) -> str:
        """Return the label of a list of datasets, or of the dataset with this number in the list."""
        return f"dataset.blend.{name}" + ("" if number is None else f"[{number}]")


def parse_split(split: str, labels: DatasetLabels | None = None) -> list[float]:
    """Parse a split into three fractions that add up to 1, with Megatron-LM's arithmetic.

    The check is stricter than Megatron-LM's own parser, which reads -1 as 1 and 1e2 as 1,2.

    Raises:
        RequestError: the split does not have one to three numbers, or train's fraction is below one half.
    """
    labels = labels or DatasetLabels()
    fractions = parse_fractions(split, labels)
    if not fractions[0]:
        raise RequestError(
            f"{labels.split} {split} leaves no training data: set the first number, train's share, above 0"
        )
    if fractions[0] < 0.5:
        raise RequestError(
            f"{labels.split} {split} holds out {1 - fractions[0]:.0%} of the data: the first number is train's share; "
            f"set it to at least half, such as 990,9,1, or specify the datasets of each split {labels.separate_splits}"
        )
    return fractions


def parse_fractions(split: str, labels: DatasetLabels | None = None) -> list[float]:
    """Parse a split into three fractions that add up to 1, of which any may be 0 (RequestError)."""
    labels = labels or DatasetLabels()
    items = split.split(",")
    try:
        numbers = [float(item) for item in items]
    except ValueError:
        numbers = []
    plain = split.isascii() and all(item.strip().replace(".", "", 1).isdecimal() for item in items)
    if not plain or not 1 <= len(numbers) <= 3 or not 0 < sum(numbers) < math.inf:
        raise RequestError(
            f"invalid {labels.split} {split!r}: specify the shares of train, validation and test, such as 990,9,1"
        )
    numbers += [0.0] * (3 - len(numbers))
    return [number / sum(numbers) for number in numbers]


def split_ranges(split: str, sequences: int) -> list[tuple[int, int] | None]:
    """Return the range of a pair's sequences for train, validation and test; None for a share of 0.

    The result, including the rounding, is that of megatron/core/datasets/blended_megatron_dataset_config.py and
    blended_megatron_dataset_builder.py.
    """
    return divide(parse_split(split), sequences)


def divide(fractions: Sequence[float], sequences: int) -> list[tuple[int, int] | None]:
    """Return the range of a pair's sequences for each fraction; None for a fraction of 0."""
    return [share and cut_share(share, sequences) for share in list_shares(fractions)]


def list_shares(fractions: Sequence[float]) -> list[tuple[float, float] | None]:
    """Return where the share of each fraction begins and ends, from 0 to 1; None for a fraction of 0.

    Megatron-LM calls this the split matrix, and names files by it, in which the first number is an integer.
    """
    edges: list[float] = [0]
    for fraction in fractions:
        edges.append(edges[-1] + fraction)
    return [(begin, end) if end > begin else None for begin, end in pairwise(edges)]


def cut_share(share: tuple[float, float], sequences: int) -> tuple[int, int]:
    """Return the range of sequences of a share."""
    begin, end = share
    return round(begin * float(sequences)), round(end * float(sequences))
