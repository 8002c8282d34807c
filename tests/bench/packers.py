"""Packing and reading of rows, each in a process: `packers.py TOOL ARGUMENT...`; the result is a line of JSON.

    pack ALGORITHM COUNT CAPACITY             tokenmill's algorithm
    pack quadratic ALGORITHM COUNT CAPACITY   the first row with room, by a search of all rows
    pack segment-tree ALGORITHM ...           the first row with room, by a recursive search of a tree
    rewrite SHARD OUTPUT ROWS                 a shard of Parquet with other row groups
    read SHARD COUNT                          rows in random order, one at a time

Only packing and reading are timed. All tools get the same lengths, and read the same rows.
"""

import hashlib
import json
import random
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

SEED = 42


def make_lengths(count: int, capacity: int) -> list[int]:
    """Return the lengths of sequences: log-normal with a median of 350 tokens, at most `capacity`."""
    dice = random.Random(SEED)
    return [min(capacity, max(1, round(350 * dice.lognormvariate(0, 1)))) for _ in range(count)]


def order(lengths: Sequence[int], algorithm: str) -> list[int]:
    """Return the order in which an algorithm visits the sequences."""
    numbers = list(range(len(lengths)))
    if algorithm == "first-fit-shuffle":
        random.Random(SEED).shuffle(numbers)
        return numbers
    return sorted(numbers, key=lambda number: -lengths[number])


def quadratic(lengths: Sequence[int], capacity: int, algorithm: str) -> list[list[int]]:
    """Put each sequence into the first row with enough room; look at all rows."""
    rows: list[list[int]] = []
    room: list[int] = []
    for number in order(lengths, algorithm):
        length = lengths[number]
        for row, left in enumerate(room):
            if left >= length:
                rows[row].append(number)
                room[row] -= length
                break
        else:
            rows.append([number])
            room.append(capacity - length)
    return rows


def segment_tree(lengths: Sequence[int], capacity: int, algorithm: str) -> list[list[int]]:
    """Put each sequence into the first row with enough room; find it by the greatest room below each inner node."""
    leaves = 1 << (len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    rows: list[list[int]] = [[] for _ in lengths]

    def place(node: int, length: int) -> int:
        if node >= leaves:
            room[node] -= length
            return node - leaves
        row = place(2 * node + (room[2 * node] < length), length)
        room[node] = max(room[2 * node], room[2 * node + 1])
        return row

    for number in order(lengths, algorithm):
        rows[place(1, lengths[number])].append(number)
    return [row for row in rows if row]


def pack(*arguments: str) -> dict[str, float | str]:
    """Time the packing of lengths."""
    *kind, algorithm, count, capacity = arguments
    values = make_lengths(int(count), int(capacity))
    if kind:
        tool = {"quadratic": quadratic, "segment-tree": segment_tree}[kind[0]]
        started = time.perf_counter()
        rows = tool(values, int(capacity), algorithm)
        seconds = time.perf_counter() - started
    else:
        import numpy as np

        from tokenmill.stages.pack.algorithms import assign

        lengths = np.array(values)
        started = time.perf_counter()
        bins = assign(lengths, int(capacity), algorithm, SEED)
        seconds = time.perf_counter() - started
        rows = bins.lists()
    return {"seconds": seconds, "rows": len(rows), "hash": hashlib.sha256(json.dumps(rows).encode()).hexdigest()}


def rewrite(shard: str, output: str, rows: str) -> dict[str, float | str]:
    """Write the rows of a shard in other row groups."""
    from pyarrow import parquet

    table = parquet.read_table(shard)
    parquet.write_table(table, output, row_group_size=int(rows), compression="zstd")
    return {"rows": table.num_rows}


def read(shard: str, count: str) -> dict[str, float | str]:
    """Time reads of rows in random order; each read decodes a row group, as the readers of trainers do."""
    from pyarrow import parquet

    digest = hashlib.sha256()
    with parquet.ParquetFile(shard) as file:
        ends = list(accumulate(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)))
        numbers = random.Random(SEED).choices(range(ends[-1]), k=int(count))
        seconds = 0.0
        for number in numbers:
            started = time.perf_counter()
            group = bisect_right(ends, number)
            table = file.read_row_group(group, columns=["input_ids", "loss_mask", "seq_start_id"])
            row = table.slice(number - (ends[group - 1] if group else 0), 1)
            values = [row.column(name)[0].values.to_numpy() for name in table.column_names]
            seconds += time.perf_counter() - started
            for value in values:
                digest.update(value.tobytes())
    return {"seconds": seconds, "rows": ends[-1], "hash": digest.hexdigest()}


if __name__ == "__main__":
    print(json.dumps({"pack": pack, "rewrite": rewrite, "read": read}[sys.argv[1]](*sys.argv[2:])))
