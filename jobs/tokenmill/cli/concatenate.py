"""`tokenmill concatenate`: join many files into a few."""

from typing import Annotated

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.cli.submittable import SubmittableCommand
from tokenmill.engine.options import FileOptions, Option, Panel, RunOptions, WorkerOptions
from tokenmill.sources.options import LineOptions


@spread
def concatenate(
    input: o.Input,
    lines: LineOptions,
    files: FileOptions,
    workers: WorkerOptions,
    run: RunOptions,
    output: o.Output = None,
    target_files: Annotated[
        int,
        Option("Number of files to write.", minimum=1, chart="dataset.targetFiles", panel=Panel.OUTPUT, usual=True),
    ] = 256,
    name: Annotated[
        str, Option("First part of the names of joined outputs.", chart="dataset.name", panel=Panel.OUTPUT)
    ] = "part",
    from_stage: o.From = None,
    processes: o.Processes = None,
) -> None:
    """Join JSONL files into a few of equal size (optional).

    preprocess --target-files groups files itself.

    Examples:
        tokenmill concatenate out --target-files 64
        tokenmill concatenate corpus joined --include '*.jsonl'
    """
    from tokenmill.cli.stage_result import run_and_report
    from tokenmill.stages.concatenate import Concatenate
    from tokenmill.stages.registry import CONCATENATE, default_output

    stage = Concatenate(
        input=input,
        output=output or default_output(input, CONCATENATE),
        target_files=target_files,
        name=name,
        selection=files.selection(),
        format=lines.format,
        from_stage=from_stage,
    )
    run_and_report(stage, run, workers, processes)


COMMAND_CLASS = SubmittableCommand
