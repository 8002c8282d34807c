"""The form of what tokenmill prints: texts of records, files and servers; quantities; tables.

Records are on shared storage, where other programs write. Their text may contain the codes of a terminal, or a line
that looks like a message of tokenmill. Machines read JSON, which this module does not format.
"""

import math
import unicodedata
from collections.abc import Collection, Sequence
from typing import NamedTuple

MAX_CELL = 60
"""Characters of a cell that a report shows."""

MAX_NAME = 100
"""Characters of a name in a message."""


def printable(text: str, length: int | None = None) -> str:
    """Return a text as one line: control characters, ends of lines and invisible characters become escapes.

    Args:
        text: the text.
        length: the maximum number of characters; three dots replace further ones.
    """
    start = text if length is None else text[: length + 1]
    if not start.isprintable():
        start = "".join(character if _is_visible(character) else ascii(character)[1:-1] for character in start)
    return start if length is None or len(start) <= length else start[: length - 3] + "..."


def printable_message(text: str) -> str:
    """Return a message whose further lines have a mark, so that they cannot look like another message."""
    return "\n| ".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode: each byte of a file's name that is not UTF-8 becomes an escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def _is_visible(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def format_count(value: float | None) -> str:
    """Format a number with four digits and a unit; a dash if it is unknown."""
    if value is None:
        return "-"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if unit != 'k' else 1e3):.4g} {unit}"
    return f"{value:,.0f}"


def format_bytes(count: float) -> str:
    """Format a number of bytes in decimal units, as vendors of storage do."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:,.2f} TB"


def format_memory(count: float) -> str:
    """Format bytes of memory in binary units."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def format_duration(seconds: float | None) -> str:
    """Format a number of seconds; a dash if it is unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    integer = int(seconds)
    if integer < 60:
        return f"{1000 * seconds:.1f} ms" if 0 < seconds < 1 else f"{seconds:.1f} s"
    if integer < 3600:
        return f"{integer // 60} min {integer % 60:02d} s"
    return f"{integer // 3600} h {integer % 3600 // 60:02d} min"


def format_share(value: float | None) -> str:
    """Format a share in per cent; a dash if it is unknown."""
    return "-" if value is None else f"{value:.2%}"


class PrintedTable(NamedTuple):
    """A table; the first column and those in `texts` have words, the others numbers.

    `columns` are the names of the columns, all empty if the first column has names of values. `bars` has a share of 1
    for each row, which an HTML page draws.
    """

    label: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: Sequence[float] | None = None
    texts: Collection[int] = ()

    @property
    def has_head(self) -> bool:
        """Whether the columns have names."""
        return any(self.columns)


def align(table: PrintedTable, max_rows: int | None = None, max_cell: int | None = None) -> list[str]:
    """Return the lines of a table; the last one is the number of further rows.

    Args:
        table: the table.
        max_rows: the number of rows to show.
        max_cell: the characters of a cell to show.
    """
    rows = [table.columns, *table.rows[:max_rows]] if table.has_head else table.rows[:max_rows]
    cells = [[printable(cell, max_cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    words = {0, *table.texts} if table.has_head else range(len(widths))
    lines = [
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    hidden = len(table.rows) - len(table.rows[:max_rows])
    return [*lines, f"and {hidden:,} more; --html and --json have them"] if hidden else lines
