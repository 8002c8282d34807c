"""Assignment of units to workers, and of consecutive files to units, balanced by bytes.

`engine.worker` uses `select_units` to find the units of a worker. Stages use `split_by_weight` while they make a plan.
"""

import heapq
from collections.abc import Sequence

from tokenmill.engine.record import Unit


def select_units(units: Sequence[Unit], worker: int, workers: int) -> list[Unit]:
    """Return the units of worker number `worker` (from 0), largest first."""
    return partition_units(units, workers)[worker]


def partition_units(units: Sequence[Unit], workers: int) -> list[list[Unit]]:
    """Return the units of each worker.

    The shares are disjoint and complete, and they depend only on the units and the number of workers. The algorithm is
    "longest processing time first": each unit goes to the worker with the fewest bytes so far (Graham 1969: the largest
    load is at most 4/3 of the optimum).
    """
    shares: list[list[Unit]] = [[] for _ in range(workers)]
    # An empty unit has a cost as well: weight + 1 also spreads a thousand empty files over the workers.
    heap = [(0, index) for index in range(workers)]
    for unit in sorted(units, key=lambda unit: (-unit.weight, unit.id)):
        load, index = heap[0]
        heapq.heapreplace(heap, (load + unit.weight + 1, index))
        shares[index].append(unit)
    return shares


def split_by_weight(weights: Sequence[int], count: int) -> list[range]:
    """Cut a sequence into `count` non-empty runs of neighbours with weights as equal as possible.

    The runs consist of neighbours, so that the order of the documents is the order of the files. Boundary k is placed
    where the cumulative weight is nearest to k/count of the total.
    """
    if not 1 <= count <= len(weights):
        raise ValueError(f"cannot cut {len(weights)} items into {count} runs that are not empty")
    # The 1 is the cost of an empty file. Without it, no boundary could be inside a run of empty files.
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
