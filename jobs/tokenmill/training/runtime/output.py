"""The log of a run: the launcher's output line by line, with tokenmill's own lines between."""

import contextlib
import queue
import sys
from typing import IO

LINE = 1 << 16
"""Bytes that are kept back at most for the end of their line."""


def pump(pipe: IO[bytes] | None, batches: "queue.Queue[list[bytes] | None]") -> None:
    """Cut output into lines, at carriage returns too, which progress bars end with; a last one is ended."""
    rest = b""
    while pipe and (data := pipe.read1(LINE)):  # type: ignore[attr-defined]
        lines = (rest + data).splitlines(keepends=True)
        rest = b"" if lines[-1].endswith((b"\n", b"\r")) or len(lines[-1]) > LINE else lines.pop()
        if lines:
            batches.put(lines)
    batches.put([rest + b"\n"] if rest else [])
    batches.put(None)


def say(words: str) -> None:
    """Say something in the log."""
    pass_on(f"tokenmill: {words}\n")
    flush()


def pass_on(text: str) -> None:
    """Write text to the log."""
    with contextlib.suppress(OSError):  # whoever read it has gone, which is no reason to end
        sys.stdout.write(text)


def flush() -> None:
    """Show what was written."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
