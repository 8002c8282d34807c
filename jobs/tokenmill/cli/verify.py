"""`tokenmill verify`: compare outputs with the records of the stages that made them."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.commands import location
from tokenmill.core.json_lines import JsonEvent, print_json
from tokenmill.core.printing import printable
from tokenmill.engine.options import Panel
from tokenmill.errors import InputError


class VerifyEvent(JsonEvent, frozen=True, tag="verify"):
    """The result of `tokenmill verify`."""

    quick: bool
    checked: list[str]
    problems: list[str]


def verify(
    path: Annotated[
        Path, typer.Argument(parser=location, help="Directory of a dataset, output of a stage, or path of a pair.")
    ],
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            rich_help_panel=Panel.STAGES,
            help="Check only structure and sizes, without reading complete files.",
        ),
    ] = False,
    stage: o.Only = None,
    json: o.Json = False,
) -> None:
    """Check outputs, and compare them with their hashes.

    Pairs are read as Megatron-LM will read them.

    Examples:
        tokenmill verify out
        tokenmill verify out/preprocessed --quick
    """
    from tokenmill.datasets.dataset import verify_outputs
    from tokenmill.samples.phases.views import find_problems, find_record_problems, list_views
    from tokenmill.stages.registry import KINDS

    if views := list_views(path):
        checked = [f"view {view}" for view in views]
        problems = [*find_record_problems(path), *(text for view in views for text in find_problems(view))]
    else:
        checked, problems = verify_outputs(path, KINDS, full=not quick, stage=stage)
    if json:
        print_json(VerifyEvent(quick, checked, problems))
    else:
        for line in checked:
            sys.stdout.write(f"checked {printable(line)}\n")
        for problem in problems:
            sys.stdout.write(f"problem: {printable(problem)}\n")
    if problems:
        raise InputError(
            f"{len(problems)} problem{'s' * (len(problems) > 1)} in {path}; follow the remedy of each problem, and run "
            "tokenmill verify again"
        )
    if not json:
        sys.stdout.write("no problems\n")
