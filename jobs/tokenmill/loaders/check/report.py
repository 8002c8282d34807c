"""The report of `tokenmill check-data` as lines of text and as one JSON object."""

import msgspec

from tokenmill.core.printing import PrintedTable, align
from tokenmill.loaders.check.rows import CheckReport


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


def render_json(report: CheckReport) -> str:
    """Return a report as one JSON object."""
    event = {
        "event": "check-data",
        **msgspec.to_builtins(report),
        "differences": report.bad,
        "verdict": ("SYNTHETIC: " if report.synthetic else "") + describe_verdict(report),
    }
    return msgspec.json.encode(event).decode()
