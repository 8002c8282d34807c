"""Open, read and verify a dataset of pairs: its pairs, its tokenizer, its documents and their sources.

The commands verify, inspect and blend, and the preparation of a training run, read the finished output of preprocess
or adopt with this module; pack also reads that of chat, whose pairs have masks.
"""

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from tokenmill.core.buckets.mirror import find_address
from tokenmill.core.buckets.tree import is_file
from tokenmill.core.files.hashing import has_sha256, hash_file
from tokenmill.core.files.mounts import directory_cache_seconds, retry_while_stale
from tokenmill.core.files.paths import join_inside
from tokenmill.core.files.tree import Tree, UnexpectedEntry
from tokenmill.core.printing import format_bytes
from tokenmill.datasets.contract import PREPROCESS, PairBasis, ResolvedTokenizer, parse_basis, parse_tokenizer
from tokenmill.datasets.formats.indexed import SUFFIXES
from tokenmill.datasets.weighted import Pair
from tokenmill.engine.contract import COPIED, IN_PLACE, FileEntry, StageKind
from tokenmill.engine.lineage import locate
from tokenmill.engine.record import Manifest, Plan, StageRecord, complete, describe_rejected, make_manifest
from tokenmill.engine.stage_input import describe_unfinished, find_records, select_records
from tokenmill.errors import RequestError, remake

_ADOPTED_REMEDIES: dict[str, str] = {
    IN_PLACE: "restore the pair that was adopted; or make it again with the tool that made it, and run the same "
    "tokenmill adopt with --replace",
    COPIED: "delete this copy and run the same tokenmill adopt again: it copies only the missing files",
}
"""The remedy for an adopted pair that changed after it was adopted, by the way it was adopted."""


@dataclass(frozen=True)
class Dataset:
    """A finished stage whose outputs are pairs."""

    record: StageRecord
    plan: Plan
    manifest: Manifest

    @property
    def pairs(self) -> list[FileEntry]:
        """The manifest's entries of the .bin files with tokens, which Megatron-LM reads; masks are not among them."""
        return [entry for entry in self.manifest.files if entry.role == SUFFIXES[0] and entry.key != self.basis.mask]

    @cached_property
    def entries(self) -> dict[str, FileEntry]:
        """The entries of `pairs` by the absolute prefix of the pair."""
        return {str(self.record.output / entry.prefix): entry for entry in self.pairs}

    @cached_property
    def hashes(self) -> dict[str, str]:
        """The content hashes of all files by their paths in the output."""
        return {entry.path: entry.xxh3_128 for entry in self.manifest.files}

    def get_remedy(self, *, same_size: bool = True) -> str:
        """Return the remedy for damaged files of the recorded size, or for missing files and those of another size."""
        adopted = _ADOPTED_REMEDIES.get(self.plan.adopted or "")
        return adopted or remake(f"the same tokenmill {self.plan.command}", same_size=same_size)

    @cached_property
    def tokenizer_problems(self) -> list[str]:
        """The problems of the tokenizer's files in the output."""
        return check_tokenizer(self.record, self.plan)

    def get_mask_prefix(self, pair: FileEntry) -> str | None:
        """Return the prefix of the pair with the mask of a pair, or None for a dataset without masks."""
        return make_mask_prefix(self.basis, pair)

    def describe_pair(self, entry: FileEntry) -> Pair:
        """Return the record of a pair."""
        return Pair(
            prefix=str(join_inside(self.record.output, entry.prefix)),
            documents=entry.documents,
            sequences=entry.sequences,
            tokens=entry.tokens,
            bytes=entry.bytes,
            dtype=self.get_dtype(entry),
            hashes=self.hashes[f"{entry.prefix}.bin"] + self.hashes[f"{entry.prefix}.idx"],
            pack_size=self.basis.rows.pack_size if self.basis.rows else 0,
            parts=entry.parts or (),
            origin=self.manifest.source,
        )

    def check_sizes(self, paths: Sequence[str], what: str) -> None:
        """Raise RequestError if files of the output, `what` in messages, are missing or have another size."""
        entries = {entry.path: entry for entry in self.manifest.files}
        tree = self.record.tree
        with tree.reading_many():
            damaged = [path for path in paths if path not in entries or tree.size(path) != entries[path].bytes]
        if damaged:
            raise RequestError(
                f"{self.record.stage} in {self.record.output} was finished, but {len(damaged)} of its {len(paths)} "
                f"{what} are missing or have another size now: {', '.join(damaged[:5])}"
                f"{', ...' if len(damaged) > 5 else ''}; {self.get_remedy(same_size=False)}"
            )

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the pairs' ids; only adopted pairs can have more than one."""
        return sorted({self.get_dtype(entry) for entry in self.pairs})

    def get_dtype(self, pair: FileEntry) -> str:
        """Return the dtype of a pair's ids."""
        return pair.dtype or self.basis.get_dtype(pair.key)

    @cached_property
    def basis(self) -> PairBasis:
        """The parameters that determine the bytes of the pairs."""
        return parse_basis(self.plan)

    @cached_property
    def tokenizer(self) -> ResolvedTokenizer:
        """The plan's description of the tokenizer."""
        return parse_tokenizer(self.plan)


@dataclass(frozen=True)
class Document:
    """One document: its pair and its number there, its token ids, and the source file and record of its text."""

    pair: FileEntry
    number: int
    ids: list[int]
    source: tuple[str, int] | None


def make_mask_prefix(basis: PairBasis, pair: FileEntry) -> str | None:
    """Return the prefix of the pair with the mask of a pair, which the same unit made; None without masks."""
    if basis.mask is None or pair.key == basis.mask:
        return None
    return f"{pair.prefix.removesuffix(f'_{pair.key}_document')}_{basis.mask}_document"


def find_dataset(path: Path, kinds: Sequence[StageKind] = (PREPROCESS,)) -> Dataset:
    """Return the finished output of a stage of `kinds`, whose outputs are pairs, in `path` or below.

    Raises:
        RequestError: there is no output, more than one, or an unfinished one.
    """
    records = list(find_records(path, kinds))
    if not records:
        commands = " or ".join(f"tokenmill {kind.name}" for kind in kinds)
        raise RequestError(
            f"there is no output of {commands} in {path} or below it; run {commands} first, or specify another "
            "directory"
        )
    if len(records) > 1:
        names = "\n".join(f"  {record.output}" for record in records)
        raise RequestError(f"there is more than one dataset in {path}; specify one of them:\n{names}")
    return open_dataset(records[0])


def open_dataset(record: StageRecord) -> Dataset:
    """Return a finished stage whose outputs are pairs; retry while the mount's directory cache may be stale.

    Raises:
        RequestError: the stage is not finished, or its files do not have the recorded sizes.
    """

    def read() -> Dataset | None:
        plan = record.read_plan()
        manifest = complete(record, plan, write=False).manifest if plan else None
        return Dataset(record, plan, manifest) if plan and manifest else None

    dataset = read() or (
        retry_while_stale(read, record.directory) if directory_cache_seconds(record.output) > 0 else None
    )
    if dataset is not None:
        return dataset
    manifest = record.stored_manifest(record.plan_id())
    plan = record.read_plan()
    if plan and manifest:
        Dataset(record, plan, manifest).check_sizes([entry.path for entry in manifest.files], "files")
    command = plan.command if plan else record.stage
    raise RequestError(
        f"{describe_unfinished(record)}; see tokenmill status {record.output}, and run the same "
        f"tokenmill {command} again"
    )


def check_same_tokenizer(datasets: Sequence[tuple[str, Dataset]], purpose: str) -> None:
    """Raise RequestError if datasets, each with its label for messages, were made by different tokenizers."""
    for label, other in datasets[1:]:
        first_label, first = datasets[0]
        if other.basis.tokenizer != first.basis.tokenizer:
            raise RequestError(
                f"the datasets of {purpose} must have the same tokenizer: {_describe_tokenizer(first_label, first)}, "
                f"{_describe_tokenizer(label, other)}; run tokenmill {other.plan.command} again for one of them, with "
                "the tokenizer of the other"
            )


def _describe_tokenizer(label: str, dataset: Dataset) -> str:
    place = f"{label} {dataset.record.output}".lstrip()
    return f"{place} has {dataset.tokenizer.reference} ({dataset.basis.tokenizer[:12]})"


def find_pair_record(prefix: Path, kinds: Sequence[StageKind] = (PREPROCESS,)) -> tuple[StageRecord, str] | None:
    """Return the stage of `kinds` in the nearest directory above a pair, and the pair's prefix in its output."""
    prefix = prefix.absolute()
    for directory in prefix.parents:
        for record in (StageRecord(directory, kind) for kind in kinds):
            if record.tree.size(record.plan_path) is not None:
                return record, prefix.relative_to(directory).as_posix()
    return None


def find_document(dataset: Dataset, number: int, *, key: str | None, prefix: str | None) -> Document:
    """Return document `number` of the pairs of one key, or of the pair `prefix`; -1 is the last document."""
    from tokenmill.datasets.formats.indexed.reader import map_pair

    known_keys = [name for name in dataset.basis.keys if name != dataset.basis.mask]
    keys = [name for name in known_keys if key in (None, name)]
    if not keys:
        raise RequestError(
            f"invalid --key {key}: the keys of the dataset are {', '.join(known_keys)}; choose one of them"
        )
    if prefix:
        requested = prefix.removesuffix(".bin").removesuffix(".idx")
        pairs = [pair for pair in dataset.pairs if pair.prefix == requested]
        pairs = pairs or [pair for pair in dataset.pairs if Path(pair.prefix).name == Path(requested).name]
    else:
        pairs = [pair for pair in dataset.pairs if pair.key == keys[0]]
    if not pairs or (prefix and len(pairs) > 1):
        known = ", ".join(pair.prefix for pair in (pairs or dataset.pairs)[:5])
        more = ", ..." if len(pairs or dataset.pairs) > 5 else ""
        raise RequestError(f"invalid --file {prefix}: the dataset has {known}{more}; specify one of them")
    ends = list(accumulate(pair.documents for pair in pairs))
    number += ends[-1] if number < 0 else 0
    if not 0 <= number < ends[-1]:
        raise RequestError(
            f"invalid --document {number}: there are {ends[-1]:,} documents, counted from 0; choose a smaller number"
        )
    chosen = bisect_right(ends, number)
    pair, local = pairs[chosen], number - (ends[chosen - 1] if chosen else 0)
    tokens = map_pair(join_inside(dataset.record.output, pair.prefix)).document(local).tolist()
    return Document(pair, local, tokens, locate(pair.parts or [], local))


def verify_outputs(
    path: Path, kinds: Sequence[StageKind], *, full: bool, stage: str | None = None
) -> tuple[list[str], list[str]]:
    """Verify the stages of `kinds` in `path` or below it, or one pair; return descriptions of the checks and problems.

    `stage` selects one stage. If `full` is false, only structure and sizes are checked.
    """
    from tokenmill.datasets.formats.indexed.check import check_pair

    records = select_records(path, kinds, stage) if path.is_dir() or stage or find_address(path) else []
    if not records:
        prefix = Path(str(path).removesuffix(".bin").removesuffix(".idx"))
        known = find_pair_record(prefix, [kind for kind in kinds if issubclass(kind.basis, PairBasis)])
        plan = known[0].read_plan() if known else None
        if known and plan and any(f"{known[1]}.bin" in unit.outputs for unit in plan.units):
            description, problems = _verify_stage(known[0], full, only=known[1])
            return [description], problems
        if not is_file(Path(f"{prefix}.idx")) and not is_file(Path(f"{prefix}.bin")):
            raise RequestError(
                f"{path} is neither an output of tokenmill nor a pair of .bin and .idx; specify an output directory, "
                "or the path of a pair"
            )
        return [
            f"structure of {prefix}; not its hashes, token range and EOD, because it has no record of its parameters"
        ], [str(problem) for problem in check_pair(prefix, full=full)]
    checked, all_problems = [], []
    for record in records:
        description, problems = _verify_stage(record, full)
        checked.append(description)
        all_problems.extend(problems)
    return checked, all_problems


def _verify_stage(record: StageRecord, full: bool, only: str | None = None) -> tuple[str, list[str]]:
    """Verify one stage, or only the pair `only`; return a description of the checks, and the problems."""
    plan = record.read_plan()
    if plan is None:
        return f"no files of {record.stage} in {record.output}", [
            f"{record.stage} in {record.output} has no plan: see tokenmill status {record.output}; if the stage is "
            f"not needed, delete {record.directory}"
        ]
    basis = parse_basis(plan) if issubclass(record.kind.basis, PairBasis) else None
    problems, files, size, rejected = [], 0, 0, 0
    units = [unit for unit in plan.units if only is None or f"{only}.bin" in unit.outputs]
    receipts = {unit.id: record.stored_receipt(plan, unit) for unit in units}
    absent = [unit for unit, receipt in receipts.items() if receipt is None]
    if absent:
        problems.append(
            f"{record.stage} in {record.output} is not finished: {len(absent)} of {len(units)} units have no receipt, "
            f"first: {absent[0]}; see the reason with tokenmill status {record.output}, and run tokenmill "
            f"{plan.command} again"
        )
    for receipt in filter(None, receipts.values()):
        rejected += receipt.counts.get("rejected", 0)
        entries = {entry.path: entry for entry in receipt.outputs}
        checked = [entry for entry in receipt.outputs if only is None or entry.prefix == only]
        files, size = files + len(checked), size + sum(entry.bytes for entry in checked)
        with record.tree.local_copies(entries) if full else nullcontext(record.output) as root:
            for entry in checked:
                if refused := [problem for path in _paths_to_open(entry) if (problem := _find_obstacle(record, path))]:
                    problems.extend(refused)
                elif basis and entry.role == SUFFIXES[0]:
                    problems.extend(_verify_pair(record, root, plan, basis, entry, entries, full))
                elif entry.role not in SUFFIXES:
                    problems.extend(_verify_file(record, root, entry, full))
                    if full and record.kind.check and record.tree.size(entry.path) is not None:
                        path = join_inside(root, entry.path)
                        problems.extend(record.kind.check(path, entry, record.kind.basis.from_json(plan.basis)))
    if basis:
        problems.extend(check_tokenizer(record, plan))
    if not absent and only is None:
        manifest = record.stored_manifest(plan.id)
        if manifest is None or manifest.hash != make_manifest(plan, [r for r in receipts.values() if r]).hash:
            problems.append(
                f"{record.manifest_path} is missing or does not match the receipts; delete it and run tokenmill status "
                f"{record.output}, which writes it again"
            )
    scope = "every byte" if full else "structure and sizes"
    description = f"{scope} of {files} files, {format_bytes(size)}, of {record.stage} in {record.output}"
    bad = describe_rejected({"rejected": rejected}, record.output)
    return f"{description}; {bad}" if bad else description, problems


def _verify_pair(
    record: StageRecord,
    root: Path,
    plan: Plan,
    basis: PairBasis,
    pair: FileEntry,
    entries: dict[str, FileEntry],
    full: bool,
) -> list[str]:
    """Return the problems of a pair below `root`, and of its mask compared with it; `entries` are those of its unit."""
    from tokenmill.datasets.formats.indexed.check import check_pair
    from tokenmill.datasets.formats.indexed.mask import check_mask

    prefix = join_inside(root, pair.prefix)
    problems = check_pair(
        prefix,
        files={suffix: entries[f"{pair.prefix}.{suffix}"] for suffix in SUFFIXES},
        vocab_size=None if pair.key == basis.mask else parse_tokenizer(plan).vocab_size,
        eod=None if basis.rows else basis.eod,
        row_tokens=basis.rows.pack_size if basis.rows else None,
        full=full,
        foreign_remedy=_ADOPTED_REMEDIES.get(plan.adopted or ""),
    )
    mask = make_mask_prefix(basis, pair)
    if mask and not any(_find_obstacle(record, f"{mask}.{suffix}") for suffix in SUFFIXES):
        problems += check_mask(prefix, join_inside(root, mask), full=full)
    return [str(problem.name_stage(record.stage)) for problem in problems]


def _paths_to_open(entry: FileEntry) -> list[str]:
    """Return the paths to check with an entry: with the .bin of a pair both files, with the .idx none."""
    if entry.role not in SUFFIXES:
        return [entry.path]
    return [f"{entry.prefix}.{suffix}" for suffix in SUFFIXES] if entry.role == SUFFIXES[0] else []


def _find_obstacle(record: StageRecord, path: str) -> str | None:
    """Return why a file of an output must not be opened, for example because it is a link; otherwise None."""
    try:
        record.tree.size(path)
    except UnexpectedEntry as error:
        return str(error)
    return None


def _verify_file(record: StageRecord, root: Path, entry: FileEntry, full: bool) -> list[str]:
    path, size = join_inside(root, entry.path), record.tree.size(entry.path)
    if size is None:
        problem = "missing"
    elif size != entry.bytes:
        problem = f"it has {size} bytes, but its receipt has {entry.bytes}"
    elif full and hash_file(path, tree=Tree(root)) != entry.xxh3_128:
        problem = "its content does not match its receipt (xxh3-128 differs)"
    else:
        return []
    return [f"{path}: {problem}; {remake(f'the same tokenmill {record.stage}', same_size=size == entry.bytes)}"]


def check_tokenizer(record: StageRecord, plan: Plan) -> list[str]:
    """Return the problems of the tokenizer's files in the output: those that differ from the plan."""
    problems = []
    for name, sha256 in parse_tokenizer(plan).files.items():
        path = record.output / "tokenizer" / name
        if not has_sha256(record.tree, path, sha256):
            problems.append(
                f"{path}: not the tokenizer that made this dataset; copy the original file there, or run tokenmill "
                f"{plan.command} again"
            )
    return problems
