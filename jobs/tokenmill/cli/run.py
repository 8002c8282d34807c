"""`tokenmill run`: a source through all stages on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.corpus.options import SourceOptions
from tokenmill.corpus.schemes import addresses
from tokenmill.options import FileOptions, RunOptions
from tokenmill.tokens.options import PreprocessOptions


@spread
def run(
    uri: Annotated[str, typer.Argument(metavar="SOURCE", help=f"{addresses()}.")],
    output: Annotated[Path, typer.Argument(help="Directory to write to, one below it for each stage.")],
    options: PreprocessOptions,
    source: SourceOptions,
    files: FileOptions,
    run: RunOptions,
    extract: Annotated[
        bool, typer.Option("--extract/--no-extract", help="Keep the text decompressed as well.")
    ] = False,
    concatenate: Annotated[
        int | None, typer.Option("--concatenate", min=1, help="Join the decompressed text into N files first.")
    ] = None,
    processes: o.Processes = None,
) -> None:
    """Take a source through download, preprocess and verify on this machine; extract and concatenate on request."""
    from tokenmill.cli.report import how_to_run, report_pipeline
    from tokenmill.corpus.uri import normalize_source
    from tokenmill.pipeline import Pipeline

    how = how_to_run(run, processes=processes)
    pipeline = Pipeline(
        uri=normalize_source(uri),
        output=output,
        options=options,
        selection=files.selection(source.sample),
        source=source,
        extract=extract,
        concatenate=concatenate,
    )
    report_pipeline(pipeline, pipeline.run(how), how)
