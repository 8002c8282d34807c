"""A comparison as text: the verdicts first, then a table with a column for each run."""

import math
from collections.abc import Callable, Sequence
from itertools import takewhile

from tokenmill.compare.report import ComparisonReport, RunSummary
from tokenmill.flow.progress import format_duration
from tokenmill.html_page import show

MAX_SETTINGS_SHOWN = 40
_MAX_CELL = 40


def format_count(value: float | None) -> str:
    """Format a number of tokens or steps with four digits and a unit; a dash if it is unknown."""
    if value is None:
        return "-"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if unit != 'k' else 1e3):.4g} {unit}"
    return f"{value:,.0f}"


def format_loss(value: float | None) -> str:
    """Format a loss with four decimals."""
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"


def format_change(value: float | None) -> str:
    """Format a share as a change in per cent with its sign."""
    return "-" if value is None else f"{100 * value + 0.0:+.2f} %".replace("-0.00", "+0.00")


def format_share(value: float | None) -> str:
    """Format a share in per cent."""
    return "-" if value is None else f"{100 * value:.2f} %"


def format_seconds(value: float | None) -> str:
    """Format a duration."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{1000 * value:.1f} ms" if 0 < value < 1 else format_duration(value)


def list_rows(report: ComparisonReport) -> list[tuple[str, list[str]]]:
    """Return the rows of the table: a title, and a cell for each run. Rows without any value are left out."""
    unit = report.axis
    baseline = report.runs[0]
    states = {verdict.run: verdict.label for verdict in report.verdicts}

    def compare(run: RunSummary, change: float | None) -> str:
        return "" if run is baseline else format_change(change)

    changes: list[tuple[str, Callable[[RunSummary], str]]] = [
        ("verdict", lambda run: states.get(run.name, "baseline")),
        ("data (fingerprint)", lambda run: ("SYNTHETIC, " if run.synthetic else "") + run.fingerprint),
        ("sequence length", lambda run: format_count(run.sequence_length)),
        ("global batch", lambda run: format_count(run.global_batch)),
        ("steps", lambda run: f"{run.steps:,}"),
        ("tokens", lambda run: format_count(run.tokens)),
        ("loss, last (smoothed)", lambda run: format_loss(run.last_loss)),
        ("loss, lowest (smoothed)", lambda run: format_loss(run.min_loss)),
    ]
    if len(report.runs) > 1:
        changes += [
            (f"last common {unit} with the baseline", lambda run: format_count(run.common)),
            (f"loss at these {unit}", lambda run: format_loss(run.loss_at_common)),
            ("  compared with the baseline", lambda run: compare(run, run.difference)),
        ]
    changes += [
        ("tokens/s (median)", lambda run: format_count(run.tokens_per_second)),
        ("  compared with the baseline", lambda run: compare(run, run.rate_ratio and run.rate_ratio - 1)),
        ("tokens/s of a GPU", lambda run: format_count(run.tokens_per_second_per_gpu)),
        ("time of a step (median)", lambda run: format_seconds(run.step_seconds)),
        ("stalls", lambda run: "-" if run.stalls is None else f"{run.stalls:,}"),
        ("  time lost in stalls", lambda run: format_seconds(run.stall_seconds)),
        ("data wait", lambda run: format_share(run.data_wait)),
        ("restarts that repeated steps", lambda run: f"{run.restarts:,}"),
        ("  steps trained twice", lambda run: f"{run.steps_trained_twice:,}"),
        ("  time between these attempts", lambda run: format_seconds(run.gap_seconds)),
        ("time outside the steps", lambda run: format_seconds(run.pause_seconds)),
        ("NaN or infinite losses", lambda run: f"{run.bad_losses:,}"),
        ("skipped iterations", lambda run: f"{run.skipped_iterations:,}"),
        ("gradient norm, highest", lambda run: "-" if run.max_grad_norm is None else f"{run.max_grad_norm:.4g}"),
        ("time of all steps", lambda run: format_seconds(run.step_time)),
        ("time from first to last step", lambda run: format_seconds(run.wall_time)),
    ]
    rows = [(title, [cell(run) for run in report.runs]) for title, cell in changes]
    return [(title, cells) for title, cells in rows if not {"-", ""} >= set(cells)]


def to_text(report: ComparisonReport) -> str:
    """Return the report as text for a terminal or a file."""
    lines = [report.headline]
    if synthetic := [run.name for run in report.runs if run.synthetic]:
        lines.append(f"SYNTHETIC data, random numbers instead of text: {', '.join(synthetic)}")
    lines += [f"  {verdict.text}" for verdict in report.verdicts]
    lines.append("")
    table = [("", [run.name for run in report.runs]), *list_rows(report)]
    lines += _align(table)
    if report.marks:
        lines += ["", f"smoothed loss at equal {report.axis}, and the difference from the baseline:"]
        lines += _align(
            [
                ("", [run.name for run in report.runs]),
                *(
                    (
                        f"{format_count(mark.position)} {report.axis}",
                        [
                            format_loss(loss) + ("" if number == 0 or change is None else f" ({format_change(change)})")
                            for number, (loss, change) in enumerate(zip(mark.losses, mark.differences, strict=True))
                        ],
                    )
                    for mark in report.marks
                ),
            ]
        )
    if report.settings:
        lines += ["", "settings that differ:"]
        shown = report.settings[:MAX_SETTINGS_SHOWN]
        rows = [(setting.name, _show_difference(setting.values)) for setting in shown]
        lines += _align([("", [run.name for run in report.runs]), *rows])
        if len(report.settings) > len(shown):
            lines.append(f"and {len(report.settings) - len(shown):,} more; --html and --json have all of them")
    if report.other_settings:
        lines.append(f"{report.other_settings:,} settings are recorded for some of the runs only")
    notes = [f"{run.name}: {note}" for run in report.runs for note in run.notes]
    if notes:
        lines += ["", "notes:", *(f"  {note}" for note in notes)]
    return "\n".join(show(line).rstrip() for line in lines)


def _show_difference(values: Sequence[str | None]) -> list[str]:
    """Return the values of a setting; long ones without most of their common start, which shows the difference."""
    known = [value for value in values if value is not None]
    common = sum(1 for _ in takewhile(lambda characters: len(set(characters)) == 1, zip(*known, strict=False)))
    start = max(0, common - 12) if max(map(len, known)) > _MAX_CELL else 0
    return ["-" if value is None else f"...{value[start:]}" if start else value for value in values]


def _align(rows: Sequence[tuple[str, list[str]]]) -> list[str]:
    table = [(_cut(title), *map(_cut, cells)) for title, cells in rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]


def _cut(text: str) -> str:
    """Return a cell without control characters, shortened."""
    text = show(text)
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 3] + "..."
