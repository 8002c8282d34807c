"""`tokenmill run`: run a source through all stages on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.corpus.options import SourceOptions
from tokenmill.corpus.schemes import format_addresses
from tokenmill.options import FileOptions, RunOptions
from tokenmill.tokens.options import PreprocessOptions


@spread
def run(
    uri: Annotated[str, typer.Argument(metavar="SOURCE", help=f"{format_addresses()}.")],
    output: Annotated[Path, typer.Argument(help="Directory to write to, with a directory for each stage below it.")],
    options: PreprocessOptions,
    source: SourceOptions,
    files: FileOptions,
    run: RunOptions,
    extract: Annotated[bool, typer.Option("--extract/--no-extract", help="Also keep the decompressed text.")] = False,
    concatenate: Annotated[
        int | None, typer.Option("--concatenate", min=1, help="First join the decompressed text into N files.")
    ] = None,
    processes: o.Processes = None,
) -> None:
    """Run download, preprocess and verify on this machine; with the options also extract and concatenate."""
    from tokenmill.cli.stage_result import open_stage_run, report_pipeline
    from tokenmill.corpus.uri import normalize_source
    from tokenmill.pipeline import Pipeline

    pipeline = Pipeline(
        uri=normalize_source(uri),
        output=output,
        options=options,
        selection=files.selection(source.sample),
        source=source,
        extract=extract,
        concatenate=concatenate,
    )
    with open_stage_run(run, processes=processes) as stage_run:
        report_pipeline(pipeline, pipeline.run(stage_run), stage_run)
