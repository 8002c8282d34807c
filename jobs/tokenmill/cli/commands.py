"""All commands and their order in the help: each is what its name says in the module of its name."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

COMMANDS = (
    "sample",
    "run",
    "download",
    "extract",
    "concatenate",
    "preprocess",
    "adopt",
    "status",
    "verify",
    "inspect",
    "blend",
    "fit",
    "train",
    "checkpoint",
)


class Command(TyperCommand):
    """A command that refuses an empty path or argument, which pathlib would take for the current directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; end with a usage message where an argument or a path is empty."""
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        for parameter in self.params:
            value = values.get(parameter.name or "")
            holds_path = parameter.param_type_name == "argument" or parameter.type.name in ("path", "file", "directory")
            if holds_path and (value == "" or (isinstance(value, list | tuple) and "" in value)):
                raise typer.BadParameter("it is empty; is a variable of the shell unset?", ctx=ctx, param=parameter)
        return super().parse_args(ctx, args)


def register(app: typer.Typer, wanted: str = "") -> None:
    """Add the wanted command to the application, or all of them where none has that name.

    Typer makes parameters out of each command that it is given, which takes as long as the rest of a start.
    """
    for name in (wanted,) if wanted in COMMANDS else COMMANDS:
        command = getattr(import_module(f"tokenmill.cli.{name}"), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(cls=Command)(command)
