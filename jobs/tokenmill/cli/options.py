"""The arguments and options that several commands share, each declared once."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.commands import address, location
from tokenmill.engine.options import Option, Panel, WorkerOptions

Input = Annotated[
    Path,
    typer.Argument(
        metavar="INPUT", parser=location, help="Directory of a dataset, output of an earlier stage, or file."
    ),
]
InputOrSource = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        parser=address,
        help="Directory of a dataset, output of an earlier stage, file, or source such as hf://datasets/ORG/NAME.",
    ),
]
ScratchDirectory = Annotated[
    Path | None,
    Option("Directory for some shards of a source at a time. Default: TMPDIR.", "--scratch", panel=Panel.INPUT),
]
Output = Annotated[
    Path | None,
    typer.Argument(
        metavar="OUTPUT", parser=location, help="Directory or bucket to write to. Default: a directory below INPUT."
    ),
]
Processes = Annotated[
    int | None,
    Option(
        "Number of processes. Default: the number of CPUs.",
        minimum=1,
        chart="processes",
        panel=Panel.PARALLELISM,
        usual=True,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", rich_help_panel=Panel.OUTPUT, help="Print progress and result as JSON lines.")
]
From = Annotated[
    str | None,
    Option(
        "Read this stage's output instead of the furthest.",
        "--from",
        metavar="STAGE",
        chart="dataset.fromStage",
        panel=Panel.INPUT,
    ),
]
Only = Annotated[
    str | None,
    typer.Option("--stage", rich_help_panel=Panel.STAGES, metavar="STAGE", help="Check only this stage."),
]
OnlyStage = Annotated[
    str | None,
    typer.Option(
        "--only",
        rich_help_panel=Panel.STAGES,
        metavar="STAGE",
        help="Run only this stage; the stages before it must be finished.",
    ),
]
Profiles = Annotated[
    Path | None,
    typer.Option(
        "--profiles",
        rich_help_panel=Panel.WHERE,
        metavar="FILE",
        envvar="TOKENMILL_PROFILES",
        help="File of profiles. Default: tokenmill.toml in the current directory.",
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        rich_help_panel=Panel.HUB,
        metavar="URL",
        envvar="HF_ENDPOINT",
        help="Address of the Hub or a mirror.",
    ),
]


def usage_error(parameter: str, reason: str) -> typer.BadParameter:
    """Return the error that ends with a usage message for a parameter."""
    return typer.BadParameter(reason, param_hint=parameter)


def check_choice(option: str, value: str, *allowed: str) -> str:
    """Return a value that is allowed; otherwise end with a usage message."""
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(allowed)}", param_hint=option)
    return value


def check_one_worker(workers: WorkerOptions) -> None:
    """End with a usage message if several workers shall run all stages: a worker does not wait for the others."""
    if workers.workers > 1:
        raise typer.BadParameter(
            "several workers cannot run all stages, because a stage starts when all workers have finished the stage "
            "before it; add --only STAGE, or --on to submit the stages",
            param_hint="--workers",
        )
