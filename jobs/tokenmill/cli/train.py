"""`tokenmill train`: one node of a training run, as a pod or by hand."""

import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer


def train(
    settings: Annotated[Path, typer.Argument(help="The run's settings, a JSON file; the chart mounts it.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check it and print the command of node 0, starting nothing.")
    ] = False,
    build_index: Annotated[
        bool, typer.Option("--build-index", help="Build Megatron-LM's sample index, on CPUs, and end.")
    ] = False,
) -> None:
    """Start, supervise and judge a Megatron-LM run: exit 0 at its target alone, 143 to be tried again, 2 for good."""
    from tokenmill.training.runtime import run
    from tokenmill.training.runtime.prepare import prepare

    if build_index:
        run.index(settings)
    elif dry_run:
        prepared = prepare(settings, scratch=Path(tempfile.mkdtemp(prefix="tokenmill-dry-run-")), dry_run=True)
        for line in prepared.said:
            sys.stderr.write(f"{line}\n")
        sys.stdout.write(shlex.join(prepared.command) + "\n")
    else:
        run.train(settings)
