"""Who does what: a share of the units for each worker, balanced by bytes."""

import heapq
from collections.abc import Sequence

from tokenmill.flow.record import Unit


def share(units: Sequence[Unit], worker: int, workers: int) -> list[Unit]:
    """Return worker `worker`'s units of `workers`, largest first."""
    return shares(units, workers)[worker]


def shares(units: Sequence[Unit], workers: int) -> list[list[Unit]]:
    """Return each worker's units.

    The shares are disjoint and complete, and depend on nothing but the units: longest processing time
    first, each unit going to the worker with the fewest bytes so far (Graham 1969: at most 4/3 of the best
    possible load).
    """
    found: list[list[Unit]] = [[] for _ in range(workers)]
    # A unit costs something even when it is empty: weight + 1 spreads a thousand empty files as well.
    heap = [(0, index) for index in range(workers)]
    for unit in sorted(units, key=lambda unit: (-unit.weight, unit.id)):
        load, index = heap[0]
        heapq.heapreplace(heap, (load + unit.weight + 1, index))
        found[index].append(unit)
    return found


def groups(weights: Sequence[int], count: int) -> list[range]:
    """Cut a sequence into `count` runs of neighbours, none empty, as equal in weight as neighbours allow.

    Neighbours, because the order of documents is then the order of the files. Boundary k is put where
    the running sum comes nearest to k/count of the total.
    """
    if not 1 <= count <= len(weights):
        raise ValueError(f"cannot cut {len(weights)} items into {count} runs that are not empty")
    # An empty file still takes a place: without the 1, a run of empty files would have no boundary in it.
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight + 1)
    runs, start = [], 0
    for k in range(1, count + 1):
        end = start + 1
        last = len(weights) - (count - k)
        target = sums[-1] * k / count
        while end < last and abs(sums[end + 1] - target) <= abs(sums[end] - target):
            end += 1
        end = last if k == count else end
        runs.append(range(start, end))
        start = end
    return runs
