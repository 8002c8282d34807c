"""The report of `tokenmill check-data` as lines of text and as one JSON event."""

import msgspec

from tokenmill.core.printing import PrintedTable, align
from tokenmill.loaders.check.rows import CheckReport


class CheckEvent(CheckReport, frozen=True, kw_only=True, tag_field="event", tag="check-data"):
    """A report, its number of differences, and its last line."""

    differences: int
    verdict: str


def render_text(report: CheckReport) -> list[str]:
    """Return the lines of a report: what was checked, one line for each row, and the verdict."""
    mark = "SYNTHETIC: " if report.synthetic else ""
    split = f", split {report.split}" if report.split else ""
    rows = [(row.check, row.result, row.detail) for row in report.rows]
    return [
        f"{mark}{report.path}: {report.kind}, seq_length {report.seq_length:,}, seed {report.seed}{split}",
        *align(PrintedTable("checks", ("check", "result", "detail"), rows, texts=(1, 2))),
        f"{mark}{describe_verdict(report)}",
    ]


def describe_verdict(report: CheckReport) -> str:
    """Return the last line of a report."""
    counts = {result: sum(row.result == result for row in report.rows) for result in ("warning", "not checked")}
    rest = "".join(f", {count} {result}" for result, count in counts.items() if count)
    problems = "no differences" if not report.bad else f"{report.bad} difference{'s' * (report.bad > 1)}"
    return f"{problems}{rest}"


def make_event(report: CheckReport) -> CheckEvent:
    """Return the form of a report for --json."""
    verdict = ("SYNTHETIC: " if report.synthetic else "") + describe_verdict(report)
    return CheckEvent(**msgspec.structs.asdict(report), differences=report.bad, verdict=verdict)
