"""The numbers of a comparison: for each run, at equal tokens, and the settings that differ.

Definitions, which docs/compare.md repeats:

    smoothed loss   mean of the losses of the last 2 % of the longest run's tokens; near the start, where the loss
                    falls fast, of the last 10 % of the tokens so far
    warm-up         the first 10 % of the rows, at least 5, which throughput and stalls leave out
    stall           a row whose step took more than 3 times the median; the time above the median is lost
    data wait       seconds of waiting for data by seconds of the steps, of all rows after the warm-up
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from tokenmill.core.json_lines import JsonEvent
from tokenmill.errors import RequestError
from tokenmill.reports.compare.columns import Floats
from tokenmill.reports.compare.run import ComparedRun, RunInput, read_run
from tokenmill.reports.compare.verdict import Comparability, judge, summarize_verdicts

MAX_RUNS = 24
SMOOTHING = 0.02
"""Share of the longest run's tokens that a smoothed loss is the mean of."""
SMOOTHING_AT_START = 0.1
"""Largest share of the tokens so far that it is the mean of."""
WARM_UP_SHARE, WARM_UP_ROWS = 0.1, 5
STALL_FACTOR = 3.0
SPIKE_FACTOR = 1.2
"""A loss above this multiple of the smoothed loss is a spike; `tokenmill inspect --iteration` shows its text."""
_MARKS = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of the common tokens at which the losses are compared."""

Axis = Literal["tokens", "steps"]


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one run; None where the run's files do not contain them."""

    name: str
    path: str
    synthetic: bool
    sources: list[str]
    fingerprint: str
    sequence_length: int | None
    global_batch: int | None
    steps: int
    """The last step."""
    tokens: float | None
    restarts: int
    """Restarts that repeated steps; one that continued after the last logged step is not visible."""
    steps_trained_twice: int
    bad_losses: int
    skipped_iterations: int
    last_loss: float | None
    """Smoothed."""
    min_loss: float | None
    """Smoothed."""
    spike_step: int | None
    """The step with the largest loss relative to the smoothed one, if it is above SPIKE_FACTOR times that."""
    common: float | None
    """Tokens (or steps) up to which both this run and the baseline have losses."""
    loss_at_common: float | None
    """Smoothed, interpolated between the neighbouring rows."""
    difference: float | None
    """Share by which loss_at_common is above that of the baseline."""
    tokens_per_second: float | None
    """Median of the rows after the warm-up."""
    tokens_per_second_per_gpu: float | None
    rate_ratio: float | None
    """Tokens per second by those of the baseline."""
    step_seconds: float | None
    """Median after the warm-up."""
    stalls: int | None
    stall_seconds: float | None
    gap_seconds: float | None
    """Time between the attempts that repeated steps."""
    pause_seconds: float | None
    """Time outside the steps: restarts, evaluations, saves."""
    data_wait: float | None
    """Share of the steps' time."""
    max_grad_norm: float | None
    step_time: float | None
    """Seconds of all steps that count."""
    wall_time: float | None
    """Seconds from the first step to the last."""
    notes: list[str]


class LossMark(msgspec.Struct, frozen=True):
    """The smoothed losses of all runs at equal tokens, and their differences from the baseline as shares."""

    position: float
    losses: list[float | None]
    differences: list[float | None]


class SettingDifference(msgspec.Struct, frozen=True):
    """A setting that differs; a run without it has None."""

    name: str
    values: list[str | None]


class ComparisonReport(JsonEvent, frozen=True, tag="result"):
    """The comparison of several runs with the first, the baseline."""

    headline: str
    axis: Axis
    """The axis on which losses are compared; steps if the tokens of a run are unknown."""
    smoothing: float
    """Tokens (or steps) that a smoothed loss is the mean of."""
    verdicts: list[Comparability]
    runs: list[RunSummary]
    marks: list[LossMark]
    settings: list[SettingDifference]
    other_settings: int
    """Settings that only some of the runs have."""
    html: str | None = None
    """The HTML file with the report."""


def compare_runs(
    inputs: Sequence[RunInput], seq_length: int | None = None
) -> tuple[ComparisonReport, list[ComparedRun]]:
    """Read runs and compare them with the first; return the report, and the runs for plots.

    Args:
        inputs: the runs; the first is the baseline.
        seq_length: tokens of a sample, for runs whose files do not contain it.

    Raises:
        RequestError: a run cannot be read, or there are too many.
    """
    if not 1 <= len(inputs) <= MAX_RUNS:
        raise RequestError(f"{len(inputs)} runs: specify between 1 and {MAX_RUNS}")
    runs = [read_run(request, seq_length) for request in inputs]
    return build_report(runs), runs


def build_report(runs: Sequence[ComparedRun]) -> ComparisonReport:
    """Compare runs with the first."""
    axis: Axis = "tokens" if all(np.isfinite(run.series.tokens).any() for run in runs) else "steps"
    lines = [select_axis(run, axis) for run in runs]
    smoothing = compute_smoothing(lines)
    smooth = [(x, smooth_losses(x, run.series.loss, smoothing)) for x, run in zip(lines, runs, strict=True)]
    verdicts = [judge(runs[0], run) for run in runs[1:]]
    baseline = _find_rate(runs[0])
    return ComparisonReport(
        headline=summarize_verdicts(verdicts, runs[0].label),
        axis=axis,
        smoothing=smoothing,
        verdicts=verdicts,
        runs=[_summarize(run, line, smooth[0], baseline) for run, line in zip(runs, smooth, strict=True)],
        marks=_compare_losses(smooth),
        settings=_compare_settings(runs),
        other_settings=_count_other_settings(runs),
    )


def select_axis(run: ComparedRun, axis: Axis) -> Floats:
    """Return the position of each row: tokens, or steps."""
    return run.series.tokens if axis == "tokens" else run.series.steps.astype(np.float64)


def compute_smoothing(positions: Sequence[Floats]) -> float:
    """Return the tokens (or steps) that a smoothed loss is the mean of, the same for all runs."""
    return SMOOTHING * max((float(x[-1]) for x in positions if len(x)), default=0.0)


def smooth_losses(x: Floats, values: Floats, window: float) -> Floats:
    """Return at each row the mean of the finite values in (x - width, x]; NaN if there is none.

    The width is the window, or near the start a share of x. It is the same for all runs, so that their lines have the
    same delay.
    """
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    ends = np.arange(1, len(x) + 1)
    starts = np.minimum(np.searchsorted(x, x - np.minimum(window, SMOOTHING_AT_START * x), side="right"), ends - 1)
    number = counts[ends] - counts[starts]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(number > 0, (sums[ends] - sums[starts]) / number, np.nan)


def _interpolate(line: tuple[Floats, Floats], position: float) -> float | None:
    x, values = line
    finite = np.isfinite(values)
    if not finite.any() or not x[finite][0] <= position <= x[finite][-1]:
        return None
    return float(np.interp(position, x[finite], values[finite]))


def _last_position(line: tuple[Floats, Floats]) -> float:
    finite = np.isfinite(line[1])
    return float(line[0][finite][-1]) if finite.any() else 0.0


def _warm(values: Floats) -> Floats:
    """Return the rows after the warm-up; a short run has a shorter warm-up."""
    return values[min(max(WARM_UP_ROWS, int(WARM_UP_SHARE * len(values))), len(values) // 2) :]


def _find_rate(run: ComparedRun) -> float | None:
    return _median(_warm(run.series.rate))


def _median(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _divide(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None


def _summarize(
    run: ComparedRun, line: tuple[Floats, Floats], baseline: tuple[Floats, Floats], baseline_rate: float | None
) -> RunSummary:
    series = run.series
    finite = line[1][np.isfinite(line[1])]
    common = min(_last_position(line), _last_position(baseline))
    loss, reference = _interpolate(line, common), _interpolate(baseline, common)
    rate = _find_rate(run)
    gpu_rate = _median(_warm(series.gpu_rate)) or _divide(rate, run.world_size)
    seconds, intervals, waits = _warm(series.seconds), _warm(series.intervals), _warm(series.data_wait)
    median = _median(seconds)
    stalls = seconds > STALL_FACTOR * median if median else np.zeros(len(seconds), dtype=bool)
    both = np.isfinite(seconds) & np.isfinite(waits)
    wait = float(waits[both] @ intervals[both]) if both.any() else None
    grad_norms = series.grad_norm[np.isfinite(series.grad_norm)]
    tokens = series.tokens[np.isfinite(series.tokens)]
    step_time = float(np.nansum(series.seconds * series.intervals))
    notes = list(run.notes)
    if series.has_derived_seconds:
        notes.append("the seconds of the steps are differences of time stamps, and contain evaluations and saves")
    return RunSummary(
        name=run.label,
        path=str(run.path),
        synthetic=run.is_synthetic,
        sources=run.sources,
        fingerprint=_describe_fingerprint(run),
        sequence_length=run.seq_length,
        global_batch=run.global_batch,
        steps=int(series.steps[-1]) if len(series.steps) else 0,
        tokens=float(tokens[-1]) if len(tokens) else None,
        restarts=max(0, series.attempts - 1),
        steps_trained_twice=series.steps_trained_twice,
        bad_losses=series.bad_losses,
        skipped_iterations=series.skipped_iterations,
        last_loss=float(finite[-1]) if len(finite) else None,
        min_loss=float(finite.min()) if len(finite) else None,
        spike_step=_find_spike(run, line),
        common=common or None,
        loss_at_common=loss,
        difference=_difference(loss, reference),
        tokens_per_second=rate,
        tokens_per_second_per_gpu=gpu_rate,
        rate_ratio=_divide(rate, baseline_rate),
        step_seconds=median,
        stalls=int(stalls.sum()) if median else None,
        stall_seconds=float(((seconds - median) * intervals)[stalls].sum()) if median else None,
        gap_seconds=_known(series.gap_seconds),
        pause_seconds=None if series.has_derived_seconds else _known(series.pause_seconds),
        data_wait=_divide(wait, float(seconds[both] @ intervals[both])) if wait is not None else None,
        max_grad_norm=float(grad_norms.max()) if len(grad_norms) else None,
        step_time=step_time or None,
        wall_time=_known(series.wall_seconds),
        notes=notes,
    )


def _find_spike(run: ComparedRun, line: tuple[Floats, Floats]) -> int | None:
    """Return the step of the largest spike of the loss after the warm-up."""
    series, smooth = run.series, line[1]
    if len(smooth) != len(series.loss):
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.where(np.isfinite(series.loss) & (smooth > 0), series.loss / smooth, 0.0)
    ratios[: len(ratios) - len(_warm(ratios))] = 0.0
    place = int(ratios.argmax()) if len(ratios) else 0
    return int(series.steps[place]) if len(ratios) and ratios[place] > SPIKE_FACTOR else None


def _describe_fingerprint(run: ComparedRun) -> str:
    if run.data is None:
        return "no record"
    return run.data.fingerprint[:12] or "not recorded by train"


def _difference(value: float | None, reference: float | None) -> float | None:
    return value / reference - 1 if value is not None and reference else None


def _compare_losses(lines: Sequence[tuple[Floats, Floats]]) -> list[LossMark]:
    common = min(_last_position(line) for line in lines)
    if len(lines) < 2 or not common:
        return []
    marks = []
    for share in _MARKS:
        losses = [_interpolate(line, share * common) for line in lines]
        marks.append(LossMark(share * common, losses, [_difference(loss, losses[0]) for loss in losses]))
    return marks


def _compare_settings(runs: Sequence[ComparedRun]) -> list[SettingDifference]:
    """Return the settings that at least two runs have with different values, in the order of their names."""
    differences = []
    for name in sorted({name for run in runs for name in run.settings}):
        values = [run.settings.get(name) for run in runs]
        if len({value for value in values if value is not None}) > 1:
            differences.append(SettingDifference(name, values))
    return differences


def _count_other_settings(runs: Sequence[ComparedRun]) -> int:
    return sum(
        any(name not in run.settings for run in runs) and sum(name in run.settings for run in runs) > 0
        for name in {name for run in runs for name in run.settings}
    )
