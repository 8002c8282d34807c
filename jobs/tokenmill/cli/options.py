"""Options that several commands share, each declared once."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.tokens.engines import choices

if TYPE_CHECKING:
    from tokenmill.corpus.blocks import Reading
    from tokenmill.selection import Selection

Input = Annotated[
    Path, typer.Argument(metavar="INPUT", help="A dataset's directory, an earlier stage's output, or a file.")
]
InputOrSource = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="A dataset's directory, an earlier stage's output, a file, or a source such as hf://datasets/ORG/NAME, "
        "whose shards then come to local scratch one by one.",
    ),
]
Scratch = Annotated[
    Path | None, typer.Option("--scratch", help="Directory for a source's shards, a few at a time; TMPDIR if left out.")
]
Output = Annotated[
    Path | None, typer.Argument(metavar="OUTPUT", help="Directory to write to; below INPUT when left out.")
]
WorkerIndex = Annotated[
    int,
    typer.Option("--worker-index", envvar="JOB_COMPLETION_INDEX", min=0, help="Which of the workers this one is."),
]
Workers = Annotated[
    int, typer.Option("--workers", envvar="TOKENMILL_WORKERS", min=1, help="How many workers share the work.")
]
Processes = Annotated[
    int | None, typer.Option("--processes", min=1, help="Processes that do the work; as many as CPUs when left out.")
]
Replace = Annotated[
    bool,
    typer.Option("--replace", help="Remake an output that was made with other parameters, keeping what is the same."),
]
VerifyHashes = Annotated[
    bool, typer.Option("--verify-hashes", help="Re-read finished files and compare hashes, not only sizes.")
]
Json = Annotated[bool, typer.Option("--json", help="Progress and result as JSON lines, for machines.")]
From = Annotated[
    str | None, typer.Option("--from", metavar="STAGE", help="Read this stage's output instead of the furthest.")
]
Only = Annotated[str | None, typer.Option("--stage", metavar="STAGE", help="Look at this stage alone.")]
Endpoint = Annotated[
    str | None, typer.Option("--endpoint", envvar="HF_ENDPOINT", help="Address of the Hub, for a mirror.")
]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of the dataset on the Hub.")]
Include = Annotated[list[str], typer.Option("--include", help="Take only files like this pattern; repeatable.")]
Exclude = Annotated[list[str], typer.Option("--exclude", help="Leave out files like this pattern; repeatable.")]
Split = Annotated[
    str | None,
    typer.Option(
        "--split", help="train, validation or test; 'any' mixes them. Default: train where there are several."
    ),
]
Sample = Annotated[int | None, typer.Option("--sample", min=1, help="Take N of the files, the same ones every time.")]
Prefer = Annotated[
    str | None,
    typer.Option("--prefer", help="compressed or plain: which to take of a text that is there in both forms."),
]
Connections = Annotated[int, typer.Option("--connections", min=1, max=256, help="Files fetched at a time.")]
Deadline = Annotated[float, typer.Option("--deadline", min=0, help="Seconds after which what still fails is given up.")]
StallSeconds = Annotated[
    float, typer.Option("--stall-seconds", min=0.1, help="Drop a connection that is silent for so long.")
]
TargetFiles = Annotated[int | None, typer.Option("--target-files", min=1, help="Make this many outputs.")]
Tokenizer = Annotated[
    str, typer.Option("--tokenizer", help="A tokenizer's directory, or its name on the Hub.", show_default=False)
]
TokenizerRevision = Annotated[
    str | None, typer.Option("--tokenizer-revision", help="Branch, tag or commit of the tokenizer on the Hub.")
]
Keys = Annotated[
    str, typer.Option("--keys", help="Comma-separated keys of the text in a record; a.b reaches into a nested one.")
]
AppendEod = Annotated[bool, typer.Option("--append-eod/--no-append-eod", help="End each document with EOD.")]
EodToken = Annotated[
    str | None, typer.Option("--eod-token", help="Token to use as EOD instead of the tokenizer's eos.")
]
SpecialTokens = Annotated[
    bool,
    typer.Option("--special-tokens/--no-special-tokens", help="Add BOS and the like where the tokenizer does."),
]
TokenizerSource = Annotated[
    str | None,
    typer.Option(
        "--tokenizer-source",
        help="Where they differ, take the ids of the tokenizer's file (file), or of transformers' class (class).",
    ),
]
SpecialInText = Annotated[
    str,
    typer.Option(
        "--special-in-text",
        help="Special tokens that the text spells: keep (encode as such, and warn), split (as text), or fail.",
    ),
]
EncoderName = Annotated[
    str,
    typer.Option(
        "--encoder",
        help=f"{', '.join(choices()[:-1])} or {choices()[-1]}; auto takes the first that proves exact.",
    ),
]
VerifyEncoder = Annotated[
    str,
    typer.Option(
        "--verify-encoder",
        help="Encode with Hugging Face too and stop at a difference: all, sample (one text in 1,000), or start: only "
        "the hostile texts and first documents of the plan.",
    ),
]
EncoderPatience = Annotated[
    float, typer.Option("--encoder-patience", min=0.1, help="Replace an encoder that is silent for so many seconds.")
]
OnBadRecord = Annotated[
    str, typer.Option("--on-bad-record", help="fail, or quarantine: keep bad records beside the output and go on.")
]
MaxBadRecords = Annotated[
    int, typer.Option("--max-bad-records", min=0, help="With quarantine: how many for each output before it fails.")
]
Name = Annotated[str, typer.Option("--name", help="First part of the names of joined outputs.")]

Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="jsonl, txt, json (arrays, or objects over several lines), parquet or arrow: read files under any name as "
        "this. Left out, the names say it.",
    ),
]
FormatOfLines = Annotated[
    str | None,
    typer.Option("--format", help="jsonl: take files under any name as this. Left out, the names say it."),
]
TxtDocument = Annotated[
    str | None,
    typer.Option("--txt-document", help="With --format txt: a document is a file (default) or a line."),
]
ZstdWindow = Annotated[
    str | None,
    typer.Option(
        "--zstd-window",
        help="Largest zstd window that is taken, up to 2GiB; it is memory for each file being read.",
    ),
]
MaxRecordSize = Annotated[
    str | None,
    typer.Option(
        "--max-record-size", help="Longest record that is taken, such as 64MiB; as the memory allows when left out."
    ),
]

DAY = 86400.0


def selection(
    include: list[str], exclude: list[str], split: str | None, sample: int | None, prefer: str | None
) -> "Selection":
    """Return which files are wanted."""
    from tokenmill.selection import PREFERENCES, Selection

    if prefer is not None:
        one_of("--prefer", prefer, *PREFERENCES)
    return Selection(include, exclude, split, sample, prefer=prefer)


def one_of(option: str, value: str, *allowed: str) -> str:
    """Return a value that is one of the allowed, else end with a usage message."""
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(allowed)}", param_hint=option)
    return value


def known_encoder(name: str) -> str:
    """Return what --encoder takes, else end with a usage message."""
    return one_of("--encoder", name, *choices())


def format_of_lines(value: str | None) -> str | None:
    """Return the format of a stage that copies lines, else end with a usage message."""
    if value not in (None, "jsonl"):
        raise typer.BadParameter(
            f"{value!r} is not jsonl: only lines are joined and counted; preprocess reads other formats directly",
            param_hint="--format",
        )
    return value


def reading(format: str | None, txt_document: str | None, zstd_window: str | None) -> "Reading":
    """Return how files are read, else end with a usage message."""
    from tokenmill.corpus.blocks import FORMATS, Reading
    from tokenmill.corpus.compression import ZSTD_WINDOW

    if format is not None:
        one_of("--format", format, *FORMATS)
    if txt_document is not None and format != "txt":
        raise typer.BadParameter("it says what a document of --format txt is", param_hint="--txt-document")
    document = one_of("--txt-document", txt_document or "file", "file", "line")
    return Reading(format, document == "line", window_of(zstd_window) or ZSTD_WINDOW)


def window_of(value: str | None) -> int | None:
    """Return the largest window of a zstd frame, else end with a usage message."""
    from tokenmill.corpus.compression import ZSTD_WINDOW_MOST

    size = size_of("--zstd-window", value)
    if size is not None and size > ZSTD_WINDOW_MOST:
        raise typer.BadParameter(f"{value} is more than 2GiB, the largest window of zstd", param_hint="--zstd-window")
    return size


def size_of(option: str, value: str | None) -> int | None:
    """Return a number of bytes such as 64MiB, 2Gi or 10MB, else end with a usage message."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]+)([KMGT]?)(i?)B?", value.strip(), re.IGNORECASE)
    if match is None or not int(match.group(1)):
        raise typer.BadParameter(f"{value!r} is no size; write it as 64MiB, 2GiB or 500MB", param_hint=option)
    power = " KMGT".index(match.group(2).upper() or " ")
    unit: int = (1024 if match.group(3) else 1000) ** power
    return int(match.group(1)) * unit
