"""`tokenmill transform`: change the shape of records."""

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.cli.submittable import SubmittableCommand
from tokenmill.corpus.options import SourceOptions
from tokenmill.options import FileOptions, RunOptions, WorkerOptions
from tokenmill.transforms.options import TransformOptions


@spread
def transform(
    input: o.InputOrSource,
    options: TransformOptions,
    source: SourceOptions,
    files: FileOptions,
    workers: WorkerOptions,
    run: RunOptions,
    output: o.Output = None,
    from_stage: o.From = None,
    scratch: o.ScratchDirectory = None,
    processes: o.Processes = None,
) -> None:
    """Change each record of JSONL, Parquet, Arrow or JSON with a function, and write JSONL in shards."""
    from tokenmill.cli.sources import run_source_stage
    from tokenmill.stages.transform import TransformRecords

    fields = {"options": options, "from_stage": from_stage}
    run_source_stage(TransformRecords, fields, input, output, source, files, scratch, workers, run, processes)


COMMAND_CLASS = SubmittableCommand
