"""`tokenmill concatenate`: join many files into a few."""

from typing import Annotated

import typer

from tokenmill.cli import options as o


def concatenate(
    input: o.Input,
    output: o.Output = None,
    target_files: Annotated[int, typer.Option("--target-files", min=1, help="How many files to make.")] = 256,
    name: o.Name = "part",
    format: o.FormatOfLines = None,
    from_stage: o.From = None,
    include: o.Include = [],  # noqa: B006 - typer copies it
    exclude: o.Exclude = [],  # noqa: B006
    split: o.Split = None,
    prefer: o.Prefer = None,
    worker_index: o.WorkerIndex = 0,
    workers: o.Workers = 1,
    processes: o.Processes = None,
    replace: o.Replace = False,
    verify_hashes: o.VerifyHashes = False,
    json: o.Json = False,
) -> None:
    """Join JSONL files into a few of equal size. Optional: preprocess --target-files groups them itself."""
    from tokenmill.cli.report import how_to_run, report
    from tokenmill.stages import launch

    target = output or launch.default_output(input, "concatenate")
    how = how_to_run(worker_index, workers, processes, replace, verify_hashes, json)
    summary = launch.concatenate(
        input,
        target,
        how,
        target_files=target_files,
        name=name,
        from_stage=from_stage,
        selection=o.selection(include, exclude, split, None, prefer),
        wanted=o.format_of_lines(format),
    )
    report(summary, target, json)
