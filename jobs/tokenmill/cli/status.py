"""`tokenmill status`: how far each stage is."""

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o


def status(
    path: Annotated[Path, typer.Argument(help="A dataset's directory, or a stage's output.")],
    stage: o.Only = None,
    json: o.Json = False,
) -> None:
    """Show how far each stage is: units and bytes done, rate, time left, and what failed and why."""
    from tokenmill.flow.progress import duration, size
    from tokenmill.flow.record import kept_aside
    from tokenmill.flow.status import statuses
    from tokenmill.stages.registry import KINDS

    for found in statuses(path, KINDS, stage):
        if json:
            sys.stdout.write(jsonlib.dumps(found.to_json()) + "\n")
            continue
        line = f"{found.stage} in {found.output}: {found.state}, {found.units_done}/{found.units} units"
        if found.units:
            line += f", {size(found.bytes_done)} of {size(found.bytes)}"
        if found.bytes_per_second and found.state != "complete":
            line += f", {size(found.bytes_per_second)}/s"
        if found.seconds_left is not None:
            line += f", about {duration(found.seconds_left)} left"
        if bad := kept_aside(found.counts, found.output):
            line += f"\n  {bad}"
        if found.at_work:
            line += f"\n  at work: {', '.join(found.at_work[:8])}{', ...' if len(found.at_work) > 8 else ''}"
        for failure in found.failures:
            line += f"\n  failed: {failure.unit} on {failure.host} at {failure.time}: {failure.message}"
        sys.stdout.write(line + "\n")
