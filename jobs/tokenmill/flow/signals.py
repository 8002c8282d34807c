"""How a worker is told to stop: SIGTERM and Ctrl-C set a flag, and interrupt a planner."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from tokenmill.errors import Stopped

STOP = threading.Event()
"""Set when this process is to stop."""

_PLANNING = threading.Event()
"""Set while a plan is made, by libraries that sleep and retry as they like: then a signal interrupts them."""


def stop_requested() -> bool:
    """Tell whether SIGTERM or Ctrl-C arrived."""
    return STOP.is_set()


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Set the stop flag on SIGTERM and Ctrl-C instead of dying; a second Ctrl-C kills as usual."""

    def stop(number: int, _frame: Any) -> None:
        STOP.set()
        signal.signal(number, signal.SIG_DFL)
        if _PLANNING.is_set():
            raise Stopped("stopped while planning; run the same command again")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let a signal raise Stopped in what is done here, which looks at no flag."""
    _PLANNING.set()
    try:
        yield
    finally:
        _PLANNING.clear()
