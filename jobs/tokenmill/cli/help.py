"""`tokenmill help`: show the usual options of a command, on one screen."""

import sys
from typing import Annotated, Any, cast

import typer

from tokenmill.cli.commands import CommandGroup, CommandWithSubcommands
from tokenmill.cli.help_text import format_short_help


def help(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]...", help="A command, and its subcommand if it has some.")
    ] = None,
) -> None:
    """Show the usual options of a command.

    Without a command, list all commands.

    Examples:
        tokenmill help preprocess
        tokenmill help checkpoint import
    """
    context = ctx.find_root()
    for name in names or ():
        context = _enter(context, name)
    if isinstance(context.command, CommandGroup):
        sys.stdout.write(context.get_help() + "\n")
    else:
        sys.stdout.write(format_short_help(context))


def _enter(context: Any, name: str) -> Any:
    """Return the context of a command below another; end with a usage message for an unknown name."""
    command = context.command
    if isinstance(command, CommandGroup):
        _, below, _ = command.resolve_command(context, [name])
        return typer.Context(cast("Any", below), info_name=name, parent=context)
    if isinstance(command, CommandWithSubcommands) and name in command.parsers:
        return typer.Context(command.parsers[name], info_name=f"{context.info_name} {name}", parent=context.parent)
    raise typer.BadParameter(f"{context.command_path} has no subcommand {name!r}", param_hint="COMMAND")
