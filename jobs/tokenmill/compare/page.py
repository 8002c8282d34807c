"""A comparison as one HTML file with plots: no network, no dependency, own SVG and script (page.css, page.js).

The file contains at most 500 points of a line; of more rows, the smallest and the largest of each part stay, so that a
spike is visible. `tokenmill.html_page` has the frame of the file and the escaping.
"""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import msgspec
import numpy as np

from tokenmill import __version__
from tokenmill.compare.columns import Floats, Integers
from tokenmill.compare.report import ComparisonReport, select_axis, smooth_losses
from tokenmill.compare.run import ComparedRun
from tokenmill.compare.text import format_change, format_count, format_loss, list_rows
from tokenmill.compare.verdict import Comparability
from tokenmill.html_page import build_html_file, show, to_html_text, write_html_file
from tokenmill.redaction import redact

MAX_POINTS = 500
_SPREAD_ROWS = 5
_CLASSES = {"comparable": "comparable", "not comparable": "different", "unknown": "unknown"}
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


def write_page(path: Path, report: ComparisonReport, runs: Sequence[ComparedRun]) -> None:
    """Write the report as one HTML file, which replaces an older report."""
    write_html_file(path, to_html(report, runs))


def to_html(report: ComparisonReport, runs: Sequence[ComparedRun]) -> str:
    """Return the report as one HTML file."""
    style, script = (Path(__file__).with_name(name).read_text() for name in ("page.css", "page.js"))
    plots = [build_plots(run, report) for run in runs]
    kinds = [kind for kind in _KINDS if any(getattr(plot, kind) for plot in plots)]
    synthetic = [run.name for run in report.runs if run.synthetic]
    title = f"Comparison of {', '.join(run.name for run in report.runs)}"
    data = msgspec.json.encode({"axis": report.axis, "runs": plots}).decode()
    body = [
        '<header><div><h1>Comparison of training runs</h1><p class="soft">',
        to_html_text(", ".join(run.name for run in report.runs)),
        '</p></div><button id="theme" type="button" class="screen">Dark or light</button></header>',
        f'<p class="synthetic">SYNTHETIC data, random numbers instead of text: {to_html_text(", ".join(synthetic))}</p>'
        if synthetic
        else "",
        _render_verdicts(report),
        "<h2>Plots</h2>",
        _render_controls(report, kinds),
        *(_render_plot(kind, report) for kind in kinds),
        "<h2>Numbers</h2>",
        _render_table(list_rows(report), report, "numbers of the runs"),
        _render_marks(report),
        _render_settings(report),
        _render_notes(report),
        f"<footer>tokenmill {escape(__version__)} compare. Baseline: {to_html_text(report.runs[0].name)}. A "
        f"smoothed value is the mean of the last {format_count(report.smoothing)} {report.axis}, and near the start of "
        "the last tenth."
        "</footer>",
    ]
    return build_html_file("compare", title, body, style, script=script, data=data)


def _render_verdicts(report: ComparisonReport) -> str:
    items = [_render_verdict(verdict) for verdict in report.verdicts]
    return f'<p><strong>{to_html_text(report.headline)}</strong></p><ul class="verdicts">{"".join(items)}</ul>'


def _render_verdict(verdict: Comparability) -> str:
    reasons = "".join(f"<li>{to_html_text(reason)}</li>" for reason in verdict.reasons)
    detail = f"<ul>{reasons}</ul>" if reasons else f'<span class="soft">({to_html_text(verdict.evidence)})</span>'
    return f'<li class="{_CLASSES[verdict.state]}"><b>{verdict.label}</b>{to_html_text(verdict.subject)} {detail}</li>'


def _render_controls(report: ComparisonReport, kinds: list[str]) -> str:
    runs = "".join(
        f'<button type="button" data-run="{number}" aria-pressed="true"><svg class="swatch" viewBox="0 0 34 10" '
        f'aria-hidden="true"></svg><span>{to_html_text(run.name)}</span></button>'
        for number, run in enumerate(report.runs)
    )
    axis = '<button type="button" id="axis" aria-pressed="false">steps instead of tokens</button>'
    tools = (
        (axis if report.axis == "tokens" else "")
        + '<button type="button" id="logX" aria-pressed="false">logarithmic axis</button>'
        '<button type="button" id="logY" aria-pressed="false">logarithmic loss</button>'
        '<button type="button" id="zoom" aria-pressed="false">second half</button>'
        '<button type="button" id="smooth" aria-pressed="true">smoothed</button>'
    )
    head = "".join(f"<th>{escape(_KINDS[kind].partition(',')[0].lower())}</th>" for kind in kinds)
    rows = "".join(
        f'<tr data-values="{number}"><td>{to_html_text(run.name)}</td>'
        + "".join(f'<td data-kind="{kind}">-</td>' for kind in kinds)
        + "</tr>"
        for number, run in enumerate(report.runs)
    )
    return (
        f'<noscript><p>The plots need JavaScript; the numbers below do not.</p></noscript><div class="controls">'
        f'<div class="tools runs" role="group" aria-label="runs">{runs}</div>'
        f'<div class="tools screen" role="group" aria-label="axes">{tools}</div></div>'
        '<p class="soft screen" id="position"></p>'
        f'<div class="scroll values screen"><table><thead><tr><th>values</th>{head}</tr></thead><tbody>{rows}</tbody>'
        "</table></div>"
    )


def _render_plot(kind: str, report: ComparisonReport) -> str:
    size = "plot" if kind == "loss" else "plot small"
    label = f"{_KINDS[kind]}, over {report.axis}, of {', '.join(run.name for run in report.runs)}"
    return (
        f'<figure><figcaption>{escape(_KINDS[kind])}</figcaption><svg class="{size}" data-kind="{kind}" tabindex="0" '
        f'role="img" aria-label="{to_html_text(label)}"></svg><div class="tip" hidden></div></figure>'
    )


def _render_table(
    rows: Iterable[tuple[str, Sequence[str]]], report: ComparisonReport, label: str, kind: str = ""
) -> str:
    head = "".join(f"<th>{to_html_text(run.name)}</th>" for run in report.runs)
    body = "".join(
        ('<tr><th class="detail">' if title.startswith(" ") else "<tr><th>")
        + f"{to_html_text(title.strip())}</th>"
        + "".join(f"<td>{to_html_text(cell)}</td>" for cell in cells)
        + "</tr>"
        for title, cells in rows
    )
    return (
        f'<div class="scroll {kind}" tabindex="0" role="region" aria-label="{label}"><table><thead><tr><th></th>{head}'
        f"</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _render_marks(report: ComparisonReport) -> str:
    if not report.marks:
        return ""
    rows = [
        (
            f"{format_count(mark.position)} {report.axis}",
            [
                format_loss(loss) + ("" if number == 0 or change is None else f" ({format_change(change)})")
                for number, (loss, change) in enumerate(zip(mark.losses, mark.differences, strict=True))
            ],
        )
        for mark in report.marks
    ]
    return (
        f'<h2>Loss at equal {report.axis}</h2><p class="soft">Smoothed, interpolated between the neighbouring rows; in '
        "parentheses the difference from the baseline.</p>" + _render_table(rows, report, "loss at equal positions")
    )


def _render_settings(report: ComparisonReport) -> str:
    if not report.settings and not report.other_settings:
        return ""
    table = "<p>All settings that several runs have are equal.</p>"
    if report.settings:
        rows = [(setting.name, [value or "-" for value in setting.values]) for setting in report.settings]
        table = _render_table(rows, report, "settings that differ", "settings")
    only = f'<p class="soft">{report.other_settings:,} settings are recorded for some of the runs only.</p>'
    return f"<h2>Settings that differ</h2>{table}{only if report.other_settings else ''}"


def _render_notes(report: ComparisonReport) -> str:
    items = []
    for run in report.runs:
        sources = "".join(f"<li>{to_html_text(source)}</li>" for source in (f"read from {run.path}", *run.sources))
        notes = "".join(f"<li>{to_html_text(note)}</li>" for note in run.notes)
        items.append(f'<p>{to_html_text(run.name)}</p><ul class="notes">{sources}{notes}</ul>')
    return f"<h2>Sources and notes</h2>{''.join(items)}"


def build_plots(run: ComparedRun, report: ComparisonReport) -> PlotRun:
    """Return the lines of a run for plots."""
    series, x = run.series, select_axis(run, report.axis)
    share = 100 * series.data_wait / series.seconds
    tokens = series.tokens / np.where(series.steps > 0, series.steps, np.nan)
    finite = tokens[np.isfinite(tokens)]
    step_tokens = float(finite[0]) if len(finite) and np.ptp(finite) <= 1e-9 * finite[0] else None
    has_tokens = bool(np.isfinite(series.tokens).any()) and step_tokens is None
    return PlotRun(
        name=show(redact(run.label)),
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
