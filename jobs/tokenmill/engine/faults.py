"""Counts of repeated requests by kind of fault, of this process and of its children that run units.

`sources.retry` counts; `engine.metrics` and the progress display read the sums.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

Fault = Literal["throttled", "refused", "no_response", "invalid", "restarted", "interrupted"]
"""Why a request was repeated: the server requested a pause (429, 503), refused (401, 403, 404), was silent, sent
unexpected content, made the bytes so far useless, or broke the connection."""

FAULTS: tuple[Fault, ...] = get_args(Fault)

_LOCK = threading.Lock()
_own: Any = [0] * len(FAULTS)
_first = 0
_children: Any = ()


def count_fault(fault: Fault) -> None:
    """Count a request that will be repeated."""
    with _LOCK:
        _own[_first + FAULTS.index(fault)] += 1


def read_faults() -> dict[Fault, int]:
    """Return the number of faults of each kind, of this process and of its children."""
    with _LOCK:
        return {
            fault: sum(_own[index :: len(FAULTS)]) + sum(_children[index :: len(FAULTS)])
            for index, fault in enumerate(FAULTS)
        }


@contextmanager
def counting_in_children(slots: Any) -> Iterator[None]:
    """Include `slots`, shared memory with a row of len(FAULTS) numbers for each child; keep their sums at the end."""
    global _children  # noqa: PLW0603 - one for each process
    with _LOCK:
        _children = slots
    try:
        yield
    finally:
        with _LOCK:
            for index in range(len(FAULTS)):
                _own[index] += sum(slots[index :: len(FAULTS)])
            _children = ()


def count_in(slots: Any, row: int) -> None:
    """Count the faults of this child in a row of the parent's shared memory."""
    global _own, _first
    with _LOCK:
        _own, _first = slots, row * len(FAULTS)
