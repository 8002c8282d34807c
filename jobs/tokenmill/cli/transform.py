"""`tokenmill transform`: change the shape of records."""

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.cli.submittable import SubmittableCommand
from tokenmill.engine.options import FileOptions, RunOptions, WorkerOptions
from tokenmill.sources.options import SourceOptions
from tokenmill.stages.transform.options import TransformOptions


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
    """Change each record with a function; write shards.

    It reads JSONL, Parquet, Arrow or JSON.

    Examples:
        tokenmill transform corpus out --transform 'sft(input=question)'
        tokenmill transform rows out --transform my_module:clean --shards 64
    """
    from tokenmill.cli.sources import resolve_source
    from tokenmill.cli.stage_result import run_and_report
    from tokenmill.stages.transform.stage import TransformRecords

    corpus, selection, target = resolve_source(TransformRecords.kind, input, output, source, files, scratch)
    stage = TransformRecords(
        input=corpus,
        output=target,
        selection=selection,
        options=options,
        from_stage=from_stage,
    )
    run_and_report(stage, run, workers, processes)


COMMAND_CLASS = SubmittableCommand
