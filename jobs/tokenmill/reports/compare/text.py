"""A comparison as text: the verdicts first, then a table with a column for each run."""

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

from tokenmill.core.printing import (
    MAX_CELL,
    PrintedTable,
    align,
    format_count,
    format_duration,
    format_share,
    printable,
)
from tokenmill.reports.compare.report import ComparisonReport, RunSummary

MAX_SETTINGS_SHOWN = 40


def format_loss(value: float | None) -> str:
    """Format a loss with four decimals."""
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"


def format_change(value: float | None) -> str:
    """Format a share as a change in per cent with its sign."""
    return "-" if value is None else f"{value + 0.0:+.2%}".replace("-0.00", "+0.00")


def list_numbers(report: ComparisonReport) -> PrintedTable:
    """Return the table with a column for each run. Rows without any value are left out."""
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
        ("loss, largest spike at step", lambda run: "-" if run.spike_step is None else f"{run.spike_step:,}"),
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
        ("time of a step (median)", lambda run: format_duration(run.step_seconds)),
        ("slow steps", lambda run: "-" if run.stalls is None else f"{run.stalls:,}"),
        ("  time lost in slow steps", lambda run: format_duration(run.stall_seconds)),
        ("data wait", lambda run: format_share(run.data_wait)),
        ("restarts that repeated steps", lambda run: f"{run.restarts:,}"),
        ("  steps trained twice", lambda run: f"{run.steps_trained_twice:,}"),
        ("  time between these attempts", lambda run: format_duration(run.gap_seconds)),
        ("time outside the steps", lambda run: format_duration(run.pause_seconds)),
        ("NaN or infinite losses", lambda run: f"{run.bad_losses:,}"),
        ("skipped iterations", lambda run: f"{run.skipped_iterations:,}"),
        ("gradient norm, highest", lambda run: "-" if run.max_grad_norm is None else f"{run.max_grad_norm:.4g}"),
        ("time of all steps", lambda run: format_duration(run.step_time)),
        ("time from first to last step", lambda run: format_duration(run.wall_time)),
    ]
    rows = [(title, *(cell(run) for run in report.runs)) for title, cell in changes]
    return _make_table("numbers of the runs", report, [row for row in rows if not {"-", ""} >= set(row[1:])])


def list_losses(report: ComparisonReport) -> PrintedTable:
    """Return the table of the smoothed losses at equal positions."""
    rows = [
        (
            f"{format_count(mark.position)} {report.axis}",
            *(
                format_loss(loss) + ("" if number == 0 or change is None else f" ({format_change(change)})")
                for number, (loss, change) in enumerate(zip(mark.losses, mark.differences, strict=True))
            ),
        )
        for mark in report.marks
    ]
    return _make_table(f"loss at equal {report.axis}", report, rows)


def list_settings(report: ComparisonReport, *, cut: bool = False) -> PrintedTable:
    """Return the table of the settings that differ; `cut` leaves out most of the common start of long values."""
    rows = [(setting.name, *_show_values(setting.values, cut=cut)) for setting in report.settings]
    return _make_table("settings that differ", report, rows, range(1, len(report.runs) + 1))


def _make_table(
    label: str, report: ComparisonReport, rows: Sequence[Sequence[str]], texts: Collection[int] = ()
) -> PrintedTable:
    return PrintedTable(label, ("", *(run.name for run in report.runs)), rows, texts=texts)


def to_text(report: ComparisonReport) -> str:
    """Return the report as text for a terminal or a file."""
    lines = [report.headline]
    if synthetic := [run.name for run in report.runs if run.synthetic]:
        lines.append(f"SYNTHETIC data, random numbers instead of text: {', '.join(synthetic)}")
    lines += [f"  {verdict.text}" for verdict in report.verdicts]
    lines += ["", *align(list_numbers(report), max_cell=MAX_CELL)]
    if report.marks:
        lines += ["", f"smoothed loss at equal {report.axis}, and the difference from the baseline:"]
        lines += align(list_losses(report), max_cell=MAX_CELL)
    if report.settings:
        lines += ["", "settings that differ:", *align(list_settings(report, cut=True), MAX_SETTINGS_SHOWN, MAX_CELL)]
    if report.other_settings:
        lines.append(f"{report.other_settings:,} settings are recorded for some of the runs only")
    notes = [f"{run.name}: {note}" for run in report.runs for note in run.notes]
    if notes:
        lines += ["", "notes:", *(f"  {note}" for note in notes)]
    return "\n".join(printable(line) for line in lines)


def _show_values(values: Sequence[str | None], *, cut: bool) -> list[str]:
    """Return the values of a setting; `cut` shows the difference of long ones."""
    known = [value for value in values if value is not None]
    start = 0
    if cut and max(map(len, known)) > MAX_CELL:
        common = sum(1 for _ in takewhile(lambda characters: len(set(characters)) == 1, zip(*known, strict=False)))
        start = max(0, common - 12)
    return ["-" if value is None else f"...{value[start:]}" if start else value for value in values]
