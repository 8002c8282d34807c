"""The stages there are, in the order data flows through them. A new stage is registered here."""

from pathlib import Path
from typing import NamedTuple

from tokenmill.flow.contract import Files, Kind, RemoteFile
from tokenmill.tokens.contract import PREPROCESS as PREPROCESS  # noqa: PLC0414 - one of them

DOWNLOAD = Kind("download", RemoteFile)
EXTRACT = Kind("extract", Files)
CONCATENATE = Kind("concatenate", Files)


class Entry(NamedTuple):
    """A stage: `folder` is where its output goes below what it reads, `next` the usual next command.

    `optional`: a pipeline leaves it out unless asked for it. `by_line`: it takes each line for a record, so that what
    it made is never read as another format.
    """

    kind: Kind
    folder: str
    next: str
    optional: bool = False
    by_line: bool = False


_PREPROCESS_NEXT = "{tokenmill} preprocess {path} --tokenizer NAME_OR_DIRECTORY"

STAGES = (
    Entry(DOWNLOAD, "", _PREPROCESS_NEXT),
    Entry(EXTRACT, "extracted", _PREPROCESS_NEXT, optional=True, by_line=True),
    Entry(CONCATENATE, "concatenated", _PREPROCESS_NEXT, optional=True, by_line=True),
    Entry(PREPROCESS, "preprocessed", "{tokenmill} verify {path}"),
)

KINDS = tuple(entry.kind for entry in STAGES)
BY_LINE = frozenset(entry.kind.name for entry in STAGES if entry.by_line)


def entry_of(name: str) -> Entry:
    """Return the entry of a stage by its name."""
    return next(entry for entry in STAGES if entry.kind.name == name)


def before(kind: Kind) -> tuple[Kind, ...]:
    """Return the kinds of outputs that a stage can read."""
    return KINDS[: KINDS.index(kind)]


def default_output(source: Path, kind: Kind) -> Path:
    """Return where a stage's output goes when no directory is named: below what it reads."""
    return (source if source.is_dir() else source.parent) / entry_of(kind.name).folder
