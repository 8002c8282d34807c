"""The help: short summaries, examples that parse, options in panels, one style of metavar, one screen for `help`."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from support.commandline import run_in_process, run_many
from support.rendering import ROOT, command_line
from tokenmill.cli import commands
from tokenmill.cli.help_text import ARGUMENTS, OTHER, is_usual, list_panels, split_help
from tokenmill.engine.options import Panel

SCREEN, COLUMNS = 60, 80
MAX_SUMMARY, MAX_OPTION_HELP, MAX_WORDS = 55, 100, 6_500
METAVAR = re.compile(r"[A-Z]+([=:,][A-Z.]+)*(\[=[A-Z]+\])?|\[[a-z0-9-]+(\|[a-z0-9-]+)*\]")
"""Upper-case nouns, or choices."""


def list_contexts() -> Iterator[Any]:
    """Yield the context of each command and subcommand."""
    root: Any = typer.Context(command_line(), info_name="tokenmill")
    for name, command in root.command.commands.items():
        context: Any = typer.Context(command, info_name=name, parent=root)
        yield context
        for word, item in getattr(command, "commands", {}).items():
            yield typer.Context(item, info_name=word, parent=context)
        for word, item in getattr(command, "parsers", {}).items():
            yield typer.Context(item, info_name=f"{name} {word}", parent=root)


CONTEXTS = {context.command_path.removeprefix("tokenmill "): context for context in list_contexts()}
COMMANDS = pytest.mark.parametrize(("name", "context"), CONTEXTS.items(), ids=CONTEXTS)


def options(context: Any) -> list[Any]:
    return [item for item in context.command.params if item.param_type_name == "option"]


def declarations(context: Any) -> dict[str, Any]:
    return getattr(context.command.callback, "declarations", {})


@COMMANDS
def test_a_command_has_a_short_summary_and_two_examples_that_parse(name: str, context: Any) -> None:
    text = split_help(context.command.help)
    assert 0 < len(text.summary) <= MAX_SUMMARY and "\n" not in text.summary
    assert len(text.examples) == 2
    for example in text.examples:
        assert example.startswith(f"tokenmill {name}") and len(example) <= COLUMNS - 4, example
        arguments = shlex.split(example)[1:]
        command: Any = command_line()
        while hasattr(command, "commands"):
            command, arguments = command.commands[arguments[0]], arguments[1:]
        command.make_context(command.name, arguments)


def test_the_list_of_commands_has_the_summary_of_each_docstring() -> None:
    for group in commands.GROUPS.values():
        for name, summary in group.items():
            assert split_help(command_line().commands[name].help).summary == summary


@COMMANDS
def test_each_option_is_in_a_panel_and_the_required_and_usual_ones_are_first(name: str, context: Any) -> None:
    panels, declared = list_panels(context), declarations(context)
    assert set(panels) <= {ARGUMENTS, OTHER, *Panel}
    assert ["--help" in item.opts for item in panels[OTHER]] == [True], f"an option of {name} has no panel"
    assert ARGUMENTS not in panels or next(iter(panels)) == ARGUMENTS
    panels.pop(ARGUMENTS, None)
    for items in panels.values():
        ranks = [(item.required, is_usual(item, declared)) for item in items]
        assert ranks == sorted(ranks, reverse=True)
    required = [items[0].required for items in panels.values()]
    assert required == sorted(required, reverse=True)


def test_the_panels_of_preprocess_are_those_of_its_groups() -> None:
    panels = list_panels(CONTEXTS["preprocess"])
    flags = {str(panel): [item.opts[0] for item in items] for panel, items in panels.items()}
    assert list(flags)[1:6] == ["Tokens", "Input", "Output", "Bad records", "Parallelism"]
    assert list(flags)[6:] == ["Where it runs", "Metrics", "Notifications", "Hub", "Other"]
    assert flags["Tokens"][:2] == ["--tokenizer", "--append-eod"]
    assert set(flags["Bad records"]) == {"--max-record-size", "--on-bad-record", "--max-bad-records"}
    assert set(flags["Hub"]) == {"--revision", "--tokenizer-revision", "--endpoint"}


@COMMANDS
def test_metavars_have_one_style_and_texts_are_short(name: str, context: Any) -> None:
    for item in options(context):
        # The text of --framework has the names of all frameworks: as choices they would not fit into a line.
        assert len(item.help) <= MAX_OPTION_HELP or item.name == "framework", (item.opts, len(item.help))
        assert item.is_flag or METAVAR.fullmatch(item.make_metavar(context)), item.opts
    assert not re.search("[{}<>a-z]", context.command.get_usage(context).partition(name)[2])


def test_choices_are_shown_as_choices_and_not_repeated() -> None:
    shown = 0
    for context in CONTEXTS.values():
        declared = declarations(context)
        for item in options(context):
            declaration = declared.get(item.opts[0].lstrip("-"))
            if declaration and (choices := declaration.option.choices):
                assert item.make_metavar(context) == f"[{'|'.join(choices)}]"
                assert ", ".join(choices[:2]) not in item.help and " or ".join(choices[-2:]) not in item.help, item.opts
                shown += 1
    assert shown > 40


def test_help_of_a_command_is_one_screen_and_its_help_option_complete() -> None:
    words = [name.split() for name in CONTEXTS]
    screens, _ = run_many([["help", *name] for name in words], COLUMNS=str(COLUMNS))
    complete, _ = run_many([[*name, "--help"] for name in words], COLUMNS=str(COLUMNS))
    for (name, context), screen, full in zip(CONTEXTS.items(), screens, complete, strict=True):
        lines, flags = screen.out.splitlines(), [item.opts[0] for item in options(context)]
        assert (screen.code, full.code) == (0, 0) and lines[0].startswith(f"Usage: tokenmill {name} [OPTIONS]")
        assert len(lines) <= SCREEN and max(map(len, lines)) <= COLUMNS, name
        assert all(f"\n  {flag}" in full.out for flag in flags), name
        if not hasattr(context.command, "commands"):
            assert lines[-1] == f"tokenmill {name} --help describes all {len(flags) + 1} options."
            assert all(f"\n  {item.opts[0]} " in screen.out for item in options(context) if item.required), name


def test_help_alone_lists_the_commands_in_groups_and_an_unknown_one_has_a_suggestion() -> None:
    listed, same, unknown, nested = (
        run_in_process(*words) for words in (["help"], ["--help"], ["help", "preproces"], ["help", "train", "fly"])
    )
    assert listed == same
    headings = [f"{group}:" for group in commands.GROUPS]
    assert [line for line in listed.out.splitlines() if line in headings] == headings
    assert unknown.code == 2 and "No such command 'preproces'. Did you mean 'preprocess'" in unknown.err
    assert nested.code == 2 and "tokenmill train has no subcommand 'fly'" in nested.err


def test_a_shell_completes_commands_options_and_choices() -> None:
    def complete(*words: str) -> list[str]:
        environment = {"_TOKENMILL_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words) - 1)}
        [ended], _ = run_many([[]], COMP_WORDS=" ".join(words), **environment)
        return ended.out.split()

    assert "`tokenmill --install-completion`" in (ROOT / "docs/README.md").read_text()
    assert complete("tokenmill", "pre") == ["preprocess"]
    assert "--encoder-patience" in complete("tokenmill", "preprocess", "--enc")
    assert complete("tokenmill", "preprocess", "--txt-document", "") == ["file", "line"]


def test_the_reference_is_short_and_names_every_option_of_a_command() -> None:
    text = (ROOT / "docs/commands.md").read_text()
    assert len(text.split()) <= MAX_WORDS
    for name, context in CONTEXTS.items():
        section = re.search(rf"^#+ {name}$(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL)
        assert section, name
        assert [item.opts[0] for item in options(context) if f"`{item.opts[0]}" not in section[1]] == [], name
