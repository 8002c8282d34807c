"""`tokenmill extract`: decompress files."""

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.cli.submittable import SubmittableCommand
from tokenmill.engine.options import FileOptions, RunOptions, WorkerOptions
from tokenmill.sources.options import LineOptions, WindowOptions


@spread
def extract(
    input: o.Input,
    lines: LineOptions,
    zstd: WindowOptions,
    files: FileOptions,
    workers: WorkerOptions,
    run: RunOptions,
    output: o.Output = None,
    from_stage: o.From = None,
    processes: o.Processes = None,
) -> None:
    """Decompress files to JSONL (optional).

    It reads .zst, .gz, .bz2 and .xz. preprocess reads compressed files itself.

    Examples:
        tokenmill extract out
        tokenmill extract corpus text --include '*.jsonl.zst'
    """
    from tokenmill.cli.stage_result import run_and_report
    from tokenmill.stages.extract import Extract
    from tokenmill.stages.registry import EXTRACT, default_output

    stage = Extract(
        input=input,
        output=output or default_output(input, EXTRACT),
        selection=files.selection(),
        format=lines.format,
        zstd_window=zstd.zstd_window,
        from_stage=from_stage,
    )
    run_and_report(stage, run, workers, processes)


COMMAND_CLASS = SubmittableCommand
