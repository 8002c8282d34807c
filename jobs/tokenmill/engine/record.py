"""The state files of a stage: the plan, the receipts, the failures and the manifest, and their paths.

The first worker writes the plan (`engine.planning`). Each attempt writes its receipt after all files that the receipt
names (`engine.workspace`). The manifest contains only data of the plan and its receipts, and no times or host names.
Therefore the same output has the same manifest hash on every machine. The next stage reads the manifest
(`engine.stage_input`).
"""

import contextlib
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from tokenmill.core.buckets.address import BucketUnavailable
from tokenmill.core.buckets.tree import open_tree
from tokenmill.core.files.codec import (
    JsonText,
    PackedList,
    content_id,
    has_content,
    pack,
    read_json,
    readable_json,
    readable_pieces,
    unpack,
)
from tokenmill.core.files.hashing import hash_file
from tokenmill.core.files.tree import Tree, UnexpectedEntry
from tokenmill.core.printing import printable
from tokenmill.core.redaction import redact
from tokenmill.core.typed_json import convert_json
from tokenmill.engine.contract import (
    IN_PLACE,
    REMAKE_OUTPUT,
    DamagedRecord,
    EmptyPair,
    Failure,
    FileEntry,
    InputFile,
    Origin,
    Receipt,
    Record,
    StageKind,
    UnitRecord,
    Upstream,
    check_manifest,
    check_plan,
    check_units,
)
from tokenmill.errors import RequestError, TokenmillError

FORMAT = 1
"""Version of the layout of the plan, the receipts and the manifest."""


class OtherFormat(RequestError):
    """A plan has another format than this version of tokenmill writes."""


COUNT_NAMES = {"out": "records", "tokens": "tokens"}
"""The names, in messages, of the counts that must not be zero."""

PLANNING = "planning"
"""The name that replaces a unit's id in the failure record of a planner."""

REJECTED = "rejected"
"""Directory below an output with copies of rejected records."""

REJECTED_PREFIX = "rejected."
"""Prefix of the counts of rejected records by reason, such as `rejected.no_messages`."""

UNREAD_PREFIX = "unread."
"""Prefix of the counts of records with a key that the stage does not read, such as `unread.source`."""

MAX_UNREAD_NAMES = 20
"""Number of such keys that a message lists."""

Counts = dict[str, int]
SpecT = TypeVar("SpecT", bound=Record)


@dataclass(frozen=True, slots=True, init=False)
class Unit:
    """A piece of work that is committed completely or not at all.

    `spec` describes the inputs and the work, `outputs` lists the files that the unit may make (relative to the output
    directory), and `weight` is the size of its input in bytes. `text` is the unit's JSON from plan.json. A unit keeps
    only this text, because 59,166 units as Python objects would add 100 MB to a process.
    """

    id: str
    weight: int
    text: JsonText = field(repr=False)

    def __init__(self, id: str, weight: int, spec: Record, outputs: list[str]) -> None:
        """Make a unit from its fields."""
        self._set(id, weight, pack({"id": id, "weight": weight, "spec": spec.to_json(), "outputs": outputs}))

    @classmethod
    def from_text(cls, text: JsonText, checked: UnitRecord) -> "Unit":
        """Make a unit from its text and the record that the text contains."""
        unit = cls.__new__(cls)
        unit._set(checked.id, checked.weight, text)
        return unit

    def _set(self, id: str, weight: int, text: JsonText) -> None:
        object.__setattr__(self, "id", id)
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "text", text)

    @property
    def inputs(self) -> list[InputFile]:
        """The input files; each access decodes the text."""
        return convert_json(unpack(self.text)["spec"].get("inputs", []), list[InputFile])

    def spec(self, spec_type: type[SpecT]) -> SpecT:
        """Return the spec as the type of its stage; each call decodes the text."""
        try:
            return spec_type.from_json(unpack(self.text)["spec"])
        except msgspec.ValidationError as error:
            message = f"the plan is damaged, or another program changed it: unit {self.id}: {error}; {REMAKE_OUTPUT}"
            raise DamagedRecord(message) from error

    @property
    def outputs(self) -> list[str]:
        """The files that the unit may make; each access decodes the text."""
        outputs: list[str] = unpack(self.text)["outputs"]
        return outputs


@dataclass(frozen=True)
class Plan:
    """The work of a stage: all units and everything that determines their output.

    `request` has the parameters of the command; a later run compares its own parameters with them. `basis` has the
    parameters that determine the bytes of a unit in addition to its spec: --replace keeps the files of units with the
    same spec and basis. `details` has the values that planning resolved (a commit, a tokenizer). `source` is the first
    source of the text, `upstream` the stage and the manifest hash that are read. `require` is the count that must not
    be zero at the end.
    """

    stage: str
    request: dict[str, object]
    units: list[Unit]
    basis: dict[str, object]
    details: dict[str, object] = field(default_factory=dict)
    source: Origin = Origin()  # noqa: RUF009 - frozen
    upstream: Upstream = Upstream()  # noqa: RUF009 - frozen
    require: str | None = None

    def content(self) -> dict[str, object]:
        """Return the plan as JSON without its id; the units are a PackedList."""
        return {
            "format": FORMAT,
            "stage": self.stage,
            "request": self.request,
            "basis": self.basis,
            "details": self.details,
            "source": self.source.to_json(),
            "upstream": self.upstream.to_json(),
            "require": self.require,
            "units": PackedList(unit.text for unit in self.units),
        }

    @cached_property
    def id(self) -> str:
        """The plan id, which is the hash of the complete content."""
        return content_id(self.content())

    @cached_property
    def weight(self) -> int:
        """The sum of the units' weights, in bytes."""
        return sum(unit.weight for unit in self.units)

    def without_units(self) -> "Plan":
        """Return a plan with the same id and no units, for a process that receives its units from another one."""
        plan = replace(self, units=[])
        plan.__dict__["id"] = self.id
        return plan

    @property
    def adopted(self) -> str | None:
        """How files of another tool became outputs (IN_PLACE or COPIED), or None if tokenmill made the files."""
        return self.source.adopted or None

    def removable_outputs(self, unit: Unit) -> list[str]:
        """Return the outputs of a unit that another plan may remove or overwrite: all but files adopted in place."""
        return [] if self.adopted == IN_PLACE else unit.outputs

    @property
    def command(self) -> str:
        """The tokenmill command that made the plan."""
        return "adopt" if self.adopted else str(self.request.get("command", self.stage))

    def unit_key(self, unit: Unit) -> str:
        """Return a hash of all that determines a unit's bytes; equal units of two plans have equal keys."""
        value = unpack(unit.text)
        made_from = {"stage": self.stage, "basis": self.basis, "spec": value["spec"], "outputs": value["outputs"]}
        return content_id(made_from)

    def pieces(self) -> list[bytes]:
        """Encode the plan for plan.json with one unit per line, so that a user can read a plan of any size."""
        head = {"id": self.id, **self.content()}
        del head["units"]
        lines = [piece for unit in self.units for piece in (b",\n", unit.text)]
        return [readable_json(head)[:-3], b',\n "units": [\n', *lines[1:], b"\n ]\n}\n"]

    def to_bytes(self) -> bytes:
        """Return the joined pieces."""
        return b"".join(self.pieces())

    @classmethod
    def read(cls, path: Path, tree: Tree, kind: StageKind) -> "Plan | None":
        """Read a plan; return None if there is no file or the file is incomplete."""
        try:
            return cls._from_json(read_json(path, packed="units", tree=tree), kind)
        except (ValueError, RecursionError):  # the text of a unit is not valid JSON
            return None

    @classmethod
    def _from_json(cls, value: Any, kind: StageKind) -> "Plan | None":
        # The caller, `StageRecord.read_plan`, continues the messages with ", or delete ...".
        if not isinstance(value, dict) or "id" not in value or "units" not in value:
            return None
        if value.get("format") != FORMAT:
            raise OtherFormat(
                f"it has format {value.get('format')!r}, but this version of tokenmill writes {FORMAT}; use the "
                "version that started it"
            )
        if content_id({name: part for name, part in value.items() if name != "id"}) != value["id"]:
            raise RequestError("it is damaged, because its content does not match its id; restore the file")
        try:
            check_plan(value, kind)
            if not isinstance(value["units"], PackedList):
                raise ValueError("its units are not a list")
            units: list[Unit] = []
            for texts, batch in value["units"].with_texts():
                units += map(Unit.from_text, texts, check_units(batch, kind))
        except ValueError as error:
            raise RequestError(
                f"it is damaged, or another version of tokenmill wrote it ({error}); use that version"
            ) from error
        parts = {name: value[name] for name in ("request", "basis", "details")}
        plan = cls(
            stage=value["stage"],
            units=units,
            require=value["require"],
            source=Origin.from_json(value["source"]),
            upstream=Upstream.from_json(value["upstream"]),
            **parts,
        )
        plan.__dict__["id"] = value["id"]  # checked above; hashing 59,166 units as objects again would take 2 s
        return plan


@dataclass(frozen=True)
class StageRecord:
    """The records of one stage in one output directory."""

    output: Path
    kind: StageKind

    @property
    def stage(self) -> str:
        """The stage's name."""
        return self.kind.name

    @cached_property
    def tree(self) -> Tree:
        """The file tree of the output; every record, and every path in a record, is opened through it."""
        return open_tree(self.output)

    @cached_property
    def directory(self) -> Path:
        """The directory `<output>/.tokenmill/<stage>`."""
        return self.output / ".tokenmill" / self.stage

    @cached_property
    def plan_path(self) -> Path:
        """The path of the plan."""
        return self.directory / "plan.json"

    @property
    def manifest_path(self) -> Path:
        """The path of the manifest, which exists when every unit is finished."""
        return self.directory / "manifest.json"

    @property
    def replaced_path(self) -> Path:
        """The path of the old plan while another plan replaces it."""
        return self.directory / "replaced.json"

    @property
    def runs_directory(self) -> Path:
        """The directory of the runs that agreed on a plan of this stage."""
        return self.directory / "runs"

    @cached_property
    def attempts_directory(self) -> Path:
        """The directory that contains one directory for each attempt."""
        return self.directory / "attempts"

    def receipt_path(self, unit_id: str) -> Path:
        """Return the path of a unit's receipt."""
        return self.directory / "receipts" / _file_name(unit_id)

    def receipt_names(self) -> set[str]:
        """Return the file names of all receipts, whether they are valid or not."""
        return set(self.tree.names(self.directory / "receipts"))

    def failure_path(self, unit_id: str) -> Path:
        """Return the path of the record of a unit's last failure."""
        return self.directory / "failures" / _file_name(unit_id)

    def read_plan(self, *, replaced: bool = False) -> Plan | None:
        """Return the plan, or the plan that is being replaced; None without a plan."""
        path = self.replaced_path if replaced else self.plan_path
        try:
            return Plan.read(path, self.tree, self.kind)
        except (UnexpectedEntry, BucketUnavailable):
            raise
        except OtherFormat as error:
            raise RequestError(
                f"{path}: {error}, choose another output directory, or delete {self.output} and run its stage again"
            ) from error
        except RequestError as error:
            raise RequestError(f"{path}: {error}, or delete {self.output} and run its stage again") from error

    def plan_id(self) -> str | None:
        """Return the id of the plan that is now on disk, or None; only the first lines of the file are read."""
        try:
            with self.tree.open(self.plan_path) as file:
                head = file.read(80)
        except FileNotFoundError:
            return None
        _, _, rest = head.partition(b'"id": "')
        return rest.partition(b'"')[0].decode(errors="replace") or None

    def read_receipt(self, plan: Plan, unit: Unit, *, verify_hashes: bool = False) -> Receipt | None:
        """Return a unit's receipt if it is valid: it is of this plan, and its files have the recorded sizes."""
        receipt = self.stored_receipt(plan, unit)
        return receipt if receipt is not None and self._has_files(plan, receipt, verify_hashes) else None

    @contextlib.contextmanager
    def report_damaged_records(self) -> Iterator[None]:
        """Add the path of the plan to the message of a DamagedRecord that is raised inside the block."""
        try:
            yield
        except DamagedRecord as error:
            raise RequestError(f"{self.plan_path}: {error}") from error

    def stored_receipt(self, plan: Plan, unit: Unit) -> Receipt | None:
        """Return a unit's receipt of this plan, without a check of the files that it names."""
        value = read_json(self.receipt_path(unit.id), tree=self.tree)
        if not isinstance(value, dict) or value.get("plan") != plan.id or value.get("unit") != unit.id:
            return None
        if not _is_complete(value, unit):
            return None
        try:
            return Receipt.from_json(value)
        except ValueError as error:
            path = self.receipt_path(unit.id)
            raise RequestError(
                f"{path} is damaged, or another program changed it ({error}); check which program did, delete the "
                f"file, and run the same tokenmill {self.stage} again, which runs only that unit"
            ) from error

    def _has_files(self, plan: Plan, receipt: Receipt, verify_hashes: bool) -> bool:
        if any(self.tree.size(entry.path) != entry.bytes for entry in receipt.outputs):
            return False
        if any(self.tree.version(name) != version for name, version in receipt.versions.items()):
            return False  # a late attempt at an older plan has overwritten the object
        if not verify_hashes:
            return True
        with self.tree.local_copies(entry.path for entry in receipt.outputs) as root:
            return all(self._is_intact(plan, entry, root) for entry in receipt.outputs)

    def _is_intact(self, plan: Plan, entry: FileEntry, root: Path) -> bool:
        """Return whether a file has its recorded hash, and content in which `tokenmill verify` finds no problem."""
        path, check = root / entry.path, self.kind.check
        if hash_file(path, tree=Tree(root)) != entry.xxh3_128:
            return False
        return check is None or not check(path, entry, self.kind.basis.from_json(plan.basis))

    def is_unchanged(self, path: Path, pieces: Iterable[bytes]) -> bool:
        """Return whether the file of a record consists of exactly these pieces."""
        try:
            with self.tree.open(path) as file:
                return has_content(file, pieces)
        except FileNotFoundError:
            return False

    def receipts(self, plan: Plan) -> Iterator[tuple[Unit, Receipt | None]]:
        """Yield every unit of the plan with its valid receipt, or with None."""
        with self.tree.reading_many():
            for unit in plan.units:
                yield unit, self.read_receipt(plan, unit)

    def stored_manifest(self, plan_id: str | None) -> "Manifest | None":
        """Return the recorded manifest of this plan; None if it is missing or does not match its hash."""
        value = read_json(self.manifest_path, packed="files", tree=self.tree)
        if not isinstance(value, dict) or value.get("plan") != plan_id or value.get("format") != FORMAT:
            return None
        recorded = value.pop("hash", None)
        manifest = Manifest(value)
        try:
            if manifest.hash != recorded:
                return None
        except (ValueError, RecursionError):  # the text of a file entry is not valid JSON
            return None
        try:
            check_manifest(value)
            for _ in manifest.files:
                pass
        except (ValueError, AttributeError) as error:
            raise RequestError(
                f"{self.manifest_path} is damaged, or another program changed it ({error}); check which program did, "
                f"delete the file, and run tokenmill status {self.output}, which writes it again from the receipts"
            ) from error
        return manifest

    def failure_names(self) -> list[str]:
        """Return the file names of the failure records."""
        return [name for name in self.tree.names(self.directory / "failures") if _is_record_name(name)]

    def failures(self) -> list[Failure]:
        """Return the last failures of the units that have not succeeded since."""
        directory = self.directory / "failures"
        values = (read_json(directory / name, tree=self.tree) for name in self.failure_names())
        return [failure for value in values if (failure := _parse_failure(value))]


def reconciles(counts: Counts) -> bool:
    """Return whether every record that was read was written, rejected or dropped."""
    return counts["in"] == counts["out"] + counts.get("rejected", 0) + counts.get("dropped", 0)


def describe_rejected(counts: Counts, output: Path) -> str | None:
    """Return a message with the number of rejected records and their directory; None without rejected records."""
    rejected = counts.get("rejected", 0)
    if not rejected:
        return None
    names = sorted(name for name in counts if name.startswith(REJECTED_PREFIX))
    reasons = ", ".join(f"{counts[name]:,} {printable(name.removeprefix(REJECTED_PREFIX))}" for name in names)
    return (
        f"{rejected:,} bad record{'s' * (rejected > 1)}{f' ({reasons})' if reasons else ''} kept in {output / REJECTED}"
    )


def describe_unread(counts: Counts) -> str | None:
    """Return a message with the keys that a stage does not read, and the number of records with each; None without."""
    names = [name for name in counts if name.startswith(UNREAD_PREFIX)]
    names.sort(key=lambda name: (-counts[name], name))
    listed = [f"{name.removeprefix(UNREAD_PREFIX)} ({counts[name]:,})" for name in names[:MAX_UNREAD_NAMES]]
    more = f" and {len(names) - len(listed):,} more" if len(names) > len(listed) else ""
    return f"ignoring the keys {', '.join(listed)}{more}; in parentheses, the number of records" if names else None


def record_failure(record: StageRecord, plan_id: str | None, unit_id: str, problem: TokenmillError) -> None:
    """Record why a unit failed for `tokenmill status`; the unit's receipt removes the record."""
    time, host = datetime.now(UTC).isoformat(timespec="seconds"), socket.gethostname()
    failure = Failure(plan_id, unit_id, redact(str(problem)), time, host, problem.exit_code)
    with contextlib.suppress(OSError):  # if the disk is full, the log still has the message
        record.tree.write_atomic(record.failure_path(unit_id), readable_json(failure.to_json()))


def _file_name(unit_id: str) -> str:
    """Return the file name of a unit's record; only a plan that another program changed has an id with a slash."""
    if "/" in unit_id:
        raise RequestError(
            f"a plan on disk is damaged: the unit id {unit_id} contains a slash; choose another output directory"
        )
    return f"{unit_id}.json"


def _is_record_name(name: str) -> bool:
    return name.endswith(".json") and not name.startswith(".")


def _parse_failure(value: Any) -> Failure | None:
    """Return the failure that a record describes, or None if the record is invalid."""
    try:
        return Failure.from_json(value)
    except msgspec.ValidationError:
        return None


def _is_complete(receipt: dict[str, Any], unit: Unit) -> bool:
    """Return whether a receipt has all fields that its readers need; without them, the unit runs again."""
    try:
        counts = receipt["counts"]
        named = {entry["path"] for entry in receipt["outputs"] if isinstance(entry["xxh3_128"], str)}
        return (
            all(isinstance(count, int) for count in counts.values())
            and reconciles(counts)
            and len(named) == len(receipt["outputs"])
            and named <= set(unit.outputs)
            and all(isinstance(entry["bytes"], int) for entry in receipt["outputs"])
            and isinstance(receipt["inputs"], list)
            and isinstance(receipt["empty"], list)
            and isinstance(receipt["weight"], int)
            and isinstance(receipt["started"] + receipt["finished"], str)
        )
    except (KeyError, TypeError, AttributeError):
        return False


@dataclass(frozen=True)
class Manifest:
    """A finished stage: its files, its counts and its input."""

    content: dict[str, Any]

    @cached_property
    def hash(self) -> str:
        """The hash of the content, which contains no times and hosts."""
        return content_id(self.content)

    @property
    def files(self) -> Iterator[FileEntry]:
        """The files; each access decodes their texts."""
        for batch in self.content["files"].batches():
            yield from convert_json(batch, list[FileEntry])

    @property
    def file_count(self) -> int:
        """The number of files."""
        return len(self.content["files"])

    @property
    def empty(self) -> list[EmptyPair]:
        """The pairs that were not written because they have no tokens."""
        return convert_json(self.content["empty"], list[EmptyPair])

    @property
    def source(self) -> Origin:
        """The first source of the text."""
        return Origin.from_json(self.content["source"])

    @property
    def upstream(self) -> Upstream:
        """The input of the stage."""
        return Upstream.from_json(self.content["upstream"])

    @property
    def counts(self) -> Counts:
        """The sum of the counts of all units."""
        return dict(self.content["counts"])


def make_manifest(plan: Plan, receipts: Iterable[Receipt]) -> Manifest:
    """Combine a plan with the receipts of all its units, in the order of the plan."""
    counts: Counts = {}
    files = PackedList()
    empty: list[dict[str, object]] = []
    for receipt in receipts:
        files.texts.extend(pack(entry.to_json()) for entry in receipt.outputs)
        empty.extend(pair.to_json() for pair in receipt.empty)
        for name, count in receipt.counts.items():
            counts[name] = counts.get(name, 0) + count
    return Manifest(
        {
            "format": FORMAT,
            "stage": plan.stage,
            "plan": plan.id,
            "upstream": plan.upstream.to_json(),
            "source": plan.source.to_json(),
            "details": plan.details,
            "counts": counts,
            "files": files,
            "empty": empty,
        }
    )


class Completion(NamedTuple):
    """How much of a stage is finished: the manifest of a complete stage, or the units without a valid receipt."""

    plan: Plan
    manifest: Manifest | None
    missing: list[Unit]
    done: int


def complete(record: StageRecord, plan: Plan, *, write: bool = True) -> Completion:
    """Check every receipt, and write the manifest if all are valid; any later reader may do this.

    The content of receipts is read only if every unit has a receipt file. Otherwise a thousand workers that end one
    after the other would read all receipts a thousand times. With `write` false, the manifest is computed but not
    written, so that a reader with a read-only mount can use it.
    """
    names = record.receipt_names()
    absent = [unit for unit in plan.units if _file_name(unit.id) not in names]
    if absent:
        return Completion(plan, None, absent, len(plan.units) - len(absent))
    missing: list[Unit] = []

    def valid_receipts() -> Iterator[Receipt]:
        for unit, receipt in record.receipts(plan):
            if receipt is None:
                missing.append(unit)
            else:
                yield receipt

    manifest = make_manifest(plan, valid_receipts())
    if missing:
        return Completion(plan, None, missing, len(plan.units) - len(missing))
    if plan.require and not manifest.counts.get(plan.require):
        raise RequestError(
            f"{plan.command} made no {COUNT_NAMES[plan.require]} from {len(plan.units)} units and "
            f"{manifest.counts['in']} records, so {record.output} is not a usable dataset; check the input and the "
            "options"
        )
    content = {"hash": manifest.hash, **manifest.content}
    if write and not record.is_unchanged(record.manifest_path, readable_pieces(content)):
        record.tree.write_atomic(record.manifest_path, readable_pieces(content))
    return Completion(plan, manifest, [], len(plan.units))
