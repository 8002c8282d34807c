"""`tokenmill download`: fetch a corpus and check every byte."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.commands import address, location
from tokenmill.cli.groups import spread
from tokenmill.cli.submittable import SubmittableCommand
from tokenmill.engine.options import FileOptions, Option, Panel, RunOptions, WorkerOptions
from tokenmill.sources.options import SourceOptions
from tokenmill.sources.schemes import format_addresses


@spread
def download(
    uri: Annotated[str, typer.Argument(metavar="SOURCE", parser=address, help=f"{format_addresses()}.")],
    output: Annotated[Path, typer.Argument(parser=location, help="Directory or bucket to write to.")],
    source: SourceOptions,
    files: FileOptions,
    workers: WorkerOptions,
    run: RunOptions,
    layout: Annotated[
        str,
        Option(
            "Write all files into OUTPUT, or the directories of the source.",
            choices=("flat", "tree"),
            chart="dataset.layout",
            panel=Panel.OUTPUT,
            usual=True,
        ),
    ] = "flat",
) -> None:
    """Fetch a corpus, and check the hash of every file.

    The corpus is on the Hub, in a bucket, on a web server or on a disk.

    Examples:
        tokenmill download hf://datasets/ORG/NAME out
        tokenmill download s3://bucket/corpus out --include '*.parquet'
    """
    from tokenmill.cli.stage_result import run_and_report
    from tokenmill.sources.uri import normalize_source
    from tokenmill.stages.download import Download

    selection = files.selection(source.sample, layout)
    stage = Download(uri=normalize_source(uri), output=output, selection=selection, source=source)
    run_and_report(stage, run, workers)


COMMAND_CLASS = SubmittableCommand
