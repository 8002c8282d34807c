"""`tokenmill pack`: pack conversations or documents into rows."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.commands import location
from tokenmill.cli.groups import spread
from tokenmill.cli.submittable import SubmittableCommand
from tokenmill.engine.options import RunOptions, WorkerOptions
from tokenmill.stages.pack.options import MEGATRON, PackOptions


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
    """Pack conversations or documents into rows.

    Rows have at most --pack-size tokens, in the format of Megatron-Bridge, or with --format megatron, for pre-training,
    in that of Megatron-LM. No text is tokenized.

    Examples:
        tokenmill pack out/chat out/packed --pack-size 8192
        tokenmill pack out/preprocessed packed --pack-size 4096 --format megatron
    """
    from tokenmill.cli.stage_result import run_and_report
    from tokenmill.stages.pack.documents import PackDocuments, open_documents
    from tokenmill.stages.pack.stage import Pack
    from tokenmill.stages.registry import PACK, default_output

    stage: Pack | PackDocuments
    place = output or default_output(input, PACK)
    if options.format == MEGATRON:
        stage = PackDocuments(dataset=open_documents(input, from_stage), output=place, options=options)
    else:
        stage = Pack(input=input, output=place, options=options, from_stage=from_stage)
    run_and_report(stage, run, workers, processes)


COMMAND_CLASS = SubmittableCommand
