"""The opening of a report: a status line and four figures. `text` and `page` show it before the sections."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from tokenmill.core.printing import format_bytes, format_count, format_share
from tokenmill.reports.compare.text import format_loss
from tokenmill.reports.contract import DatasetReport, Report, RunReport

FIGURES = 4
_MAX_NUMBER = 10_000_000
"""Numbers from here on have a unit, so that they fit on a phone."""

State = Literal["good", "unsure", "bad"]


class Figure(NamedTuple):
    """A number in large type, and what it counts."""

    value: str
    label: str


class Opening(NamedTuple):
    """The status in words, its colour, and the figures."""

    state: State
    status: str
    figures: Sequence[Figure]


def make_opening(report: Report) -> Opening:
    """Return the opening of a report."""
    if isinstance(report, RunReport):
        state, status, figures = *_judge_run(report), _list_run_figures(report)
    else:
        state, status, figures = *_judge_dataset(report), _list_dataset_figures(report)
    return Opening(state, status, figures[:FIGURES])


def _number(value: float, noun: str) -> Figure:
    return Figure(f"{value:,.0f}" if value < _MAX_NUMBER else format_count(value), noun if value == 1 else f"{noun}s")


def _judge_dataset(report: DatasetReport) -> tuple[State, str]:
    for stage in report.stages:
        if stage.state != "complete":
            return "bad", f"Incomplete: the state of {stage.stage} is {stage.state}."
    rejected, notes = sum(entry.records for entry in report.rejected), len(report.notes)
    problems = [f"{rejected:,} record{'s were' if rejected > 1 else ' was'} rejected"] * bool(rejected)
    problems += [f"see the note{'s' * (notes > 1)} below"] * bool(notes)
    return ("unsure", f"Complete, with problems: {'; '.join(problems)}.") if problems else ("good", "Complete.")


def _list_dataset_figures(report: DatasetReport) -> list[Figure]:
    if totals := report.totals:
        figures = [_number(totals.documents, "document"), _number(totals.tokens, "token")]
        figures.append(Figure(format_bytes(totals.bytes), "on disk"))
        if totals.trained_tokens is not None:
            share = totals.trained_tokens / totals.tokens if totals.tokens else None
            return [*figures, Figure(format_share(share), "of the tokens trained")]
        lengths = report.lengths
        median = next((point.tokens for point in lengths.percentiles if point.percent == 50), 0) if lengths else 0
        return [*figures, Figure(f"{median:,}", "tokens in the median document")]
    stage = report.stages[-1]
    size = Figure(format_bytes(stage.output_bytes), "on disk")
    if pack := report.pack:
        filled = Figure(format_share(pack.fill), "of the rows filled")
        return [_number(pack.rows, "packed row"), _number(pack.tokens, "token"), size, filled]
    counted = _number(stage.rejected, "rejected record") if stage.tokens is None else _number(stage.tokens, "token")
    units = Figure(f"{stage.units_done:,}/{stage.units:,}", "units finished")
    return [_number(stage.written, "record"), counted, size, units]


def _judge_run(report: RunReport) -> tuple[State, str]:
    if not report.verdict.startswith("completed"):
        state: State = "bad" if "exit code" in report.verdict else "unsure"
        return state, f"{'Incomplete' if report.attempts else 'Unknown'}: {report.verdict}."
    summary = report.summary
    bad = [f"{summary.bad_losses:,} NaN or infinite losses"] * bool(summary.bad_losses) if summary else []
    damaged = sum(saved.state != "complete" for saved in report.checkpoints)
    bad += [f"{damaged:,} checkpoint{'s are' if damaged > 1 else ' is'} not complete"] * bool(damaged)
    with_problems = f", with problems: {'; '.join(bad)}" if bad else ""
    return "unsure" if bad else "good", f"Complete{with_problems}: {report.verdict}."


def _list_run_figures(report: RunReport) -> list[Figure]:
    """Return the figures that are known, the most useful first."""
    figures, summary = list[Figure](), report.summary
    if summary:
        known = [
            (f"{summary.steps:,}", "iterations"),
            (format_loss(summary.last_loss), "last loss (smoothed)"),
            (format_count(summary.tokens), "tokens"),
            (format_count(summary.tokens_per_second), "tokens/s (median)"),
        ]
        figures += [Figure(value, label) for value, label in known if value != "-"]
    else:
        last = max((saved.iteration for saved in report.checkpoints), default=0)
        figures.append(Figure(f"{last:,}", "iterations (last checkpoint)"))
    figures += [_number(len(report.checkpoints), "checkpoint"), _number(len(report.attempts), "attempt")]
    return [*figures, Figure(format_bytes(sum(saved.bytes for saved in report.checkpoints)), "of checkpoints")]
