"""`tokenmill status`: show the progress of each stage."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.commands import location
from tokenmill.core.json_lines import print_json
from tokenmill.core.printing import format_bytes, format_duration, printable
from tokenmill.engine.options import Panel

if TYPE_CHECKING:
    from tokenmill.engine.status import StageStatus
    from tokenmill.submit.kubernetes import ObjectState
    from tokenmill.submit.slurm import JobStates


def status(
    path: Annotated[Path, typer.Argument(parser=location, help="Directory of a dataset, or output of a stage.")],
    stage: o.Only = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            rich_help_panel=Panel.WHERE,
            metavar="NAME",
            help="Read the states of jobs on Kubernetes with this profile.",
        ),
    ] = None,
    profiles: o.Profiles = None,
    abort_uploads: Annotated[
        float | None,
        typer.Option(
            "--abort-uploads",
            rich_help_panel=Panel.OUTPUT,
            metavar="HOURS",
            min=0,
            help="First abort the unfinished uploads to a bucket that began so many hours ago or earlier.",
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Show the progress of each stage and its jobs.

    The progress has finished units and bytes, the rate, the time left, and failures with their reasons. Jobs are on
    Slurm or Kubernetes.

    Examples:
        tokenmill status out
        tokenmill status /data/out --on kubernetes
    """
    from tokenmill.engine.status import list_statuses
    from tokenmill.errors import RequestError
    from tokenmill.stages.registry import KINDS

    uploads = _read_uploads(path, abort_uploads)
    jobs = _read_jobs(path, on, profiles)
    try:
        statuses = list_statuses(path, KINDS, stage)
    except RequestError:
        if not jobs:
            raise
        statuses = []
    _print_statuses(statuses, json=json)
    for job in jobs:
        if json:
            print_json(job)
        else:
            sys.stdout.write(f"{printable(str(job))}\n")
    if uploads:
        sys.stderr.write(f"{printable(uploads)}\n")


def _read_uploads(path: Path, abort_hours: float | None) -> str | None:
    """Return a line about the unfinished uploads to a bucket, and abort old ones before if `abort_hours` is given."""
    from tokenmill.core.buckets import mirror, uploads
    from tokenmill.core.buckets.client import BucketError
    from tokenmill.errors import RequestError

    if abort_hours is not None and not math.isfinite(abort_hours):
        raise RequestError(f"invalid --abort-uploads {abort_hours}: it must be a number of hours; correct it")
    address = mirror.find_address(path)
    if address is None:
        if abort_hours is not None:
            raise RequestError(f"--abort-uploads: {path} is not in a bucket; remove the option")
        return None
    try:
        if abort_hours is not None:
            uploads.abort_uploads(address, abort_hours * 3600)
        unfinished = uploads.list_uploads(address)
    except BucketError as error:
        return f"warning: cannot list the unfinished uploads: {error}; allow these credentials to list them"
    if not unfinished:
        return None
    oldest = format_duration(max(0.0, *(upload.age_seconds for upload in unfinished)))
    return (
        f"{len(unfinished)} unfinished uploads, the oldest of {oldest} ago, of running attempts or of killed ones; the "
        "end of a stage aborts those of a day ago, and --abort-uploads HOURS others"
    )


def _read_jobs(path: Path, on: str | None, profiles: Path | None) -> "list[JobStates | ObjectState]":
    """Return the submitted jobs that write to a directory: those that Slurm knows, and with a profile Kubernetes'."""
    from tokenmill.submit import slurm

    if on is None or on in ("local", "slurm"):
        return [*slurm.read_states(path)]
    from tokenmill.submit import kubernetes
    from tokenmill.submit.profile import KubernetesProfile, read_profile

    profile = read_profile(on, "status", profiles, Path.cwd())
    if isinstance(profile, KubernetesProfile):
        return [*kubernetes.read_states(str(path), profile)]
    return [*slurm.read_states(path)]


def _print_statuses(statuses: "list[StageStatus]", *, json: bool) -> None:
    from tokenmill.engine.record import describe_rejected

    for stage_status in statuses:
        if json:
            print_json(stage_status)
            continue
        units = f"{stage_status.units_done}/{stage_status.units} units"
        line = f"{stage_status.stage} in {stage_status.output}: {stage_status.state}, {units}"
        if stage_status.units:
            line += f", {format_bytes(stage_status.bytes_done)} of {format_bytes(stage_status.bytes)}"
        if stage_status.bytes_per_second and stage_status.state != "complete":
            line += f", {format_bytes(stage_status.bytes_per_second)}/s"
        if stage_status.seconds_left is not None:
            line += f", about {format_duration(stage_status.seconds_left)} left"
        lines = [line]
        if rejected := describe_rejected(stage_status.counts, stage_status.output):
            lines.append(f"  {rejected}")
        if running := stage_status.at_work:
            lines.append(f"  in progress: {', '.join(running[:8])}{', ...' if len(running) > 8 else ''}")
        for failure in stage_status.failures:
            lines.append(f"  failed: {failure.unit} on {failure.host} at {failure.time}: {failure.message}")
        sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
