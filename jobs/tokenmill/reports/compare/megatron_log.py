"""Iterations and arguments in the log of Megatron-LM, or of `tokenmill train`, which contains Megatron-LM's output.

The lines are those of training_log in megatron/training/training.py:

    [2026-11-25 10:00:00] iteration       10/    1000 | consumed samples:          160 | elapsed time per iteration
    (ms): 1147.6 | learning rate: 1.0E-04 | global batch size:    16 | lm loss: 9.1E+00 | ... |

Each contains averages over the iterations since the previous line. With --timing-log-level 2 the durations of the
timers follow, of which batch-generator is the wait for data. Megatron-LM prints its arguments once, at the start.
"""

import re
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tokenmill.reports.compare.columns import ALIASES, DATA_WAIT, MAX_ROWS, TIME, ColumnWriter, RowCollector
from tokenmill.reports.compare.search import read_chunks
from tokenmill.train.runtime.iteration_line import ITERATION

_LINE = re.compile(ITERATION.pattern.encode() + rb"([^\r\n]{0,4000})")
_TIMER = re.compile(rb"^[^\n]{0,40}\bbatch-generator \.+: \(\s*[\d.]{1,20},\s*([\d.]{1,20})\)", re.MULTILINE)
_ARGUMENTS, _END_OF_ARGUMENTS = b"-------- arguments --------", b"-------- end of arguments --------"
_ARGUMENT = re.compile(rb"^[^\n]{0,40}?  ([A-Za-z_]\w{0,100}) \.* ?([^\r\n]{0,2000})", re.MULTILINE)
_MAX_ARGUMENTS_BYTES = 400_000
_TIME_BYTES = len("[2026-11-25 10:00:00]")
_FIELDS = {name.encode(): column for name, column in ALIASES.items()}


class _LogField(NamedTuple):
    """A field of a line: its place, the text in front of its number, the factor and the column that it fills."""

    place: int
    head: bytes
    factor: float
    writer: ColumnWriter


def read_megatron_log(path: Path, rows: RowCollector, settings: dict[str, str]) -> list[str]:
    """Add the iterations of a log to the rows, and the last arguments that it contains to the settings; return notes.

    Raises:
        OSError: the file cannot be read.
    """
    rest = b""
    for chunk in read_chunks(path):
        _read_iterations(chunk, rows)
        rest = _read_arguments(rest + chunk, settings)
        if len(rows) >= MAX_ROWS:
            return [f"{path}: only the first {MAX_ROWS:,} iterations are read"]
    return []


def _read_arguments(text: bytes, settings: dict[str, str]) -> bytes:
    """Read each complete list of arguments; return the start of a list that continues in the next piece."""
    position = 0
    while (start := text.find(_ARGUMENTS, position)) >= 0:
        end = text.find(_END_OF_ARGUMENTS, start)
        if end < 0:
            return text[start : start + _MAX_ARGUMENTS_BYTES]
        for name, value in _ARGUMENT.findall(text, start, min(end, start + _MAX_ARGUMENTS_BYTES)):
            settings[name.decode()] = value.decode(errors="replace").strip()
        position = end
    return b""


def _read_iterations(text: bytes, rows: RowCollector) -> None:
    timers = b" batch-generator " in text
    previous = length = 0
    fields: list[_LogField] = []
    for match in _LINE.finditer(text):
        if timers and len(rows):
            _read_timer(text, previous, match.start(), rows)
        previous = match.end()
        rows.add_row(int(match[1]))
        if (seconds := _parse_time(text[max(0, match.start() - _TIME_BYTES) : match.start()])) is not None:
            rows.set(TIME, seconds)
        parts = match[2].split(b"|")
        row = len(rows.steps) - 1
        if len(parts) != length or not all(parts[place].startswith(head) for place, head, _, _ in fields):
            fields, length = _locate_fields(parts, rows), len(parts)
        for place, head, factor, writer in fields:
            try:
                number = float(parts[place][len(head) :])
            except ValueError:
                continue
            writer.rows.append(row)
            writer.values.append(number * factor)
    if timers and len(rows):
        _read_timer(text, previous, len(text), rows)


def _locate_fields(parts: list[bytes], rows: RowCollector) -> list[_LogField]:
    """Return the fields of a line that fill a column; nearly all lines of a log have the same fields."""
    fields = []
    for place, part in enumerate(parts):
        name, colon, _ = part.partition(b":")
        if colon and (column := _FIELDS.get(name.strip())):
            fields.append(_LogField(place, name + colon, column[1], rows.open_column(column[0])))
    return fields


def _read_timer(text: bytes, start: int, end: int, rows: RowCollector) -> None:
    """Set the wait for data of the last row from the timers between two iterations."""
    if match := _TIMER.search(text, start, end):
        try:
            rows.set(DATA_WAIT, float(match[1]) / 1000)
        except ValueError:
            return


@lru_cache(maxsize=4)
def _parse_time(text: bytes) -> float | None:
    """Return seconds from a time stamp in brackets, whose time zone is unknown; UTC, so that differences are exact."""
    if not text.startswith(b"[") or not text.endswith(b"]"):
        return None
    try:
        return datetime.fromisoformat(text[1:-1].decode("ascii")).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
