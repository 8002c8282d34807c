"""A report as one HTML file with plots: no network, no script, own SVG and style (page.css).

Texts are HTML and only lines and bars are SVG, which stretches, so that the page is legible on a telephone.
`tokenmill.html_page` has the frame of the file and the escaping.
"""

from html import escape
from pathlib import Path

from tokenmill import __version__
from tokenmill.compare.text import format_count
from tokenmill.html_page import build_html_file, to_html_text, write_html_file
from tokenmill.reporting.contract import Report, RunReport
from tokenmill.reporting.sections import LinePlot, PlottedLine, ReportSection, ReportTable, list_sections, quote

COMMAND = "report"
_WIDTH, _HEIGHT = 1000, 300
"""Units of a plot, which the page stretches."""


def write_page(path: Path, report: Report) -> None:
    """Write the report as one HTML file, which replaces an older report."""
    write_html_file(path, to_html(report))


def to_html(report: Report) -> str:
    """Return the report as one HTML file."""
    is_run = isinstance(report, RunReport)
    name = report.path if isinstance(report, RunReport) else report.output
    title = f"Report about {'a run' if is_run else 'a dataset'}: {Path(name).name or name}"
    notes = "".join(f"<li>{to_html_text(note)}</li>" for note in report.notes)
    sections = list_sections(report)
    contents = "".join(
        f'<li><a href="#section-{number}">{to_html_text(section.title)}</a></li>'
        for number, section in enumerate(sections)
    )
    body = [
        f'<header><div><h1>{to_html_text(title)}</h1><p class="soft">{to_html_text(name)}</p></div></header>',
        f'<ul class="warnings">{notes}</ul>' if notes else "",
        f'<nav class="screen" aria-label="contents"><ul>{contents}</ul></nav>',
        *(_render_section(number, section) for number, section in enumerate(sections)),
        f"<footer>tokenmill {escape(__version__)} report. Counts are exact unless a section names a sample.</footer>",
    ]
    return build_html_file(COMMAND, title, body, Path(__file__).with_name("page.css").read_text())


def _render_section(number: int, section: ReportSection) -> str:
    parts = [f'<h2 id="section-{number}">{to_html_text(section.title)}</h2>']
    parts += [f"<p>{to_html_text(sentence)}</p>" for sentence in section.sentences]
    parts += [_render_plot(plot) for plot in section.plots]
    parts += [_render_table(table) for table in section.tables]
    parts += [
        f'<figure class="quote"><figcaption>{to_html_text(title)}</figcaption><blockquote>{to_html_text(quote(text))}'
        "</blockquote></figure>"
        for title, text in section.quotes
    ]
    return f"<section>{''.join(parts)}</section>"


def _render_table(table: ReportTable) -> str:
    has_head = any(table.columns)
    bars = table.bars
    cells = [
        f'<th scope="col"{_mark(table, number)}>{to_html_text(name)}</th>' for number, name in enumerate(table.columns)
    ]
    if bars is not None:
        cells.insert(1, '<td class="bar" aria-hidden="true"></td>')
    head = "".join(cells)
    body = "".join(
        f'<tr><th scope="row">{to_html_text(row[0])}</th>'
        + (_render_bar(bars[number]) if bars is not None else "")
        + "".join(f"<td{_mark(table, column)}>{to_html_text(cell)}</td>" for column, cell in enumerate(row) if column)
        + "</tr>"
        for number, row in enumerate(table.rows)
    )
    is_narrow = len(table.columns) <= 3 and bars is None and not table.texts
    kind = " facts" if not has_head else " narrow" if is_narrow else ""
    label = to_html_text(table.label)
    return (
        f'<div class="scroll{kind}" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<caption>{label}</caption>"
        + (f"<thead><tr>{head}</tr></thead>" if has_head else "")
        + f"<tbody>{body}</tbody></table></div>"
    )


def _mark(table: ReportTable, column: int) -> str:
    return ' class="words"' if column in table.texts else ""


def _render_bar(share: float) -> str:
    width = 100 * min(1.0, max(0.0, share))
    return (
        '<td class="bar" aria-hidden="true"><svg viewBox="0 0 100 10" preserveAspectRatio="none">'
        f'<rect class="back" width="100" height="10"/><rect class="fill" width="{width:.2f}" height="10"/></svg></td>'
    )


def _render_plot(plot: LinePlot) -> str:
    """Return the lines of a quantity; the labels of the axes are HTML around the SVG."""
    low, high = plot.low, plot.high
    lines = (plot.raw, plot.smooth)
    first, last = min(line.positions[0] for line in lines), max(line.positions[-1] for line in lines)
    paths = [_make_path(line, (first, last), (low, high)) for line in lines]
    grid = "".join(
        f'<line class="grid" x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}"/>' for y in range(0, _HEIGHT + 1, _HEIGHT // 4)
    )
    labels = "".join(f"<span>{escape(plot.format(high - step * (high - low) / 4))}</span>" for step in range(5))
    ends = f"<span>{format_count(first)}</span><span>{format_count(last)} {escape(plot.axis)}</span>"
    values = plot.smooth.values
    description = (
        f"{plot.title} over {plot.axis}: from {plot.format(values[0])} to {plot.format(values[-1])}, lowest "
        f"{plot.format(min(values))}, highest {plot.format(max(values))}, smoothed"
    )
    return (
        f'<figure class="lines"><figcaption>{escape(plot.title)}</figcaption><div class="frame">'
        f'<div class="y" aria-hidden="true">{labels}</div><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(description)}">{grid}'
        f'<path class="raw" d="{paths[0]}"/><path class="smooth" d="{paths[1]}"/></svg></div>'
        f'<div class="x" aria-hidden="true">{ends}</div>'
        '<p class="soft">Thin: logged steps. Thick: smoothed. The table below has some of the points.</p></figure>'
    )


def _make_path(line: PlottedLine, across: tuple[float, float], down: tuple[float, float]) -> str:
    """Return the data of a path; a value above the range ends at the border of the plot."""
    width, height = across[1] - across[0] or 1.0, down[1] - down[0]
    points = [
        f"{_WIDTH * (x - across[0]) / width:.1f} {_HEIGHT * min(1.0, max(0.0, (down[1] - value) / height)):.1f}"
        for x, value in zip(line.positions, line.values, strict=True)
    ]
    return "M" + "L".join(points)
