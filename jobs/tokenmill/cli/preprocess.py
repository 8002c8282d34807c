"""`tokenmill preprocess`: tokenize text into Megatron-LM's indexed datasets."""

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.cli.submittable import SubmittableCommand
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
    from tokenmill.cli.sources import run_source_stage
    from tokenmill.stages.preprocess import Preprocess

    fields = {"options": options, "from_stage": from_stage, "endpoint": source.endpoint}
    run_source_stage(Preprocess, fields, input, output, source, files, scratch, workers, run, processes)


COMMAND_CLASS = SubmittableCommand
