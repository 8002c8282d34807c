"""A preprocessed dataset as a reader meets it: its pairs, its tokenizer, its documents and where they came from."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from tokenmill.errors import WITH_HASHES, RequestError
from tokenmill.files.hashing import has_sha256, hash_file
from tokenmill.files.mounts import patiently, settle_seconds
from tokenmill.files.paths import inside
from tokenmill.files.tree import UnexpectedEntry
from tokenmill.flow.contract import COPIED, IN_PLACE, FileEntry, Kind
from tokenmill.flow.lineage import find_records, records_of, unfinished
from tokenmill.flow.progress import size as words
from tokenmill.flow.provenance import locate
from tokenmill.flow.record import Manifest, Plan, StageRecord, complete, kept_aside, make_manifest
from tokenmill.tokens import formats
from tokenmill.tokens.contract import PREPROCESS, PairBasis, ResolvedTokenizer, basis_of, tokenizer_of
from tokenmill.tokens.encoder_store import Encoders
from tokenmill.tokens.formats.base import Format

_DAMAGED: dict[str, str] = {
    IN_PLACE: "put back what was adopted; or make the pair again with the tool that made it, and run the same "
    "tokenmill adopt with --replace",
    COPIED: "delete this copy and run the same tokenmill adopt again: it copies only what is missing",
}
"""What to do about a pair that was adopted and is not any more what was adopted."""


@dataclass(frozen=True)
class Dataset:
    """A finished preprocess stage."""

    record: StageRecord
    plan: Plan
    manifest: Manifest

    @property
    def pairs(self) -> list[FileEntry]:
        """The manifest's entries of the .bin files with tokens: what Megatron-LM is given."""
        tokens = formats.get(self.basis.output_format).suffixes[0]
        return [entry for entry in self.manifest.files if entry.role == tokens]

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the pairs' ids: one, unless they were adopted."""
        return sorted({self.dtype(entry) for entry in self.pairs})

    def dtype(self, pair: FileEntry) -> str:
        """Return the dtype of a pair's ids."""
        return pair.dtype or self.basis.dtype

    @property
    def backend(self) -> Path:
        """The tokenizer's backend JSON, which turns ids back into text."""

        path = Encoders(self.record).backend(self.basis)
        self.record.tree.size(path)  # refuses a link
        return path

    @cached_property
    def basis(self) -> PairBasis:
        """What decides the bytes of the pairs."""
        return basis_of(self.plan)

    @cached_property
    def tokenizer(self) -> ResolvedTokenizer:
        """What the plan says of the tokenizer."""
        return tokenizer_of(self.plan)


@dataclass(frozen=True)
class Document:
    """One document: its pair and number in it, its token ids, and where its text came from."""

    pair: FileEntry
    number: int
    ids: list[int]
    source: tuple[str, int] | None


def find_dataset(path: Path) -> Dataset:
    """Return the one preprocess output in `path` or below; none, several or an unfinished one is a RequestError."""
    records = list(find_records(path, [PREPROCESS]))
    if not records:
        raise RequestError(f"no output of tokenmill preprocess lies in {path}")
    if len(records) > 1:
        names = "\n".join(f"  {record.output}" for record in records)
        raise RequestError(f"more than one dataset lies in {path}; name one:\n{names}")
    return open_dataset(records[0])


def open_dataset(record: StageRecord) -> Dataset:
    """Return a finished preprocess; one that is not, or whose files are not there as recorded, is a RequestError.

    Both are concluded only once the mount's caches must have told the truth.
    """

    def look() -> Dataset | None:
        plan = record.read_plan()
        manifest = complete(record, plan, write=False).manifest if plan else None
        return Dataset(record, plan, manifest) if plan and manifest else None

    found = look() or (patiently(look, record.directory) if settle_seconds(record.output) > 0 else None)
    if found is not None:
        return found
    manifest = record.stored_manifest(record.plan_id())
    plan = record.read_plan()
    files = list(manifest.files) if manifest else []
    damaged = [entry.path for entry in files if record.tree.size(entry.path) != entry.bytes]
    if damaged:
        raise RequestError(
            f"preprocess in {record.output} was finished, but {len(damaged)} of its {len(files)} files are missing or "
            f"have another size now: {', '.join(damaged[:5])}{', ...' if len(damaged) > 5 else ''}; "
            + _DAMAGED.get((plan and plan.adopted) or "", "run tokenmill preprocess again: it makes only those")
        )
    command = plan.command if plan else record.stage
    raise RequestError(f"{unfinished(record)}; see tokenmill status {record.output}, and run {command} again")


def record_of_pair(prefix: Path) -> tuple[StageRecord, str] | None:
    """Return the preprocess that a pair may belong to, and the pair's prefix in it: of the nearest directory above."""
    prefix = prefix.absolute()
    for directory in prefix.parents:
        record = StageRecord(directory, PREPROCESS)
        if record.tree.size(record.plan_path) is not None:
            return record, prefix.relative_to(directory).as_posix()
    return None


def find_document(dataset: Dataset, number: int, *, key: str | None, prefix: str | None) -> Document:
    """Return document `number`, counted through the pairs of one key or within the pair `prefix`; -1 is the last."""
    from tokenmill.tokens.formats.indexed.reader import IndexedReader

    keys = [k for k in dataset.basis.keys if key in (None, k)]
    if not keys:
        raise RequestError(f"--key {key}: the dataset has {', '.join(dataset.basis.keys)}")
    if prefix:
        wanted = prefix.removesuffix(".bin").removesuffix(".idx")
        pairs = [p for p in dataset.pairs if p.prefix == wanted]
        pairs = pairs or [p for p in dataset.pairs if Path(p.prefix).name == Path(wanted).name]
    else:
        pairs = [p for p in dataset.pairs if p.key == keys[0]]
    if not pairs or (prefix and len(pairs) > 1):
        known = ", ".join(p.prefix for p in (pairs or dataset.pairs)[:5])
        more = ", ..." if len(pairs or dataset.pairs) > 5 else ""
        raise RequestError(f"--file {prefix}: the dataset has {known}{more}; name one of them")
    ends = list(accumulate(pair.documents for pair in pairs))
    number += ends[-1] if number < 0 else 0
    if not 0 <= number < ends[-1]:
        raise RequestError(f"--document {number}: there are {ends[-1]:,}, counted from 0")
    chosen = bisect_right(ends, number)
    pair, local = pairs[chosen], number - (ends[chosen - 1] if chosen else 0)
    reader = IndexedReader(inside(dataset.record.output, pair.prefix))
    return Document(pair, local, reader.document(local).tolist(), locate(pair.parts or [], local))


def check(path: Path, kinds: Sequence[Kind], *, full: bool, stage: str | None = None) -> tuple[list[str], list[str]]:
    """Return what was checked and what is wrong, of the stages of `kinds` below `path`, of `stage`, or a bare pair."""
    from tokenmill.tokens.formats.indexed.check import check_pair

    records = records_of(path, kinds, stage) if path.is_dir() or stage else []
    if not records:
        prefix = Path(str(path).removesuffix(".bin").removesuffix(".idx"))
        known = record_of_pair(prefix)
        plan = known[0].read_plan() if known else None
        if known and plan and any(f"{known[1]}.bin" in unit.outputs for unit in plan.units):
            said, wrong = _check_stage(known[0], full, only=known[1])
            return [said], wrong
        if not Path(f"{prefix}.idx").exists() and not Path(f"{prefix}.bin").exists():
            raise RequestError(f"{path} is neither an output of tokenmill nor a pair of .bin and .idx")
        return [f"structure of {prefix}; hashes, token range and EOD not: no record says what it was made with"], [
            str(problem) for problem in check_pair(prefix, full=full)
        ]
    checked, wrong = [], []
    for record in records:
        said, problems = _check_stage(record, full)
        checked.append(said)
        wrong.extend(problems)
    return checked, wrong


def _check_stage(record: StageRecord, full: bool, only: str | None = None) -> tuple[str, list[str]]:
    """Check one stage, or of a preprocess stage the pair with the prefix `only`."""
    plan = record.read_plan()
    if plan is None:
        return f"nothing of {record.stage} in {record.output}", [
            f"{record.stage} in {record.output} has no plan: see tokenmill status {record.output}; if it is "
            f"not wanted, delete {record.directory}"
        ]
    form = formats.get(basis_of(plan).output_format if plan.stage == PREPROCESS.name else formats.DEFAULT)
    wrong, files, size, rejected = [], 0, 0, 0
    units = [unit for unit in plan.units if only is None or f"{only}.bin" in unit.outputs]
    receipts = {unit.id: record.stored_receipt(plan, unit) for unit in units}
    absent = [unit for unit, receipt in receipts.items() if receipt is None]
    if absent:
        wrong.append(
            f"{record.stage} in {record.output} is not finished: {len(absent)} of {len(units)} units have no receipt, "
            f"first: {absent[0]}; see tokenmill status {record.output} for why, and run tokenmill {plan.command} again"
        )
    for receipt in filter(None, receipts.values()):
        rejected += receipt.counts.get("rejected", 0)
        entries = {entry.path: entry for entry in receipt.outputs}
        for entry in receipt.outputs:
            if only is not None and entry.prefix != only:
                continue
            files, size = files + 1, size + entry.bytes
            if refused := [problem for path in _looked_at(entry, form) if (problem := _refused(record, path))]:
                wrong.extend(refused)
            elif entry.role == form.suffixes[0]:
                problems = form.check(
                    inside(record.output, entry.prefix),
                    {suffix: entries[f"{entry.prefix}.{suffix}"] for suffix in form.suffixes},
                    vocab_size=tokenizer_of(plan).vocab_size,
                    eod=basis_of(plan).eod,
                    full=full,
                    foreign=_DAMAGED.get(plan.adopted or ""),
                )
                wrong.extend(map(str, problems))
            elif entry.role not in form.suffixes:
                wrong.extend(_check_file(record, entry, full))
    if plan.stage == PREPROCESS.name:
        wrong.extend(check_tokenizer(record, plan))
    if not absent and only is None:
        manifest = record.stored_manifest(plan.id)
        if manifest is None or manifest.hash != make_manifest(plan, [r for r in receipts.values() if r]).hash:
            wrong.append(
                f"{record.manifest_path} is missing, or not what the receipts say; delete it and run tokenmill status "
                f"{record.output}, which completes it"
            )
    how = "every byte" if full else "structure and sizes"
    said = f"{how} of {files} files, {words(size)}, of {record.stage} in {record.output}"
    bad = kept_aside({"rejected": rejected}, record.output)
    return f"{said}; {bad}" if bad else said, wrong


def _looked_at(entry: FileEntry, form: Format) -> list[str]:
    """Return the paths that are looked at together: with a format's first file the others, which then come to none."""
    if entry.role not in form.suffixes:
        return [entry.path]
    return [f"{entry.prefix}.{suffix}" for suffix in form.suffixes] if entry.role == form.suffixes[0] else []


def _refused(record: StageRecord, path: str) -> str | None:
    """Say why a file of an output is not even looked at, such as a link; None where it may be."""
    try:
        record.tree.size(path)
    except UnexpectedEntry as error:
        return str(error)
    return None


def _check_file(record: StageRecord, entry: FileEntry, full: bool) -> list[str]:
    path, size = inside(record.output, entry.path), record.tree.size(entry.path)
    again = f"run the same tokenmill {record.stage} again"
    if size is None:
        return [f"{path}: missing; {again}: it makes only this one"]
    if size != entry.bytes:
        return [f"{path}: {size} bytes, its receipt says {entry.bytes}; {again}: it makes only this one"]
    if full and hash_file(path, tree=record.tree) != entry.xxh3_128:
        return [
            f"{path}: its bytes are not those its receipt names (xxh3-128 differs); {again} with {WITH_HASHES}, which "
            "makes only what is damaged"
        ]
    return []


def check_tokenizer(record: StageRecord, plan: Plan) -> list[str]:
    """Compare the tokenizer beside the data with what the data were made with."""
    wrong = []
    for name, sha256 in tokenizer_of(plan).files.items():
        path = record.output / "tokenizer" / name
        if not has_sha256(record.tree, path, sha256):
            wrong.append(
                f"{path}: not the tokenizer these data were made with; copy the right one there, or run tokenmill "
                f"{plan.command} again"
            )
    return wrong
