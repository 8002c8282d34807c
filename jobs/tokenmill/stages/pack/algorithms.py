"""Assign sequences to rows by their lengths alone; `stages.pack.assignment` builds the rows of a dataset with it.

The first-fit algorithms look for the first row with enough room in a segment tree, so that n sequences cost n log n
steps. Best-fit decreasing places all sequences of one length at once. `shuffle` uses Python's own generator, and
best-fit numpy's RandomState, whose numbers no version changes: the same seed gives the same rows on every machine.
"""

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
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
    the other algorithms, too, so that another seed gives other rows. With best-fit, the seed always decides which of
    several sequences of one length a row has, and the order of the rows.
    """
    import numpy as np

    if algorithm == BEST_FIT:
        longest = int(lengths.max(initial=0))
        capped = lengths if longest <= capacity else np.minimum(lengths, capacity)
        return _best_fit(capped, capacity, np.random.RandomState(seed % (1 << 32)))
    order = np.arange(len(lengths))
    if shuffled or algorithm == FIRST_FIT_SHUFFLE:
        order = shuffle(len(lengths), seed)
    if algorithm == FIRST_FIT_DECREASING:
        order = order[np.argsort(-lengths[order], kind="stable")]
    visited = np.minimum(lengths, capacity)[order]
    if algorithm == CONCATENATIVE:
        return Bins(order, _next_fit(visited, capacity))
    # Two rows next to each other are together more than full, which limits the number of rows.
    most = min(len(visited), 2 * int(visited.sum(dtype="i8")) // max(capacity, 1) + 2)
    places = _first_fit(chain.from_iterable(_chunks(visited)), capacity, most)
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


def _best_fit(lengths: "Array", capacity: int, random: Any) -> Bins:
    """Return the rows of best-fit decreasing, in random order; no length is above `capacity`."""
    import numpy as np

    if not len(lengths):
        return Bins(np.empty(0, np.int64), np.empty(0, np.int64))
    order = np.arange(len(lengths), dtype=np.uint32 if len(lengths) < 1 << 32 else np.int64)
    random.shuffle(order)
    order = _sort_descending(lengths, capacity, order)
    visited = lengths[order]
    bounds = np.concatenate(([0], np.flatnonzero(visited[1:] != visited[:-1]) + 1, [len(order)]))
    placements, rows = _place_by_length(visited[bounds[:-1]].tolist(), np.diff(bounds).tolist(), capacity)
    del visited
    sizes = np.zeros(rows, np.int64)
    for first, end, per_row in placements:
        sizes[first:end] += per_row
    arranged = random.permutation(rows)
    ends = np.cumsum(sizes[arranged])
    nexts = np.empty(rows, np.int64)  # for each row, the place of its next sequence
    nexts[arranged] = ends - sizes[arranged]
    placed, taken = np.empty_like(order), 0
    for first, end, per_row in placements:
        stop = taken + (end - first) * per_row
        if end - first == 1:
            place = int(nexts[first])
            placed[place : place + per_row] = order[taken:stop]
        else:
            placed[(nexts[first:end, None] + np.arange(per_row)).reshape(-1)] = order[taken:stop]
        nexts[first:end] += per_row
        taken = stop
    return Bins(placed, ends)


def _sort_descending(lengths: "Array", capacity: int, order: "Array") -> "Array":
    """Return `order` sorted by the lengths, the longest first, equal ones in their order; none is above `capacity`.

    numpy sorts 16 bits at a time by counting, which is five times as fast as its comparisons.
    """
    import numpy as np

    for shift in range(0, capacity.bit_length(), 16):
        keys = ((capacity - lengths) >> shift).astype(np.uint16)
        order = order[np.argsort(keys[order], kind="stable")]
    return order


def _place_by_length(
    lengths: Sequence[int], counts: Sequence[int], capacity: int
) -> tuple[list[tuple[int, int, int]], int]:
    """Return where the sequences go, and the number of rows; there are `counts[i]` sequences of `lengths[i]`.

    The lengths decrease. A placement (first, end, per_row) has the next `per_row` sequences for each of the rows from
    `first` to `end`. A sequence goes to the fullest row with enough room. That row is then still the fullest with
    enough room, if it has room for another one of this length, so that as many as fit can go there at once; the same
    holds for all rows with as much room.
    """
    rooms, count = _Rooms(capacity), 0
    placements: list[tuple[int, int, int]] = []
    for length, number in zip(lengths, counts, strict=True):
        left = number
        while left:
            free = rooms.pop(length)
            if free is None:
                free = capacity, count, count + max(1, left // (capacity // length))
                count = free[2]
            room, first, end = free
            per_row = room // length
            rows = min(end - first, left // per_row)
            if not rows:  # the last sequences of this length do not fill a row
                rows, per_row = 1, left
            if rows < end - first:
                rooms.add(room, first, end - rows)
            rooms.add(room - per_row * length, end - rows, end)
            placements.append((end - rows, end, per_row))
            left -= rows * per_row
    return placements, count


class _Rooms:
    """Ranges of rows by the room that each of their rows has.

    A room is a word and a bit in it. `words[w]` has bit b if a row has this room, `filled` has bit w if the word is not
    0. Both are about as long as the square root of the capacity, so that a large row costs little.
    """

    def __init__(self, capacity: int) -> None:
        self._shift = max((capacity + 1).bit_length() // 2, 6)
        self._ones = (1 << self._shift) - 1
        self._words = [0] * ((capacity >> self._shift) + 1)
        self._filled = 0
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def add(self, room: int, first: int, end: int) -> None:
        """Add the rows from `first` to `end`."""
        if room in self._ranges:
            self._ranges[room].append((first, end))
        else:
            self._ranges[room] = [(first, end)]
            self._words[room >> self._shift] |= 1 << (room & self._ones)
            self._filled |= 1 << (room >> self._shift)

    def pop(self, length: int) -> tuple[int, int, int] | None:
        """Remove and return the range that was added last of those with the smallest room of at least `length`."""
        word = length >> self._shift
        fitting = self._words[word] >> (length & self._ones)
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
        else:
            later = self._filled >> (word + 1)
            if not later:
                return None
            word += (later & -later).bit_length()
            bits = self._words[word]
            room = (word << self._shift) + (bits & -bits).bit_length() - 1
        ranges = self._ranges[room]
        first, end = ranges.pop()
        if not ranges:
            del self._ranges[room]
            self._words[word] ^= 1 << (room & self._ones)
            if not self._words[word]:
                self._filled ^= 1 << word
        return room, first, end


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
