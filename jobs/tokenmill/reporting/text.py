"""A report as text for a terminal or a file."""

from collections.abc import Sequence

from tokenmill.html_page import show
from tokenmill.reporting.contract import Report, RunReport
from tokenmill.reporting.sections import MAX_ROWS, ReportSection, ReportTable, list_sections, quote

_MAX_CELL = 60
_SHOWN_ROWS = MAX_ROWS // 2
_MAX_SENTENCE = 400


def to_text(report: Report) -> str:
    """Return the report as text."""
    name = f"run {report.path}" if isinstance(report, RunReport) else f"dataset {report.output}"
    lines = [name, *report.notes]
    for section in list_sections(report):
        lines += ["", section.title.upper(), *_render(section)]
    return "\n".join(show(line).rstrip() for line in lines)


def _render(section: ReportSection) -> list[str]:
    lines = [
        sentence if len(sentence) < _MAX_SENTENCE else f"{sentence[:_MAX_SENTENCE]}..."
        for sentence in section.sentences
    ]
    for table in section.tables:
        lines += ["", *_align(table)] if lines else _align(table)
    for title, text in section.quotes:
        lines += [f"  {title}", f"    {quote(text)}"]
    return lines


def _align(table: ReportTable) -> list[str]:
    has_head = any(table.columns)
    rows: list[Sequence[str]] = [[_cut(cell) for cell in row] for row in table.rows[:_SHOWN_ROWS]]
    rows = [[_cut(cell) for cell in table.columns], *rows] if has_head else rows
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    lines = [
        "  "
        + "  ".join(
            cell.ljust(width) if column == 0 or not has_head else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    hidden = len(table.rows) - _SHOWN_ROWS
    return [*lines, f"  and {hidden:,} more; --html and --json have them"] if hidden > 0 else lines


def _cut(text: str) -> str:
    text = show(text)
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 3] + "..."
