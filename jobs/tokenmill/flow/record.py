"""Plans, receipts and manifests: the three records of a stage, and where they lie.

A plan is written once by whichever worker is first; a receipt is written last, after the files it
names; a manifest is a pure function of the plan and its receipts, without times and hosts, so that
the same content has the same hash on any machine.
"""

import contextlib
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from tokenmill.errors import RequestError, TokenmillError
from tokenmill.files.codec import (
    JsonText,
    Packed,
    content_id,
    is_content,
    pack,
    read_json,
    readable_json,
    readable_pieces,
    unpack,
)
from tokenmill.files.hashing import hash_file
from tokenmill.files.tree import Tree, UnexpectedEntry
from tokenmill.flow.contract import (
    IN_PLACE,
    REMAKE,
    DamagedRecord,
    EmptyPair,
    Failure,
    FileEntry,
    InputFile,
    Kind,
    Origin,
    Receipt,
    Record,
    Upstream,
    check_manifest,
    check_plan,
    check_units,
)
from tokenmill.redaction import redact

FORMAT = 1
"""Version of the three records' layout."""


class OtherFormat(RequestError):
    """A plan has another format than this version of tokenmill writes."""


WORDS = {"out": "records", "tokens": "tokens"}
"""How the counts that must not be zero are called."""

PLANNING = "planning"
"""Under this name in the place of a unit's lies why a plan could not be made."""

REJECTED = "rejected"
"""Directory below an output where bad records are kept."""

Counts = dict[str, int]
S = TypeVar("S", bound=Record)


@dataclass(frozen=True, slots=True, init=False)
class Unit:
    """One piece of work that is committed whole.

    `spec` says from what and how, `outputs` which files it may make (relative to the output directory),
    `weight` is its input in bytes. `text` is all of it, as it stands in plan.json: of 59,166 units as objects
    a process would grow by 100 MB.
    """

    id: str
    weight: int
    text: JsonText = field(repr=False)

    def __init__(self, id: str, weight: int, spec: Record, outputs: list[str]) -> None:
        """Make a unit from its parts."""
        self._set(id, weight, pack({"id": id, "weight": weight, "spec": spec.to_json(), "outputs": outputs}))

    @classmethod
    def of_text(cls, text: JsonText, value: dict[str, Any]) -> "Unit":
        """Make a unit from its text and what that says, which is checked."""
        unit = cls.__new__(cls)
        unit._set(value["id"], value["weight"], text)
        return unit

    def _set(self, id: str, weight: int, text: JsonText) -> None:
        object.__setattr__(self, "id", id)
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "text", text)

    @property
    def inputs(self) -> list[InputFile]:
        """The files it is made from; read from the text each time."""
        return msgspec.convert(unpack(self.text)["spec"].get("inputs", []), list[InputFile])

    def spec(self, kind: type[S]) -> S:
        """Return from what it is made and how, as its stage says it; read from the text each time."""
        try:
            return kind.of_json(unpack(self.text)["spec"])
        except msgspec.ValidationError as error:
            words = f"the plan is damaged, or somebody changed it: unit {self.id}: {error}; {REMAKE}"
            raise DamagedRecord(words) from error

    @property
    def outputs(self) -> list[str]:
        """The files it may make; read from the text each time."""
        outputs: list[str] = unpack(self.text)["outputs"]
        return outputs


@dataclass(frozen=True)
class Plan:
    """What a stage will make.

    `request` is what was asked (compared when somebody asks again), `basis` the parameters that decide a unit's bytes
    beside its inputs: --replace keeps what a unit of the same inputs and basis wrote. `details` is what planning
    resolved (a commit, a tokenizer), `source` where the text comes from in the end, `upstream` the stage and manifest
    hash read, `require` the count that must not be zero at the end.
    """

    stage: str
    request: dict[str, Any]
    units: list[Unit]
    basis: dict[str, Any]
    details: dict[str, Any] = field(default_factory=dict)
    source: Origin = Origin()  # noqa: RUF009 - frozen
    upstream: Upstream = Upstream()  # noqa: RUF009 - frozen
    require: str | None = None

    def content(self) -> dict[str, Any]:
        """Return the plan as JSON, its units Packed, without its id."""
        return {
            "format": FORMAT,
            "stage": self.stage,
            "request": self.request,
            "basis": self.basis,
            "details": self.details,
            "source": self.source.to_json(),
            "upstream": self.upstream.to_json(),
            "require": self.require,
            "units": Packed(unit.text for unit in self.units),
        }

    @cached_property
    def id(self) -> str:
        """The plan id: hash of everything in it."""
        return content_id(self.content())

    @cached_property
    def weight(self) -> int:
        """Sum of the units' weights, in bytes."""
        return sum(unit.weight for unit in self.units)

    @property
    def adopted(self) -> str | None:
        """How the files of another tool became outputs, IN_PLACE or COPIED; None where tokenmill made them."""
        return self.source.adopted or None

    def removable(self, unit: Unit) -> list[str]:
        """Return the outputs of a unit that another plan may remove or overwrite: none that somebody else made."""
        return [] if self.adopted == IN_PLACE else unit.outputs

    @property
    def command(self) -> str:
        """The command of tokenmill that made the plan."""
        return "adopt" if self.adopted else self.stage

    def unit_key(self, unit: Unit) -> str:
        """Hash what decides a unit's bytes, so that a replaced plan can keep what did not change."""
        value = unpack(unit.text)
        made_from = {"stage": self.stage, "basis": self.basis, "spec": value["spec"], "outputs": value["outputs"]}
        return content_id(made_from)

    def pieces(self) -> list[bytes]:
        """Encode for plan.json: one unit a line, so that a person can read a plan of any size."""
        head = {"id": self.id, **self.content()}
        del head["units"]
        lines = [piece for unit in self.units for piece in (b",\n", unit.text)]
        return [readable_json(head)[:-3], b',\n "units": [\n', *lines[1:], b"\n ]\n}\n"]

    def to_bytes(self) -> bytes:
        """Return the pieces as one."""
        return b"".join(self.pieces())

    @classmethod
    def read(cls, path: Path, tree: Tree, kind: Kind) -> "Plan | None":
        """Read a plan of a kind back; None when there is none, or it is incomplete."""
        try:
            return cls._of_json(read_json(path, packed="units", tree=tree), kind)
        except (ValueError, RecursionError):  # a unit's text is no JSON
            return None

    @classmethod
    def _of_json(cls, value: Any, kind: Kind) -> "Plan | None":
        if not isinstance(value, dict) or "id" not in value or "units" not in value:
            return None
        if value.get("format") != FORMAT:
            raise OtherFormat(f"it has format {value.get('format')!r}, this version of tokenmill writes {FORMAT}")
        if content_id({name: part for name, part in value.items() if name != "id"}) != value["id"]:
            raise RequestError("it is damaged: it is not what was written, since its id is another")
        try:
            check_plan(value, kind)
            if not isinstance(value["units"], Packed):
                raise ValueError("its units are no list")
            units: list[Unit] = []
            for texts, batch in value["units"].with_texts():
                check_units(batch, kind)
                units += map(Unit.of_text, texts, batch)
        except ValueError as error:
            raise RequestError(f"it is damaged, or of another version of tokenmill ({error})") from error
        parts = {name: value[name] for name in ("request", "basis", "details")}
        plan = cls(
            stage=value["stage"],
            units=units,
            require=value["require"],
            source=Origin.of_json(value["source"]),
            upstream=Upstream.of_json(value["upstream"]),
            **parts,
        )
        plan.__dict__["id"] = value["id"]  # just compared: hashing 59,166 units as objects again would take 2 s
        return plan


@dataclass(frozen=True)
class StageRecord:
    """The records of one stage in one output directory."""

    output: Path
    kind: Kind

    @property
    def stage(self) -> str:
        """The stage's name."""
        return self.kind.name

    @cached_property
    def tree(self) -> Tree:
        """The output's files: every path of a record, and every record, is opened through it."""
        return Tree(self.output)

    @cached_property
    def directory(self) -> Path:
        """`<output>/.tokenmill/<stage>`."""
        return self.output / ".tokenmill" / self.stage

    @property
    def plan_path(self) -> Path:
        """Where the plan lies."""
        return self.directory / "plan.json"

    @property
    def manifest_path(self) -> Path:
        """Where the manifest lies once all is done."""
        return self.directory / "manifest.json"

    @property
    def replaced_path(self) -> Path:
        """Where the old plan lies while another takes its place."""
        return self.directory / "replaced.json"

    @property
    def runs(self) -> Path:
        """Directory of the runs that agreed on a plan here."""
        return self.directory / "runs"

    @property
    def attempts(self) -> Path:
        """Directory of the attempts' own directories."""
        return self.directory / "attempts"

    def receipt_path(self, unit_id: str) -> Path:
        """Where a unit's receipt lies."""
        return self.directory / "receipts" / _file_name(unit_id)

    def receipt_names(self) -> set[str]:
        """Return the names of the receipts there are, whether they count or not."""
        return set(self.tree.names(self.directory / "receipts"))

    def failure_path(self, unit_id: str) -> Path:
        """Where the reason of a unit's last failure lies."""
        return self.directory / "failures" / _file_name(unit_id)

    def read_plan(self, *, replaced: bool = False) -> Plan | None:
        """Return the plan, or that which another is replacing; None when there is none."""
        path = self.replaced_path if replaced else self.plan_path
        try:
            return Plan.read(path, self.tree, self.kind)
        except UnexpectedEntry:
            raise
        except OtherFormat as error:
            raise RequestError(
                f"{path}: {error}; use the version that began it, choose another output directory, or delete "
                f"{self.output} and make it again"
            ) from error
        except RequestError as error:
            raise RequestError(f"{path}: {error}; delete {self.output} and make it again") from error

    def plan_id(self) -> str | None:
        """Return the id of the plan on disk now, reading only its first lines; None when there is none."""
        try:
            with self.tree.open(self.plan_path) as file:
                head = file.read(80)
        except FileNotFoundError:
            return None
        _, _, rest = head.partition(b'"id": "')
        return rest.partition(b'"')[0].decode(errors="replace") or None

    def read_receipt(self, plan: Plan, unit: Unit, *, verify_hashes: bool = False) -> Receipt | None:
        """Return a unit's receipt when it counts: this plan's, and its files there with the sizes it names."""
        receipt = self.stored_receipt(plan, unit)
        return receipt if receipt is not None and self._holds(receipt, verify_hashes) else None

    @contextlib.contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Name the plan where what is done inside finds out that a unit of it lacks something."""
        try:
            yield
        except DamagedRecord as error:
            raise RequestError(f"{self.plan_path}: {error}") from error

    def stored_receipt(self, plan: Plan, unit: Unit) -> Receipt | None:
        """Return a unit's receipt of this plan, whatever became of the files it names."""
        value = read_json(self.receipt_path(unit.id), tree=self.tree)
        if not isinstance(value, dict) or value.get("plan") != plan.id or value.get("unit") != unit.id:
            return None
        if not _is_whole(value, unit):
            return None
        try:
            return Receipt.of_json(value)
        except ValueError as error:
            path = self.receipt_path(unit.id)
            raise RequestError(
                f"{path} is damaged, or somebody changed it ({error}); look at who did, delete it, and run the same "
                f"tokenmill {self.stage} again, which makes that unit anew"
            ) from error

    def _holds(self, receipt: Receipt, verify_hashes: bool) -> bool:
        for output in receipt.outputs:
            if self.tree.size(output.path) != output.bytes:
                return False
            if verify_hashes and hash_file(self.output / output.path, tree=self.tree) != output.xxh3_128:
                return False
        return True

    def holds(self, path: Path, pieces: Iterable[bytes]) -> bool:
        """Tell whether a record holds these pieces and nothing else."""
        try:
            with self.tree.open(path) as file:
                return is_content(file, pieces)
        except FileNotFoundError:
            return False

    def receipts(self, plan: Plan) -> Iterator[tuple[Unit, Receipt | None]]:
        """Yield every unit of the plan with its receipt, or None where it has none that counts."""
        with self.tree.held():
            for unit in plan.units:
                yield unit, self.read_receipt(plan, unit)

    def stored_manifest(self, plan_id: str | None) -> "Manifest | None":
        """Return the recorded manifest of this plan, None when there is none or it is not what was written."""
        value = read_json(self.manifest_path, packed="files", tree=self.tree)
        if not isinstance(value, dict) or value.get("plan") != plan_id or value.get("format") != FORMAT:
            return None
        recorded = value.pop("hash", None)
        manifest = Manifest(value)
        try:
            if manifest.hash != recorded:
                return None
        except (ValueError, RecursionError):  # a file's text is no JSON
            return None
        try:
            check_manifest(value)
            for _ in manifest.files:
                pass
        except (ValueError, AttributeError) as error:
            raise RequestError(
                f"{self.manifest_path} is damaged, or somebody changed it ({error}); look at who did, delete it, and "
                f"run tokenmill status {self.output}, which completes it from the receipts"
            ) from error
        return manifest

    def failure_names(self) -> list[str]:
        """Return the names of the records of failures."""
        return [name for name in self.tree.names(self.directory / "failures") if _is_record(name)]

    def failures(self) -> list[Failure]:
        """Return why units failed last, for those that have not succeeded since."""
        directory = self.directory / "failures"
        values = (read_json(directory / name, tree=self.tree) for name in self.failure_names())
        return [failure for value in values if (failure := _failure(value))]


def reconciles(counts: Counts) -> bool:
    """Tell whether each record that was read was written, rejected or dropped."""
    return counts["in"] == counts["out"] + counts.get("rejected", 0) + counts.get("dropped", 0)


def kept_aside(counts: Counts, output: Path) -> str | None:
    """Say how many bad records a stage kept beside its output, and where; None when there are none."""
    bad = counts.get("rejected", 0)
    return f"{bad:,} bad record{'s' * (bad > 1)} kept in {output / REJECTED}" if bad else None


def record_failure(record: StageRecord, plan_id: str | None, unit_id: str, problem: TokenmillError) -> None:
    """Keep why a unit failed, for whoever asks for the status; its receipt removes it."""
    time, host = datetime.now(UTC).isoformat(timespec="seconds"), socket.gethostname()
    failure = Failure(plan_id, unit_id, redact(str(problem)), time, host, problem.exit_code)
    with contextlib.suppress(OSError):  # on a full disk the message in the log must do
        record.tree.write_atomic(record.failure_path(unit_id), readable_json(failure.to_json()))


def _file_name(unit_id: str) -> str:
    """Name the record of a unit; an id that is no file name comes from a plan that was tampered with."""
    if "/" in unit_id:
        raise RequestError(f"a plan on disk is damaged (unit {unit_id!r}); choose another output directory")
    return f"{unit_id}.json"


def _is_record(name: str) -> bool:
    return name.endswith(".json") and not name.startswith(".")


def _failure(value: Any) -> Failure | None:
    """Return the failure that a record describes; None where it describes nothing of the kind."""
    try:
        return Failure.of_json(value)
    except msgspec.ValidationError:
        return None


def _is_whole(receipt: dict[str, Any], unit: Unit) -> bool:
    """Tell whether a receipt has what its readers count on; one that has not is none, and the unit is done again."""
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
    """A finished stage: its files and counts, and what they came from."""

    content: dict[str, Any]

    @cached_property
    def hash(self) -> str:
        """Hash of the content, times and hosts being no part of it."""
        return content_id(self.content)

    @property
    def files(self) -> Iterator[FileEntry]:
        """The files; read from their texts each time."""
        for batch in self.content["files"].batches():
            yield from msgspec.convert(batch, list[FileEntry])

    @property
    def file_count(self) -> int:
        """How many files there are."""
        return len(self.content["files"])

    @property
    def empty(self) -> list[EmptyPair]:
        """The pairs that were left out, since they have no tokens."""
        return msgspec.convert(self.content["empty"], list[EmptyPair])

    @property
    def source(self) -> Origin:
        """Where the text comes from in the end."""
        return Origin.of_json(self.content["source"])

    @property
    def upstream(self) -> Upstream:
        """What the stage read."""
        return Upstream.of_json(self.content["upstream"])

    @property
    def counts(self) -> Counts:
        """The stage's counts, summed over its units."""
        return dict(self.content["counts"])


def make_manifest(plan: Plan, receipts: Iterable[Receipt]) -> Manifest:
    """Combine a plan with the receipts of all its units, in the plan's order."""
    counts: Counts = {}
    files = Packed()
    empty: list[dict[str, Any]] = []
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
    """How far a stage is: the manifest when it is whole, else the units without a receipt."""

    plan: Plan
    manifest: Manifest | None
    missing: list[Unit]
    done: int


def complete(record: StageRecord, plan: Plan, *, write: bool = True) -> Completion:
    """Look at every receipt, and write the manifest when all count; any later reader may do this.

    Receipts are read only where none is missing by name: a thousand workers that end one after the other
    would read them all a thousand times. With `write` false the manifest is only computed: a reader with a
    read-only mount can go on.
    """
    names = record.receipt_names()
    absent = [unit for unit in plan.units if _file_name(unit.id) not in names]
    if absent:
        return Completion(plan, None, absent, len(plan.units) - len(absent))
    missing: list[Unit] = []

    def found() -> Iterator[Receipt]:
        for unit, receipt in record.receipts(plan):
            if receipt is None:
                missing.append(unit)
            else:
                yield receipt

    manifest = make_manifest(plan, found())
    if missing:
        return Completion(plan, None, missing, len(plan.units) - len(missing))
    if plan.require and not manifest.counts.get(plan.require):
        raise RequestError(
            f"{plan.command} gave no {WORDS[plan.require]} from {len(plan.units)} units and {manifest.counts['in']} "
            f"records: {record.output} is no dataset to go on with; check the input and the options"
        )
    content = {"hash": manifest.hash, **manifest.content}
    if write and not record.holds(record.manifest_path, readable_pieces(content)):
        record.tree.write_atomic(record.manifest_path, readable_pieces(content))
    return Completion(plan, manifest, [], len(plan.units))
