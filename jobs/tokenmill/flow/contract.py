"""What the records of a stage hold: types that cross from module to module, and from worker to worker on a shared disk.

A record comes from a disk that others write to, so that each type checks what it is made from, and a part that a
stage alone understands stays JSON until that stage looks at it: its Kind says what it is to be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from tokenmill.errors import RequestError

REMAKE = "look at who did, delete that output and make it again"
"""What to do about a plan that cannot be trusted."""

Count = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1)]
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{16,128}$")]


class DamagedRecord(RequestError):
    """A record lacks a part that this version of tokenmill reads."""


class Record(Struct, omit_defaults=True, frozen=True):
    """A part of a record: to JSON and back, what it does not have being left out."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        value: dict[str, Any] = msgspec.to_builtins(self)
        return value

    @classmethod
    def of_json(cls, value: Any) -> Self:
        """Check JSON and take it; msgspec.ValidationError says what is wrong with it, and where."""
        return msgspec.convert(value, cls)


class Part(Record, frozen=True, gc=False):
    """A run of records of a source file: `count` of them from record `first`; a count of None is all of the file."""

    source: str
    first: Count
    count: Count | None


class RemoteFile(Record, frozen=True, gc=False):
    """A file of a listing. `size` None: the server does not say; of the hashes at most one is known.

    `git_sha1` is git's blob hash, SHA-1 over "blob <size>\\0" and the content; `version` is whatever else changes with
    the content (ETag, modification time), `xet` its name in the Hub's Xet storage.
    """

    path: str = field(name="source")
    size: Count | None = field(name="bytes")
    sha256: str | None = None
    git_sha1: str | None = None
    version: str | None = None
    xet: str | None = None


class InputFile(Record, frozen=True):
    """A file that a unit reads: `identity` changes when its content does.

    `parts` say which records of which source files it holds; `records` and `blank` are its lines, where the stage
    that made it counted them. `remote` says how to fetch one that is not here.
    """

    path: Name
    identity: str
    bytes: Count | None = None
    parts: list[Part] | None = None
    records: Count | None = None
    blank: Count | None = None
    remote: RemoteFile | None = None

    def __post_init__(self) -> None:
        """Refuse a path that leads elsewhere."""
        check_path(self.path)


class InputRange(Record, frozen=True, gc=False):
    """Where an input's records begin in the output of a unit, and how many it has there; None is all."""

    path: str
    first: Count
    count: Count | None


class EmptyPair(Record, frozen=True, gc=False):
    """A pair that was left out, since it has no tokens."""

    key: str
    prefix: Name
    documents: Count


@dataclass(frozen=True)
class Kind:
    """The records of a stage: the name under which they lie, and what its plans say that it alone understands.

    `spec` says from what a unit is made and how, `basis` what decides the bytes of every unit, `details` what planning
    resolved.
    """

    name: str
    spec: type[Record]
    basis: type[Record] = Record
    details: type[Record] = Record


class Files(Record, frozen=True):
    """From what a unit is made that has nothing but its inputs."""

    inputs: Annotated[list[InputFile], Meta(min_length=1)]


class UnitRecord(Struct, forbid_unknown_fields=True):
    """A unit of a plan."""

    id: Name
    weight: Count
    spec: dict[str, Any]
    outputs: list[Name]

    def __post_init__(self) -> None:
        """Refuse an id that is no file name, and outputs that lead elsewhere or to records."""
        if "/" in self.id or "\0" in self.id or self.id.startswith("."):
            raise ValueError(f"the id {self.id!r} is no file name")
        for path in self.outputs:
            check_path(path)


Adopted = Literal["in place", "copied"]
IN_PLACE: Adopted = "in place"
COPIED: Adopted = "copied"
"""How files of another tool became outputs. What lies in its place is somebody else's, and is never removed."""


class Origin(Record, frozen=True):
    """Where the text comes from in the end: `revision` is the commit of a source that has commits.

    `adopted` is IN_PLACE or COPIED for files that another tool made.
    """

    uri: str | UnsetType = UNSET
    revision: str | UnsetType | None = UNSET
    adopted: Adopted | UnsetType = UNSET

    @property
    def commit(self) -> str | None:
        """The commit, None where there is none."""
        return self.revision or None


class Upstream(Record, frozen=True):
    """What a stage reads: the stage that made it, and hashes that name its content.

    `stage` None: files that somebody brought, whose names and identities `listing` hashes. `manifest` is the hash of a
    stage's manifest, `files` one of the names of its files, where not all are read. Of a source nothing is set.
    """

    stage: str | UnsetType | None = UNSET
    manifest: str | UnsetType = UNSET
    listing: str | UnsetType = UNSET
    files: str | UnsetType = UNSET

    @property
    def maker(self) -> str | None:
        """The stage of ours that made the files, None where none did."""
        return self.stage or None


class PlanRecord(Struct):
    """A plan without its units."""

    stage: Name
    request: dict[str, Any]
    basis: dict[str, Any]
    details: dict[str, Any]
    source: Origin
    upstream: Upstream
    require: Literal["out", "tokens"] | None


class FileEntry(Record, frozen=True):
    """A file that a unit made, as its receipt and the manifest have it; a pair is told by the entry of its .bin."""

    path: Name
    bytes: Count
    xxh3_128: str
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
        """Refuse a path that leads elsewhere, and a pair that is not described."""
        check_path(self.path)
        if self.role in ("bin", "idx") and self.path != f"{self.prefix}.{self.role}":
            raise ValueError(f"{self.path} is not the .{self.role} of the prefix {self.prefix}")
        counted = min(self.documents, self.sequences, self.tokens) >= 0
        if self.role == "bin" and not (self.key and counted and self.parts is not None):
            raise ValueError(f"{self.path} lacks its key, documents, sequences, tokens or parts")
        if self.role is None and self.parts is None:
            raise ValueError(f"{self.path} lacks its parts")


class Receipt(Record, frozen=True):
    """A finished unit: the files that it made, and where each input's records are in them."""

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

    def __post_init__(self) -> None:
        """Refuse half a pair."""
        paths = {file.path for file in self.outputs}
        for file in self.outputs:
            if file.role == "bin" and f"{file.prefix}.idx" not in paths:
                raise ValueError(f"{file.path} is there without its .idx")


class Failure(Record, frozen=True):
    """Why a unit failed last; `unit` is `record.PLANNING` where there was no plan yet."""

    plan: str | None
    unit: str
    message: str
    time: str
    host: str
    exit_code: int = 1


class ManifestRecord(Struct):
    """A finished stage, without its files."""

    stage: str
    source: Origin
    upstream: Upstream
    details: dict[str, Any]
    counts: dict[str, Count]
    empty: list[EmptyPair]


def check_plan(value: dict[str, Any], kind: Kind) -> None:
    """Check a plan without its units."""
    msgspec.convert(value, PlanRecord)
    kind.basis.of_json(value["basis"])
    kind.details.of_json(value["details"])


def check_units(values: Sequence[Any], kind: Kind) -> None:
    """Check units of a plan."""
    msgspec.convert(values, list[UnitRecord])
    msgspec.convert([value["spec"] for value in values], list[kind.spec])  # type: ignore[name-defined]


def check_manifest(value: dict[str, Any]) -> None:
    """Check a manifest without its files."""
    msgspec.convert(value, ManifestRecord)


def check_path(path: str) -> None:
    """Refuse a path that leads out of the output, or to its records (ValueError)."""
    names = path.split("/") if "/" in path else (path,)
    if "\0" in path or not {"", ".", ".."}.isdisjoint(names) or names[0] == ".tokenmill":
        raise ValueError(f"the path {path!r} leads elsewhere")
