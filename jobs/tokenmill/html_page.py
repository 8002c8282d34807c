"""One self-contained HTML file: its frame, its shared style (html_page.css), and the escaping of all texts.

`compare.page` and `reporting.page` write their files with these functions. A file needs no network. Its
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

from tokenmill import __version__
from tokenmill.errors import RequestError
from tokenmill.files.explain import explain_os_errors
from tokenmill.files.publish import write_atomic
from tokenmill.redaction import redact

_HEAD_BYTES = 2000
"""Bytes at the start of a file that contain the generator element."""


def show(text: str) -> str:
    """Return a text of a user without characters that control a terminal, end a line, or cannot be encoded."""
    return "".join(character if character.isprintable() else "?" for character in text)


def to_html_text(text: str) -> str:
    """Return a text of a user for HTML, without secrets and control characters."""
    return escape(show(redact(text)))


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
        raise RequestError(f"cannot write {path}: {error.strerror}; choose another FILE") from None
    if not os.path.lexists(path):
        return
    is_report = False
    try:
        if path.is_file():  # opening a named pipe would wait for its writer
            with path.open("rb") as file:
                is_report = _start_generator(command).encode() in file.read(_HEAD_BYTES)
    except OSError as error:
        raise RequestError(f"cannot replace {path}: {error.strerror}; choose another FILE") from None
    if not is_report:
        raise RequestError(
            f"{path} exists and is not a report of tokenmill {command}; remove it, or choose another FILE"
        )


def build_html_file(
    command: str, title: str, body: Iterable[str], style: str, *, script: str = "", data: str | None = None
) -> str:
    """Return an HTML file from escaped elements of its body.

    Args:
        command: the command of tokenmill that writes the file.
        title: the title, not escaped.
        body: the elements of the body; empty ones are left out.
        style: the command's own style, which follows the shared one.
        script: the script, which runs after the body.
        data: the JSON that the script reads from the element `data`.
    """
    css = Path(__file__).with_name("html_page.css").read_text() + style
    script_policy = f"script-src 'sha256-{_hash(script)}'; " if script else ""
    policy = (
        f"default-src 'none'; style-src 'sha256-{_hash(css)}'; {script_policy}"
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    scripts = f"\n<script>{script}</script>" if script else ""
    if data is not None:
        scripts = f'\n<script type="application/json" id="data">{escape_script(data)}</script>{scripts}'
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'{_start_generator(command)} {escape(__version__)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{to_html_text(title)}</title>\n<style>{css}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, body))
        + f"{scripts}\n</body>\n</html>\n"
    )


def write_html_file(path: Path, text: str) -> None:
    """Write an HTML file, which replaces an older one."""
    with explain_os_errors(path):
        write_atomic(path, text.encode(errors="replace"))


def _start_generator(command: str) -> str:
    return f'<meta name="generator" content="tokenmill {command}'


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
