"""Options of how a source is fetched and how its files are read; see `tokenmill.options`."""

from dataclasses import dataclass
from typing import Annotated

from tokenmill.corpus.block_kinds import FORMATS, ZSTD_WINDOW_MOST
from tokenmill.options import InvalidOption, Option, byte_size

DAY = 86400.0


def window_size(text: str) -> int:
    """Return the largest window of a zstd frame, in bytes (ValueError)."""
    size = byte_size(text)
    if size > ZSTD_WINDOW_MOST:
        raise ValueError(f"{text} is more than 2GiB, the largest window of zstd")
    return size


def _lines(text: str) -> str:
    if text != "jsonl":
        raise ValueError(f"{text!r} is not jsonl: this stage copies lines; preprocess reads other formats directly")
    return text


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Which state of a source is read, and how its files are fetched."""

    revision: Annotated[str | None, Option("Branch, tag or commit of the dataset on the Hub.")] = None
    sample: Annotated[int | None, Option("Take N of the files, the same ones every time.", least=1)] = None
    connections: Annotated[int, Option("Files fetched at a time.", least=1, most=256)] = 8
    deadline: Annotated[float, Option("Seconds after which what still fails is given up.", least=0)] = DAY
    stall_seconds: Annotated[float, Option("Drop a connection that is silent for so long.", least=0.1)] = 60.0
    endpoint: Annotated[str | None, Option("Address of the Hub, for a mirror.", env="HF_ENDPOINT")] = None


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """What decompression may take of the memory."""

    zstd_window: Annotated[
        int | None,
        Option(
            "Largest zstd window that is taken, up to 2GiB; it is memory for each file being read.", parse=window_size
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LineOptions:
    """How a stage that copies lines reads its files."""

    format: Annotated[
        str | None, Option("jsonl: take files under any name as this. Left out, the names say it.", parse=_lines)
    ] = None


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(WindowOptions):
    """How a stage that parses records reads its files."""

    format: Annotated[
        str | None,
        Option(
            "jsonl, txt, json (arrays, or objects over several lines), parquet or arrow: read files under any name as "
            "this. Left out, the names say it.",
            choices=FORMATS,
        ),
    ] = None
    txt_document: Annotated[
        str | None,
        Option("With --format txt: a document is a file (default) or a line.", choices=("file", "line")),
    ] = None
    max_record_size: Annotated[
        int | None,
        Option("Longest record that is taken, such as 64MiB; as the memory allows when left out.", parse=byte_size),
    ] = None

    def __post_init__(self) -> None:
        """Refuse options that have no meaning together (InvalidOption)."""
        if self.txt_document is not None and self.format != "txt":
            raise InvalidOption("--txt-document", "it says what a document of --format txt is")
