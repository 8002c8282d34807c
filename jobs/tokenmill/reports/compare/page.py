"""A comparison as one HTML file with plots: no network, no dependency.

`tokenmill.reports.html_page` has the frame of the file, its tables and the escaping, and `reports.compare.plots` the
plots.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenmill.core.printing import format_count
from tokenmill.reports.compare.plots import build_plots, render_plots
from tokenmill.reports.compare.report import ComparisonReport
from tokenmill.reports.compare.run import ComparedRun
from tokenmill.reports.compare.text import list_losses, list_numbers, list_settings
from tokenmill.reports.compare.verdict import Comparability
from tokenmill.reports.html_page import build_html_file, render_list, render_table, to_html_text, write_html_file

_CLASSES = {"comparable": "good", "not comparable": "bad", "unknown": "unsure"}


def write_page(path: Path, report: ComparisonReport, runs: Sequence[ComparedRun]) -> None:
    """Write the report as one HTML file, which replaces an older report."""
    write_html_file(path, to_html(report, runs))


def to_html(report: ComparisonReport, runs: Sequence[ComparedRun]) -> str:
    """Return the report as one HTML file."""
    plots = render_plots([build_plots(run, report) for run in runs], report.axis)
    synthetic = ", ".join(run.name for run in report.runs if run.synthetic)
    body = [
        f'<p class="synthetic">SYNTHETIC data, random numbers instead of text: {to_html_text(synthetic)}</p>'
        if synthetic
        else "",
        f"<p><strong>{to_html_text(report.headline)}</strong></p>",
        f'<ul class="cards">{"".join(map(_render_verdict, report.verdicts))}</ul>' if report.verdicts else "",
        f"<h2>Plots</h2>{plots.elements}" if plots else "",
        "<h2>Numbers</h2>",
        render_table(list_numbers(report)),
        _render_losses(report),
        _render_settings(report),
        "<h2>Sources and notes</h2>",
        *(
            f"<p>{to_html_text(run.name)}</p>"
            + render_list([f"read from {run.path}", *run.sources])
            + (render_list(run.notes) if run.notes else "")
            for run in report.runs
        ),
    ]
    footer = (
        f"Baseline: {report.runs[0].name}. A smoothed value is the mean of the last {format_count(report.smoothing)} "
        f"{report.axis}, and near the start of the last tenth."
    )
    names = ", ".join(run.name for run in report.runs)
    style = Path(__file__).with_name("page.css").read_text()
    return build_html_file("compare", "Comparison of training runs", names, body, footer, style, plots)


def _render_verdict(verdict: Comparability) -> str:
    evidence = f'<span class="soft">({to_html_text(verdict.evidence)})</span>'
    detail = render_list(verdict.reasons) if verdict.reasons else evidence
    return f'<li class="{_CLASSES[verdict.state]}"><b>{verdict.label}</b> {to_html_text(verdict.subject)} {detail}</li>'


def _render_losses(report: ComparisonReport) -> str:
    if not report.marks:
        return ""
    return (
        f'<h2>Loss at equal {report.axis}</h2><p class="soft">Smoothed, interpolated between the neighbouring rows; in '
        f"parentheses the difference from the baseline.</p>{render_table(list_losses(report))}"
    )


def _render_settings(report: ComparisonReport) -> str:
    if not report.settings and not report.other_settings:
        return ""
    table = "<p>All settings that several runs have are equal.</p>"
    if report.settings:
        table = render_table(list_settings(report))
    only = f'<p class="soft">{report.other_settings:,} settings are recorded for some of the runs only.</p>'
    return f"<h2>Settings that differ</h2>{table}{only if report.other_settings else ''}"
