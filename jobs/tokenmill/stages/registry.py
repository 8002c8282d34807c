"""The registry of stages, in the order in which data flows through them. To add a stage, add its entry here.

The command line, the charts and the reports read the stages from `STAGES`. `adopt` has no entry, because it writes the
state files of preprocess.
"""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from tokenmill.core.buckets.tree import is_directory
from tokenmill.datasets.contract import CHAT as CHAT  # noqa: PLC0414 - re-exported as one of the stages
from tokenmill.datasets.contract import PREPROCESS as PREPROCESS  # noqa: PLC0414 - re-exported as one of the stages
from tokenmill.engine.contract import Count, Files, InputFile, Name, Record, RemoteFile, StageKind
from tokenmill.packs.kind import PACK as PACK  # noqa: PLC0414 - re-exported as one of the stages

DOWNLOAD = StageKind("download", RemoteFile)
EXTRACT = StageKind("extract", Files)
CONCATENATE = StageKind("concatenate", Files)


class TransformSpec(Record, frozen=True):
    """The inputs and the shards of a unit.

    Shard number i of `shards` has the records whose number in the input, modulo `modulus`, is `remainder` + i. A unit
    whose input is not divided has one shard and the modulus 1. `limits` has the maximum number of records that each
    shard reads.
    """

    inputs: Annotated[list[InputFile], Meta(min_length=1)]
    shards: Annotated[list[Name], Meta(min_length=1)]
    remainder: Count = 0
    modulus: Annotated[int, Meta(ge=1)] = 1
    limits: list[Count] | None = None


class TransformBasis(Record, frozen=True):
    """The parameters that determine the bytes of all units: the transform with its arguments, and the output's form.

    `transform` is the JSON of a `stages.transform.call.TransformCall`; for a function of the user, `code` is a hash of
    it.
    """

    transform: dict[str, object]
    compression: str
    code: str = ""
    format: str = ""
    output_format: str = ""


TRANSFORM = StageKind("transform", TransformSpec, TransformBasis)
"""The record types of the stage that changes the shape of records."""


Form = Literal["records", "pairs", "rows"]
"""The content of the files of an output: records of text, pairs of tokens, or packed rows."""


class StageEntry(NamedTuple):
    """A stage and its place in the pipeline.

    Attributes:
        kind: the name of the stage and the type of its units.
        folder: the directory of its output, relative to its input.
        next: the usual next command, a template with `tokenmill` and `path`; transform has `suggest_next` as well.
        reads: the form of its input. It reads the outputs of all stages before it that have this form.
        writes: the form of its output.
        optional: whether a pipeline skips the stage unless the user requests it.
        by_line: whether the stage treats each line as a record, so that preprocess must read its output as JSONL.
    """

    kind: StageKind
    folder: str
    next: str
    reads: Form = "records"
    writes: Form = "records"
    optional: bool = False
    by_line: bool = False


PREPROCESS_NEXT = "{tokenmill} preprocess {path} --tokenizer NAME_OR_DIRECTORY"

VERIFY_NEXT = "{tokenmill} verify {path}"

CHAT_NEXT = "{tokenmill} chat {path} --tokenizer NAME_OR_DIRECTORY"

STAGES = (
    StageEntry(DOWNLOAD, "", PREPROCESS_NEXT),
    StageEntry(EXTRACT, "extracted", PREPROCESS_NEXT, optional=True, by_line=True),
    StageEntry(CONCATENATE, "concatenated", PREPROCESS_NEXT, optional=True, by_line=True),
    StageEntry(TRANSFORM, "transformed", CHAT_NEXT, optional=True),
    StageEntry(PREPROCESS, "preprocessed", VERIFY_NEXT, writes="pairs"),
    StageEntry(CHAT, "chat", "{tokenmill} pack {path}", writes="pairs", optional=True),
    StageEntry(PACK, "packed", VERIFY_NEXT, reads="pairs", writes="rows", optional=True),
)

KINDS = tuple(entry.kind for entry in STAGES)
LINE_STAGES = frozenset(entry.kind.name for entry in STAGES if entry.by_line)


def get_stage(name: str) -> StageEntry:
    """Return the entry of the stage with this name."""
    return next(entry for entry in STAGES if entry.kind.name == name)


def earlier_kinds(kind: StageKind) -> tuple[StageKind, ...]:
    """Return the kinds of the stages whose outputs a stage can read, in the order of the data flow."""
    names = [entry.kind.name for entry in STAGES]
    return tuple(entry.kind for entry in STAGES[: names.index(kind.name)] if entry.writes == get_stage(kind.name).reads)


def default_output(source: Path, kind: StageKind) -> Path:
    """Return the default output directory of a stage, which is below its input."""
    return (source if is_directory(source) else source.parent) / get_stage(kind.name).folder
