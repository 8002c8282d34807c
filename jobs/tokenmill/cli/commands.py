"""The list of all commands, in the order of the help; each command is a function with its module's name."""

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, cast

import typer
from typer.core import TyperCommand

from tokenmill.core.files.user_path import local_path

if TYPE_CHECKING:
    from tokenmill.cli.groups import Declaration

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
    """A command that refuses paths that pathlib would misread.

    An empty path would be the current directory, and the address of a bucket a directory with the name `s3:`.
    """

    raw_values: Mapping[str, Any]
    """The arguments and options as the user wrote them, by the name of the parameter."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; end with a message if an argument or a path is empty, or a path an address."""
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        self.raw_values = values
        for parameter in self.params:
            is_argument = parameter.param_type_name == "argument"
            if is_argument or parameter.type.name == "path":
                value = values.get(parameter.name or "", parameter.resolve_envvar_value(ctx))
                for text in value if isinstance(value, list | tuple) else [value]:
                    if text == "":
                        raise typer.BadParameter(
                            "it is empty; check that the shell variable in the command is set", ctx=ctx, param=parameter
                        )
                    if text and parameter.type.name != address.__name__:
                        local_path(text, parameter.human_readable_name if is_argument else parameter.opts[0])
        return super().parse_args(ctx, args)


def address(text: str) -> str:
    """Return the value of an argument that may also be the address of a source; its type has this function's name."""
    return text


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


def list_options(name: str) -> "dict[str, Declaration]":
    """Return the Options of a command by flag without dashes."""
    module = import_module(f"tokenmill.cli.{name}")
    options: dict[str, Declaration] = getattr(module, name).declarations
    return options


def chart_keys(stage: str) -> dict[str, str]:
    """Return the key of each option of a stage in the values of the stage's chart, by flag without dashes."""
    options = {flag: declared.option for flag, declared in list_options(stage).items()}
    return {flag: option.chart for flag, option in options.items() if option.chart and option.chart_of in ("", stage)}


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
