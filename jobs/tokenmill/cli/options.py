"""Options that several commands share, each declared once."""

from pathlib import Path
from typing import Annotated

import typer

Input = Annotated[
    Path, typer.Argument(metavar="INPUT", help="A dataset's directory, an earlier stage's output, or a file.")
]
InputOrSource = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="A dataset's directory, an earlier stage's output, a file, or a source such as hf://datasets/ORG/NAME, "
        "whose shards then come to local scratch one by one.",
    ),
]
ScratchFile = Annotated[
    Path | None, typer.Option("--scratch", help="Directory for a source's shards, a few at a time; TMPDIR if left out.")
]
Output = Annotated[
    Path | None, typer.Argument(metavar="OUTPUT", help="Directory to write to; below INPUT when left out.")
]
Processes = Annotated[
    int | None, typer.Option("--processes", min=1, help="Processes that do the work; as many as CPUs when left out.")
]
Json = Annotated[bool, typer.Option("--json", help="Progress and result as JSON lines, for machines.")]
From = Annotated[
    str | None, typer.Option("--from", metavar="STAGE", help="Read this stage's output instead of the furthest.")
]
Only = Annotated[str | None, typer.Option("--stage", metavar="STAGE", help="Look at this stage alone.")]
Endpoint = Annotated[
    str | None, typer.Option("--endpoint", envvar="HF_ENDPOINT", help="Address of the Hub, for a mirror.")
]
Name = Annotated[str, typer.Option("--name", help="First part of the names of joined outputs.")]


def one_of(option: str, value: str, *allowed: str) -> str:
    """Return a value that is one of the allowed, else end with a usage message."""
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(allowed)}", param_hint=option)
    return value
