"""`tokenmill preprocess`: tokenize text into Megatron-LM's indexed datasets."""

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.cli.submittable import SubmittableCommand
from tokenmill.engine.options import FileOptions, RunOptions, WorkerOptions
from tokenmill.sources.options import SourceOptions
from tokenmill.tokenize.options import PreprocessOptions


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
    """Tokenize text into .bin/.idx, as Megatron-LM does.

    It reads JSONL, Parquet, Arrow, JSON and plain text, compressed or not. The shards of a source are fetched to
    local scratch one by one.

    Examples:
        tokenmill preprocess corpus out --tokenizer Qwen/Qwen3-8B
        tokenmill preprocess hf://datasets/ORG/NAME out --tokenizer Qwen/Qwen3-8B
    """
    from tokenmill.cli.sources import resolve_source
    from tokenmill.cli.stage_result import run_and_report
    from tokenmill.stages.preprocess import Preprocess

    corpus, selection, target = resolve_source(Preprocess.kind, input, output, source, files, scratch)
    stage = Preprocess(
        input=corpus,
        output=target,
        selection=selection,
        options=options,
        from_stage=from_stage,
        endpoint=source.endpoint,
    )
    run_and_report(stage, run, workers, processes)


COMMAND_CLASS = SubmittableCommand
