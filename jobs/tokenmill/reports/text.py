"""A report as text for a terminal or a file."""

from tokenmill.core.printing import MAX_CELL, align, printable
from tokenmill.reports.contract import Report, RunReport
from tokenmill.reports.opening import make_opening
from tokenmill.reports.sections import MAX_ROWS, ReportSection, list_sections, quote

_MAX_SENTENCE = 400


def to_text(report: Report) -> str:
    """Return the report as text."""
    name = f"run {report.path}" if isinstance(report, RunReport) else f"dataset {report.output}"
    opening = make_opening(report)
    figures = ", ".join(f"{figure.value} {figure.label}" for figure in opening.figures)
    lines = [name, opening.status, figures, *report.notes]
    for section in list_sections(report):
        lines += ["", f"{section.title.upper()}: {section.question}", *_render(section)]
    return "\n".join(printable(line) for line in lines)


def _render(section: ReportSection) -> list[str]:
    lines = [printable(sentence, _MAX_SENTENCE) for sentence in section.sentences]
    for table in section.tables:
        lines += [""] if lines else []
        lines += [f"  {line}" for line in align(table, MAX_ROWS // 2, MAX_CELL)]
    for title, text in section.quotes:
        lines += [f"  {title}", f"    {quote(text)}"]
    return lines
