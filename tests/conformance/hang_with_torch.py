"""One rank of a run in which rank 3 stays in data loading; torch's own flight recorder writes the dump.

Arguments: the directory of the dumps, and their form (pickle or json). Run by test_diagnose.py.
"""

import datetime
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

DUMP_AFTER_SECONDS = 4.0
STEPS = 3


def write_dump(path: Path, form: str) -> None:
    """Write the dump when the other ranks wait; a rename shows that it is complete."""
    time.sleep(DUMP_AFTER_SECONDS)
    data = _distributed_c10d._dump_fr_trace_json() if form == "json" else _distributed_c10d._dump_fr_trace()
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").rename(path)


def load_batch(rank: int, step: int) -> torch.Tensor:
    """Return the data of a step, which rank 3 never gets in the last step."""
    while rank == 3 and step == STEPS:
        time.sleep(3600)
    return torch.ones(4, 2)


def main() -> None:
    """Train: sum over the pair of ranks, then over all ranks; each odd rank sends to the next even one."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    rank = dist.get_rank()
    pairs = [dist.new_group([first, first + 1], group_desc="tensor_parallel") for first in (0, 2)]
    path = Path(sys.argv[1]) / f"nccl_trace_rank_{rank}"
    threading.Thread(target=write_dump, args=(path, sys.argv[2]), daemon=True).start()
    for step in range(1, STEPS + 1):
        batch = load_batch(rank, step)
        dist.all_reduce(batch, group=pairs[rank // 2])
        if rank == 1:
            dist.send(batch, 2)
        if rank == 2:
            dist.recv(batch, 1)
        total = batch.sum()
        dist.all_reduce(total)


if __name__ == "__main__":
    main()
