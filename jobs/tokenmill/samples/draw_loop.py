"""The loop that computes draws of a blend, compiled by numba where it is installed.

Draw n takes a sample from the dataset for which share * n - (samples drawn from it) is largest, and from the first one
of several. Megatron-LM compares all datasets for each draw. Here a dataset is compared only while it is behind by
`low` or more, and `low` is adapted so that few are. Between two of its draws a dataset falls behind steadily, so the
draw from which it must be compared is known, and a wheel of slots, one for each of the next draws, holds it until then.
The time of a draw thus does not depend on the number of datasets. Datasets with equal shares take turns in their order,
so they are compared as one group.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SLOTS = 1 << 12
"""Slots of the wheel, a power of two."""

ADAPT_AFTER = 1 << 10
"""Draws after which `low` may be raised."""

FEW_COMPARED = 12
"""Datasets compared for a draw on average, above which `low` is raised."""

NO_LIMIT = 1 << 62


class Groups(NamedTuple):
    """The datasets of a blend, in groups of equal shares and limits.

    Attributes:
        shares: float64, shape (groups,): the share of each dataset of a group.
        limits: int64: the samples of all datasets of a group.
        starts: int64: the place of a group's first dataset in `members`.
        sizes: int64: the number of datasets of a group.
        members: int64, shape (datasets,): the numbers of the datasets, ascending in each group.
    """

    shares: Array
    limits: Array
    starts: Array
    sizes: Array
    members: Array

    @classmethod
    def build(cls, shares: Sequence[float], sizes: Sequence[int] | None) -> "Groups":
        """Group the datasets; `sizes` has the samples of each dataset, None if they have no end."""
        members: dict[tuple[float, int], list[int]] = {}
        for dataset, share in enumerate(shares):
            size = NO_LIMIT if sizes is None else sizes[dataset]
            members.setdefault((share, size if share > 0 else 0), []).append(dataset)
        counts = np.array([len(group) for group in members.values()], np.int64)
        return cls(
            shares=np.array([share for share, _ in members], np.float64),
            limits=np.array([min(size * len(group), NO_LIMIT) for (_, size), group in members.items()], np.int64),
            starts=np.cumsum(counts) - counts,
            sizes=counts,
            members=np.array([dataset for group in members.values() for dataset in group], np.int64),
        )

    def count_members(self, drawn: Array) -> Array:
        """Return the draws of each dataset, int64, from those of each group."""
        counts = np.empty(len(self.members), np.int64)
        turns = np.arange(len(self.members)) - self.starts.repeat(self.sizes)
        counts[self.members] = (drawn // self.sizes).repeat(self.sizes) + (
            turns < (drawn % self.sizes).repeat(self.sizes)
        )
        return counts


def draw(groups: Groups, drawn: Array, first: int, datasets: Array, samples: Array, *, compiled: bool) -> None:
    """Compute draws from number `first` on, as many as `datasets` has places.

    Args:
        groups: the datasets.
        drawn: int64, shape (groups,): the draws of each group before `first`; this function adds to it.
        first: the number of the first draw.
        datasets: int16, where the dataset of each draw is written.
        samples: int64, where the number of the sample in its dataset is written.
        compiled: use numba if it is installed; compiling takes a second, and is stored.
    """
    arguments = _list_arguments(groups, drawn, first, datasets, samples)
    loop = _compile() if compiled else None
    if loop is not None:
        loop(*arguments)
        return
    lists = [item.tolist() if isinstance(item, np.ndarray) else item for item in arguments]  # 3 times faster
    _loop(*lists)
    for array, values in zip(arguments, lists, strict=True):
        if array is drawn or array is datasets or array is samples:
            array[:] = values


def _list_arguments(groups: Groups, drawn: Array, first: int, datasets: Array, samples: Array) -> list[Any]:
    """Return the arguments of the loop, with its scratch arrays."""
    count = len(groups.shares)
    scratch = [np.empty(SLOTS, np.int64), *np.empty((3, count), np.int64), *np.empty((2, count))]
    turns = [drawn // groups.sizes, drawn % groups.sizes]
    return [*groups, drawn, *turns, first, len(datasets), datasets, samples, *scratch]


def _loop(  # noqa: PLR0912, PLR0915
    shares: Any,
    limits: Any,
    starts: Any,
    sizes: Any,
    members: Any,
    drawn: Any,
    turns: Any,
    members_drawn: Any,
    first: int,
    number: int,
    datasets: Any,
    samples: Any,
    wheel: Any,
    following: Any,
    compared: Any,
    heads: Any,
    compared_shares: Any,
    compared_counts: Any,
) -> None:
    """Compute the draws.

    A group has drawn the sample `turns` from the first `members_drawn` of its datasets; the next one is its head.
    `wheel` has the first group of each slot, and `following` the next group of the same slot. The other scratch arrays
    have an entry for each group that is compared: its number, its head, its share, and its turn as a float.
    """
    low, margin = 0.0, 2.0 / len(shares)
    place, count, work, least = first, 0, 0, 1.0
    rebuild, adapted = True, first
    while place < first + number:
        if rebuild:
            for slot in range(SLOTS):
                wheel[slot] = -1
            count, rebuild, adapted, work, least = 0, False, place, 0, 1.0
            for group in range(len(shares)):
                following[group] = group + 1
            following[len(shares) - 1] = -1
            group = 0
        else:
            slot = place & (SLOTS - 1)
            group, wheel[slot] = wheel[slot], -1
        while group >= 0:
            after = following[group]
            if drawn[group] < limits[group]:
                # One draw early: the division rounds. Comparing a dataset too early does no harm.
                due = int((low + turns[group]) / shares[group]) - 1
                if due <= place:
                    compared[count], heads[count] = group, members[starts[group] + members_drawn[group]]
                    compared_shares[count], compared_counts[count] = shares[group], float(turns[group])
                    count += 1
                else:
                    slot = min(due, place + SLOTS - 1) & (SLOTS - 1)
                    following[group], wheel[slot] = wheel[slot], group
            group = after

        position = float(max(place, 1))
        chosen, largest = -1, -math.inf
        for candidate in range(count):
            behind = compared_shares[candidate] * position - compared_counts[candidate]
            if behind > largest or (behind == largest and heads[candidate] < heads[chosen]):
                chosen, largest = candidate, behind
        if largest < low:  # a dataset that was not compared may be further behind
            low = (low if chosen < 0 else largest) - margin
            margin *= 2
            rebuild = True
            continue

        group = compared[chosen]
        datasets[place - first], samples[place - first] = heads[chosen], turns[group]
        drawn[group] += 1
        members_drawn[group] += 1
        if members_drawn[group] == sizes[group]:
            members_drawn[group] = 0
            turns[group] += 1
        place += 1
        work += count
        least = min(least, largest)
        count -= 1  # the group goes back to the wheel, or is compared for the next draw
        compared[chosen], heads[chosen] = compared[count], heads[count]
        compared_shares[chosen], compared_counts[chosen] = compared_shares[count], compared_counts[count]
        if drawn[group] < limits[group]:
            due = int((low + turns[group]) / shares[group]) - 1
            slot = max(place, min(due, place + SLOTS - 1)) & (SLOTS - 1)
            following[group], wheel[slot] = wheel[slot], group
        if place - adapted >= ADAPT_AFTER:
            margin /= 2
            if work > FEW_COMPARED * (place - adapted) and least - margin > low:
                low, rebuild = least - margin, True
            adapted, work, least = place, 0, 1.0


@functools.cache
def _compile() -> Callable[..., None] | None:
    """Return the compiled loop; None without numba."""
    try:
        import numba
    except ImportError:
        return None
    nothing = Groups.build([1.0], None), np.zeros(1, np.int64), 0, np.empty(0, np.int16), np.empty(0, np.int64)
    try:
        loop = numba.njit(cache=True)(_loop)
        loop(*_list_arguments(*nothing))  # compiles and stores it
    except (RuntimeError, OSError):  # there is no directory for the compiled code, or no space
        loop = numba.njit(_loop)
    return loop  # type: ignore[no-any-return]
