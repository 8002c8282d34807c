"""`tokenmill status`: show the progress of each stage."""

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o


def status(
    path: Annotated[Path, typer.Argument(help="Directory of a dataset, or output of a stage.")],
    stage: o.Only = None,
    json: o.Json = False,
) -> None:
    """Show the progress of each stage: finished units and bytes, rate, time left, and failures with their reasons."""
    from tokenmill.flow.progress import format_bytes, format_duration
    from tokenmill.flow.record import describe_rejected
    from tokenmill.flow.status import list_statuses
    from tokenmill.stages.registry import KINDS

    for stage_status in list_statuses(path, KINDS, stage):
        if json:
            sys.stdout.write(jsonlib.dumps(stage_status.to_json()) + "\n")
            continue
        units = f"{stage_status.units_done}/{stage_status.units} units"
        line = f"{stage_status.stage} in {stage_status.output}: {stage_status.state}, {units}"
        if stage_status.units:
            line += f", {format_bytes(stage_status.bytes_done)} of {format_bytes(stage_status.bytes)}"
        if stage_status.bytes_per_second and stage_status.state != "complete":
            line += f", {format_bytes(stage_status.bytes_per_second)}/s"
        if stage_status.seconds_left is not None:
            line += f", about {format_duration(stage_status.seconds_left)} left"
        if rejected := describe_rejected(stage_status.counts, stage_status.output):
            line += f"\n  {rejected}"
        if running := stage_status.at_work:
            line += f"\n  in progress: {', '.join(running[:8])}{', ...' if len(running) > 8 else ''}"
        for failure in stage_status.failures:
            line += f"\n  failed: {failure.unit} on {failure.host} at {failure.time}: {failure.message}"
        sys.stdout.write(line + "\n")
