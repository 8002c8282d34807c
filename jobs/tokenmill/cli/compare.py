"""`tokenmill compare`: compare training runs, fingerprints first, as a table and as one HTML file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.engine.options import Panel


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Directory of a run, or its log, TensorBoard events, trainer_state.json, CSV or JSONL; NAME=PATH sets "
            "a name. The first run is the baseline.",
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            rich_help_panel=Panel.OUTPUT,
            metavar="FILE",
            help="Also write one HTML file with plots, which needs no network.",
        ),
    ] = None,
    seq_length: Annotated[
        int | None,
        typer.Option(
            "--seq-length",
            rich_help_panel=Panel.INPUT,
            min=1,
            max=1 << 40,
            help="Tokens of a sample, for runs whose files do not contain it.",
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Compare training runs, data and order first.

    It also compares loss over tokens, throughput, slow steps and settings.

    Examples:
        tokenmill compare checkpoints/a checkpoints/b
        tokenmill compare old=logs/a new=logs/b --html compare.html
    """
    import msgspec

    from tokenmill.core.json_lines import make_portable, print_json
    from tokenmill.core.printing import printable
    from tokenmill.reports.compare.page import write_page
    from tokenmill.reports.compare.report import compare_runs
    from tokenmill.reports.compare.run import parse_inputs
    from tokenmill.reports.compare.text import to_text
    from tokenmill.reports.html_page import check_target

    if html is not None:
        check_target(html, "compare")
    report, compared = compare_runs(parse_inputs(runs), seq_length)
    if html is not None:
        write_page(html, report, compared)
    if json:
        print_json(msgspec.structs.replace(report, html=html and printable(str(html))), make_portable)
        return
    sys.stdout.write(to_text(report) + "\n" + (f"\nwith plots: {printable(str(html))}\n" if html else ""))
