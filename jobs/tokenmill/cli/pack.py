"""`tokenmill pack`: pack sequences into rows for fine-tuning."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.commands import location
from tokenmill.cli.groups import spread
from tokenmill.cli.submittable import SubmittableCommand
from tokenmill.engine.options import RunOptions, WorkerOptions
from tokenmill.stages.pack.options import PackOptions


@spread
def pack(
    input: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            parser=location,
            help="Output of chat, preprocess or adopt, or a blend.json with such outputs.",
        ),
    ],
    options: PackOptions,
    workers: WorkerOptions,
    run: RunOptions,
    output: o.Output = None,
    from_stage: o.From = None,
    processes: o.Processes = None,
) -> None:
    """Pack sequences into rows for fine-tuning.

    Rows have --pack-size tokens, in the format of Megatron-Bridge. No text is tokenized.

    Examples:
        tokenmill pack out/chat
        tokenmill pack out/chat out/packed --pack-size 8192
    """
    from tokenmill.cli.stage_result import run_and_report
    from tokenmill.stages.pack.stage import Pack
    from tokenmill.stages.registry import PACK, default_output

    stage = Pack(
        input=input,
        output=output or default_output(input, PACK),
        options=options,
        from_stage=from_stage,
    )
    run_and_report(stage, run, workers, processes)


COMMAND_CLASS = SubmittableCommand
