"""One run of a comparison, read from its directory or from one of its files.

A directory may contain the same steps in several forms, such as Megatron-LM's log and TensorBoard's events. The form
with the most losses gives the steps, and the others fill columns that it lacks, at equal steps.
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokenmill.core.redaction import redact
from tokenmill.errors import RequestError
from tokenmill.reports.compare.columns import LOSS, TIME, Floats, MetricRows, RowCollector, join_rows, select_rows
from tokenmill.reports.compare.event_file import make_rows, read_event_file
from tokenmill.reports.compare.megatron_log import read_megatron_log
from tokenmill.reports.compare.metric_file import read_csv, read_jsonl, read_trainer_state
from tokenmill.reports.compare.run_data import RunData, read_run_data
from tokenmill.reports.compare.search import list_files
from tokenmill.reports.compare.series import RunSeries, make_series
from tokenmill.reports.compare.settings import (
    GLOBAL_BATCH_NAMES,
    SEQ_LENGTH_NAMES,
    clean_settings,
    find_integer,
    read_settings_file,
)

FORMS = "a log of Megatron-LM, TensorBoard events, trainer_state.json, CSV or JSONL with a step and a loss"
_MAX_NOTES = 20


class RunInput(NamedTuple):
    """A run as requested."""

    name: str
    path: Path
    metrics: Path | None = None
    """A log, or a directory with logs or TensorBoard events, if they are not in `path`."""


class ComparedRun(NamedTuple):
    """A run as read."""

    name: str
    path: Path
    sources: list[str]
    """The files that gave the steps, as text."""
    series: RunSeries
    data: RunData | None
    settings: dict[str, str]
    seq_length: int | None
    global_batch: int | None
    world_size: int | None
    is_synthetic: bool
    notes: list[str]

    @property
    def label(self) -> str:
        """Return the name, with a mark if the data is synthetic."""
        return f"{self.name} [SYNTHETIC]" if self.is_synthetic else self.name


class _FileContent(NamedTuple):
    """The rows of a file; `is_synthetic` if the file marks them as random numbers."""

    path: Path
    rows: MetricRows
    is_synthetic: bool


class _Form(NamedTuple):
    """The rows of all files of one form."""

    name: str
    paths: list[Path]
    rows: MetricRows
    is_synthetic: bool


def parse_inputs(arguments: list[str]) -> list[RunInput]:
    """Return the runs of a command line, each PATH or NAME=PATH, with names that differ.

    Raises:
        RequestError: two runs have the same name or the same path.
    """
    inputs: list[RunInput] = []
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not equals or Path(argument).exists() or "/" in name:
            resolved = Path(argument).resolve()
            inputs.append(RunInput(resolved.name or argument, Path(argument)))
        elif not name.strip() or not path:
            raise RequestError(f"invalid run {argument!r}: specify NAME=PATH or PATH")
        else:
            inputs.append(RunInput(name.strip()[:60], Path(path)))
    duplicates = {run.name for run in inputs if sum(run.name == other.name for other in inputs) > 1}
    named = [
        RunInput("/".join(run.path.resolve().parts[-2:]), run.path)
        if run.name in duplicates and "=" not in argument
        else run
        for run, argument in zip(inputs, arguments, strict=True)
    ]
    for number, run in enumerate(named):
        for other in named[:number]:
            if run.name == other.name:
                raise RequestError(f"two runs have the name {run.name!r}: set other names with NAME=PATH")
    return named


def read_run(request: RunInput, seq_length: int | None = None) -> ComparedRun:
    """Read a run. `seq_length` (tokens of a sample) applies if the run's files do not contain it.

    Raises:
        RequestError: the run has no readable steps, or contains several runs.
    """
    source = request.metrics or request.path
    files = list_files(source)
    if request.metrics:
        files = files.with_records(list_files(request.path))
    settings: dict[str, str] = {}
    notes = list(files.notes)
    readers = {
        "JSONL": (files.jsonl, _read_jsonl),
        "Megatron-LM's log": (files.logs, _read_log),
        "TensorBoard events": (files.events, _read_events),
        "CSV": (files.csv, _read_csv),
        "trainer_state.json": (files.trainer_states, _read_trainer_state),
    }
    forms: list[_Form] = []
    for name, (paths, read) in readers.items():
        contents = [content for path in paths if (content := _try_to_read(read, path, settings, notes))]
        if contents:
            forms.append(_order_files(source, name, contents))
    if not forms:
        looked = sum(map(len, (files.logs, files.events, files.jsonl, files.csv, files.trainer_states)))
        detail = f" ({'; '.join(notes[:3])})" if notes else ""
        raise RequestError(
            f"{source} has no steps with a loss in the {looked:,} files of metrics that were looked at{detail}: "
            f"specify a directory or file with {FORMS}"
        )
    for path in files.settings:
        if note := read_settings_file(path, settings):
            notes.append(note)
    data = read_run_data(files, settings, notes)
    known_seq_length = data.identity.seq_length if data else find_integer(settings, SEQ_LENGTH_NAMES)
    batch = data.global_batch if data and data.global_batch else find_integer(settings, GLOBAL_BATCH_NAMES)
    series = make_series(_merge_forms(forms), known_seq_length or seq_length, batch)
    is_synthetic = any(form.is_synthetic for form in forms) or settings.get("mock_data") == "True"
    notes += series.notes
    if not np.isfinite(series.tokens).any():
        missing = "sequence length" if not (known_seq_length or seq_length) else "global batch"
        remedy = "set --seq-length" if missing == "sequence length" else "write consumed_samples or tokens in each row"
        notes.append(f"the tokens of the steps are unknown, because the {missing} is: {remedy}")
    return ComparedRun(
        name=redact(request.name),
        path=request.path,
        sources=[f"{form.name}: {_describe_paths(form.paths)}" for form in forms],
        series=series,
        data=data,
        settings=clean_settings(settings),
        seq_length=known_seq_length or seq_length,
        global_batch=batch or series.global_batch,
        world_size=find_integer(settings, ("world_size",)),
        is_synthetic=is_synthetic or (data is not None and data.identity.synthetic),
        notes=[redact(note) for note in notes[:_MAX_NOTES]],
    )


_Reader = Callable[[Path, RowCollector, dict[str, str]], list[str]]


def _read_jsonl(path: Path, rows: RowCollector, settings: dict[str, str]) -> list[str]:
    return read_jsonl(path, rows)


def _read_csv(path: Path, rows: RowCollector, settings: dict[str, str]) -> list[str]:
    return read_csv(path, rows)


def _read_log(path: Path, rows: RowCollector, settings: dict[str, str]) -> list[str]:
    return read_megatron_log(path, rows, settings)


def _read_trainer_state(path: Path, rows: RowCollector, settings: dict[str, str]) -> list[str]:
    return read_trainer_state(path, rows, settings)


def _read_events(path: Path, rows: RowCollector, settings: dict[str, str]) -> list[str]:
    events = read_event_file(path)
    for name, text in events.texts.items():
        settings.setdefault(name, text)
    if (complete := make_rows(events)) is not None:
        rows.add_complete(complete)
    return [events.note] if events.note else []


def _try_to_read(read: _Reader, path: Path, settings: dict[str, str], notes: list[str]) -> _FileContent | None:
    """Return the content of a file; None if it has no loss or cannot be read, which a note explains."""
    collector = RowCollector()
    try:
        notes += read(path, collector, settings)
    except OSError as error:
        notes.append(f"cannot read {path}: {error.strerror}")
        return None
    rows = collector.finish()
    return _FileContent(path, rows, collector.is_synthetic) if rows.count_losses() else None


def _order_files(run: Path, name: str, contents: list[_FileContent]) -> _Form:
    """Join the files of one form in the order of time; lines that a second file repeats are left out.

    Raises:
        RequestError: the files belong to several runs.
    """
    first_times = [_first(content.rows.column(TIME)) for content in contents]
    if np.isfinite(first_times).all():
        contents = [contents[index] for index in np.argsort(first_times, kind="stable")]
    contents = _drop_copies(contents)
    for earlier, later in itertools.pairwise(contents):
        if _are_different_runs(earlier, later):
            raise RequestError(
                f"{run} contains several runs ({earlier.path} and {later.path}): specify the file or the directory of "
                "one run"
            )
    return _Form(
        name,
        [content.path for content in contents],
        join_rows([content.rows for content in contents]),
        any(content.is_synthetic for content in contents),
    )


def _first(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known[0]) if len(known) else math.nan


def _drop_copies(contents: list[_FileContent]) -> list[_FileContent]:
    """Leave out rows with the step, time and loss of a row of an earlier file: `tee` wrote them twice."""
    if len(contents) == 1:
        return contents
    sizes = [len(content.rows.steps) for content in contents]
    joined = join_rows([content.rows for content in contents])
    keys = np.stack([joined.steps.astype(np.float64), joined.column(TIME), joined.column(LOSS)], axis=1)
    _, first = np.unique(np.nan_to_num(keys, nan=-1.0), axis=0, return_index=True)
    keep = np.zeros(len(joined.steps), dtype=bool)
    keep[first] = True
    keep |= np.isnan(joined.column(TIME))  # without a time, equal rows may be those of two attempts
    kept = np.split(keep, np.cumsum(sizes)[:-1])
    parts = [
        content._replace(rows=select_rows(content.rows, selection))
        for content, selection in zip(contents, kept, strict=True)
    ]
    return [part for part in parts if part.rows.count_losses()]


def _are_different_runs(earlier: _FileContent, later: _FileContent) -> bool:
    """Return whether two files, in the order of time, cannot be attempts of one run."""
    times, later_times = (content.rows.column(TIME) for content in (earlier, later))
    times, later_times = times[np.isfinite(times)], later_times[np.isfinite(later_times)]
    starts_again = later.rows.steps[0] <= earlier.rows.steps[0]
    if starts_again and (earlier.path.parent != later.path.parent or not len(times) or not len(later_times)):
        return True
    if len(times) < 3 or len(later_times) < 3:
        return False
    overlap = float(times.max() - later_times.min())
    return overlap > 0.5 * float(min(np.ptp(times), np.ptp(later_times)))


def _merge_forms(forms: list[_Form]) -> MetricRows:
    """Return the rows of the form with the most losses, with the columns that only other forms have."""
    forms = sorted(forms, key=lambda form: -form.rows.count_losses())
    rows = forms[0].rows
    for form in forms[1:]:
        order = np.argsort(form.rows.steps, kind="stable")
        steps = form.rows.steps[order]
        places = np.maximum(np.searchsorted(steps, rows.steps, side="right") - 1, 0)
        is_equal = steps[places] == rows.steps
        for name, values in form.rows.columns.items():
            if not np.isfinite(rows.column(name)).any():
                rows.columns[name] = np.where(is_equal, values[order][places], np.nan)
    return rows


def _describe_paths(paths: list[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
