"""`tokenmill forget`: write a dataset without some of its documents, and list the runs that read them."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.core.printing import printable
from tokenmill.engine.options import Panel


@spread
def forget(
    dataset: Annotated[Path, typer.Argument(metavar="DATASET", help="Output of preprocess or adopt.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Directory to write to, outside DATASET.")],
    documents: Annotated[
        Path,
        typer.Option(
            "--documents",
            rich_help_panel=Panel.INPUT,
            metavar="FILE",
            help="Names of documents, one on each line: PAIR:NUMBER, FILE#RECORD, sha256:HEX, or JSON.",
        ),
    ],
    allow_missing: Annotated[
        bool,
        typer.Option("--allow-missing", rich_help_panel=Panel.INPUT, help="Accept names that match no document."),
    ] = False,
    run: Annotated[
        list[Path],
        typer.Option(
            "--run",
            rich_help_panel=Panel.SAMPLES,
            metavar="RUN",
            help="List the iterations and checkpoints of this run that read them; repeatable.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    phases: Annotated[
        Path | None,
        typer.Option(
            "--phases", rich_help_panel=Panel.SAMPLES, metavar="FILE", help="The file of the phases of these runs."
        ),
    ] = None,
    rewrite: Annotated[
        bool,
        typer.Option(
            "--rewrite",
            rich_help_panel=Panel.OUTPUT,
            help="Write pairs, as preprocess does without the documents; not views, which link to DATASET.",
        ),
    ] = False,
    json: o.Json = False,
    processes: o.Processes = None,
) -> None:
    """Leave documents out of a dataset.

    OUTPUT has a view of each pair, and a record. FILE has names as inspect shows them, also its lines of JSON; HEX is
    the SHA-256 of a text as inspect shows it.

    Examples:
        tokenmill forget out forgotten --documents documents.txt --run run
        tokenmill forget out clean --documents documents.txt --rewrite
    """
    from tokenmill.core.files.explain import explain_os_errors
    from tokenmill.core.json_lines import print_json
    from tokenmill.engine.progress import Reporter
    from tokenmill.engine.stage import StageRun
    from tokenmill.pipelines.forget import ForgetRequest, to_lines
    from tokenmill.pipelines.forget import forget as write_without

    request = ForgetRequest(dataset, output, documents, run, phases, rewrite, allow_missing)
    with explain_os_errors(output):
        record = write_without(request, StageRun(Reporter(json_lines=json), processes=processes))
    if json:
        print_json(record)
    else:
        sys.stdout.write("".join(f"{printable(line)}\n" for line in to_lines(output, record)))
