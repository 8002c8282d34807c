"""The commands, in the order of the help: each is a function with its module's name, or a group with that name."""

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import typer
from typer.core import TyperCommand, TyperGroup

from tokenmill.cli import help_text
from tokenmill.core.files.user_path import local_path

if TYPE_CHECKING:
    from tokenmill.cli.groups import Declaration

GROUPS = {
    "Data": {
        "sample": "Try all stages on text that ships with Python.",
        "run": "Run download, preprocess and verify.",
        "download": "Fetch a corpus, and check the hash of every file.",
        "extract": "Decompress files to JSONL (optional).",
        "concatenate": "Join JSONL files into a few of equal size (optional).",
        "transform": "Change each record with a function; write shards.",
        "preprocess": "Tokenize text into .bin/.idx, as Megatron-LM does.",
        "adopt": "Record another tool's pairs as output of preprocess.",
        "join": "Write the pairs of a dataset as fewer, larger ones.",
        "forget": "Leave documents out of a dataset.",
        "verify": "Check outputs, and compare them with their hashes.",
    },
    "Chat": {
        "sft": "Run chat, pack and verify.",
        "chat": "Render conversations to token ids and loss masks.",
        "pack": "Pack conversations or documents into rows.",
    },
    "Training": {
        "blend": "Write Megatron-LM's blend file from weighted datasets.",
        "check-data": "Check a run's data, and what each framework reads.",
        "fit": "List the layouts of a model that fit the GPUs.",
        "train": "Start and supervise a Megatron-LM run.",
        "checkpoint": "List, verify, repair, import and export checkpoints.",
    },
    "Look": {
        "status": "Show the progress of each stage and its jobs.",
        "inspect": "Show a dataset, a document, or its loss tokens.",
        "report": "Describe a dataset or a training run.",
        "compare": "Compare training runs, data and order first.",
        "help": "Show the usual options of a command.",
    },
}
"""The summary of each command, by the heading of the list of commands.

Each is the first line of the command's docstring, too, which takes an import to read.
"""
COMMANDS = tuple(name for group in GROUPS.values() for name in group)


class Command(TyperCommand):
    """A command that refuses paths that pathlib would misread.

    An empty path would be the current directory, and the address of a bucket a directory with the name `s3:`.
    """

    raw_values: Mapping[str, Any]
    """The arguments and options as the user wrote them, by the name of the parameter."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Make the command, and complete the metavars."""
        super().__init__(*args, **settings)
        help_text.set_metavars(self.params)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage, without Typer's braces around a required argument."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the summary, the examples and the details into the help."""
        help_text.write_text(self.help or "", formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the subcommands, the arguments and the panels of options into the help."""
        self.format_commands(ctx, formatter)
        help_text.write_panels(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write nothing: this command has no subcommands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; end with a message if an argument or a path is empty, or a path an address."""
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        self.raw_values = values
        for parameter in () if ctx.resilient_parsing else self.params:
            is_argument = parameter.param_type_name == "argument"
            if is_argument or parameter.type.name == "path":
                value = values.get(parameter.name or "", parameter.resolve_envvar_value(ctx))
                for text in value if isinstance(value, list | tuple) else [value]:
                    if text == "":
                        raise typer.BadParameter(
                            "it is empty; check that the shell variable in the command is set", ctx=ctx, param=parameter
                        )
                    if text and parameter.type.name not in (address.__name__, location.__name__):
                        local_path(text, parameter.human_readable_name if is_argument else parameter.opts[0])
        return super().parse_args(ctx, args)


def address(text: str) -> str:
    """Return the value of an argument that may also be the address of a source; its type has this function's name."""
    return text


def location(text: str) -> Path:
    """Return the path of an argument that may also be the address of a bucket: the path then stands for the bucket."""
    from tokenmill.core.buckets.mirror import parse_location

    return parse_location(text)


class CommandWithSubcommands(Command):
    """A command that also has subcommands: `tokenmill NAME ARGUMENT` and `tokenmill NAME SUBCOMMAND ARGUMENT`.

    If the first argument is the name of a subcommand, this is the subcommand. `./NAME` is a file of that name.
    """

    subcommands: ClassVar[tuple[Callable[..., None], ...]] = ()

    @cached_property
    def parsers(self) -> dict[str, TyperCommand]:
        """Return the subcommands by name."""
        return {function.__name__: make_command(function, Command) for function in self.subcommands}

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the command line of this command, or of the subcommand that its first argument names."""
        if args and args[0] in self.parsers:
            name = f"{info_name} {args[0]}"
            return self.parsers[args[0]].make_context(name, args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the subcommands into the help."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, help_text.split_help(command.help or "").summary) for name, command in self.parsers.items()]
            )


def list_options(name: str) -> "dict[str, Declaration]":
    """Return the Options of a command by flag without dashes."""
    module = import_module(f"tokenmill.cli.{name}")
    options: dict[str, Declaration] = getattr(module, name).declarations
    return options


def chart_keys(stage: str) -> dict[str, str]:
    """Return the key of each option of a stage in the values of the stage's chart, by flag without dashes."""
    options = {flag: declared.option for flag, declared in list_options(stage).items()}
    return {flag: option.chart for flag, option in options.items() if option.chart and option.chart_of in ("", stage)}


def load(name: str) -> Any:
    """Import the module of a command, and return the command."""
    function = name.replace("-", "_")
    module = import_module(f"tokenmill.cli.{function}")
    command = getattr(module, function)
    if isinstance(command, typer.Typer):
        return typer.main.get_command(command)
    return make_command(command, getattr(module, "COMMAND_CLASS", Command))


def make_command(function: Callable[..., None], cls: type[TyperCommand]) -> TyperCommand:
    """Return the command that runs a function."""
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.command(cls=cls)(function)
    return cast("TyperCommand", typer.main.get_command(app))


class CommandGroup(TyperGroup):
    """A group of commands whose help has examples and panels."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the summary, the examples and the details into the help."""
        help_text.write_text(self.help or "", formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands into the help, then the options."""
        self.format_commands(ctx, formatter)
        help_text.write_panels(ctx, formatter)


class AllCommands(CommandGroup):
    """All commands. Each is imported when it is needed, because the import of all takes longer than a start."""

    def __init__(self, **settings: Any) -> None:
        """Make the group; the value of a command is None until the group imports it."""
        super().__init__(**settings)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None if none has this name."""
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            self.commands[cmd_name] = load(cmd_name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the summaries of the commands into the help, in groups."""
        for heading, summaries in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<{max(map(len, COMMANDS))}}", text) for name, text in summaries.items()])
