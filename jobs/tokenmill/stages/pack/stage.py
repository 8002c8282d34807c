"""pack: pairs of chat or preprocess -> files of rows, each with several sequences and at most `--pack-size` tokens.

Input: the output of chat (ids and masks), of preprocess or adopt (ids, of which every token is trained), or a
blend.json with several such outputs. Fine-tuning reads the output.

The planner reads the lengths of all sequences and the masks, and stores which sequences each row has
(`stages.pack.assignment`). Thus another pack size, seed or number of epochs needs no tokenization. A unit is one output
file, a range of rows; one more unit writes the files that describe all rows. An interrupted unit starts again.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import xxhash

from tokenmill.core.buckets.mirror import find_address
from tokenmill.core.buckets.tree import is_directory
from tokenmill.core.files.codec import content_id
from tokenmill.core.printing import encodable
from tokenmill.datasets.contract import ResolvedTokenizer
from tokenmill.datasets.dataset import check_same_tokenizer
from tokenmill.engine.contract import Origin, StageKind, Upstream
from tokenmill.engine.inputs import explain_directory_errors, is_output, reject_special, walk_files
from tokenmill.engine.planning import Request
from tokenmill.engine.record import Counts, Manifest, Plan, StageRecord, Unit
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.stage_input import FinishedStage, check_exists, find_finished
from tokenmill.engine.workspace import Workspace
from tokenmill.errors import VERIFY_HASHES_OPTION, InputError, RequestError
from tokenmill.packs.contract import BLEND, METADATA, SHARD, PackBasis, PackDetails, PackSpec, ShardFile
from tokenmill.packs.kind import PACK
from tokenmill.packs.rows import Rows
from tokenmill.packs.writers import SHARD_FORMATS, ShardInfo, ShardWriter
from tokenmill.stages.pack.assignment import Assignment, AssignmentBuilder, Group, padded, parse_assignment
from tokenmill.stages.pack.blend import ALL, PackBlend, describe_double_use, load_blend, single
from tokenmill.stages.pack.metadata import BLEND_FILE, METADATA_FILE, describe_rows, encode_blend, encode_metadata
from tokenmill.stages.pack.options import PackOptions
from tokenmill.stages.pack.rows import PairReader, assemble
from tokenmill.stages.pack.sources import PackSource
from tokenmill.stages.registry import earlier_kinds
from tokenmill.tokenize.encoder_store import Encoders

ASSIGNMENT_FILE = "assignment.bin"

METADATA_UNIT = "metadata"
"""The id of the unit that writes the files that describe all rows."""

WINDOW_TOKENS = 4 << 20
"""Tokens of rows that are read together, pair by pair and in the order of each pair: 20 MB of memory."""

BYTES_PER_TOKEN = 5
"""Bytes of a stored token, an id and its mask, as the weight of a unit."""


class OpenedInput(NamedTuple):
    """The datasets of a blend, opened: for each list, in the order of the blend."""

    blend: PackBlend
    sources: dict[str, list[PackSource]]
    notes: list[str]

    @property
    def all(self) -> list[PackSource]:
        """All datasets, by number."""
        return [source for sources in self.sources.values() for source in sources]

    def request(self) -> dict[str, object]:
        """Return the description of the input for the plan."""
        if list(self.blend.lists) == [ALL] and len(self.all) == 1:
            return self.upstream.to_json()
        return {
            name: [
                {
                    "name": dataset.name,
                    "weight": dataset.weight,
                    "stage": source.record.stage,
                    "manifest": source.identity,
                }
                for dataset, source in zip(datasets, self.sources[name], strict=True)
            ]
            for name, datasets in self.blend.lists.items()
        }

    @property
    def upstream(self) -> Upstream:
        """The stage that made the datasets, and a hash of their manifests."""
        sources = self.all
        identity = sources[0].identity if len(sources) == 1 else content_id([source.identity for source in sources])
        return Upstream(sources[-1].record.stage, identity)

    @property
    def origin(self) -> Origin:
        """The source of the text of a single dataset, or the names of the datasets of a blend."""
        sources = self.all
        if len(sources) == 1:
            # Without `adopted`: pack has made all of its files.
            return Origin(sources[0].manifest.source.uri, sources[0].manifest.source.revision)
        return Origin(f"blend:{','.join(source.name for source in sources)}")


@dataclass(frozen=True, kw_only=True)
class Pack(Stage):
    """The stage that packs the sequences of `input`: a directory, a blend.json, or a blend."""

    input: Path | PackBlend
    output: Path
    options: PackOptions
    from_stage: str | None = None

    kind: ClassVar[StageKind] = PACK
    concurrency: ClassVar = "processes"
    resumable: ClassVar = False

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Plan one unit per shard; the planner reads all lengths and masks, and stores the assignment."""
        opened = self._open()
        for note in opened.notes:
            run.reporter.log(note)
        if self.options.key and all(source.basis.mask for source in opened.all):
            raise RequestError(
                f"--key {self.options.key}: every input is an output of tokenmill chat, which has one key; leave out "
                "--key"
            )
        check_same_tokenizer([("", source) for source in opened.all], "a pack")
        if warning := _compare_templates(opened.all):
            run.reporter.warn(warning)
        request = {"input": opened.request(), **self.options.request()}
        record = StageRecord(self.output, PACK)

        def make_plan() -> Plan:
            pad = self._find_pad(opened.all[0])
            assignment = self._build(opened)
            for note in dict.fromkeys(
                [*_describe_dropped(assignment), *assignment.notes, *_describe_shares(assignment)]
            ):
                run.reporter.log(note)
            plan = self._make_plan(opened, request, assignment, pad)
            record.tree.write_atomic(record.directory / ASSIGNMENT_FILE, assignment.to_bytes())
            return plan

        return Request(request, make_plan, opened.all[0].record.output)

    def _open(self) -> OpenedInput:
        """Find the finished outputs of the input.

        Raises:
            RequestError: an output is missing or not finished, or the pairs have no records.
        """
        blend = self.input if isinstance(self.input, PackBlend) else _read_blend(self.input)
        sources: dict[str, list[PackSource]] = {}
        notes: list[str] = []
        count = 0
        for name, datasets in blend.lists.items():
            sources[name] = []
            for dataset in datasets:
                with _name_place(blend.describe(name, dataset)):
                    record, manifest, more = self._find_pairs(dataset.path)
                    plan = _read_plan(record, manifest)
                source = PackSource(
                    record, plan, manifest, number=count, name=dataset.name, packed_key=self.options.key
                )
                sources[name].append(source)
                notes += [*more, f"reading the pairs of {record.stage} in {record.output}"]
                count += 1
        notes += _check_distinct(blend, sources)
        return OpenedInput(blend, sources, notes)

    def _find_pairs(self, path: Path) -> FinishedStage:
        with explain_directory_errors(path):
            check_exists(path)
            if not is_directory(path):
                raise RequestError(_describe_file(path))
            finished = find_finished(path, PACK.name, earlier_kinds(PACK), only=self.from_stage)
            if finished is None:
                raise RequestError(_describe_missing(path))
            return finished

    def _build(self, opened: OpenedInput, heartbeat: Callable[[], None] = lambda: None) -> Assignment:
        return AssignmentBuilder(opened.blend, dict(opened.sources), self.options, heartbeat).build()

    def _find_pad(self, source: PackSource) -> int:
        """Return the id of padding: eos, because Megatron-Bridge finds the end of a sequence by it."""
        tokenizer, options = source.tokenizer, self.options
        if options.multiple == 1:
            return 0
        if tokenizer.eos_token is None:
            raise RequestError(
                f"--cp {options.cp} and {'--sp' if options.sp else '--no-sp'} pad sequences with the tokenizer's eos, "
                f"but {tokenizer.reference} has no eos token; leave out --cp and --sp, or run tokenmill "
                f"{source.record.stage} with a tokenizer that has eos"
            )
        if tokenizer.eos_token == tokenizer.eod_token and tokenizer.eod_id is not None:
            return tokenizer.eod_id
        from tokenizers import Tokenizer

        backend = Encoders(source.record).backend(source.basis)
        try:
            token_id: int | None = Tokenizer.from_file(str(backend)).token_to_id(tokenizer.eos_token)
        except Exception as error:  # tokenizers has no other class
            raise RequestError(
                f"{backend} is missing or damaged ({error}), and --cp and --sp need the eos of {tokenizer.reference} "
                f"there; run tokenmill {source.record.stage} again"
            ) from error
        if token_id is None:
            raise RequestError(
                f"{backend} has no token {tokenizer.eos_token!r}, the eos of {tokenizer.reference}; run tokenmill "
                f"{source.record.stage} again"
            )
        return token_id

    def _make_plan(self, opened: OpenedInput, request: dict[str, object], assignment: Assignment, pad: int) -> Plan:
        options, tokenizer = self.options, opened.all[0].tokenizer
        basis = PackBasis(
            inputs=assignment.inputs_hash([pair.identity for source in opened.all for pair in source.packed_pairs]),
            format=options.format,
            pack_size=options.pack_size,
            fill=options.count,
            multiple=options.multiple,
            pad=pad,
            vocabulary=_count_ids(tokenizer),
        )
        units, shards = _plan_units(assignment, options)
        metadata = describe_rows(assignment, options, tokenizer)
        dropped = sum(assignment.dropped.values())
        files = PackSpec(metadata=metadata, shards=shards, dropped=dropped)
        return Plan(
            PACK.name,
            request,
            [*units, Unit(METADATA_UNIT, 0, files, [METADATA_FILE, BLEND_FILE])],
            basis=basis.to_json(),
            details=PackDetails(tokenizer, assignment.hash).to_json(),
            source=opened.origin,
            upstream=opened.upstream,
            require="out",
        )

    def do(self, unit: Unit, workspace: Workspace, shared: None) -> Counts:
        """Write the rows of one shard, or the files that describe all shards."""
        spec, basis = unit.spec(PackSpec), PackBasis.from_json(workspace.plan.basis)
        if not spec.rows:
            for name, role, data in (
                (METADATA_FILE, METADATA, encode_metadata(spec.metadata)),
                (BLEND_FILE, BLEND, encode_blend(self.output, spec.shards)),
            ):
                output = workspace.open(name)
                output.write(data)
                output.describe(role=role)
            return {"in": spec.dropped, "out": 0, "dropped": spec.dropped}
        assignment, pairs = self._load(workspace)
        output = workspace.open(unit.outputs[0])
        info = {"split": spec.split, "epoch": str(spec.epoch), "pack_size": str(basis.pack_size), "count": basis.fill}
        writer = SHARD_FORMATS[basis.format].start(
            output, ShardInfo(spec.rows, basis.pack_size, [encodable(name) for name in assignment.sources], info)
        )
        try:
            trained = self._write(spec, basis, workspace, writer, assignment, pairs)
        except BaseException:
            writer.abandon()
            raise
        if trained != spec.trained:
            roots = ", ".join(map(str, pairs.list_roots(assignment.slots[_slots_of(assignment, spec)]["pair"])))
            raise InputError(
                f"{unit.outputs[0]}: its rows train {trained:,} tokens, but {spec.trained:,} were planned: a mask in "
                f"{roots} was replaced since; run the command that made the masks again with {VERIFY_HASHES_OPTION}, "
                "and then the same tokenmill pack"
            )
        output.describe(role=SHARD, records=spec.rows, sequences=spec.sequences, tokens=spec.tokens)
        return {
            "in": spec.sequences,
            "out": spec.sequences,
            "rows": spec.rows,
            "tokens": spec.tokens,
            "padding": spec.padding,
            "trained": trained,
        }

    def _write(
        self,
        spec: PackSpec,
        basis: PackBasis,
        workspace: Workspace,
        writer: ShardWriter,
        assignment: Assignment,
        pairs: PairReader,
    ) -> int:
        """Write all rows of a shard, and return the number of loss tokens."""
        trained, at_once = 0, SHARD_FORMATS[basis.format].rows_at_once(basis.pack_size)
        for first, count in _windows(spec, basis.pack_size, at_once):
            begin = int(assignment.ends[first - 1]) if first else 0
            ends = assignment.ends[first : first + count] - begin
            slots = assignment.slots[begin : begin + int(ends[-1])]
            rows = assemble(slots, ends, pairs.read, multiple=basis.multiple, pad=basis.pad)
            _check_ids(rows, slots, basis, assignment)
            writer.add(rows)
            trained += int(rows.mask.sum(dtype="i8"))
            pairs.release()
            workspace.report_progress(BYTES_PER_TOKEN * len(rows.ids))
        writer.finish()
        return trained

    def _load(self, workspace: Workspace) -> tuple[Assignment, PairReader]:
        """Return the assignment of the plan and a reader of its pairs; a process keeps those of its last plan."""
        plan = workspace.plan
        key = (plan.id, str(self.output.absolute()), repr(self.input))
        if key not in _LOADED:
            opened = self._open()
            if opened.request() != plan.request["input"]:
                workspace.check_plan_unchanged()
                raise RequestError(
                    f"the input of pack in {self.output} changed after it was planned; run the same command again"
                )
            details = PackDetails.from_json(plan.details)
            assignment = _read_assignment(workspace.record, details.assignment)
            if assignment is None:
                assignment = self._build(opened, workspace.report_progress)
                if assignment.hash != details.assignment:
                    workspace.check_plan_unchanged()
                    raise RequestError(
                        f"the assignment of the plan in {self.output} is missing, and this version of tokenmill makes "
                        "another one; use the version that made the plan, or run the same command with --replace"
                    )
                workspace.tree.write_atomic(workspace.record.directory / ASSIGNMENT_FILE, assignment.to_bytes())
            roots = [source.record.output for source in opened.all]
            makers = [source.record.stage for source in opened.all]
            _LOADED.clear()
            _LOADED[key] = assignment, PairReader(assignment.pairs, roots, makers)
        return _LOADED[key]


_LOADED: dict[tuple[str, ...], tuple[Assignment, PairReader]] = {}
"""The assignment of the last plan of this process, by the plan's id and the places of output and input."""


def _read_assignment(record: StageRecord, expected: str) -> Assignment | None:
    """Map the stored assignment; return None if it is missing or belongs to another plan."""
    try:
        with record.tree.open(record.directory / ASSIGNMENT_FILE) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError):  # an empty file cannot be mapped
        return None
    if xxhash.xxh3_128_hexdigest(data) != expected:
        data.close()
        return None
    return parse_assignment(data)


def _read_blend(path: Path) -> PackBlend:
    with explain_directory_errors(path):
        check_exists(path)
        if find_address(path):
            return single(path)
        reject_special(path)
        if path.is_file() and path.suffix == ".json":
            return load_blend(path)
        if path.is_file():
            raise RequestError(_describe_file(path))
    return single(path)


def _describe_file(path: Path) -> str:
    """Return the error message for a dataset that is not a directory."""
    return (
        f"{path} is a file, but pack reads the output directory of tokenmill chat or preprocess, or a blend.json; "
        "specify the directory"
    )


@contextmanager
def _name_place(place: str) -> Iterator[None]:
    """Begin the message of an error with the place of a dataset in a blend."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{place}: {error}" if place else str(error)) from error


def _check_distinct(blend: PackBlend, sources: dict[str, list[PackSource]]) -> list[str]:
    """Refuse a blend in which documents are used twice without a weight; return notes about equal datasets.

    Two paths can lead to one output, because an output below a directory is also the output of that directory.
    """
    notes = []
    used: dict[Path | str, tuple[str, str]] = {}  # the list and the place, by directory and by content
    for name, datasets in blend.lists.items():
        for dataset, source in zip(datasets, sources[name], strict=True):
            place = blend.describe(name, dataset) or str(dataset.path)
            directory = source.record.output.resolve()
            if directory in used:
                other_list, other = used[directory]
                raise RequestError(
                    f"{place}: {dataset.path} has the output {directory}, which is also used as {other}, "
                    f"{describe_double_use(name, other_list)}; remove one of the two"
                )
            other_list, other = used.get(source.identity, (name, ""))
            if other_list != name:
                raise RequestError(
                    f"{place}: {directory} has the same documents as {other}, "
                    f"{describe_double_use(name, other_list)}; remove one of the two"
                )
            if other:
                notes.append(f"{place} has the same documents as {other}: they are used as often as both weights say")
            used[directory] = used[source.identity] = name, place
    return notes


def _describe_missing(path: Path) -> str:
    """Return the error message for a directory without an output of chat or preprocess."""
    pairs = [] if is_output(path) else [name for name in walk_files(path).files if name.endswith((".bin", ".idx"))]
    if pairs:
        return (
            f"{path} has pairs without records of tokenmill, such as {pairs[0]}; run tokenmill adopt {path} "
            "--tokenizer NAME_OR_DIRECTORY, which checks and records them, and then run this command again"
        )
    return (
        f"there is no output of tokenmill chat or preprocess in {path} or below it; run tokenmill chat first, or "
        "specify another directory"
    )


def _read_plan(record: StageRecord, manifest: Manifest) -> Plan:
    """Return the plan of a finished stage; raise RequestError if another run has replaced it."""
    plan = record.read_plan()
    if plan is None or plan.id != manifest.content["plan"]:
        raise RequestError(
            f"{record.plan_path} changed while it was read: another run of {record.stage} replaced it; wait for that "
            "run, and run the same command again"
        )
    return plan


def _compare_templates(sources: Sequence[PackSource]) -> str | None:
    """Return a warning if conversations were rendered with different templates."""
    chats = [source for source in sources if source.template is not None]
    others = [source for source in chats if source.template != chats[0].template]
    if not others:
        return None
    return (
        f"{others[0].record.output} has another chat template than {chats[0].record.output}: the model would learn two "
        "formats of a conversation. If that is not intended, run tokenmill chat with the same --chat-template"
    )


def _count_ids(tokenizer: ResolvedTokenizer) -> int:
    return max(tokenizer.vocab_size, tokenizer.max_token_id + 1)


def _describe_dropped(assignment: Assignment) -> list[str]:
    return [
        f"left out {count:,} sequence{'s' * (count > 1)} {reason}"
        for reason, count in sorted(assignment.dropped.items())
    ]


def _describe_shares(assignment: Assignment) -> list[str]:
    """Describe the use of each dataset of a blend."""
    lines = []
    for split, shares in assignment.shares.items():
        total = sum(share.trained * share.repetitions for _, share in shares)
        for name, share in shares if len(shares) > 1 else ():
            lines.append(
                f"{split}: {name} has {share.trained:,} loss tokens and is used {share.repetitions:.2f} times, for "
                f"{share.trained * share.repetitions / total:.1%} of them (weight {share.weight:g})"
            )
    return lines


def _plan_units(assignment: Assignment, options: PackOptions) -> tuple[list[Unit], dict[str, list[ShardFile]]]:
    """Return a unit for each shard, and the shards of each split."""
    import numpy as np

    in_splits = bool(options.valid_shards or options.test_shards) or len(assignment.shares) > 1
    shards: dict[str, list[ShardFile]] = {split: [] for split in assignment.shares}
    suffix, units = SHARD_FORMATS[options.format].suffix, []
    for group in assignment.groups:
        for first, rows in _cut_rows(group):
            number = len(shards[group.split])
            path = f"{f'{group.split}/' if in_splits else ''}shard_{number:06d}.{suffix}"
            begin = int(assignment.ends[first - 1]) if first else 0
            lengths = assignment.slots["length"][begin : int(assignment.ends[first + rows - 1])]
            tokens = int(padded(lengths, options.multiple).sum(dtype=np.int64))
            spec = PackSpec(
                split=group.split,
                epoch=group.epoch,
                first=first,
                rows=rows,
                content=assignment.content(first, rows),
                sequences=len(lengths),
                tokens=tokens,
                padding=tokens - int(lengths.sum(dtype=np.int64)),
                trained=sum(assignment.trained[first : first + rows]),
            )
            units.append(Unit(path.replace("/", "-"), BYTES_PER_TOKEN * tokens, spec, [path]))
            shards[group.split].append(ShardFile(path, rows))
    return units, shards


def _slots_of(assignment: Assignment, spec: PackSpec) -> slice:
    """Return the slots of the rows of a unit."""
    start = int(assignment.ends[spec.first - 1]) if spec.first else 0
    return slice(start, int(assignment.ends[spec.first + spec.rows - 1]))


def _cut_rows(group: Group) -> Iterator[tuple[int, int]]:
    """Yield the first row and the number of rows of each shard; the numbers differ by at most one."""
    for number in range(group.shards):
        begin, end = (group.rows * bound // group.shards for bound in (number, number + 1))
        yield group.first + begin, end - begin


def _windows(spec: PackSpec, pack_size: int, at_once: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the number of rows that are read together, about WINDOW_TOKENS."""
    step = max(1, WINDOW_TOKENS // pack_size // at_once) * at_once
    end = spec.first + spec.rows
    for first in range(spec.first, end, step):
        yield first, min(step, end - first)


def _check_ids(rows: Rows, slots: Any, basis: PackBasis, assignment: Assignment) -> None:
    """Raise InputError for an id outside the vocabulary, which would end the training later."""
    import numpy as np

    if rows.ids.min() >= 0 and rows.ids.max() < basis.vocabulary:
        return
    place = int(((rows.ids < 0) | (rows.ids >= basis.vocabulary)).argmax())
    slot = slots[int(np.searchsorted(rows.sequences, place, side="right")) - 1]
    raise InputError(
        f"{assignment.pairs[slot['pair']].ids}: the id {rows.ids[place]} of the record {slot['record']} of "
        f"{assignment.sources[slot['source']]} is not in the vocabulary of {basis.vocabulary:,} ids; run tokenmill "
        "verify on the input, and run its stage again with --verify-hashes"
    )
