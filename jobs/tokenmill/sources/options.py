"""Options that control how a source is fetched and how its files are read.

`tokenmill.engine.options` defines the form of an option. The command line declares its flags from these groups, and the
stages receive them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from tokenmill.engine.options import InvalidOption, Option, Panel, parse_byte_size, parse_size_limit
from tokenmill.records.block_kinds import FORMATS, MAX_ZSTD_WINDOW

DAY_SECONDS = 86400.0


def _parse_line_format(text: str) -> str:
    if text != "jsonl":
        raise ValueError(
            f"{text!r} is not jsonl: this stage copies lines; run preprocess without this stage for other formats"
        )
    return text


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """The revision of a source, and how its files are fetched."""

    panel = Panel.INPUT

    revision: Annotated[
        str | None,
        Option("Branch, tag or commit of the dataset on the Hub.", chart="dataset.revision", panel=Panel.HUB),
    ] = None
    sample: Annotated[
        int | None,
        Option("Use N of the files, the same files in every run.", minimum=1, chart="dataset.sampleFiles", usual=True),
    ] = None
    connections: Annotated[
        int,
        Option(
            "Number of files to fetch in parallel.",
            minimum=1,
            maximum=256,
            chart="dataset.connections",
            chart_of="download",
            panel=Panel.PARALLELISM,
        ),
    ] = 8
    deadline: Annotated[
        float,
        Option(
            "Seconds after which failed requests are not retried any more.",
            metavar="SECONDS",
            minimum=0,
            chart="dataset.deadlineSeconds",
            chart_of="download",
        ),
    ] = DAY_SECONDS
    stall_seconds: Annotated[
        float,
        Option(
            "Close a connection that sends no data for this many seconds.",
            metavar="SECONDS",
            minimum=0.1,
            chart="dataset.stallSeconds",
            chart_of="download",
        ),
    ] = 60.0
    endpoint: Annotated[
        str | None, Option("Address of the Hub or a mirror.", metavar="URL", env="HF_ENDPOINT", panel=Panel.HUB)
    ] = None


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Limits on the memory that decompression uses."""

    panel = Panel.INPUT

    zstd_window: Annotated[
        int | None,
        Option(
            "Largest accepted zstd window, up to 2GiB. Each file that is being read needs this much memory.",
            metavar="SIZE",
            parse=partial(parse_byte_size, minimum=1, maximum=MAX_ZSTD_WINDOW),
            chart="dataset.zstdWindow",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LineOptions:
    """How a stage that copies lines reads its files."""

    panel = Panel.INPUT

    format: Annotated[
        str | None,
        Option(
            "Read all files in this format. Default: by file name.",
            metavar="[jsonl]",
            parse=_parse_line_format,
            chart="dataset.format",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RecordOptions(WindowOptions):
    """The limit of a record, and what a stage that parses records does with a bad one."""

    panel = Panel.BAD_RECORDS

    max_record_size: Annotated[
        int | None,
        Option(
            "Largest accepted record, such as 64MB; MB is MiB. Default: limited by the available memory.",
            metavar="SIZE",
            parse=parse_size_limit,
            chart="dataset.maxRecordSize",
        ),
    ] = None
    on_bad_record: Annotated[
        str,
        Option(
            "quarantine copies bad records to the directory rejected/ of the output, and continues.",
            choices=("fail", "quarantine"),
            chart="onBadRecord",
            usual=True,
        ),
    ] = "fail"
    max_bad_records: Annotated[
        int, Option("Maximum number of bad records of each output, with quarantine.", minimum=0, chart="maxBadRecords")
    ] = 1000


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(RecordOptions):
    """How a stage that encodes records reads its files."""

    panel = Panel.INPUT

    format: Annotated[
        str | None,
        Option(
            "Read all files in this format. Default: by file name.",
            choices=FORMATS,
            chart="dataset.format",
            usual=True,
        ),
    ] = None
    txt_document: Annotated[
        str | None,
        Option(
            "The part of a file that is a document, with --format txt. Default: file.",
            choices=("file", "line"),
            chart="dataset.txtDocument",
            chart_of="preprocess",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raise InvalidOption for options that cannot be combined."""
        if self.txt_document is not None and self.format != "txt":
            raise InvalidOption("--txt-document", "it applies only to --format txt; add --format txt")
