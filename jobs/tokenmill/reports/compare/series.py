"""The steps of a run: those from which its newest state descends, with tokens and seconds for each.

A run that was interrupted repeats the steps since its last checkpoint, and its files contain them twice. The steps of
the later attempt count, and the others only as steps trained twice. A row of a log stands for all steps since the row
before (its interval): Megatron-LM logs every tenth iteration, with averages.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenmill.reports.compare.columns import (
    BATCH,
    DATA_SHARE,
    DATA_WAIT,
    GPU_RATE,
    GRAD_NORM,
    LOSS,
    MAX_STEP,
    NAN,
    RATE,
    SAMPLES,
    SECONDS,
    SKIPPED,
    TIME,
    TOKENS,
    Floats,
    Integers,
    MetricRows,
    select_rows,
)

MAX_ATTEMPTS = 1000
"""Attempts whose first row gets an exact interval; a run with more of them has no usable log."""


class RunSeries(NamedTuple):
    """The rows of a run that count, in the order of their steps; a missing number is NaN."""

    steps: Integers
    intervals: Floats
    """Steps that a row stands for."""
    tokens: Floats
    """Tokens that were consumed when the step ended, from the start of the run; all NaN if unknown."""
    loss: Floats
    seconds: Floats
    """Duration of a step."""
    data_wait: Floats
    """Seconds of a step in which the trainer waited for data."""
    rate: Floats
    """Tokens per second of all ranks."""
    gpu_rate: Floats
    """Tokens per second of one GPU, if the program logged it."""
    grad_norm: Floats
    global_batch: int | None
    """Samples of a step, if the program logged them or the number of consumed samples."""
    digests: list[str]
    attempts: int
    steps_trained_twice: int
    bad_losses: int
    """Rows of all attempts whose loss is NaN or infinite."""
    skipped_iterations: int
    gap_seconds: float
    """Time between the attempts; NaN without time stamps."""
    pause_seconds: float
    """Time outside the steps: between the attempts, and for evaluations and saves; NaN without time stamps."""
    wall_seconds: float
    """Time from the start of the first row to the last; NaN without time stamps."""
    has_derived_seconds: bool
    """Whether the seconds are differences of time stamps."""
    notes: list[str]


def make_series(rows: MetricRows, seq_length: int | None, global_batch: int | None) -> RunSeries:
    """Return the series of a run from its rows, in the order in which they were written."""
    notes: list[str] = []
    bad_losses = int(rows.is_bad_loss.sum())
    nan_iterations = _count(rows.column(NAN))
    rows, twice = _merge_equal_steps(rows)
    rows = select_rows(rows, _is_training(rows))
    attempts = np.concatenate(([0], np.cumsum(np.diff(rows.steps) < 0)))
    first_rows = np.concatenate(([0], np.flatnonzero(np.diff(attempts)) + 1))
    counts = _count_later_first_steps(rows.steps, attempts, first_rows)
    intervals = _compute_intervals(rows.steps, attempts, first_rows, counts)
    seconds, is_derived = _compute_seconds(rows, attempts, intervals)
    gap, pause, wall = _measure_gaps(rows.column(TIME), seconds * intervals, first_rows)
    twice += round(float(intervals[~counts].sum()))
    skipped = _count(rows.column(SKIPPED))
    rows, intervals, seconds = select_rows(rows, counts), intervals[counts], seconds[counts]
    tokens = _compute_tokens(rows, intervals, seq_length, global_batch, notes)
    data_wait = rows.column(DATA_WAIT)
    data_wait = np.where(np.isnan(data_wait), rows.column(DATA_SHARE) * seconds, data_wait)
    return RunSeries(
        steps=rows.steps,
        intervals=intervals,
        tokens=tokens,
        loss=rows.column(LOSS),
        seconds=seconds,
        data_wait=np.where(data_wait >= 0, data_wait, np.nan),
        rate=_compute_rate(rows, tokens, intervals, seconds),
        gpu_rate=_positive(rows.column(GPU_RATE)),
        grad_norm=rows.column(GRAD_NORM),
        global_batch=_find_batch(rows, intervals),
        digests=rows.digests,
        attempts=int(attempts[-1]) + 1 if len(attempts) else 0,
        steps_trained_twice=twice,
        bad_losses=max(bad_losses, nan_iterations),
        skipped_iterations=skipped,
        gap_seconds=gap,
        pause_seconds=pause,
        wall_seconds=wall,
        has_derived_seconds=is_derived,
        notes=notes,
    )


def _count(values: Floats) -> int:
    """Return the sum of counts, whatever numbers the file has."""
    with np.errstate(over="ignore"):
        return int(np.clip(np.nansum(values), 0, 2**62))


def _is_training(rows: MetricRows) -> NDArray[np.bool_]:
    """Return which rows are about a step of the training; rows of evaluations have none of these columns."""
    has_digest = np.array([digest != "" for digest in rows.digests] or [False] * len(rows.steps), dtype=bool)
    has_number = np.isfinite(rows.column(LOSS)) | np.isfinite(rows.column(SECONDS))
    is_training: NDArray[np.bool_] = has_number | rows.is_bad_loss | has_digest
    return is_training


def _positive(values: Floats) -> Floats:
    return np.where(values > 0, values, np.nan)


def _merge_equal_steps(rows: MetricRows) -> tuple[MetricRows, int]:
    """Join neighbouring rows of one step; return the rows, and the number of steps that have more than one loss.

    Lightning and the Trainer write the loss and the evaluation of a step in two rows.
    """
    is_first = np.concatenate(([True], np.diff(rows.steps) != 0))[: len(rows.steps)]
    if is_first.all():
        return rows, 0
    groups = np.cumsum(is_first) - 1
    count = int(groups[-1]) + 1
    has_loss = np.isfinite(rows.column(LOSS)) | rows.is_bad_loss
    losses = np.bincount(groups[has_loss], minlength=count)
    columns = {}
    for name, values in rows.columns.items():
        present = np.flatnonzero(~np.isnan(values))
        column = np.full(count, np.nan)
        column[groups[present]] = values[present]  # the last of several values stays
        columns[name] = column
    bad = np.zeros(count, dtype=bool)
    bad[groups[has_loss]] = rows.is_bad_loss[has_loss]
    columns[LOSS] = np.where(bad, np.nan, columns.get(LOSS, np.full(count, np.nan)))
    digests: list[str] = []
    if rows.digests:
        digests = [""] * count
        for group, digest in zip(groups, rows.digests, strict=True):
            digests[group] = digest or digests[group]
    merged = MetricRows(rows.steps[is_first], columns, bad, digests)
    return merged, int(np.maximum(losses - 1, 0).sum())


def _count_later_first_steps(steps: Integers, attempts: Integers, first_rows: Integers) -> NDArray[np.bool_]:
    """Return which rows count: those before the first step of every later attempt."""
    first_steps = steps[first_rows] if len(steps) else steps
    later = np.concatenate((np.minimum.accumulate(first_steps[::-1])[::-1][1:], [MAX_STEP + 1]))
    counts: NDArray[np.bool_] = steps < later[attempts[: len(steps)]]
    return counts


def _compute_intervals(steps: Integers, attempts: Integers, first_rows: Integers, counts: NDArray[np.bool_]) -> Floats:
    """Return the number of steps that each row stands for."""
    differences = np.diff(steps, prepend=steps[:1])
    inside = np.diff(attempts[: len(steps)], prepend=attempts[:1]) == 0
    inside[:1] = False
    usual = float(np.median(differences[inside])) if inside.any() else 1.0
    intervals = np.where(inside, differences, usual).astype(np.float64)
    for row in first_rows[: min(len(steps), MAX_ATTEMPTS)]:
        # An attempt continues after a step that an earlier attempt logged, or a few steps after it.
        earlier = steps[:row][steps[:row] < steps[row]]
        before = int(earlier.max()) if len(earlier) else (0 if steps[row] > 0 else -1)
        intervals[row] = min(usual, float(steps[row] - before))
    return np.maximum(intervals, 1.0)


def _compute_seconds(rows: MetricRows, attempts: Integers, intervals: Floats) -> tuple[Floats, bool]:
    """Return the seconds of a step, and whether they are differences of time stamps."""
    seconds = _positive(rows.column(SECONDS))
    if np.isfinite(seconds).any():
        return seconds, False
    times = rows.column(TIME)
    differences = np.diff(times, prepend=np.nan)
    differences[np.diff(attempts[: len(times)], prepend=-1) != 0] = np.nan
    seconds = _positive(differences / intervals)
    return seconds, bool(np.isfinite(seconds).any())


def _measure_gaps(times: Floats, row_seconds: Floats, first_rows: Integers) -> tuple[float, float, float]:
    """Return the seconds between the attempts, those outside all steps, and those from the first row to the last.

    All are unknown for a clock that starts again with each attempt.
    """
    known = np.flatnonzero(np.isfinite(times))
    if not len(known) or (np.diff(times[known]) < 0).any():
        return np.nan, np.nan, np.nan
    starts = times - np.nan_to_num(row_seconds)
    pauses = np.maximum(starts[known[1:]] - times[known[:-1]], 0.0)
    gap = float(pauses[np.isin(known[1:], first_rows)].sum())
    return gap, float(pauses.sum()), max(0.0, float(times[known].max() - starts[known[0]]))


def _compute_tokens(
    rows: MetricRows, intervals: Floats, seq_length: int | None, global_batch: int | None, notes: list[str]
) -> Floats:
    """Return the tokens that were consumed at the end of each row's step; all NaN if unknown."""
    tokens = _check_counter(rows.column(TOKENS), "tokens", notes)
    if np.isfinite(tokens).any():
        return _fill(tokens)
    samples = _check_counter(rows.column(SAMPLES), "consumed_samples", notes)
    if seq_length and not np.isfinite(samples).any():
        batches = _positive(rows.column(BATCH))
        if np.isfinite(batches).any():
            # The batch may grow during a run. Rows before the first known batch have that batch.
            batches = _fill(batches)
            skipped = float(rows.steps[0]) + (rows.steps[0] == 0) - intervals[0]
            samples = np.cumsum(batches * intervals) + max(0.0, skipped) * batches[0]
        elif global_batch:
            samples = np.asarray((rows.steps + (rows.steps[:1] == 0).any()) * float(global_batch), dtype=np.float64)
    if seq_length and np.isfinite(samples).any():
        return _fill(samples) * seq_length
    return np.full(len(rows.steps), np.nan)


def _find_batch(rows: MetricRows, intervals: Floats) -> int | None:
    """Return the usual number of samples of a step."""
    batches = _positive(rows.column(BATCH))
    if not np.isfinite(batches).any():
        batches = _positive(np.diff(rows.column(SAMPLES), prepend=np.nan) / np.diff(rows.steps, prepend=-1))
    known = batches[np.isfinite(batches)]
    return round(float(np.median(known))) if len(known) else None


def _check_counter(values: Floats, name: str, notes: list[str]) -> Floats:
    known = values[np.isfinite(values)]
    if len(known) > 1 and (np.any(np.diff(known) < 0) or known[-1] <= known[0]):
        notes.append(f"{name} does not grow with the steps and is left out: the column must count from the run's start")
        return np.full(len(values), np.nan)
    return values


def _fill(values: Floats) -> Floats:
    """Fill missing numbers from their neighbours."""
    known = np.flatnonzero(np.isfinite(values))
    if len(known) == len(values):
        return values
    return np.interp(np.arange(len(values)), known, values[known])


def _compute_rate(rows: MetricRows, tokens: Floats, intervals: Floats, seconds: Floats) -> Floats:
    """Return tokens per second: as logged, or a step's tokens by its seconds."""
    rate = _positive(rows.column(RATE))
    if np.isfinite(rate).any() or not np.isfinite(tokens).any():
        return rate
    step_tokens = np.diff(tokens, prepend=np.nan) / np.diff(rows.steps, prepend=0)
    if len(tokens):
        count = rows.steps[0] + (1 if rows.steps[0] == 0 else 0)
        step_tokens[0] = tokens[0] / max(1, count)
    return _positive(step_tokens / seconds)
