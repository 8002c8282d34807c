"""`tokenmill check-data`: check the data of a run, and that each framework reads the same samples from it."""

import sys
from dataclasses import replace
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.commands import address
from tokenmill.cli.groups import spread
from tokenmill.core.json_lines import print_json
from tokenmill.core.printing import printable
from tokenmill.loaders.check.options import CheckOptions


@spread
def check_data(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            parser=address,
            help="Output of preprocess or pack, prefix of a pair, file of tokenmill blend, or synthetic:VOCAB for "
            "random tokens.",
        ),
    ],
    options: CheckOptions,
    json: o.Json = False,
) -> None:
    """Check a run's data, and what each framework reads.

    It checks files, vocabulary and tokens, and compares the samples of the frameworks.

    Examples:
        tokenmill check-data out/preprocessed --seq-length 4096
        tokenmill check-data blend.txt --seq-length 4096 --framework all
    """
    from tokenmill.loaders.check.frameworks import choose_frameworks
    from tokenmill.loaders.check.report import make_event, render_text
    from tokenmill.loaders.check.request import CheckRequest
    from tokenmill.loaders.check.run import check

    request = CheckRequest(
        **vars(replace(options, part="validation")) if options.part == "valid" else vars(options),
        path=path,
        vocabulary=options.vocab_size if options.model is None else _count_rows(options.model),
        frameworks=choose_frameworks(options.framework or []),
    )
    report = check(request, log=lambda line: None if json else _log(line))
    if json:
        print_json(make_event(report))
    else:
        sys.stdout.write("\n".join(render_text(report)) + "\n")
    if report.bad:
        raise typer.Exit(1)


def _log(line: str) -> None:
    sys.stderr.write(f"{printable(line)}\n")
    sys.stderr.flush()


def _count_rows(model: str) -> int:
    """Return the rows of the embedding of a preset, as planning computes them without tensor parallelism."""
    from tokenmill.loaders.check.files import PADDED_TO
    from tokenmill.models.model import load_preset

    return -(-load_preset(model).vocabulary_size // PADDED_TO) * PADDED_TO
