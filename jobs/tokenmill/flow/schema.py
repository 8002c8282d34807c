"""What the parts of a record hold that other modules read by name; records on a shared disk may hold anything.

The functions `check_...` raise ValueError with the place and what is wrong there.
A name that a part lacks is noticed where it is read (`Recorded`), since each stage has parts of its own.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tokenmill.errors import RequestError

REMAKE = "look at who did, delete that output and make it again"
"""What to do about a plan that cannot be trusted."""

Count = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1)]
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{16,128}$")]


class DamagedRecord(RequestError):
    """A record lacks a part that this version of tokenmill reads."""


class Recorded(dict[str, Any]):
    """A part of a record: to read a name that it lacks is a DamagedRecord that names the record, not a KeyError."""

    record = "the plan"
    """What the part belongs to."""

    @classmethod
    def of(cls, record: Path, value: dict[str, Any]) -> "Recorded":
        """Take a part of the record at a path."""
        part = cls(value)
        part.record = str(record)
        return part

    def __missing__(self, name: str) -> Any:
        """Refuse the record."""
        raise DamagedRecord(f"{self.record} is damaged, or somebody changed it: it lacks {name!r}; {REMAKE}")


class PartRecord(Struct):
    """A run of records of a source file (`flow.provenance`)."""

    source: str
    first: Count
    count: Count | None


class RemoteRecord(Struct):
    """A file of a source (`corpus.source.RemoteFile`)."""

    source: str
    bytes: Count | None
    sha256: str | None = None
    git_sha1: str | None = None
    url: str | None = None
    version: str | None = None
    xet: str | None = None


class InputRecord(Struct):
    """A file that a unit reads."""

    path: Name
    identity: str
    parts: list[PartRecord] | UnsetType = UNSET
    bytes: Count | UnsetType = UNSET
    records: Count | UnsetType = UNSET
    blank: Count | UnsetType = UNSET
    remote: RemoteRecord | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Refuse a path that leads elsewhere."""
        _check_path(self.path)


class SpecRecord(Struct):
    """From what a unit is made: what the stages have in common of it."""

    name: Name | UnsetType = UNSET
    inputs: Annotated[list[InputRecord], Meta(min_length=1)] | UnsetType = UNSET
    source: str | UnsetType = UNSET
    bytes: Count | UnsetType | None = UNSET
    sha256: str | None = None
    git_sha1: str | None = None
    url: str | None = None
    version: str | None = None
    xet: str | None = None

    def __post_init__(self) -> None:
        """Refuse a name that leads elsewhere."""
        if self.name is not UNSET:
            _check_path(self.name)


class UnitRecord(Struct, forbid_unknown_fields=True):
    """A unit of a plan."""

    id: Name
    weight: Count
    spec: SpecRecord
    outputs: list[Name]

    def __post_init__(self) -> None:
        """Refuse an id that is no file name, and outputs that lead elsewhere or to records."""
        if "/" in self.id or "\0" in self.id or self.id.startswith("."):
            raise ValueError(f"the id {self.id!r} is no file name")
        for path in self.outputs:
            _check_path(path)


class TokenizerRecord(Struct):
    """What a plan says of its tokenizer (`tokens.tokenizer.ResolvedTokenizer`)."""

    reference: str
    revision: str | None
    files: dict[str, Hash]
    vocab_size: Count
    eod_id: Count | None

    def __post_init__(self) -> None:
        """Refuse files that lie elsewhere than beside each other."""
        for path in self.files:
            _check_path(path)


class DetailsRecord(Struct):
    """What planning resolved."""

    tokenizer: TokenizerRecord | UnsetType = UNSET
    notes: list[str] | UnsetType = UNSET


class BasisRecord(Struct):
    """What decides the bytes of every unit."""

    tokenizer: Hash | UnsetType = UNSET
    keys: Annotated[list[Name], Meta(min_length=1)] | UnsetType = UNSET
    eod: Count | None = None
    special_tokens: bool | UnsetType = UNSET
    dtype: Literal["uint8", "int8", "int16", "int32", "int64", "uint16"] | UnsetType = UNSET


class SourceRecord(Struct):
    """Where the text comes from in the end."""

    uri: str | UnsetType = UNSET
    revision: str | None = None


class UpstreamRecord(Struct):
    """What a stage reads."""

    stage: str | None = None
    manifest: str | UnsetType = UNSET
    listing: str | UnsetType = UNSET


class PlanRecord(Struct):
    """A plan without its units."""

    stage: Name
    request: dict[str, Any]
    basis: BasisRecord
    details: DetailsRecord
    source: SourceRecord
    upstream: UpstreamRecord
    require: Literal["out", "tokens"] | None


class FileRecord(Struct):
    """A file that a unit made, as its receipt and the manifest have it."""

    path: Name
    bytes: Count
    xxh3_128: str
    role: Literal["bin", "idx", "rejected"] | None = None
    key: str | UnsetType = UNSET
    prefix: Name | UnsetType = UNSET
    documents: Count | UnsetType = UNSET
    sequences: Count | UnsetType = UNSET
    tokens: Count | UnsetType = UNSET
    records: Count | None = None
    blank: Count | None = None
    parts: list[PartRecord] | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Refuse a path that leads elsewhere, and a pair that is not described."""
        _check_path(self.path)
        if self.role in ("bin", "idx") and self.path != f"{self.prefix}.{self.role}":
            raise ValueError(f"{self.path} is not the .{self.role} of the prefix {self.prefix}")
        if self.role == "bin" and UNSET in (self.key, self.documents, self.sequences, self.tokens, self.parts):
            raise ValueError(f"{self.path} lacks its key, documents, sequences, tokens or parts")
        if self.role is None and self.parts is UNSET:
            raise ValueError(f"{self.path} lacks its parts")


class ReceiptRecord(Struct):
    """A finished unit."""

    plan: str
    unit: str
    counts: dict[str, Count]
    outputs: list[FileRecord]
    inputs: list[dict[str, Any]]
    empty: list[dict[str, Any]]
    weight: Count
    started: str
    finished: str

    def __post_init__(self) -> None:
        """Refuse times that are none, and half a pair."""
        for time in (self.started, self.finished):
            datetime.fromisoformat(time)
        paths = {file.path for file in self.outputs}
        for file in self.outputs:
            if file.role == "bin" and f"{file.prefix}.idx" not in paths:
                raise ValueError(f"{file.path} is there without its .idx")


class FailureRecord(Struct):
    """Why a unit failed last."""

    plan: str | None
    unit: str
    message: str
    time: str
    host: str


class ManifestRecord(Struct):
    """A finished stage, without its files."""

    stage: str
    source: SourceRecord
    upstream: UpstreamRecord
    details: DetailsRecord
    counts: dict[str, Count]
    empty: list[dict[str, Any]]


class ColumnRecord(Struct):
    """How far an output pair is in a journal (`tokens.writer.IndexedWriter.mark`)."""

    dtype_code: Count
    sequences: Count
    documents: Count
    even: Count
    tokens: Count
    bin_bytes: Count


class JournalRecord(Struct):
    """How far an attempt at a unit of preprocess is (`tokens.unit_tokenizer`)."""

    done: Count
    columns: list[ColumnRecord]
    rejected_bytes: Count
    counts: dict[str, Count]
    parts: list[PartRecord]
    inputs: list[dict[str, Any]]


def check_plan(value: dict[str, Any]) -> None:
    """Check a plan without its units."""
    msgspec.convert(value, PlanRecord)


def check_units(values: Sequence[Any]) -> None:
    """Check units of a plan."""
    msgspec.convert(values, list[UnitRecord])


def check_receipt(value: dict[str, Any]) -> None:
    """Check a receipt."""
    msgspec.convert(value, ReceiptRecord)


def check_manifest(value: dict[str, Any]) -> None:
    """Check a manifest without its files."""
    msgspec.convert(value, ManifestRecord)


def check_files(values: Sequence[Any]) -> None:
    """Check files of a manifest."""
    msgspec.convert(values, list[FileRecord])


def check_journal(value: Any) -> None:
    """Check a journal."""
    msgspec.convert(value, JournalRecord)


def is_failure(value: Any) -> bool:
    """Tell whether a value is a record of a failure."""
    try:
        msgspec.convert(value, FailureRecord)
    except msgspec.ValidationError:
        return False
    return True


def _check_path(path: str) -> None:
    names = path.split("/") if "/" in path else (path,)
    if "\0" in path or not {"", ".", ".."}.isdisjoint(names) or names[0] == ".tokenmill":
        raise ValueError(f"the path {path!r} leads elsewhere")
