"""The form of the help: the summary, examples, details, then the arguments, and the options in panels.

A docstring of a command contains the first three: its first line is the summary, and its last paragraph, `Examples:`,
has one command on each line. Click writes the usage above them.
"""

from collections.abc import Mapping, Sequence
from inspect import cleandoc
from typing import Any, NamedTuple

from tokenmill.engine.options import Panel

MARKER = "Examples:\n"
ARGUMENTS = "Arguments"
OTHER = "Other"
"""The panel of --help and --version."""
METAVARS = {"int": "N", "int range": "N", "float": "N", "float range": "N", "path": "PATH"}
"""The metavar of an option that declares none, by the name of its type in Typer; that of any other type is NAME."""
RARE = {Panel.WHERE, Panel.METRICS, Panel.NOTIFICATIONS, Panel.HUB, OTHER}
"""Panels without a usual option, except --on."""


class HelpText(NamedTuple):
    """The parts of a command's docstring."""

    summary: str
    examples: list[str]
    details: str


def split_help(text: str) -> HelpText:
    """Return the parts of the docstring of a command."""
    description, _, examples = cleandoc(text).partition(MARKER)
    summary, _, details = description.partition("\n\n")
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    return HelpText(summary.strip(), lines, details.strip())


def set_metavars(parameters: Sequence[Any]) -> None:
    """Set the metavar of each parameter without one to an upper-case noun."""
    for parameter in parameters:
        if parameter.metavar is None and parameter.param_type_name == "argument":
            parameter.metavar = parameter.name.upper()
        elif parameter.metavar is None and not parameter.is_flag:
            parameter.metavar = METAVARS.get(parameter.type.name, "NAME")


def write_text(text: str, formatter: Any, *, details: bool = True) -> None:
    """Write the summary and the examples of a command, and the details if wanted."""
    parts = split_help(text)
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(parts.summary)
    with formatter.section("Examples"):
        for example in parts.examples:
            formatter.write(f"  {example}\n")
    if details and parts.details:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(parts.details)


def list_panels(ctx: Any) -> dict[str, list[Any]]:
    """Return the arguments, then the options of each panel, the required and the usual first.

    A panel with a required option is above those without one.
    """
    panels: dict[str, list[Any]] = {ARGUMENTS: []}
    for parameter in ctx.command.get_params(ctx):
        panels.setdefault(_panel(parameter), []).append(parameter)
    declared, order = _declarations(ctx.command), [ARGUMENTS, *Panel, OTHER]
    for name in panels.keys() - {ARGUMENTS}:
        panels[name].sort(key=lambda item: (not item.required, not is_usual(item, declared)))
    names = sorted(panels, key=lambda name: (name != ARGUMENTS and not panels[name][0].required, order.index(name)))
    return {name: panels[name] for name in names if panels[name]}


def write_panels(ctx: Any, formatter: Any) -> None:
    """Write the arguments and all options."""
    for name, parameters in list_panels(ctx).items():
        with formatter.section(name):
            formatter.write_dl([parameter.get_help_record(ctx) for parameter in parameters])


def format_short_help(ctx: Any) -> str:
    """Return the help of a command on one screen: without the details and the options that are rarely set."""
    command, formatter = ctx.command, ctx.make_formatter()
    command.format_usage(ctx, formatter)
    write_text(command.help or "", formatter, details=False)
    command.format_commands(ctx, formatter)
    declared, panels = _declarations(command), list_panels(ctx)
    arguments = panels.pop(ARGUMENTS, [])
    options = [option for panel in panels.values() for option in panel]
    usual = [option for option in options if is_usual(option, declared)]
    for name, shown in ((ARGUMENTS, arguments), ("Usual options", usual)):
        if shown:
            with formatter.section(name):
                formatter.write_dl([parameter.get_help_record(ctx) for parameter in shown])
    formatter.write_paragraph()
    formatter.write_text(f"{ctx.command_path} --help describes all {len(options)} options.")
    text: str = formatter.getvalue()
    return text


def is_usual(option: Any, declared: Mapping[str, Any]) -> bool:
    """Return whether users often set an option: a required one, one that its Option marks, or one of this command."""
    flag = option.opts[0].lstrip("-")
    if flag in declared:
        return bool(option.required or declared[flag].option.usual)
    return option.name == "on" or _panel(option) not in RARE


def _declarations(command: Any) -> Mapping[str, Any]:
    declarations: Mapping[str, Any] = getattr(command.callback, "declarations", {})
    return declarations


def _panel(parameter: Any) -> str:
    return ARGUMENTS if parameter.param_type_name == "argument" else parameter.rich_help_panel or OTHER
