"""`tokenmill adopt`: take over pairs that another tool made."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.options import RunOptions, WorkerOptions
from tokenmill.tokens.options import TokenizerOptions


@spread
def adopt(
    prefixes: Annotated[
        list[Path],
        typer.Argument(
            metavar="PREFIX...",
            help="Pairs, with or without .bin or .idx, or directories of which all pairs are taken.",
        ),
    ],
    tokenizer: TokenizerOptions,
    workers: WorkerOptions,
    run: RunOptions,
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
    endpoint: o.Endpoint = None,
    processes: o.Processes = None,
) -> None:
    """Verify and hash pairs that Megatron-LM, NeMo or another tool made, and record them as an output of preprocess."""
    from tokenmill.cli.report import how_to_run, report
    from tokenmill.files.explain import explained
    from tokenmill.flow.run import run_stage
    from tokenmill.stages.adopt import Adopt, find_pairs

    with explained(output or prefixes[0]):
        pairs = find_pairs(prefixes, output)
    ends = True if append_eod is None and tokenizer.eod_token else append_eod
    stage = Adopt(pairs=pairs, output=pairs.output, tokenizer=tokenizer, append_eod=ends, endpoint=endpoint)
    report(run_stage(stage, how_to_run(run, workers, processes)), stage.output, run.json)
