"""The list of all commands, in the order of the help; each command is a function with its module's name."""

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar, cast

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
    "report",
)


class Command(TyperCommand):
    """A command that refuses an empty path or argument, which pathlib would read as the current directory."""

    raw_values: Mapping[str, Any]
    """The arguments and options as the user wrote them, by the name of the parameter."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; end with a usage message if an argument or a path is empty."""
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        self.raw_values = values
        for parameter in self.params:
            value = values.get(parameter.name or "")
            holds_path = parameter.param_type_name == "argument" or parameter.type.name in ("path", "file", "directory")
            if holds_path and (value == "" or (isinstance(value, list | tuple) and "" in value)):
                raise typer.BadParameter(
                    "it is empty; check that the shell variable in the command is set", ctx=ctx, param=parameter
                )
        return super().parse_args(ctx, args)


class CommandWithSubcommands(Command):
    """A command that also has subcommands: `tokenmill NAME ARGUMENT` and `tokenmill NAME SUBCOMMAND ARGUMENT`.

    If the first argument is the name of a subcommand, this is the subcommand. `./NAME` is a file of that name.
    """

    subcommands: ClassVar[tuple[Callable[..., None], ...]] = ()

    @cached_property
    def parsers(self) -> dict[str, TyperCommand]:
        """Return the subcommands by name."""
        built = {}
        for function in self.subcommands:
            app = typer.Typer(
                add_completion=False,
                rich_markup_mode=None,
                context_settings={"help_option_names": ["-h", "--help"]},
            )
            app.command(cls=Command)(function)
            built[function.__name__] = cast("TyperCommand", typer.main.get_command(app))
        return built

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the command line of this command, or of the subcommand that its first argument names."""
        if args and args[0] in self.parsers:
            name = f"{info_name} {args[0]}"
            return self.parsers[args[0]].make_context(name, args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options into the help, then the subcommands."""
        super().format_options(ctx, formatter)
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in self.parsers.items()])


def register(app: typer.Typer, requested: str = "") -> None:
    """Add the requested command to the application, or all commands if none has that name.

    Typer builds the parameters of every command that it receives, which takes as long as the rest of the start.
    """
    for name in (requested,) if requested in COMMANDS else COMMANDS:
        function = name.replace("-", "_")
        module = import_module(f"tokenmill.cli.{function}")
        command = getattr(module, function)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(cls=getattr(module, "COMMAND_CLASS", Command))(command)
