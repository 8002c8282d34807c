"""`tokenmill download`: fetch a corpus, every byte checked."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o


def download(
    source: Annotated[str, typer.Argument(help="hf://datasets/ORG/NAME, https://, s3://, gs://, az:// or a path.")],
    output: Annotated[Path, typer.Argument(help="Directory to write to.")],
    revision: o.Revision = None,
    include: o.Include = [],  # noqa: B006 - typer copies it
    exclude: o.Exclude = [],  # noqa: B006
    split: o.Split = None,
    sample: o.Sample = None,
    prefer: o.Prefer = None,
    layout: Annotated[str, typer.Option(help="flat: all files in OUTPUT; tree: as they lie in the source.")] = "flat",
    connections: o.Connections = 8,
    deadline: o.Deadline = o.DAY,
    stall_seconds: o.StallSeconds = 60.0,
    endpoint: o.Endpoint = None,
    worker_index: o.WorkerIndex = 0,
    workers: o.Workers = 1,
    replace: o.Replace = False,
    verify_hashes: o.VerifyHashes = False,
    json: o.Json = False,
) -> None:
    """Fetch a corpus from the Hub, a bucket, the web or a disk, checking every file's hash."""
    from tokenmill.cli.report import how_to_run, report
    from tokenmill.corpus.source import normalize_source
    from tokenmill.stages import launch

    selection = o.selection(include, exclude, split, sample, prefer)
    how = how_to_run(worker_index, workers, None, replace, verify_hashes, json)
    summary = launch.download(
        normalize_source(source),
        output,
        how,
        revision=revision,
        selection=selection._replace(layout=o.one_of("--layout", layout, "flat", "tree")),
        connections=connections,
        deadline_seconds=deadline,
        stall_seconds=stall_seconds,
        endpoint=endpoint,
    )
    report(summary, output, json)
