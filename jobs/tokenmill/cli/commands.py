"""All commands and their order in the help: each is what its name says in the module of its name."""

from importlib import import_module

import typer

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


def register(app: typer.Typer, wanted: str = "") -> None:
    """Add the wanted command to the application, or all of them where none has that name.

    Typer makes parameters out of each command that it is given, which takes as long as the rest of a start.
    """
    for name in (wanted,) if wanted in COMMANDS else COMMANDS:
        command = getattr(import_module(f"tokenmill.cli.{name}"), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command()(command)
