"""The options that several commands share, each declared once."""

from pathlib import Path
from typing import Annotated

import typer

Input = Annotated[
    Path, typer.Argument(metavar="INPUT", help="Directory of a dataset, output of an earlier stage, or file.")
]
InputOrSource = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="Directory of a dataset, output of an earlier stage, file, or source such as hf://datasets/ORG/NAME. The "
        "shards of a source are fetched to local scratch one by one.",
    ),
]
ScratchDirectory = Annotated[
    Path | None, typer.Option("--scratch", help="Directory for some shards of a source at a time. Default: TMPDIR.")
]
Output = Annotated[
    Path | None, typer.Argument(metavar="OUTPUT", help="Directory to write to. Default: a directory below INPUT.")
]
Processes = Annotated[
    int | None, typer.Option("--processes", min=1, help="Number of processes. Default: the number of CPUs.")
]
Json = Annotated[bool, typer.Option("--json", help="Print progress and result as JSON lines.")]
From = Annotated[
    str | None, typer.Option("--from", metavar="STAGE", help="Read this stage's output instead of the furthest.")
]
Only = Annotated[str | None, typer.Option("--stage", metavar="STAGE", help="Check only this stage.")]
Endpoint = Annotated[
    str | None, typer.Option("--endpoint", envvar="HF_ENDPOINT", help="Address of the Hub or a mirror.")
]
Name = Annotated[str, typer.Option("--name", help="First part of the names of joined outputs.")]


def check_choice(option: str, value: str, *allowed: str) -> str:
    """Return a value that is allowed; otherwise end with a usage message."""
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(allowed)}", param_hint=option)
    return value
