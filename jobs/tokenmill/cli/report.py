"""`tokenmill report`: describe a dataset or a training run as text, as one HTML file, or as JSON."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.commands import location
from tokenmill.engine.options import Panel


def report(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            parser=location,
            help="Output of a stage, directory of a dataset, or directory of a run's checkpoints.",
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", rich_help_panel=Panel.OUTPUT, metavar="FILE", help="Write one HTML file, which needs no network."
        ),
    ] = None,
    seq_length: Annotated[
        int | None,
        typer.Option(
            "--seq-length",
            rich_help_panel=Panel.INPUT,
            min=1,
            max=1 << 40,
            help="Count the documents with more tokens (default: 4096); of a run, tokens of a sample if unknown.",
        ),
    ] = None,
    tokenizer_compare: Annotated[
        str | None,
        typer.Option(
            "--tokenizer-compare",
            rich_help_panel=Panel.TOKENS,
            metavar="NAME",
            help="Encode a sample of the texts with this tokenizer too: a directory, or a name on the Hub.",
        ),
    ] = None,
    examples: Annotated[
        int,
        typer.Option(
            "--examples",
            rich_help_panel=Panel.OUTPUT,
            min=0,
            max=100,
            help="Show this many texts of the data for each reason and kind. The default shows no text.",
        ),
    ] = 0,
    sample_tokens: Annotated[
        int,
        typer.Option(
            "--sample-tokens",
            rich_help_panel=Panel.TOKENS,
            min=1,
            help="Of a dataset with more tokens, count ids and duplicates on a sample of this size.",
        ),
    ] = 1_000_000_000,
    complete: Annotated[
        bool,
        typer.Option(
            "--all",
            rich_help_panel=Panel.TOKENS,
            help="Count ids and duplicates on all tokens, however many there are.",
        ),
    ] = False,
    metrics: Annotated[
        Path | None,
        typer.Option(
            "--metrics",
            rich_help_panel=Panel.INPUT,
            metavar="PATH",
            help="Log or directory of TensorBoard events of a run, if it is not in OUT.",
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Describe a dataset or a training run.

    The report of a dataset has its size, sources, lengths, scripts, ids, duplicates and stages.

    Examples:
        tokenmill report out
        tokenmill report out --html report.html
    """
    import msgspec

    from tokenmill.core.files.explain import explain_os_errors
    from tokenmill.core.json_lines import make_portable, print_json
    from tokenmill.core.printing import printable
    from tokenmill.engine.progress import Reporter
    from tokenmill.reports.contract import Report
    from tokenmill.reports.dataset import DEFAULT_SEQ_LENGTH, ReportOptions, build_dataset_report, select_output
    from tokenmill.reports.html_page import check_target
    from tokenmill.reports.page import COMMAND, write_page
    from tokenmill.reports.run import build_run_report, is_run
    from tokenmill.reports.text import to_text

    if html is not None:
        check_target(html, COMMAND)
    with explain_os_errors(path):
        if is_run(path):
            if tokenizer_compare or examples or complete:
                raise typer.BadParameter(
                    f"{path} is a training run; --tokenizer-compare, --examples and --all are for datasets"
                )
            result: Report = build_run_report(path, metrics, seq_length)
        else:
            if metrics is not None:
                raise typer.BadParameter(f"{path} is not a training run; --metrics is for runs")
            options = ReportOptions(
                seq_length or DEFAULT_SEQ_LENGTH, tokenizer_compare, examples, None if complete else sample_tokens
            )
            result = build_dataset_report(select_output(path), options, Reporter(json_lines=json).log)
    if html is not None:
        write_page(html, result)
    if json:
        print_json(msgspec.structs.replace(result, html=html and printable(str(html))), make_portable)
    else:
        sys.stdout.write(f"report: {printable(str(html))}\n" if html else to_text(result) + "\n")
