"""Generate the references: docs/commands.md and the tables of values/README.md; `make charts`.

What a command takes is read off its own --help, what an overlay sets off the file.

    python tools/reference.py            write them
    python tools/reference.py --check    exit 1, naming the files, when something is not what would be written
"""

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from fresh import write_or_check

from tokenmill.cli import app, commands

ROOT = Path(__file__).parents[1]
VALUES = ROOT / "values"
COMMANDS = ROOT / "docs/commands.md"
KINDS = ("datasets", "models", "parallelism", "clusters", "storage")
MARKER = "<!-- What follows is generated from the files: `make charts`. -->\n"
INTRODUCTION = """# Commands

Generated from the commands' own `--help` by `make charts`. What they are for, and in which order:
[README.md](../README.md); how they end: [exit codes](resume.md#exit-codes).

"""
WIDE = 1000
SECTIONS = {"Arguments:", "Options:", "Commands:"}


def cell(text: str) -> str:
    """Return a text as it can stand in a table of Markdown."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    """Return a text as code in a table."""
    return f"`{text.replace('|', chr(92) + '|')}`"


def help_of(*words: str) -> str:
    """Return what a command says of itself."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        app([*words, "--help"], prog_name="tokenmill", terminal_width=WIDE)  # a line that goes on is cut at hyphens too
    return said.getvalue()


def entries(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield names and texts of a section of the help; a text goes on in lines that are indented more."""
    name, text = "", ""
    for line in lines:
        begins = re.match(r"  (\S.*?)(?:  +(\S.*))?$", line)
        if begins:
            if name:
                yield name, text
            name, text = begins[1], begins[2] or ""
        else:
            text = f"{text} {line.strip()}".strip()
    if name:
        yield name, text


def sections(said: str) -> dict[str, list[str]]:
    """Cut a command's help at its headings; what it does is under ""."""
    found: dict[str, list[str]] = {"": []}
    heading = ""
    for line in said.splitlines()[1:]:
        if line in SECTIONS:
            heading = line
            found[heading] = []
        elif line.strip():
            found[heading].append(line)
    return found


def command(*words: str, level: int = 2) -> Iterator[str]:
    """Yield the reference of a command, and of those below it."""
    said = help_of(*words)
    parts = sections(said)
    below = [name for name, _ in entries(parts.get("Commands:", []))]
    usage = said.splitlines()[0].removeprefix("Usage: ")
    yield f"{'#' * level} {' '.join(words)}\n\n    {usage}\n\n{' '.join(line.strip() for line in parts[''])}\n"
    rows = [
        f"| {code(name)} | {cell(text)} |"
        for part in ("Arguments:", "Options:")
        for name, text in entries(parts.get(part, []))
        if name != "-h, --help"
    ]
    if rows:
        yield "\n".join(["| | |", "|---|---|", *rows]) + "\n"
    for name in below:
        yield from command(*words, name, level=level + 1)


def reference() -> str:
    """Return docs/commands.md."""
    commands.register(app)
    names = [name for name, _ in entries(sections(help_of())["Commands:"])]
    links = ", ".join(f"[{name}](#{name})" for name in names)
    return INTRODUCTION + f"{links}.\n\n" + "\n".join(part for name in names for part in command(name))


def settings(values: Any, key: str = "") -> Iterator[str]:
    """Yield what a file of values sets, KEY=VALUE."""
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from settings(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list) and not any(isinstance(item, dict | list) for item in values):
        yield f"{key}={{{','.join(map(str, values))}}}"
    else:
        yield f"{key}={str(values).lower() if isinstance(values, bool) else values}"


def about(text: str) -> str:
    """Return the first sentence of a file's comment."""
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    return re.split(r"(?<! al)\. ", " ".join(lines))[0].rstrip(".")


def tables() -> str:
    """Return values/README.md: what is written by hand, and a table for each kind of overlay."""
    own = (VALUES / "README.md").read_text().partition(MARKER)[0]
    parts = []
    for kind in KINDS:
        rows = [f"## {kind}\n", "| file | what | sets |", "|---|---|---|"]
        for file in sorted((VALUES / kind).glob("*.yaml")):
            text = file.read_text()
            sets = "<br>".join(map(code, settings(yaml.safe_load(text))))
            rows.append(f"| [{file.stem}]({kind}/{file.name}) | {cell(about(text))} | {sets} |")
        parts.append("\n".join(rows) + "\n")
    return f"{own}{MARKER}\n" + "\n".join(parts)


if __name__ == "__main__":
    sys.exit(write_or_check(((COMMANDS, reference()), (VALUES / "README.md", tables()))))
