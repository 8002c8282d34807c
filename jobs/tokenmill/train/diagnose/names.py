"""The names of a hang's directory, which is next to the checkpoints, and of the files in it.

    <checkpoints>/.tokenmill/hangs/20260102T030405Z-1a2b3c4d/   the start and the id of the attempt that hung
        rank-12.stack.txt       stacks of all threads of a rank, as Python's fault handler writes them
        rank-12.flight.pickle   dump of torch's flight recorder, unchanged
        node-3.ncclras.txt      output of ncclras, which asks NCCL about all ranks

Names sort by time.
"""

import re
import time
from pathlib import Path

HANGS = Path(".tokenmill") / "hangs"
"""Directory of all hangs, below the checkpoints."""

HANG_NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-z]+")
MAX_RANK = 1 << 20

_RANK = re.compile(r"rank[-_.]?(\d{1,7})(?!\d)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d{1,7})(?:\.\w+)?$")


def hang_name(started: float, attempt: str) -> str:
    """Return the name of the directory for a hang of the attempt that started at this time."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(started))}-{attempt[:8]}"


def stack_name(rank: int) -> str:
    """Return the name of the file with a rank's stacks."""
    return f"rank-{rank}.stack.txt"


def flight_name(rank: int) -> str:
    """Return the name of the file with a rank's flight-recorder dump."""
    return f"rank-{rank}.flight.pickle"


def ras_name(node: int) -> str:
    """Return the name of the file with the output of ncclras on a node."""
    return f"node-{node}.ncclras.txt"


def find_rank(name: str, *, is_dump: bool) -> int | None:
    """Return the rank in a file's name; for a dump also the last number, as in `nccl_trace_0`."""
    match = _RANK.search(name) or (_LAST_NUMBER.search(name) if is_dump else None)
    rank = int(match[1]) if match else MAX_RANK
    return rank if rank < MAX_RANK else None
