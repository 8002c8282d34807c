"""`tokenmill adopt`: take over pairs that another tool made."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o


def adopt(
    prefixes: Annotated[
        list[Path],
        typer.Argument(
            metavar="PREFIX...",
            help="Pairs, with or without .bin or .idx, or directories of which all pairs are taken.",
        ),
    ],
    tokenizer: o.Tokenizer = ...,  # type: ignore[assignment]
    tokenizer_revision: o.TokenizerRevision = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", help="Directory to copy the pairs to; when left out, the records are written beside them."
        ),
    ] = None,
    append_eod: Annotated[
        bool | None,
        typer.Option(
            "--append-eod/--no-append-eod",
            help="Refuse a pair with a document that does not end with EOD, or let documents end as they do. When left "
            "out, what some documents end with decides.",
        ),
    ] = None,
    eod_token: o.EodToken = None,
    tokenizer_source: o.TokenizerSource = None,
    endpoint: o.Endpoint = None,
    worker_index: o.WorkerIndex = 0,
    workers: o.Workers = 1,
    processes: o.Processes = None,
    replace: o.Replace = False,
    json: o.Json = False,
) -> None:
    """Verify and hash pairs that Megatron-LM, NeMo or another tool made, and record them as an output of preprocess."""
    from tokenmill.cli.report import how_to_run, report
    from tokenmill.stages import launch

    how = how_to_run(worker_index, workers, processes, replace, False, json)
    summary, target = launch.adopt(
        prefixes,
        output,
        how,
        tokenizer=tokenizer,
        tokenizer_revision=tokenizer_revision,
        append_eod=True if append_eod is None and eod_token else append_eod,
        eod_token=eod_token,
        endpoint=endpoint,
        tokenizer_source=tokenizer_source and o.one_of("--tokenizer-source", tokenizer_source, "file", "class"),
    )
    report(summary, target, json)
