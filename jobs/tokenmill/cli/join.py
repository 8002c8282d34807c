"""`tokenmill join`: write the pairs of a dataset as fewer, larger pairs."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.commands import location
from tokenmill.cli.groups import spread
from tokenmill.engine.options import Option, Panel, RunOptions, WorkerOptions


@spread
def join(
    input: Annotated[Path, typer.Argument(metavar="INPUT", parser=location, help="Output of preprocess or adopt.")],
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", parser=location, help="Directory or bucket to write to, outside INPUT.")
    ],
    workers: WorkerOptions,
    run: RunOptions,
    target_files: Annotated[
        int | None,
        Option("Number of pairs to write for each key.", minimum=1, panel=Panel.OUTPUT, usual=True),
    ] = None,
    target_size: Annotated[
        str,
        Option("Without --target-files: about this size of a pair.", metavar="SIZE", panel=Panel.OUTPUT, usual=True),
    ] = "10GiB",
    by_source: Annotated[
        bool,
        Option(
            "Join only pairs whose texts are from one directory; the number is then that of each directory.",
            panel=Panel.OUTPUT,
        ),
    ] = False,
    name: Annotated[str, Option("First part of the names of the pairs.", panel=Panel.OUTPUT)] = "part",
    processes: o.Processes = None,
) -> None:
    """Write the pairs of a dataset as fewer, larger ones.

    The files are those of Megatron-LM's merge_datasets. Each pair needs two open files in each rank, and time at the
    start of a run.

    Examples:
        tokenmill join out/preprocessed joined --target-files 8
        tokenmill join out/preprocessed joined --target-size 20GiB --by-source
    """
    from tokenmill.cli.stage_result import run_and_report
    from tokenmill.datasets.dataset import find_dataset
    from tokenmill.engine.options import parse_size_limit
    from tokenmill.stages.join import Join

    try:
        size = parse_size_limit(target_size)
    except ValueError as error:
        raise o.usage_error("--target-size", str(error)) from error
    stage = Join(
        dataset=find_dataset(input),
        output=output,
        target_files=target_files,
        target_bytes=None if target_files else size,
        by_source=by_source,
        name=name,
    )
    run_and_report(stage, run, workers, processes)
