"""`tokenmill preprocess`: text to Megatron-LM's indexed datasets."""

from pathlib import Path

import typer

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.corpus.options import SourceOptions
from tokenmill.options import FileOptions, RunOptions, WorkerOptions
from tokenmill.tokens.options import PreprocessOptions


@spread
def preprocess(
    input: o.InputOrSource,
    options: PreprocessOptions,
    source: SourceOptions,
    files: FileOptions,
    workers: WorkerOptions,
    run: RunOptions,
    output: o.Output = None,
    from_stage: o.From = None,
    scratch: o.ScratchFile = None,
    processes: o.Processes = None,
) -> None:
    """Tokenise JSONL, compressed or not, Parquet, Arrow, JSON or text into .bin/.idx, as Megatron-LM does."""
    from tokenmill.cli.report import how_to_run, report
    from tokenmill.corpus.uri import normalize_source
    from tokenmill.flow.run import run_stage
    from tokenmill.stages.preprocess import Preprocess
    from tokenmill.stages.registry import PREPROCESS, default_output
    from tokenmill.tokens.stream import Stream

    input = normalize_source(input)
    local, target = "://" not in input, output
    if local:
        for_sources = {"--revision": source.revision, "--sample": source.sample, "--scratch": scratch}
        if given := [option for option, value in for_sources.items() if value]:
            raise typer.BadParameter(
                f"it is for a source such as hf://datasets/ORG/NAME, and {input} is a path",
                param_hint=", ".join(given),
            )
        target = output or default_output(Path(input), PREPROCESS)
    if target is None:
        raise typer.BadParameter("name the directory to write to; only below a local input is there a default")
    selection = files.selection(source.sample)
    stage = Preprocess(
        input=Path(input) if local else Stream(uri=input, selection=selection, source=source, scratch=scratch),
        output=target,
        options=options,
        selection=selection,
        from_stage=from_stage,
        endpoint=source.endpoint,
    )
    report(run_stage(stage, how_to_run(run, workers, processes)), target, run.json)
