"""The log of a run: the launcher's output line by line, with tokenmill's own lines between.

During a run a thread writes the log, because a reader that reads nothing blocks every write to it: signals must not
wait for the reader. An error of a write is ignored, because a run continues without its log.
"""

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Iterator
from typing import IO

from tokenmill.errors import TokenmillError

MAX_LINE_BYTES = 1 << 16
"""Bytes of an incomplete line that are held back until the line ends."""
MAX_PENDING_BATCHES = 64
"""Batches of lines that may wait for the reader of the log before the run waits for it."""
MAX_BATCHES_AT_END = 1024
"""Batches that may wait once a run ends, because it then no longer waits for the reader; further batches are lost."""
BLOCKED_SECONDS = 5.0
"""Seconds after which a reader that has read nothing no longer delays the end of a run."""


def pump_lines(pipe: IO[bytes] | None, batches: "queue.Queue[list[bytes] | None]") -> None:
    """Read the pipe to its end, and put its lines into the queue in batches; None marks the end.

    All updates of a progress bar that were read together, which end with carriage returns, are one line. The last line
    gets a newline if it has none.
    """
    rest = b""
    while pipe and (data := pipe.read1(MAX_LINE_BYTES)):  # type: ignore[attr-defined]
        *lines, rest = (rest + data).split(b"\n")
        lines = [line + b"\n" for line in lines]
        updates = rest.rfind(b"\r", 0, -1) + 1  # a carriage return at the end may belong to a newline
        if len(rest) > MAX_LINE_BYTES:
            updates = len(rest)
        if updates:
            lines.append(rest[:updates])
            rest = rest[updates:]
        if lines:
            batches.put(lines)
    batches.put([rest + b"\n"] if rest else [])
    batches.put(None)


class _LogThread:
    """Writes texts to standard output in the background."""

    def __init__(self) -> None:
        """Start the thread."""
        self.texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._written = 0
        self._ended = threading.Event()
        threading.Thread(target=self._write_texts, daemon=True).start()

    def end(self) -> bool:
        """Wait until all texts are written, as long as the reader reads; return whether they are."""
        self.texts.put(None)
        before = -1
        while not self._ended.wait(BLOCKED_SECONDS):
            if self._written == before:
                return False
            before = self._written
        return True

    def _write_texts(self) -> None:
        while (text := self.texts.get()) is not None:
            _write(text)
            self._written += 1
        self._ended.set()


_thread: _LogThread | None = None


@contextlib.contextmanager
def writing_in_background() -> Iterator[None]:
    """Let a thread write the log during the block; a blocked log does not change how the block ends.

    If the reader of the log is blocked at the end, the process gets a few more seconds, because standard error may have
    another reader, and then ends with the exit code of the block's error.
    """
    global _thread  # noqa: PLW0603 - a process has one log
    thread = _thread = _LogThread()
    code = 1
    try:
        yield
        code = 0
    except TokenmillError as problem:
        code = problem.exit_code
        raise
    finally:
        _thread = None
        if not thread.end():
            timer = threading.Timer(BLOCKED_SECONDS, os._exit, [code])
            timer.daemon = True
            timer.start()


def is_blocked() -> bool:
    """Return whether so much of the log waits for its reader that the run must wait, too."""
    return _thread is not None and _thread.texts.qsize() > MAX_PENDING_BATCHES


def log(message: str) -> None:
    """Write a message of tokenmill to the log."""
    write(f"tokenmill: {message}\n")


def write(text: str) -> None:
    """Write text to the log."""
    if _thread is None:
        _write(text)
    elif _thread.texts.qsize() < MAX_BATCHES_AT_END:
        _thread.texts.put(text)


def _write(text: str) -> None:
    # The reader of the log has gone, its volume is full, or the descriptor is closed: the run continues without it.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(text)
        sys.stdout.flush()
