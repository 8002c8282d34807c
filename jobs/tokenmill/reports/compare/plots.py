"""The plots of loss, throughput and data wait on an HTML page: own SVG, which a script draws (plots.js, plots.css).

A line has at most 500 points; of more rows, the smallest and the largest of each part stay, so that a spike is visible.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec
import numpy as np

from tokenmill.core.printing import PrintedTable, printable
from tokenmill.core.redaction import redact
from tokenmill.reports.compare.columns import Floats, Integers
from tokenmill.reports.compare.report import ComparisonReport, select_axis, smooth_losses
from tokenmill.reports.compare.run import ComparedRun
from tokenmill.reports.html_page import ScriptedPart, render_table, to_html_text

MAX_POINTS = 500
_SPREAD_ROWS = 5
_KINDS = {
    "loss": "Loss",
    "rate": "Throughput, tokens per second",
    "wait": "Data wait, per cent of a step",
}


class PlotLine(msgspec.Struct, frozen=True):
    """The points of a line. Without tokens, they are the steps times the tokens of a step of the run."""

    steps: list[int]
    tokens: list[float] | None
    values: list[float]


class PlotLines(msgspec.Struct, frozen=True):
    """A quantity of a run: all rows, and the smoothed line; the range that a plot shows."""

    raw: PlotLine
    smooth: PlotLine
    low: float
    high: float


class PlotRun(msgspec.Struct, frozen=True):
    """The lines of a run; None where the run has no such numbers."""

    name: str
    step_tokens: float | None
    loss: PlotLines | None
    rate: PlotLines | None
    wait: PlotLines | None


def render_plots(runs: Sequence[PlotRun], axis: str, *, whole: bool = False) -> ScriptedPart | None:
    """Return the plots of runs over tokens or steps with their controls; None if no run has two points of a line.

    `whole` shows all values at first, instead of the range without spikes.
    """
    kinds = [kind for kind in _KINDS if any(getattr(run, kind) for run in runs)]
    if not kinds:
        return None
    style, script = (Path(__file__).with_name(name).read_text() for name in ("plots.css", "plots.js"))
    data = msgspec.json.encode({"axis": axis, "runs": runs, "whole": whole}).decode()
    names = ", ".join(run.name for run in runs)
    figures = "".join(
        f'<figure><figcaption>{escape(_KINDS[kind])}</figcaption><svg class="plot{"" if kind == "loss" else " small"}" '
        f'data-kind="{kind}" tabindex="0" role="img" aria-label="'
        f'{to_html_text(f"{_KINDS[kind]}, over {axis}, of {names}")}"></svg><div class="tip" hidden></div></figure>'
        for kind in kinds
    )
    return ScriptedPart(_render_controls(runs, axis, kinds, whole=whole) + figures, style, script, data)


def _render_controls(runs: Sequence[PlotRun], axis: str, kinds: Sequence[str], *, whole: bool) -> str:
    buttons = "".join(
        f'<button type="button" data-run="{number}" aria-pressed="true"><svg class="swatch" viewBox="0 0 34 10" '
        f'aria-hidden="true"></svg><span>{to_html_text(run.name)}</span></button>'
        for number, run in enumerate(runs)
    )
    select_steps = '<button type="button" id="axis" aria-pressed="false">steps instead of tokens</button>'
    tools = (
        (select_steps if axis == "tokens" else "")
        + f'<button type="button" id="whole" aria-pressed="{str(whole).lower()}">all values</button>'
        '<button type="button" id="logX" aria-pressed="false">logarithmic axis</button>'
        '<button type="button" id="logY" aria-pressed="false">logarithmic loss</button>'
        '<button type="button" id="zoom" aria-pressed="false">second half</button>'
        '<button type="button" id="smooth" aria-pressed="true">smoothed</button>'
        '<button type="button" id="theme">dark or light</button>'
    )
    columns = ("", *(_KINDS[kind].partition(",")[0].lower() for kind in kinds))
    values = PrintedTable("values", columns, [(run.name, *["-"] * len(kinds)) for run in runs])
    return (
        f'<noscript><p>The plots need JavaScript; the numbers below do not.</p></noscript><div class="controls">'
        f'<div class="tools runs" role="group" aria-label="runs">{buttons}</div>'
        f'<div class="tools screen" role="group" aria-label="axes">{tools}</div></div>'
        f'<p class="soft screen" id="position"></p>{render_table(values, "values screen")}'
    )


def build_plots(run: ComparedRun, report: ComparisonReport) -> PlotRun:
    """Return the lines of a run for plots."""
    series, x = run.series, select_axis(run, report.axis)
    share = 100 * series.data_wait / series.seconds
    tokens = series.tokens / np.where(series.steps > 0, series.steps, np.nan)
    finite = tokens[np.isfinite(tokens)]
    step_tokens = float(finite[0]) if len(finite) and np.ptp(finite) <= 1e-9 * finite[0] else None
    has_tokens = bool(np.isfinite(series.tokens).any()) and step_tokens is None
    return PlotRun(
        name=printable(redact(run.label)),
        step_tokens=step_tokens,
        loss=_build_lines(run, x, series.loss, report.smoothing, has_tokens),
        rate=_build_lines(run, x, series.rate, report.smoothing, has_tokens),
        wait=_build_lines(run, x, share, report.smoothing, has_tokens),
    )


def _build_lines(run: ComparedRun, x: Floats, values: Floats, smoothing: float, has_tokens: bool) -> PlotLines | None:
    rows = np.flatnonzero(np.isfinite(values) & np.isfinite(x))
    if len(rows) < 2:
        return None
    smooth = smooth_losses(x, values, smoothing)
    known = values[rows]
    edges = _list_edges(len(rows))
    start = float(np.median(known[:_SPREAD_ROWS]))
    return PlotLines(
        raw=_select_points(run, values, rows[_keep_extremes(known, edges)], has_tokens),
        smooth=_select_points(run, smooth, rows[np.unique(np.append(edges[1:] - 1, 0))], has_tokens),
        low=float(known.min()),
        high=float(min(known.max(), 1.2 * max(start, float(np.quantile(known, 0.995))))),
    )


def _list_edges(count: int) -> Integers:
    """Return the limits of at most MAX_POINTS / 2 parts, of equal length on a linear or on a logarithmic axis."""
    number = MAX_POINTS // 4
    if count <= MAX_POINTS // 2:
        return np.arange(count + 1)
    linear, logarithmic = np.linspace(0, count, number + 1), np.geomspace(1, count, number)
    return np.unique(np.concatenate((linear, logarithmic)).astype(np.int64))


def _keep_extremes(values: Floats, edges: Integers) -> Integers:
    """Return the indices of the smallest and the largest value of each part, and of the first and last value."""
    if len(values) <= MAX_POINTS:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = values[start:end]
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    return np.array(sorted(kept), dtype=np.int64)


def _select_points(run: ComparedRun, values: Floats, rows: Integers, has_tokens: bool) -> PlotLine:
    return PlotLine(
        steps=run.series.steps[rows].tolist(),
        tokens=[round(value) for value in run.series.tokens[rows].tolist()] if has_tokens else None,
        values=[float(f"{value:.6g}") for value in values[rows].tolist()],
    )
