"""Count the records of line-based text at the speed of the disk.

extract and concatenate count records with this module, without parsing them. For every file, the count is equal to the
count of `records.readers`.
"""

import re

BOM = b"\xef\xbb\xbf"

CONTENT = re.compile(rb"\S")  # for bytes, \S is each byte except space, \t, \r, \n, \v and \f
_NEWLINE = 10
_STEP_BYTES = 256 << 10  # bytes that are scanned several times while they are in the cache of the CPU core
_SHORT_LINE_BYTES = 256  # average line length below which a scan of each line is slower than a scan of each byte
_NUMPY_MIN_LINES = 200_000  # short lines that need half the time of the import of numpy
_BLANK_LINE = re.compile(rb"[ \t\r\v\f]*\n")


class RecordCounter:
    """A counter of the non-blank and blank lines of one file, which the caller passes in blocks of any size.

    A line is blank if it contains only space, tab, carriage return, vertical tab or form feed. A byte-order mark alone
    at the start of the file is blank too. `ends_with_newline` is also true for a file without any byte, because the
    next byte starts a line.
    """

    def __init__(self) -> None:
        self.records = 0
        self.blank = 0
        self.ends_with_newline = True
        self._head: bytes | None = b""  # the file's first bytes, while they can still become a byte-order mark
        self._short = 0  # consecutive short lines
        self._open_content = False  # the unfinished line at the end of the last block has content

    def update(self, block: bytes | bytearray, size: int | None = None) -> None:
        """Count the lines of the file's next block, or of its first `size` bytes."""
        end = len(block) if size is None else size
        start = 0
        if self._head is not None:
            head = self._head + block[: min(end, len(BOM))]
            if len(head) < len(BOM) and BOM.startswith(head):
                self._head = head
                return
            if head.startswith(BOM):
                start = len(BOM) - len(self._head)
            else:
                self._open_content = len(self._head) > 0
            self._head = None
        while start < end:
            stop = min(end, start + _STEP_BYTES)
            self._count(block, start, stop)
            start = stop

    def _count(self, block: bytes | bytearray, start: int, end: int) -> None:
        self.ends_with_newline = block[end - 1] == _NEWLINE
        first = block.find(b"\n", start, end)
        if first < 0:
            self._open_content = self._open_content or CONTENT.search(block, start, end) is not None
            return
        content = self._open_content or CONTENT.search(block, start, first) is not None
        lines, blank = (_count_short_lines if self._short > _NUMPY_MIN_LINES else _count_long_lines)(
            block, first + 1, end
        )
        self._short = self._short + lines if lines > (end - start) // _SHORT_LINE_BYTES else 0
        self.records += lines - blank + content
        self.blank += blank + (not content)
        self._open_content = CONTENT.search(block, block.rfind(b"\n", start, end) + 1, end) is not None

    def finish(self) -> int:
        """Count the last line if it has no newline, and return the number of records."""
        if self._head is not None:
            self._open_content = CONTENT.search(self._head) is not None
            self.ends_with_newline = not self._head
            self._head = None
        if not self.ends_with_newline:
            self.records += self._open_content
            self.blank += not self._open_content
            self._open_content = False
        return self.records


def _count_long_lines(block: bytes | bytearray, start: int, stop: int) -> tuple[int, int]:
    """Return (lines, blank lines) that start at `start` or later and end before `stop`; scan line by line."""
    lines = blank = 0
    find = block.find
    while (end := find(b"\n", start, stop)) >= 0:
        lines += 1
        if block[start] <= 32 and _BLANK_LINE.match(block, start, stop):
            blank += 1
        start = end + 1
    return lines, blank


def _count_short_lines(block: bytes | bytearray, start: int, stop: int) -> tuple[int, int]:
    """Return the same as `_count_long_lines`, at a speed that does not depend on the length of the lines."""
    import numpy as np

    data = np.frombuffer(block, np.uint8, stop - start + 1, start - 1)  # its first byte is a newline
    newline = data == _NEWLINE
    suspect = data[1:] <= 32  # a line with another first byte is not blank
    suspect &= newline[:-1]
    blank = 0
    if suspect.any():
        blank = int(np.count_nonzero(suspect & newline[1:]))
        starts = np.flatnonzero(suspect & ~newline[1:]) + start
        blank += sum(_BLANK_LINE.match(block, index, stop) is not None for index in starts.tolist())
    return int(np.count_nonzero(newline)) - 1, blank
