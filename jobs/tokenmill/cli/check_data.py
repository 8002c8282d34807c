"""`tokenmill check-data`: check the data of a run, and that each framework reads the same samples from it."""

import sys
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.core.json_lines import print_json
from tokenmill.core.printing import printable


def check_data(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="Output of preprocess or pack, prefix of a pair, file of tokenmill blend, or synthetic:VOCAB for "
            "random tokens.",
        ),
    ],
    seq_length: Annotated[
        int, typer.Option("--seq-length", min=2, max=2**31 - 2, help="Tokens of a sample; for a pack, its pack size.")
    ],
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            min=1,
            help="Samples that the run requests of train, or of --part. Default: one epoch; with weights, as many "
            "samples as the tokens of all datasets give.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of the order.")] = 1234,
    split: Annotated[
        str | None,
        typer.Option(
            "--split", metavar="A,B,C", help="Shares of train, validation and test. Default: all data is train."
        ),
    ] = None,
    part: Annotated[
        str | None, typer.Option("--part", help="Check only train, validation or test. Default: all with data.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="The key to use from datasets with several keys.")] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            min=1,
            help="Rows of the model's embedding, with padding. Default: those that the data's tokenizer needs.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="A preset, such as llama3-8b, instead of --vocab-size.")
    ] = None,
    framework: Annotated[
        list[str],
        typer.Option(
            "--framework",
            metavar="NAME",
            help="Compare the samples that a framework reads: all, megatron-core, automodel, torch, transformers, "
            "lightning, torchtitan, deepspeed or megatron-bridge; repeatable. all leaves out those that are not "
            "installed.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    count: Annotated[int, typer.Option("--count", min=1, help="Number of samples of each part to compare.")] = 256,
    pad: Annotated[
        int | None,
        typer.Option("--pad", min=0, help="Id that Megatron-LM's tokenizer has as pad: read as 0 and not trained."),
    ] = None,
    json: o.Json = False,
) -> None:
    """Check files, vocabulary and tokens of a run's data, and compare the samples that each framework reads."""
    if vocab_size is not None and model is not None:
        raise typer.BadParameter("--vocab-size and --model both set the model's vocabulary; use one of them")
    from tokenmill.loaders.check.frameworks import choose_frameworks
    from tokenmill.loaders.check.report import make_event, render_text
    from tokenmill.loaders.check.request import CheckRequest
    from tokenmill.loaders.check.run import check

    request = CheckRequest(
        path=path,
        seq_length=seq_length,
        samples=samples,
        seed=seed,
        split=split,
        part="validation" if part == "valid" else part,
        key=key,
        pad=pad,
        count=count,
        vocabulary=vocab_size if model is None else _count_rows(model),
        frameworks=choose_frameworks(framework),
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
