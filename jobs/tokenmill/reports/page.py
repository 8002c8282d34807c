"""A report as one HTML file: the opening, then the sections; no network, and a script only for the plots of a run.

`tokenmill.reports.html_page` has the frame of the file, its tables and the escaping, and `reports.compare.plots` the
plots.
"""

from pathlib import Path

from tokenmill.reports.compare.plots import render_plots
from tokenmill.reports.contract import Report, RunReport
from tokenmill.reports.html_page import build_html_file, render_list, render_table, to_html_text, write_html_file
from tokenmill.reports.opening import Opening, make_opening
from tokenmill.reports.sections import ReportSection, list_sections, quote

COMMAND = "report"


def write_page(path: Path, report: Report) -> None:
    """Write the report as one HTML file, which replaces an older report."""
    write_html_file(path, to_html(report))


def to_html(report: Report) -> str:
    """Return the report as one HTML file."""
    plots = None
    if isinstance(report, RunReport):
        heading, subject = "Report about a run", report.path
        plots = render_plots([report.plots], report.axis or "steps", whole=True) if report.plots else None
    else:
        heading, subject = "Report about a dataset", report.output
    sections = list_sections(report)
    contents = "".join(
        f'<li><a href="#section-{number}">{to_html_text(section.title)}</a></li>'
        for number, section in enumerate(sections)
    )
    body = [
        _render_opening(make_opening(report)),
        render_list(report.notes, "cards") if report.notes else "",
        f'<nav class="screen" aria-label="contents"><ul>{contents}</ul></nav>',
        *(
            _render_section(number, section, plots.elements if plots and section.has_plots else "")
            for number, section in enumerate(sections)
        ),
    ]
    footer = "Counts are exact unless a section names a sample."
    style = Path(__file__).with_name("page.css").read_text()
    return build_html_file(COMMAND, heading, subject, body, footer, style, plots)


def _render_opening(opening: Opening) -> str:
    figures = "".join(
        f"<div><dt>{to_html_text(figure.label)}</dt><dd>{to_html_text(figure.value)}</dd></div>"
        for figure in opening.figures
    )
    return f'<p class="status {opening.state}">{to_html_text(opening.status)}</p><dl class="figures">{figures}</dl>'


def _render_section(number: int, section: ReportSection, plots: str) -> str:
    parts = [
        f'<h2 id="section-{number}">{to_html_text(section.title)}</h2>',
        f'<p class="soft">{to_html_text(section.question)}</p>',
    ]
    parts += [f"<p>{to_html_text(sentence)}</p>" for sentence in section.sentences]
    parts += [plots, *map(render_table, section.tables)]
    parts += [
        f'<figure class="quote"><figcaption>{to_html_text(title)}</figcaption><blockquote>{to_html_text(quote(text))}'
        "</blockquote></figure>"
        for title, text in section.quotes
    ]
    return f"<section>{''.join(parts)}</section>"
