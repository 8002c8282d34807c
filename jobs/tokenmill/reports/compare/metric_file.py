"""Rows of JSONL and CSV files and of trainer_state.json, with the names in `columns.ALIASES`.

A JSONL file contains one object for each step; tokenmill's own examples write

    {"step": 1, "consumed_samples": 8, "tokens": 16384, "loss": 9.1, "seconds": 0.2, "data_wait_seconds": 0.001,
     "digest": "5f...", "time": 1764064800.0}

A CSV file has a header; an empty cell is a missing number (Lightning's CSVLogger writes such files). The Hugging Face
Trainer's trainer_state.json has the rows in log_history.
"""

import csv
import io
import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import orjson

from tokenmill.reports.compare.columns import (
    ALIASES,
    DATA_SHARE,
    DIGEST,
    LOSS,
    MAX_ROWS,
    MAX_STEP,
    STEP_NAMES,
    SYNTHETIC,
    ColumnWriter,
    RowCollector,
    parse_number,
    parse_step,
)
from tokenmill.reports.compare.search import read_chunks, read_lines, read_small

MAX_TRAINER_STATE_BYTES = 256 << 20
_MAX_DIGEST = 128
_SUMMARY_FIELDS = ("train_samples_per_second", "total_flos")
"""Fields of the Trainer's last row, whose train_loss is the mean of the complete run."""
_MAX_FIELDS = 10_000
_BATCH_LINES = 2000
"""Lines that are read together; one odd line makes the reader read as many one by one."""


class _Field(NamedTuple):
    """A field that fills a column, after a multiplication by the factor."""

    name: str
    column: str
    factor: float
    writer: ColumnWriter


class _Plan:
    """Which fields of a row are read: the same for all rows with the same names."""

    def __init__(self, names: Iterable[str], rows: RowCollector) -> None:
        known = list(names)
        self.step = next((name for name in STEP_NAMES if name in known), None)
        self.fields: list[_Field] = []
        for name in known:
            column, factor = ALIASES.get(name, ("", 1.0))
            if column and column not in (field.column for field in self.fields):
                self.fields.append(_Field(name, column, factor, rows.open_column(column)))
        if any(name in known for name in _SUMMARY_FIELDS):
            self.fields = []
        self.has_digest, self.has_mark = DIGEST in known, SYNTHETIC in known
        self.is_plain = (
            bool(self.fields) and not self.has_mark and DATA_SHARE not in (field[1] for field in self.fields)
        )

    @property
    def has_loss(self) -> bool:
        return any(field.column == LOSS for field in self.fields)


def read_jsonl(path: Path, rows: RowCollector) -> list[str]:
    """Add the objects of a JSONL file that have a step to the rows; return notes.

    A file whose first objects have no step is not a file of metrics, and is left out.

    Raises:
        OSError: the file cannot be read.
    """
    reader = _JsonlReader(path, rows)
    lines = read_lines(path)
    while batch := list(itertools.islice(lines, _BATCH_LINES)):
        if not reader.read_equal_lines(batch):
            for number, line, is_complete in batch:
                reader.read_line(number, line, is_complete)
        if reader.is_other_content:
            return []
        if len(rows) >= MAX_ROWS:
            reader.notes.add(f"only the first {MAX_ROWS:,} rows are read")
            break
    if reader.bad and len(rows):
        first = reader.bad[0]
        reader.notes.add(
            f"{len(reader.bad):,} lines are not JSON objects and are left out (the first is line {first:,})"
        )
    return reader.notes.texts


class _JsonlReader:
    """Reads the lines of a JSONL file: many at a time if they have the same names, else one by one."""

    def __init__(self, path: Path, rows: RowCollector) -> None:
        self.notes = _Notes(path)
        self.bad: list[int] = []
        """Numbers of the lines that are not JSON objects."""
        self.is_other_content = False
        """Whether the file has text, or is not JSON at all."""
        self._rows = rows
        self._plans: dict[tuple[str, ...], _Plan] = {}

    def _find_plan(self, names: tuple[str, ...]) -> _Plan:
        if names not in self._plans:
            if len(self._plans) > 1000:  # hostile: each line has other names
                self._plans.clear()
            self._plans[names] = _Plan(names, self._rows)
        return self._plans[names]

    def read_equal_lines(self, batch: list[tuple[int, bytes, bool]]) -> bool:
        """Add lines with the same names and plain numbers, and return True; else add nothing.

        It gives the same rows as `read_line`, in a quarter of its time.
        """
        try:
            values = orjson.loads(b"[%b]" % b",".join(line for _, line, _ in batch))
        except orjson.JSONDecodeError:
            return False
        if len(values) != len(batch) or not all(type(value) is dict for value in values):
            return False
        names = tuple(values[0])
        plan = self._find_plan(names)
        if plan.step is None or not plan.is_plain or not all(tuple(value) == names for value in values):
            return False
        columns = dict(zip(names, zip(*map(dict.values, values), strict=True), strict=True))
        steps = columns[plan.step]
        if set(map(type, steps)) != {int} or min(steps) < 0 or max(steps) > MAX_STEP:
            return False
        if not all(set(map(type, columns[field.name])) <= {int, float} for field in plan.fields):
            return False
        numbers = range(len(self._rows), len(self._rows) + len(steps))
        self._rows.steps.extend(steps)
        for name, _, factor, writer in plan.fields:
            writer.rows.extend(numbers)
            writer.values.extend(columns[name] if factor == 1 else [value * factor for value in columns[name]])
        for number, digest in zip(numbers, columns.get(DIGEST, ()), strict=False):
            if isinstance(digest, str) and digest:
                self._rows.digests[number] = digest[:_MAX_DIGEST]
        return True

    def read_line(self, number: int, line: bytes, is_complete: bool) -> None:
        """Add a line of any content."""
        if not line.strip() or self.is_other_content:
            return
        value = parse_json(line)
        if not isinstance(value, dict) or len(value) > _MAX_FIELDS:
            if is_complete:
                self.bad.append(number)
            else:
                self.notes.add("the last line is incomplete and left out; the run may still be writing")
            self.is_other_content = len(self._rows) == 0 and len(self.bad) > 100
            return
        plan = self._find_plan(tuple(value))
        if plan.step is None and len(self._rows) == 0:
            has_text = bool(value.get("type")) or "text" in value or "messages" in value
            self.is_other_content = has_text or number > 1000
            return
        _add_row(value, plan, self._rows, self.notes)


def _add_row(value: dict[str, object], plan: _Plan, rows: RowCollector, notes: "_Notes") -> None:
    if plan.step is None or not plan.fields:
        return
    step = parse_step(value[plan.step])
    if step is None:
        notes.add(f"a row has the step {str(value[plan.step])[:40]!r}, which is not an integer, and is left out")
        return
    row = len(rows.steps)
    rows.steps.append(step)
    for name, column, factor, writer in plan.fields:
        content = value[name]
        if type(content) is float and column != DATA_SHARE:
            writer.rows.append(row)
            writer.values.append(content * factor)
            continue
        if content is None:
            if column == LOSS:  # orjson, and JavaScript, write null for NaN
                rows.set(LOSS, math.nan)
            continue
        number = parse_number(content)
        if number is None:
            continue
        if column == DATA_SHARE and not 0 <= number * factor <= 1:
            notes.add(
                f"{name} is {number:g}, which is not a share of the step between 0 and 1, and is left out; "
                "data_wait_seconds has seconds"
            )
            continue
        writer.rows.append(row)
        writer.values.append(number * factor)
    if plan.has_digest and isinstance(digest := value[DIGEST], str) and digest:
        rows.digests[row] = digest[:_MAX_DIGEST]
    if plan.has_mark and value.get(SYNTHETIC) in (True, 1, "true", "True", "1"):
        rows.is_synthetic = True


def read_csv(path: Path, rows: RowCollector) -> list[str]:
    """Add the rows of a CSV file with a step and a loss to the rows; return notes.

    A file without these columns is left out.

    Raises:
        OSError: the file cannot be read.
    """
    notes = _Notes(path)
    header: list[str] | None = None
    indices: dict[str, int] = {}
    plan = _Plan((), rows)
    for chunk in read_chunks(path):
        if header is None and b"," not in chunk[:100_000]:
            return []
        text = chunk.decode(errors="replace").replace("\0", "")
        try:
            for cells in csv.reader(io.StringIO(text, newline="")):
                if header is None:
                    header = [name.strip().removeprefix("\ufeff") for name in cells]
                    plan = _Plan(dict.fromkeys(header), rows)
                    if plan.step is None or not plan.has_loss or len(header) > _MAX_FIELDS:
                        return []
                    indices = {name: header.index(name) for name in (*(field.name for field in plan.fields), plan.step)}
                    indices |= {name: header.index(name) for name in (DIGEST, SYNTHETIC) if name in header}
                    continue
                row: dict[str, object] = {
                    name: cells[index] if index < len(cells) else "" for name, index in indices.items()
                }
                if row[plan.step or ""] == "":
                    continue
                if len(cells) < len(header):
                    notes.add("a row has fewer cells than the header; the run may still be writing")
                _add_row(row, plan, rows, notes)
                if len(rows) >= MAX_ROWS:
                    notes.add(f"only the first {MAX_ROWS:,} rows are read")
                    return notes.texts
        except csv.Error as error:
            notes.add(f"the file is not valid CSV after {len(rows):,} rows ({error}); the rows before are used")
            return notes.texts
    return notes.texts


def read_trainer_state(path: Path, rows: RowCollector, settings: dict[str, str]) -> list[str]:
    """Add the log_history of a trainer_state.json to the rows, and its other numbers to the settings; return notes.

    Raises:
        OSError: the file cannot be read.
    """
    state = parse_json(read_small(path, MAX_TRAINER_STATE_BYTES))
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        return [f"{path} is not valid JSON with a log_history; it is left out"]
    notes = _Notes(path)
    for entry in state["log_history"][:MAX_ROWS]:
        if isinstance(entry, dict):
            _add_row(entry, _Plan(entry, rows), rows, notes)
    for name in ("train_batch_size", "max_steps", "num_train_epochs", "logging_steps", "save_steps", "eval_steps"):
        if isinstance(state.get(name), int | float):
            settings[name] = str(state[name])
    return notes.texts


def parse_json(text: bytes) -> object:
    """Return a JSON value, also with NaN and Infinity as Python writes them; None if it is not valid."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    if not (b"NaN" in text or b"Infinity" in text):
        return None
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


class _Notes:
    """Notes about one file, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        text = f"{self._path}: {text}"
        if len(self.texts) < 5 and text not in self.texts:
            self.texts.append(text)
