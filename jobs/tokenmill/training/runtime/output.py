"""The log of a run: the launcher's output line by line, with tokenmill's own lines between."""

import contextlib
import queue
import sys
from typing import IO

MAX_LINE_BYTES = 1 << 16
"""Bytes of an incomplete line that are held back until the line ends."""


def pump_lines(pipe: IO[bytes] | None, batches: "queue.Queue[list[bytes] | None]") -> None:
    """Read the pipe to its end, and put its lines into the queue in batches; None marks the end.

    A carriage return, with which progress bars end, also ends a line. The last line gets a newline if it has none.
    """
    rest = b""
    while pipe and (data := pipe.read1(MAX_LINE_BYTES)):  # type: ignore[attr-defined]
        lines = (rest + data).splitlines(keepends=True)
        rest = b"" if lines[-1].endswith((b"\n", b"\r")) or len(lines[-1]) > MAX_LINE_BYTES else lines.pop()
        if lines:
            batches.put(lines)
    batches.put([rest + b"\n"] if rest else [])
    batches.put(None)


def log(message: str) -> None:
    """Write a message of tokenmill to the log."""
    write(f"tokenmill: {message}\n")
    flush()


def write(text: str) -> None:
    """Write text to the log without flushing it."""
    with contextlib.suppress(OSError):  # the reader of the log has gone; the run continues without it
        sys.stdout.write(text)


def flush() -> None:
    """Flush the log."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
