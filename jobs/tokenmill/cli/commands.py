"""The list of all commands, in the order of the help; each command is a function with its module's name."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

COMMANDS = (
    "sample",
    "run",
    "sft",
    "download",
    "extract",
    "concatenate",
    "transform",
    "preprocess",
    "chat",
    "pack",
    "adopt",
    "status",
    "verify",
    "inspect",
    "check-data",
    "blend",
    "fit",
    "train",
    "checkpoint",
    "compare",
)


class Command(TyperCommand):
    """A command that refuses an empty path or argument, which pathlib would read as the current directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; end with a usage message if an argument or a path is empty."""
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        for parameter in self.params:
            value = values.get(parameter.name or "")
            holds_path = parameter.param_type_name == "argument" or parameter.type.name in ("path", "file", "directory")
            if holds_path and (value == "" or (isinstance(value, list | tuple) and "" in value)):
                raise typer.BadParameter(
                    "it is empty; check that the shell variable in the command is set", ctx=ctx, param=parameter
                )
        return super().parse_args(ctx, args)


def register(app: typer.Typer, requested: str = "") -> None:
    """Add the requested command to the application, or all commands if none has that name.

    Typer builds the parameters of every command that it receives, which takes as long as the rest of the start.
    """
    for name in (requested,) if requested in COMMANDS else COMMANDS:
        function = name.replace("-", "_")
        command = getattr(import_module(f"tokenmill.cli.{function}"), function)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(cls=Command)(command)
