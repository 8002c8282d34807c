"""Generate docs/commands.md, the tables of values/README.md and the models of docs/convert.md: `make charts`.

The sources are each command's --help, the values files and their comments, and the registry of model families.

    python tools/reference.py            write the files
    python tools/reference.py --check    exit with 1 and name the stale files
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

from tokenmill.checkpoints.families import FAMILIES
from tokenmill.cli import app, commands

ROOT = Path(__file__).parents[1]
VALUES = ROOT / "values"
COMMANDS = ROOT / "docs/commands.md"
CONVERT = ROOT / "docs/convert.md"
OVERLAY_KINDS = ("datasets", "models", "parallelism", "clusters", "storage")
MARKER = "<!-- `make charts` generates the tables below from the files. -->\n"
MODELS_MARKER = "<!-- `make charts` generates this table from jobs/tokenmill/checkpoints/families. -->\n"
INTRODUCTION = """# Commands

`make charts` generates this page from each command's `--help`. [README.md](../README.md) explains the purpose and the
order of the commands, and [resume.md](resume.md#exit-codes) their exit codes.

"""
HELP_COLUMNS = 1000
"""Width of the help text: Click breaks longer lines, at hyphens too."""
HEADINGS = {"Arguments:", "Options:", "Commands:"}


def cell(text: str) -> str:
    """Return a text, escaped for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    """Return a text as inline code for a cell of a Markdown table."""
    return f"`{text.replace('|', chr(92) + '|')}`"


def read_help(*names: str) -> str:
    """Return the help text of a command, which its names specify."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        app([*names, "--help"], prog_name="tokenmill", terminal_width=HELP_COLUMNS)
    return output.getvalue()


def parse_entries(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of a section of the help; a text continues in lines with a deeper indent."""
    name, text = "", ""
    for line in lines:
        entry = re.match(r"  (\S.*?)(?:  +(\S.*))?$", line)
        if entry:
            if name:
                yield name, text
            name, text = entry[1], entry[2] or ""
        else:
            text = f"{text} {line.strip()}".strip()
    if name:
        yield name, text


def split_sections(help_text: str) -> dict[str, list[str]]:
    """Split a command's help at its headings; the description has the key ""."""
    sections: dict[str, list[str]] = {"": []}
    heading = ""
    for line in help_text.splitlines()[1:]:
        if line in HEADINGS:
            heading = line
            sections[heading] = []
        elif line.strip():
            sections[heading].append(line)
    return sections


def command_reference(*names: str, level: int = 2) -> Iterator[str]:
    """Yield the reference of a command and of its subcommands."""
    help_text = read_help(*names)
    parts = split_sections(help_text)
    subcommands = [name for name, _ in parse_entries(parts.get("Commands:", []))]
    usage = help_text.splitlines()[0].removeprefix("Usage: ")
    yield f"{'#' * level} {' '.join(names)}\n\n    {usage}\n\n{' '.join(line.strip() for line in parts[''])}\n"
    rows = [
        f"| {code(name)} | {cell(text)} |"
        for part in ("Arguments:", "Options:")
        for name, text in parse_entries(parts.get(part, []))
        if name != "-h, --help"
    ]
    if rows:
        yield "\n".join(["| | |", "|---|---|", *rows]) + "\n"
    for name in subcommands:
        yield from command_reference(*names, name, level=level + 1)


def command_page() -> str:
    """Return the content of docs/commands.md."""
    commands.register(app)
    names = [name for name, _ in parse_entries(split_sections(read_help())["Commands:"])]
    links = ", ".join(f"[{name}](#{name})" for name in names)
    return INTRODUCTION + f"{links}.\n\n" + "\n".join(part for name in names for part in command_reference(name))


def format_settings(values: Any, key: str = "") -> Iterator[str]:
    """Yield the settings of a values file as KEY=VALUE."""
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from format_settings(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list) and not any(isinstance(item, dict | list) for item in values):
        yield f"{key}={{{','.join(map(str, values))}}}"
    else:
        yield f"{key}={str(values).lower() if isinstance(values, bool) else values}"


def first_sentence(text: str) -> str:
    """Return the first sentence of a file's comment."""
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    return re.split(r"(?<! al)\. ", " ".join(lines))[0].rstrip(".")


def overlay_page() -> str:
    """Return the content of values/README.md: the manual part, and a table for each kind of overlay."""
    manual_part = (VALUES / "README.md").read_text().partition(MARKER)[0]
    parts = []
    for kind in OVERLAY_KINDS:
        rows = [f"## {kind}\n", "| file | content | sets |", "|---|---|---|"]
        for file in sorted((VALUES / kind).glob("*.yaml")):
            text = file.read_text()
            settings = "<br>".join(map(code, format_settings(yaml.safe_load(text))))
            rows.append(f"| [{file.stem}]({kind}/{file.name}) | {cell(first_sentence(text))} | {settings} |")
        parts.append("\n".join(rows) + "\n")
    return f"{manual_part}{MARKER}\n" + "\n".join(parts)


def convert_page() -> str:
    """Return the content of docs/convert.md with the table of the model families."""
    rows = ["| model type | models | class of transformers | architecture |", "|---|---|---|---|"]
    for family in FAMILIES.values():
        cells = (code(family.model_type), family.models, code(family.architecture), cell(family.summary))
        rows.append(f"| {' | '.join(cells)} |")
    before, _, after = CONVERT.read_text().partition(MODELS_MARKER)
    return f"{before}{MODELS_MARKER}\n" + "\n".join(rows) + "\n\n" + after.lstrip("\n").partition("\n\n")[2]


if __name__ == "__main__":
    pages = {COMMANDS: command_page(), VALUES / "README.md": overlay_page(), CONVERT: convert_page()}
    sys.exit(write_or_check(pages.items()))
