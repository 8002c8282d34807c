"""`tokenmill train`: run one node of a training run, in a pod or on a machine."""

import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.groups import spread
from tokenmill.options import MetricsOptions


@spread
def train(
    settings: Annotated[Path, typer.Argument(help="JSON file with the settings of the run; the chart mounts it.")],
    metrics: MetricsOptions,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the settings and print the command of node 0, without starting it."),
    ] = False,
    build_index: Annotated[
        bool, typer.Option("--build-index", help="Build Megatron-LM's sample index on CPUs, then exit.")
    ] = False,
) -> None:
    """Start and supervise a Megatron-LM run: exit 0 only at its target, 143 to be retried, 2 if no retry can help."""
    from tokenmill.training.runtime import run
    from tokenmill.training.runtime.prepare import prepare

    if build_index:
        run.build_sample_index(settings)
    elif dry_run:
        prepared = prepare(settings, scratch=Path(tempfile.mkdtemp(prefix="tokenmill-dry-run-")), dry_run=True)
        for line in prepared.messages:
            sys.stderr.write(f"{line}\n")
        sys.stdout.write(shlex.join(prepared.command) + "\n")
    else:
        run.train(settings, metrics.metrics)
