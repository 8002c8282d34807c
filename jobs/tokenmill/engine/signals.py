"""The stop request of a worker: a stop signal sets a flag; during planning it also interrupts the planner.

`engine.worker` installs the handlers. The units check the flag in `Workspace.report_progress`. Before and after, and in
commands without a stage, SIGTERM and SIGUSR1 end the process: `__main__` installs those handlers first.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tokenmill.core.machine import STOP_SIGNALS
from tokenmill.errors import Stopped, StoppedEarly

STOP = threading.Event()
"""Set when this process must stop."""

_PLANNING = threading.Event()
"""Set while a plan is made. Libraries that planning uses may sleep and retry, so a signal raises an exception then."""


EARLY_STOP_VARIABLE = "TOKENMILL_EARLY_STOP_SECONDS"
"""Variable with the seconds after a start in which a stop counts as a failure; the charts set it."""


def stop_error(started: float) -> type[Stopped]:
    """Return the error of a worker that was stopped: another one soon after its start, a time of `time.time`."""
    seconds = os.environ.get(EARLY_STOP_VARIABLE, "")
    return StoppedEarly if seconds.isdecimal() and time.time() - started < int(seconds) else Stopped


def stop_requested() -> bool:
    """Return whether a stop signal arrived (`machine.STOP_SIGNALS`)."""
    return STOP.is_set()


def end_on_signals() -> None:
    """End this process on SIGTERM and SIGUSR1 with a message and the exit code of a stop.

    The kernel delivers only signals with a handler to PID 1 of a container. Without this handler, PID 1 would ignore
    SIGTERM while a command starts. The process ends without Python's cleanup, as it would without a handler.
    """
    started = time.time()

    def end(number: int, _frame: Any) -> None:
        code = stop_error(started).exit_code
        message = f"stopped by {signal.Signals(number).name}; run the same command again"
        line = f"error: {message}"
        if "--json" in sys.argv:
            line = json.dumps({"event": "error", "message": message, "exit_code": code})
        with contextlib.suppress(OSError):  # its volume is full, or its reader has gone
            os.write(2, f"{line}\n".encode())
        os._exit(code)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, end)


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Set the stop flag on a stop signal; a second signal of the same kind kills the process."""

    def stop(number: int, _frame: Any) -> None:
        STOP.set()
        signal.signal(number, signal.SIG_DFL)
        if _PLANNING.is_set():
            raise Stopped("stopped while planning; run the same command again")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let a signal raise Stopped inside the block, which does not check the stop flag."""
    _PLANNING.set()
    try:
        yield
    finally:
        _PLANNING.clear()
