"""The types of the state files of a stage: plan, receipt, failure and manifest.

Workers on other machines, and later stages, read these files from shared storage that other programs can write to.
Therefore each type checks its values when it is loaded. Some fields have a meaning for one stage only. They stay JSON
until that stage converts them to its own type, which its `StageKind` names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from tokenmill.core.typed_json import convert_json
from tokenmill.errors import RequestError

REMAKE_OUTPUT = "check who changed the file, delete that output and run its stage again"
"""The remedy for a plan that is not what tokenmill wrote."""

Count = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1)]
Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{16,128}\Z")]
FileHash = Annotated[str, Meta(pattern=r"^[0-9a-f]{1,32}\Z")]


class DamagedRecord(RequestError):
    """A record lacks a part that this version of tokenmill reads."""


class Record(Struct, omit_defaults=True, frozen=True):
    """A part of a record that converts to and from JSON; the JSON leaves out default values."""

    def to_json(self) -> dict[str, object]:
        """Return the record as JSON."""
        value: dict[str, object] = msgspec.to_builtins(self)
        return value

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Check JSON and convert it.

        Raises:
            msgspec.ValidationError: the JSON is invalid; the message contains the reason and the position.
        """
        return convert_json(value, cls)


class Part(Record, frozen=True, gc=False):
    """Records of a source file: `count` records from record `first`; a count of None means all records.

    `step` is the distance between two records: 4 for each fourth record. `kept` is a bitmap of the records that remain
    after others were dropped, if they form too many ranges: base64 of little-endian bits, and bit i is record
    `first` + i * `step` (`engine.lineage`).
    """

    source: str
    first: Count
    count: Count | None
    step: Annotated[int, Meta(ge=1)] = 1
    kept: str = ""


class RemoteFile(Record, frozen=True, gc=False):
    """A file of a remote listing; `size` is None where the server sends no size, and at most one hash is set.

    `git_sha1` is git's blob hash, SHA-1 over "blob <size>\\0" and the content. `version` is any other value that
    changes with the content (ETag, modification time). `xet` is the file's name in the Hub's Xet storage.
    """

    path: str = field(name="source")
    size: Count | None = field(name="bytes")
    sha256: str | None = None
    git_sha1: str | None = None
    version: str | None = None
    xet: str | None = None


class InputFile(Record, frozen=True):
    """A file that a unit reads; `identity` changes when the content changes.

    `parts` list the records of source files that the file contains. `records` and `blank` count its lines, if the
    stage that made the file counted them. `remote` describes how to download a file that is not on the disk.
    """

    path: Name
    identity: str
    bytes: Count | None = None
    parts: list[Part] | None = None
    records: Count | None = None
    blank: Count | None = None
    remote: RemoteFile | None = None

    def __post_init__(self) -> None:
        """Refuse a path that leaves the input directory."""
        check_path(self.path)


class InputRange(Record, frozen=True, gc=False):
    """The position of an input's records in a unit's output: first record and count; a count of None means all."""

    path: str
    first: Count
    count: Count | None


class EmptyPair(Record, frozen=True, gc=False):
    """A pair that the stage did not write because it has no tokens."""

    key: str
    prefix: Name
    documents: Count


@dataclass(frozen=True)
class StageKind:
    """The name of a stage's record directory, and the types of the parts of a plan that only this stage reads.

    `spec` describes the inputs and the work of a unit, `basis` everything else that determines the bytes of every
    unit, and `details` the values that planning resolved. `check` returns the problems of the content of an output
    file, from its path, its entry and the basis; without it, only size and hash are checked.
    """

    name: str
    spec: type[Record]
    basis: type[Record] = Record
    details: type[Record] = Record
    check: "Callable[[Path, FileEntry, Record], list[str]] | None" = None


class Files(Record, frozen=True):
    """The spec of a unit that needs only its input files."""

    inputs: Annotated[list[InputFile], Meta(min_length=1)]


class UnitRecord(Struct, forbid_unknown_fields=True):
    """A unit of a plan."""

    id: Name
    weight: Count
    spec: dict[str, object]
    outputs: list[Name]

    def __post_init__(self) -> None:
        """Refuse an id that is not a file name, and outputs outside the output directory or among the records."""
        if "/" in self.id or "\0" in self.id or self.id.startswith("."):
            raise ValueError(f"the id {self.id!r} is not a file name")
        for path in self.outputs:
            check_path(path)


Adopted = Literal["in place", "copied"]
IN_PLACE: Adopted = "in place"
COPIED: Adopted = "copied"
"""How the files of another tool became outputs. Files adopted in place belong to the user and are never removed."""


class Origin(Record, frozen=True):
    """The first source of the text; `revision` is the commit of a source that has commits.

    `adopted` is IN_PLACE or COPIED for files that another tool made.
    """

    uri: str | UnsetType = UNSET
    revision: str | UnsetType | None = UNSET
    adopted: Adopted | UnsetType = UNSET

    @property
    def commit(self) -> str | None:
        """The commit, or None for a source without commits."""
        return self.revision or None


class Upstream(Record, frozen=True):
    """The input of a stage: the stage that made it, and hashes that identify its content.

    A `stage` of None means the user's own files; then `listing` is the hash of their names and identities. `manifest`
    is the hash of the stage's manifest. `files` is the hash of the names of the files, if only some of them are read.
    No field is set for a remote source.
    """

    stage: str | UnsetType | None = UNSET
    manifest: str | UnsetType = UNSET
    listing: str | UnsetType = UNSET
    files: str | UnsetType = UNSET

    @property
    def maker(self) -> str | None:
        """The tokenmill stage that made the files, or None if no stage made them."""
        return self.stage or None


class PlanRecord(Struct):
    """A plan without its units."""

    stage: Name
    request: dict[str, object]
    basis: dict[str, object]
    details: dict[str, object]
    source: Origin
    upstream: Upstream
    require: Literal["out", "tokens"] | None


class FileEntry(Record, frozen=True):
    """A file that a unit made, in its receipt and in the manifest; the entry of the .bin file describes the pair."""

    path: Name
    bytes: Count
    xxh3_128: FileHash
    role: Name | None = None
    key: str = ""
    prefix: str = ""
    documents: Count = -1
    sequences: Count = -1
    tokens: Count = -1
    dtype: str = ""
    records: Count | None = None
    blank: Count | None = None
    parts: list[Part] | None = None

    def __post_init__(self) -> None:
        """Refuse a path that leaves the output directory, and an entry that lacks a required field."""
        check_path(self.path)
        if self.role in ("bin", "idx") and self.path != f"{self.prefix}.{self.role}":
            raise ValueError(f"{self.path!r} is not the .{self.role} of the prefix {self.prefix!r}")
        counted = min(self.documents, self.sequences, self.tokens - bool(self.bytes)) >= 0
        if self.role == "bin" and not (self.key and counted and self.parts is not None):
            raise ValueError(f"{self.path!r} lacks its key, documents, sequences, tokens or parts")
        if self.role is None and self.parts is None:
            raise ValueError(f"{self.path!r} lacks its parts")


class Receipt(Record, frozen=True):
    """The record of a finished unit: the files that it made, and the position of each input's records in them."""

    plan: str
    unit: str
    counts: dict[str, Count]
    outputs: list[FileEntry]
    inputs: list[InputRange]
    empty: list[EmptyPair]
    weight: Count
    started: datetime
    finished: datetime
    host: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    """The version of the object of each output, if the output is a bucket."""

    def __post_init__(self) -> None:
        """Refuse a .bin file without its .idx file."""
        paths = {file.path for file in self.outputs}
        for file in self.outputs:
            if file.role == "bin" and f"{file.prefix}.idx" not in paths:
                raise ValueError(f"{file.path!r} is recorded without its .idx")


class Failure(Record, frozen=True):
    """Why a unit failed last; `unit` is `record.PLANNING` if planning failed and there was no plan yet."""

    plan: str | None
    unit: str
    message: str
    time: str
    host: str
    exit_code: int = 1


class ManifestRecord(Struct):
    """A finished stage without its files."""

    stage: str
    source: Origin
    upstream: Upstream
    details: dict[str, object]
    counts: dict[str, Count]
    empty: list[EmptyPair]


def check_plan(value: Mapping[str, object], kind: StageKind) -> None:
    """Check the JSON of a plan without its units (msgspec.ValidationError)."""
    convert_json(value, PlanRecord)
    kind.basis.from_json(value["basis"])
    kind.details.from_json(value["details"])


def check_units(values: Sequence[Any], kind: StageKind) -> list[UnitRecord]:
    """Check the JSON of units of a plan (msgspec.ValidationError), and return the units."""
    units = convert_json(values, list[UnitRecord])
    convert_json([unit.spec for unit in units], list[kind.spec])  # type: ignore[name-defined]
    return units


def check_manifest(value: Mapping[str, object]) -> None:
    """Check the JSON of a manifest without its files (msgspec.ValidationError)."""
    convert_json(value, ManifestRecord)


def check_path(path: str) -> None:
    """Refuse a path that leaves the output directory or leads to its records (ValueError)."""
    names = path.split("/") if "/" in path else (path,)
    if "\0" in path or not {"", ".", ".."}.isdisjoint(names) or names[0] == ".tokenmill":
        raise ValueError(f"the path {path!r} is not a file below the output directory")
