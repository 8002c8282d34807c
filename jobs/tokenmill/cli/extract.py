"""`tokenmill extract`: decompress."""

from tokenmill.cli import options as o


def extract(
    input: o.Input,
    output: o.Output = None,
    format: o.FormatOfLines = None,
    zstd_window: o.ZstdWindow = None,
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
    """Decompress .zst .gz .bz2 .xz to .jsonl. Optional: preprocess reads compressed files itself."""
    from tokenmill.cli.report import how_to_run, report
    from tokenmill.stages import launch

    target = output or launch.default_output(input, "extract")
    how = how_to_run(worker_index, workers, processes, replace, verify_hashes, json)
    summary = launch.extract(
        input,
        target,
        how,
        from_stage=from_stage,
        selection=o.selection(include, exclude, split, None, prefer),
        wanted=o.format_of_lines(format),
        zstd_window=o.window_of(zstd_window),
    )
    report(summary, target, json)
