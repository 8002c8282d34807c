"""`tokenmill preprocess`: tokenize text into Megatron-LM's indexed datasets."""

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
    scratch: o.ScratchDirectory = None,
    processes: o.Processes = None,
) -> None:
    """Tokenize JSONL, compressed or not, Parquet, Arrow, JSON or text into .bin/.idx, as Megatron-LM does."""
    from tokenmill.cli.report import build_stage_run, report
    from tokenmill.corpus.uri import normalize_source
    from tokenmill.flow.run import run_stage
    from tokenmill.stages.preprocess import Preprocess
    from tokenmill.stages.registry import PREPROCESS, default_output
    from tokenmill.tokens.stream import Stream

    input = normalize_source(input)
    local, target = "://" not in input, output
    if local:
        source_options = {"--revision": source.revision, "--sample": source.sample, "--scratch": scratch}
        if unusable := [option for option, value in source_options.items() if value]:
            raise typer.BadParameter(
                f"it needs a source such as hf://datasets/ORG/NAME, but {input} is a path; remove the option",
                param_hint=", ".join(unusable),
            )
        target = output or default_output(Path(input), PREPROCESS)
    if target is None:
        raise typer.BadParameter("specify the output directory; only a local input has a default")
    selection = files.selection(source.sample)
    stage = Preprocess(
        input=Path(input) if local else Stream(uri=input, selection=selection, source=source, scratch=scratch),
        output=target,
        options=options,
        selection=selection,
        from_stage=from_stage,
        endpoint=source.endpoint,
    )
    report(run_stage(stage, build_stage_run(run, workers, processes)), target, run.json)
