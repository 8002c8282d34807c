"""`tokenmill adopt`: record the pairs of another tool as an output of preprocess."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.engine.options import Panel, RunOptions, WorkerOptions
from tokenmill.tokenize.options import TokenizerOptions


@spread
def adopt(
    prefixes: Annotated[
        list[Path],
        typer.Argument(
            metavar="PREFIX...",
            help="Pairs, with or without .bin or .idx, or directories, of which all pairs are adopted.",
        ),
    ],
    tokenizer: TokenizerOptions,
    workers: WorkerOptions,
    run: RunOptions,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            rich_help_panel=Panel.OUTPUT,
            help="Directory to copy the pairs to. Default: write the records next to the pairs.",
        ),
    ] = None,
    append_eod: Annotated[
        bool | None,
        typer.Option(
            "--append-eod/--no-append-eod",
            rich_help_panel=Panel.TOKENS,
            help="Refuse pairs with a document without EOD, or accept all. Default: as some documents end.",
        ),
    ] = None,
    endpoint: o.Endpoint = None,
    processes: o.Processes = None,
) -> None:
    """Record another tool's pairs as output of preprocess.

    It verifies and hashes the pairs, which Megatron-LM, NeMo or another tool made.

    Examples:
        tokenmill adopt corpus_text_document --tokenizer Qwen/Qwen3-8B
        tokenmill adopt pairs --output out --tokenizer Qwen/Qwen3-8B
    """
    from tokenmill.cli.stage_result import run_and_report
    from tokenmill.core.files.explain import explain_os_errors
    from tokenmill.stages.adopt import Adopt, find_pairs

    with explain_os_errors(output or prefixes[0]):
        pairs = find_pairs(prefixes, output)
    if append_eod is None and tokenizer.eod_token:
        append_eod = True
    stage = Adopt(pairs=pairs, output=pairs.output, tokenizer=tokenizer, append_eod=append_eod, endpoint=endpoint)
    run_and_report(stage, run, workers, processes)
