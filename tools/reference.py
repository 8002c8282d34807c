"""Generate docs/commands.md, the tables of values/README.md and the models of docs/convert.md: `make charts`.

The sources are the commands, the values files and their comments, and the registry of model families.

    python tools/reference.py            write the files
    python tools/reference.py --check    exit with 1 and name the stale files
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import typer
import yaml
from fresh import write_or_check

from tokenmill.checkpoints.families import FAMILIES
from tokenmill.cli import app, commands
from tokenmill.cli.help_text import ARGUMENTS, OTHER, list_panels, split_help
from tokenmill.engine.options import Panel

ROOT = Path(__file__).parents[1]
VALUES = ROOT / "values"
COMMANDS = ROOT / "docs/commands.md"
CONVERT = ROOT / "docs/convert.md"
OVERLAY_KINDS = ("datasets", "models", "parallelism", "clusters", "storage")
MARKER = "<!-- `make charts` generates the tables below from the files. -->\n"
MODELS_MARKER = "<!-- `make charts` generates this table from jobs/tokenmill/checkpoints/families. -->\n"
INTRODUCTION = """# Commands

`make charts` generates this page from the commands. [README.md](../README.md) explains their purpose and their order,
and [resume.md](resume.md#exit-codes) their exit codes. `tokenmill help COMMAND` prints the usual options of a command,
and `tokenmill COMMAND --help` all options.

"""
SHARED = """## Shared options

Options that several commands have, in their panels.

"""
ANCHOR = "options-"
"""The start of the anchor of a shared panel."""


class Row(NamedTuple):
    """An option: its panel, its flag, and its entry in the help."""

    panel: str
    flag: str
    name: str
    text: str


def cell(text: str) -> str:
    """Return a text, escaped for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    """Return a text as inline code for a cell of a Markdown table."""
    return f"`{text.replace('|', chr(92) + '|')}`"


def list_commands() -> Iterator[tuple[Any, int]]:
    """Yield the context of each command and subcommand, in the order of the help, and its depth."""
    root: Any = typer.Context(cast("Any", typer.main.get_command(app)), info_name="tokenmill")
    for name in commands.COMMANDS:
        context = typer.Context(root.command.get_command(root, name), info_name=name, parent=root)
        yield context, 1
        for below, command in getattr(context.command, "commands", {}).items():
            yield typer.Context(command, info_name=below, parent=context), 2
        for below, command in getattr(context.command, "parsers", {}).items():
            yield typer.Context(command, info_name=f"{name} {below}", parent=root), 2


def list_rows(context: Any) -> list[Row]:
    """Return the options of a command, in the order of its help, without --help."""
    return [
        Row(panel, parameter.opts[0], *parameter.get_help_record(context))
        for panel, parameters in list_panels(context).items()
        for parameter in parameters
        if panel not in (ARGUMENTS, OTHER)
    ]


def find_shared(contexts: list[Any]) -> set[Row]:
    """Return the options that several commands share: of the texts of a flag in a panel, the most frequent one."""
    shared = {}
    for row, count in reversed(Counter(row for context in contexts for row in list_rows(context)).most_common()):
        if count > 1:
            shared[row.panel, row.flag] = row
    return set(shared.values())


def make_table(entries: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and texts, or an empty text without entries."""
    rows = [f"| {code(name)} | {cell(text)} |" for name, text in entries]
    return "\n".join(["| | |", "|---|---|", *rows]) + "\n\n" if rows else ""


def command_reference(context: Any, depth: int, shared: set[Row]) -> str:
    """Return the reference of a command; options that other commands have too are links."""
    text, rows = split_help(context.command.help), list_rows(context)
    usage = context.command.get_usage(context).removeprefix("Usage: ")
    arguments = [item.get_help_record(context) for item in list_panels(context).get(ARGUMENTS, ())]
    examples = "\n".join(text.examples)
    title = context.command_path.removeprefix("tokenmill ")
    about = " ".join(f"{text.summary} {text.details}".split())
    parts = [f"{'#' * (depth + 1)} {title}\n\n    {' '.join(usage.split())}\n\n{about}\n\n```sh\n{examples}\n```\n\n"]
    parts += make_table([*arguments, *((row.name, row.text) for row in rows if row not in shared)])
    links: dict[str, list[str]] = {}
    for row in rows:
        if row in shared:
            links.setdefault(row.panel, []).append(f"`{row.flag}`")
    lines = [f"- [{panel}](#{ANCHOR}{panel.lower().replace(' ', '-')}): {', '.join(links[panel])}\n" for panel in links]
    return "".join([*parts, *lines, "\n" if lines else ""])


def command_page() -> str:
    """Return the content of docs/commands.md."""
    listed = list(list_commands())
    shared = find_shared([context for context, _ in listed])
    order = {row: None for context, _ in listed for row in list_rows(context) if row in shared}
    parts = [INTRODUCTION]
    for group, names in commands.GROUPS.items():
        parts.append(f"- {group}: {', '.join(f'[{name}](#{name})' for name in names)}\n")
    parts.append("\n")
    parts += [command_reference(context, depth, shared) for context, depth in listed]
    parts.append(SHARED)
    for panel in Panel:
        rows = [(row.name, row.text) for row in order if row.panel == panel]
        parts.append(f"### Options: {panel}\n\n{make_table(rows)}" if rows else "")
    return "".join(parts).rstrip() + "\n"


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
