"""`tokenmill train`: run one node of a training run, in a pod or on a machine; diagnose a run that hung."""

import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.commands import CommandWithSubcommands
from tokenmill.cli.groups import spread
from tokenmill.cli.submittable import SubmittableCommand
from tokenmill.engine.options import MetricsOptions, NotifyOptions, Panel


@spread
def train(
    settings: Annotated[Path, typer.Argument(help="JSON file with the settings of the run; the chart mounts it.")],
    metrics: MetricsOptions,
    notify: NotifyOptions,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            rich_help_panel=Panel.OUTPUT,
            help="Check the settings and print the command of each phase, or with --on what would be submitted.",
        ),
    ] = False,
    build_index: Annotated[
        bool,
        typer.Option(
            "--build-index",
            rich_help_panel=Panel.OUTPUT,
            help="Build Megatron-LM's sample index on CPUs, then exit.",
        ),
    ] = False,
) -> None:
    """Start and supervise a Megatron-LM run.

    It exits with 0 only at the target of the run, with 143 to be retried, and with 2 if no retry can help.

    Examples:
        tokenmill train settings.json
        tokenmill train settings.json --dry-run
    """
    from tokenmill.train.runtime import run
    from tokenmill.train.runtime.prepare import prepare

    if build_index:
        run.build_sample_index(settings)
    elif dry_run:
        prepared = prepare(settings, scratch=Path(tempfile.mkdtemp(prefix="tokenmill-dry-run-")), dry_run=True)
        for line in prepared.messages:
            sys.stderr.write(f"{line}\n")
        sys.stdout.write("\n\n".join(map(format_command, prepared.commands)) + "\n")
    else:
        run.train(settings, metrics.metrics, notify.notify)


def format_command(command: Sequence[str]) -> str:
    """Return a command for a shell, with a line for each option and its values."""
    lines = [shlex.quote(command[0])]
    for word in command[1:]:
        if word.startswith("--"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n  ".join(lines)


def diagnose(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Directory of a hang, of a run's checkpoints (the last hang), or of flight-recorder dumps and stacks.",
        ),
    ],
    json: o.Json = False,
) -> None:
    """Name the ranks and the operation of a hung run.

    It reads the stacks and the flight-recorder dumps of the ranks.

    Examples:
        tokenmill train diagnose checkpoints
        tokenmill train diagnose dumps --json
    """
    from tokenmill.core.json_lines import make_portable, print_json
    from tokenmill.train.diagnose import report
    from tokenmill.train.diagnose.evidence import read_evidence
    from tokenmill.train.diagnose.text import to_text

    result = report.diagnose(read_evidence(directory))
    if json:
        print_json(result, make_portable)
        return
    sys.stdout.write(to_text(result) + "\n")


class TrainCommand(SubmittableCommand, CommandWithSubcommands):
    """`tokenmill train SETTINGS` and `tokenmill train diagnose DIR`."""

    subcommands = (diagnose,)


COMMAND_CLASS = TrainCommand
