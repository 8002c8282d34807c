"""Assign sequences to rows by their lengths alone; `stages.pack.assignment` builds the rows of a dataset with it.

The first-fit algorithms look for the first row with enough room in a segment tree, so that n sequences cost n log n
steps. `shuffle` uses Python's own generator: the same seed gives the same rows on every machine.
"""

import random
from array import array
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

FIRST_FIT_SHUFFLE = "first-fit-shuffle"
FIRST_FIT_DECREASING = "first-fit-decreasing"
BEST_FIT = "best-fit"
CONCATENATIVE = "concatenative"
ALGORITHMS = (FIRST_FIT_SHUFFLE, FIRST_FIT_DECREASING, BEST_FIT, CONCATENATIVE)
"""The names of the algorithms; the first is the default."""

CHUNK = 1 << 16
"""Lengths that are Python numbers at the same time; such a number is eight times larger than in an array."""


class Bins(NamedTuple):
    """Rows of sequences: row i has the sequences `order[ends[i - 1]:ends[i]]`, the first row those up to `ends[0]`."""

    order: "Array"
    ends: "Array"

    def lists(self) -> list[list[int]]:
        """Return the sequences of each row as lists."""
        order = self.order.tolist()
        return [order[start:end] for start, end in pairwise([0, *self.ends.tolist()])]


def assign(lengths: "Array", capacity: int, algorithm: str, seed: int, *, shuffled: bool = False) -> Bins:
    """Return the rows of sequences of these lengths; a length above `capacity` counts as `capacity`.

    first-fit-shuffle visits the sequences in the order of `random.Random(seed)`, the decreasing algorithms the longest
    first, concatenative in their own order. A sequence goes to the first row with enough room, with best-fit to the
    fullest such row, with concatenative to the last row if there is room. `shuffled` first shuffles the sequences for
    the other algorithms, too, so that another seed gives other rows.
    """
    import numpy as np

    order = np.arange(len(lengths))
    if shuffled or algorithm == FIRST_FIT_SHUFFLE:
        order = shuffle(len(lengths), seed)
    if algorithm in (FIRST_FIT_DECREASING, BEST_FIT):
        order = order[np.argsort(-lengths[order], kind="stable")]
    visited = np.minimum(lengths, capacity)[order]
    if algorithm == CONCATENATIVE:
        return Bins(order, _next_fit(visited, capacity))
    numbers = chain.from_iterable(_chunks(visited))
    if algorithm == BEST_FIT:
        places = _best_fit(numbers, capacity)
    else:
        # Two rows next to each other are together more than full, which limits the number of rows.
        most = min(len(visited), 2 * int(visited.sum(dtype="i8")) // max(capacity, 1) + 2)
        places = _first_fit(numbers, capacity, most)
    rows = np.frombuffer(places, places.typecode) if places else np.empty(0, np.int64)
    return Bins(order[np.argsort(rows, kind="stable")], np.cumsum(np.bincount(rows)))


def _chunks(values: "Array") -> Iterator[list[int]]:
    """Yield the numbers of an array in lists of CHUNK numbers."""
    for first in range(0, len(values), CHUNK):
        yield values[first : first + CHUNK].tolist()


def shuffle(count: int, seed: int | str) -> "Array":
    """Return the numbers from 0 to `count` in the order of `random.Random(seed).shuffle`."""
    import numpy as np

    numbers = array("q", range(count))  # a fifth of the memory of a list
    random.Random(seed).shuffle(numbers)
    return np.frombuffer(numbers, np.int64) if count else np.empty(0, np.int64)


def _first_fit(lengths: Iterable[int], capacity: int, most: int) -> "array[int]":
    """Return the row of each length: the first row with enough room; there are at most `most` rows.

    The leaves of a segment tree hold the room of all rows, also of those without a sequence; an inner node holds the
    largest room below it.
    """
    leaves = 1 << max(most - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)
    rows = array("i")
    for length in lengths:
        node = 1
        while node < leaves:
            node += node
            if room[node] < length:
                node += 1
        rows.append(node - leaves)
        left = room[node] - length
        room[node] = left
        while node > 1:
            other = room[node ^ 1]
            if other > left:  # noqa: PLR1730 - max() would double the time
                left = other
            node >>= 1
            if room[node] == left:
                break
            room[node] = left
    return rows


def _best_fit(lengths: Iterable[int], capacity: int) -> "array[int]":
    """Return the row of each length: the fullest row with enough room, of equal rows the one that was used last.

    A room is a word and a bit in it. `words[w]` has bit b if a row has this room, `filled` has bit w if the word is not
    0. Both are about as long as the square root of the capacity, so that a large row costs little.
    """
    shift = max((capacity + 1).bit_length() // 2, 6)
    ones = (1 << shift) - 1
    words = [0] * ((capacity >> shift) + 1)
    filled = 0
    rows_by_room: dict[int, list[int]] = {}
    rows, count = array("i"), 0
    for length in lengths:
        word = length >> shift
        fitting = words[word] >> (length & ones)
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
        else:
            later = filled >> (word + 1)
            room = -1
            if later:
                word += (later & -later).bit_length()
                bits = words[word]
                room = (word << shift) + (bits & -bits).bit_length() - 1
        if room >= 0:
            with_room = rows_by_room[room]
            row = with_room.pop()
            if not with_room:
                del rows_by_room[room]
                words[word] ^= 1 << (room & ones)
                if not words[word]:
                    filled ^= 1 << word
        else:
            room, row, count = capacity, count, count + 1
        rows.append(row)
        room -= length
        if room in rows_by_room:
            rows_by_room[room].append(row)
        else:
            rows_by_room[room] = [row]
            words[room >> shift] |= 1 << (room & ones)
            filled |= 1 << (room >> shift)
    return rows


def _next_fit(lengths: "Array", capacity: int) -> "Array":
    """Return the end of each row: a row ends before the first sequence for which it has no room."""
    import numpy as np

    sums = np.concatenate(([0], np.cumsum(lengths)))
    ends, start = [], 0
    while start < len(lengths):
        # The last position with the same sum, so that empty sequences stay in the row before them.
        start = int(np.searchsorted(sums, sums[start] + capacity, side="right")) - 1
        ends.append(start)
    return np.array(ends, dtype=np.int64)


def spread(bins: Bins, lengths: "Array", rows: int) -> Bins | None:
    """Return the same sequences in `rows` rows, or None if there are fewer sequences than rows.

    The row with the most tokens is divided into two of about equal size until there are enough rows; the second parts
    follow the other rows.
    """
    import numpy as np

    if len(bins.order) < rows:
        return None
    lists = bins.lists() if len(bins.ends) < rows else []
    if not lists:
        return bins
    sizes = lengths.tolist()
    heap = [(-sum(sizes[i] for i in row), number) for number, row in enumerate(lists) if len(row) > 1]
    heapify(heap)
    while len(lists) < rows:
        _, number = heappop(heap)
        row = lists[number]
        sums = np.cumsum([sizes[i] for i in row])
        cut = min(int(np.abs(sums - sums[-1] / 2).argmin()) + 1, len(row) - 1)
        lists[number] = row[:cut]
        lists.append(row[cut:])
        for part in (number, len(lists) - 1):
            if len(lists[part]) > 1:
                heappush(heap, (-sum(sizes[i] for i in lists[part]), part))
    ends = np.cumsum([len(row) for row in lists])
    return Bins(np.array([i for row in lists for i in row], dtype=np.int64), ends)
