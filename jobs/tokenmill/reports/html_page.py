"""One self-contained HTML file: its frame and style (html_page.css), its tables, and the escaping of all texts.

`reports.compare.page` and `reports.page` write their files with these functions. A file needs no network. Its
Content-Security-Policy allows only its own style and script, by their hashes. The `generator` element marks a file that
a later command may replace.
"""

import base64
import hashlib
import os
import tempfile
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import NamedTuple

from tokenmill import __version__
from tokenmill.core.files.explain import explain_os_errors, is_temporary
from tokenmill.core.files.publish import write_atomic
from tokenmill.core.printing import PrintedTable, printable
from tokenmill.core.redaction import redact
from tokenmill.errors import RequestError

_HEAD_BYTES = 2000
"""Bytes at the start of a file that contain the generator element."""


class ScriptedPart(NamedTuple):
    """Elements of a body with the style and the script that they need, and the JSON that the script reads.

    The script runs after the body and reads the JSON from the element `data`.
    """

    elements: str
    style: str
    script: str
    data: str


def to_html_text(text: str) -> str:
    """Return a text of a user for HTML, without secrets and control characters."""
    return escape(printable(redact(text)))


def render_list(texts: Iterable[str], kind: str = "notes") -> str:
    """Return a list of texts; `kind` is its class."""
    return f'<ul class="{kind}">{"".join(f"<li>{to_html_text(text)}</li>" for text in texts)}</ul>'


def render_table(table: PrintedTable, kind: str = "") -> str:
    """Return a table; `kind` is a class. A row that begins with a blank is a detail.

    A table that is wider than the page scrolls, and its caption has a note about it (`.hint` of html_page.css).
    """
    words = [' class="words"' if column in table.texts else "" for column in range(len(table.columns))]
    head = [f'<th scope="col"{mark}>{to_html_text(name)}</th>' for name, mark in zip(table.columns, words, strict=True)]
    if table.bars is not None:
        head.insert(1, '<td class="bar" aria-hidden="true"></td>')
    rows = []
    for number, row in enumerate(table.rows):
        detail = ' class="detail"' if row[0].startswith(" ") else ""
        cells = [f"<td{mark}>{to_html_text(cell)}</td>" for cell, mark in zip(row, words, strict=True)]
        cells[0] = f'<th scope="row"{detail}>{to_html_text(row[0].strip())}</th>'
        if table.bars is not None:
            cells.insert(1, _render_bar(table.bars[number]))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    is_narrow = len(table.columns) <= 3 and table.bars is None and not table.texts
    width = "facts" if not table.has_head else "narrow" if is_narrow else ""
    label = to_html_text(table.label)
    return (
        f'<div class="{" ".join(filter(None, ("scroll", width, kind)))}" tabindex="0" role="region" '
        f'aria-label="{label}"><table><caption><span class="title">{label}</span>'
        '<span class="hint screen" aria-hidden="true">scrolls sideways \u2192</span></caption>'
        + (f"<thead><tr>{''.join(head)}</tr></thead>" if table.has_head else "")
        + f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _render_bar(share: float) -> str:
    width = 100 * min(1.0, max(0.0, share))
    return (
        '<td class="bar" aria-hidden="true"><svg viewBox="0 0 100 10" preserveAspectRatio="none">'
        f'<rect class="back" width="100" height="10"/><rect class="fill" width="{width:.2f}" height="10"/></svg></td>'
    )


def escape_script(json: str) -> str:
    """Return JSON that no text inside can end, or turn into a comment, when it is inside a script element."""
    for character in "<>&\u2028\u2029":
        json = json.replace(character, f"\\u{ord(character):04x}")
    return json


def check_target(path: Path, command: str) -> None:
    """Check that the file of a command can be written, before the command does its work.

    Raises:
        RequestError: the directory does not exist or is not writable, or the file exists and this command did not
            write it.
    """
    if not path.parent.is_dir():
        raise RequestError(f"the directory {path.parent} of {path} does not exist; create it, or choose another FILE")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        if is_temporary(error):
            raise
        raise RequestError(f"cannot write {path}: {error.strerror}; choose another FILE") from None
    if not os.path.lexists(path):
        return
    is_report = False
    try:
        if path.is_file():  # opening a named pipe would wait for its writer
            with path.open("rb") as file:
                is_report = _start_generator(command).encode() in file.read(_HEAD_BYTES)
    except OSError as error:
        if is_temporary(error):
            raise
        raise RequestError(f"cannot replace {path}: {error.strerror}; choose another FILE") from None
    if not is_report:
        raise RequestError(
            f"{path} exists and is not a report of tokenmill {command}; remove it, or choose another FILE"
        )


def build_html_file(
    command: str,
    heading: str,
    subject: str,
    body: Iterable[str],
    footer: str,
    style: str = "",
    scripted: ScriptedPart | None = None,
) -> str:
    """Return an HTML file.

    Args:
        command: the command of tokenmill that writes the file.
        heading: the first heading, not escaped.
        subject: what the page is about, not escaped; it follows the heading, also in the title.
        body: the escaped elements between header and footer; empty ones are left out.
        footer: the text of the footer, not escaped.
        style: the command's own style, which follows the shared one.
        scripted: the part of the body that needs a script; `body` contains its elements.
    """
    css = Path(__file__).with_name("html_page.css").read_text() + style + (scripted.style if scripted else "")
    script_policy = f"script-src 'sha256-{_hash(scripted.script)}'; " if scripted else ""
    policy = (
        f"default-src 'none'; style-src 'sha256-{_hash(css)}'; {script_policy}"
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    elements = [
        f'<header><h1>{to_html_text(heading)}</h1><p class="soft">{to_html_text(subject)}</p></header>',
        *filter(None, body),
        f"<footer>tokenmill {escape(__version__)} {command}. {to_html_text(footer)}</footer>",
    ]
    if scripted:
        elements.append(f'<script type="application/json" id="data">{escape_script(scripted.data)}</script>')
        elements.append(f"<script>{scripted.script}</script>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'{_start_generator(command)} {escape(__version__)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{to_html_text(heading)}: {to_html_text(subject)}</title>\n<style>{css}</style>\n</head>\n<body>\n"
        + "\n".join(elements)
        + "\n</body>\n</html>\n"
    )


def write_html_file(path: Path, text: str) -> None:
    """Write an HTML file, which replaces an older one."""
    with explain_os_errors(path):
        write_atomic(path, text.encode(errors="replace"))


def _start_generator(command: str) -> str:
    return f'<meta name="generator" content="tokenmill {command}'


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
