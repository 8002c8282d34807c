"""How a list of datasets is cut into train, validation and test, as Megatron-LM cuts it."""

import math
from itertools import pairwise

from tokenmill.errors import RequestError

SPLITS = ("train", "validation", "test")
"""The parts of a split, in Megatron-LM's order; it calls the second one valid."""


class Names:
    """What messages call what names the datasets: keys of the settings, unless a command has its own."""

    key = "dataset.key"
    split = "dataset.split"
    apart = "in dataset.blend"

    def part(self, name: str, number: int | None = None) -> str:
        """Return what a list of datasets is called, or one of them, each by its own name."""
        return f"dataset.blend.{name}" + ("" if number is None else f"[{number}]")


def fractions(split: str, names: Names | None = None) -> list[float]:
    """Parse a split to three fractions of 1, as Megatron-LM reckons them, and as strictly as it does not.

    Raises RequestError for what are not one to three numbers of which the first is the largest part.
    """
    names = names or Names()
    words = split.split(",")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    plain = all(word.strip().replace(".", "", 1).isdecimal() for word in words)  # Megatron-LM reads -1 as 1, 1e2 as 1,2
    if not plain or not 1 <= len(numbers) <= 3 or not 0 < sum(numbers) < math.inf:
        raise RequestError(
            f"{names.split} is {split!r}: give the shares of train, validation and test, such as 990,9,1"
        )
    numbers += [0.0] * (3 - len(numbers))
    parts = [number / sum(numbers) for number in numbers]
    if not parts[0]:
        raise RequestError(f"{names.split} {split} leaves nothing to train on: its first number is train's share")
    if parts[0] < 0.5:
        raise RequestError(
            f"{names.split} {split} holds out {1 - parts[0]:.0%} of the data: its first number is train's share, such "
            f"as 990,9,1; to hold out so much, name datasets for each split {names.apart}"
        )
    return parts


def cuts(split: str, sequences: int) -> list[tuple[int, int] | None]:
    """Return which sequences of a pair go to train, validation and test; None for a part whose share is 0.

    As megatron/core/datasets/blended_megatron_dataset_config.py and _builder.py do, to the rounding.
    """
    edges = [0.0]
    for part in fractions(split):
        edges.append(edges[-1] + part)
    return [
        (round(begin * float(sequences)), round(end * float(sequences))) if end > begin else None
        for begin, end in pairwise(edges)
    ]
