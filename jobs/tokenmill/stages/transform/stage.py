"""transform: JSONL, JSON, Parquet or Arrow -> JSONL or Parquet with other records, in shards of about equal size.

Input: the output of download, extract or concatenate, a directory of files, or a source that the stage streams. The
files may be compressed. preprocess and chat read the output.

A unit is one output file, made from complete input files. With more shards than input files, each file is divided by
the numbers of its records. A unit then makes several of its shards, so that few units read the same file. An
interrupted unit starts again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tokenmill.core.buckets.tree import open_tree
from tokenmill.engine.planning import Request
from tokenmill.engine.record import REJECTED, Counts, Plan, Unit
from tokenmill.engine.stage import StageRun
from tokenmill.engine.stage_input import DataFile, find_records
from tokenmill.engine.workspace import Workspace
from tokenmill.errors import InputError, RequestError
from tokenmill.records.block_kinds import LINES, ROWS
from tokenmill.records.blocks import is_columnar
from tokenmill.records.parse import list_names
from tokenmill.records.readers import first_rows, get_record_unit
from tokenmill.stages.chat import preference
from tokenmill.stages.chat.rows import PREFERENCE, BadRow, RowSettings, read_row
from tokenmill.stages.registry import (
    CHAT_NEXT,
    PREPROCESS_NEXT,
    TRANSFORM,
    VERIFY_NEXT,
    TransformBasis,
    TransformSpec,
    earlier_kinds,
)
from tokenmill.stages.sources import SourceStage
from tokenmill.stages.transform.builtin import BuiltinTransform
from tokenmill.stages.transform.load import (
    LoadedTransform,
    is_portable,
    load_planned,
    load_transform,
    redirect_output,
    wrap_function,
)
from tokenmill.stages.transform.options import TransformOptions
from tokenmill.stages.transform.shards import FileSlice, assign_files
from tokenmill.stages.transform.types import RejectedRow, Transform
from tokenmill.stages.transform.unit import Fetch, UnitTransformer

MAX_READS = 8
"""Number of units that read a file that is divided between many shards; the maximum of processes that share it."""
MAX_OPEN_SHARDS = 64
"""Number of shards that a unit has open at a time."""
MAX_SHARDS = 1_000_000
"""Number of shards whose numbers have six digits."""
FIRST_SHARDS = 8
"""Shards whose first records decide which next command is printed."""
FIRST_ROWS, FIRST_BYTES = 1000, 1 << 20
"""Records of a file, and bytes that contain them, on which the planner tries the transform."""


@dataclass(frozen=True, kw_only=True)
class TransformRecords(SourceStage):
    """The stage that applies a function to each record and writes the results as JSONL or Parquet.

    `function` is a function of a Python program, which replaces the transform of the options. `only` has the numbers of
    the shards to write, or is None for all. `shard_limit` is the maximum number of records that a shard reads, and
    `limit` that of all shards together, divided between them.
    """

    options: TransformOptions
    function: Transform | None = None
    only: tuple[int, ...] | None = None
    shard_limit: int | None = None
    limit: int | None = None

    kind: ClassVar = TRANSFORM
    concurrency: ClassVar = "processes"
    resumable: ClassVar = False

    @property
    def file_format(self) -> str | None:
        """The requested format of the files."""
        return self.options.format

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Plan one unit per shard, or per group of shards of one file; the planner tries the transform."""
        self._refuse_own_output()
        options, loaded = self.options, self._load()
        input_fields, list_inputs, dataset = self.find_input(run, pinned)
        request: dict[str, object] = {
            **input_fields,
            "transform": str(loaded.call),
            **({"transform_code": loaded.code} if loaded.code else {}),
            "compression": options.compression,
            **options.output(),
            **options.sharding(),
            **({"format": options.format} if options.format else {}),
            **{name: value for name in ("only", "shard_limit", "limit") if (value := getattr(self, name)) is not None},
        }

        def make_plan() -> Plan:
            inputs = list_inputs()
            units = self._plan_units(inputs.files)
            with inputs.open_heads() as paths:
                _check_rows(paths, loaded, options)
            basis = TransformBasis(
                loaded.call.to_json(), options.compression, loaded.code, options.format or "", **options.output()
            )
            return Plan(
                TRANSFORM.name,
                request,
                units,
                basis=basis.to_json(),
                source=inputs.source,
                upstream=inputs.upstream,
                require="out",
            )

        if dataset is None:
            return Request(request, make_plan)
        return Request(request, make_plan, dataset.root, inputs=dataset.identities)

    def _refuse_own_output(self) -> None:
        """Refuse an output of transform, unless the output of an earlier stage is there, too."""
        if not isinstance(self.input, Path) or not self.input.is_dir():
            return
        earlier, own = (list(find_records(self.input, kinds, 0)) for kinds in (earlier_kinds(TRANSFORM), [TRANSFORM]))
        if not earlier and any(record.tree.size(record.plan_path) is not None for record in own):
            raise RequestError(
                f"{self.input} is an output of tokenmill transform, and transform does not read its own outputs; write "
                "one function that makes both changes, and run it on the input of the first transform"
            )

    def _load(self) -> LoadedTransform:
        if self.function is not None:
            return wrap_function(self.function)
        call = self.options.call
        if call.name in ("select", "rename") and not call.arguments and not call.named:
            raise RequestError(
                f"--transform {call}: it names no field, so every record would become empty; specify the fields to keep"
            )
        return load_transform(call)

    def _plan_units(self, files: list[DataFile]) -> list[Unit]:
        options = self.options
        shards = options.count_shards(sum(file.bytes for file in files))
        if shards > MAX_SHARDS:
            raise RequestError(
                f"--shard-size {options.shard_size} (in bytes) makes {shards:,} shards, more than {MAX_SHARDS:,}; "
                "raise --shard-size"
            )
        by_path = {file.path: file for file in files}
        assigned = assign_files([(file.path, file.bytes) for file in files], shards)
        chosen = set(range(shards) if self.only is None else self.only)
        units = []
        number = 0
        while number < shards:
            slices = assigned[number].slices
            if number not in chosen or not slices:
                number += 1
                continue
            count = _count_shards_of_unit(slices)
            while not chosen.issuperset(range(number, number + count)):
                count -= 1
            numbers = range(number, number + count)
            spec = TransformSpec(
                [by_path[piece.path].input for piece in slices],
                [f"shard_{index:06d}{options.suffix}" for index in numbers],
                slices[0].remainder,
                slices[0].modulus,
                self._get_limits(numbers, shards),
            )
            name = f"shard_{number:06d}" + (f"-{numbers[-1]:06d}" if count > 1 else "")
            weight = sum(shard.bytes for shard in assigned[number : number + count])
            units.append(Unit(name, weight, spec, [*spec.shards, f"{REJECTED}/{name}.jsonl"]))
            number += count
        return units

    def _get_limits(self, numbers: Sequence[int], shards: int) -> list[int] | None:
        """Return the maximum number of records of each of these shards, or None without limits."""
        if self.limit is None:
            return None if self.shard_limit is None else [self.shard_limit] * len(numbers)
        share, rest = divmod(self.limit, shards)
        return [share + (number < rest) for number in numbers]

    def width(self, cpus: int) -> int:
        """Return one unit per CPU; one unit for a function that no child process can receive."""
        return 1 if self.function is not None and not is_portable(self.function) else cpus

    def do(self, unit: Unit, workspace: Workspace, shared: None) -> Counts:
        """Transform the records of a unit."""
        basis = TransformBasis.from_json(workspace.plan.basis)
        function = self.function or load_planned(self.options.call, basis.code)
        # A Python program sees what its own function prints.
        with self._fetching(workspace) as fetch, redirect_output() if self.function is None else nullcontext():
            return UnitTransformer(unit, workspace, self.options, function, fetch).run()

    @contextmanager
    def _fetching(self, workspace: Workspace) -> Iterator[Fetch | None]:
        """Open the source for one unit; yield None for a directory."""
        if isinstance(self.input, Path):
            yield None
            return
        with self.input.shards(workspace.plan.source.commit, lambda _: None) as shards:
            yield lambda input: shards.fetch(input, workspace.report_progress)


def suggest_next(output: Path) -> str:
    """Return the next command for an output, which the shape of its first records decides; a template as `next`.

    Only a trainer reads the rows of preferences and of prompts without an answer.
    """
    settings, read, texts = RowSettings(), 0, 0
    tree = open_tree(output)
    names = [name for name in tree.names() if name.startswith("shard_")][:FIRST_SHARDS]
    with tree.local_copies(names) as root:
        for path in (root / name for name in names):
            for _, row in first_rows(path, (), FIRST_ROWS, FIRST_BYTES)[0]:
                texts += isinstance(row.get("text"), str)
                if preference.is_labelled(row):
                    return VERIFY_NEXT
                try:
                    read += bool(read_row(row, settings, columnar=is_columnar(path.name, None)))
                except BadRow as error:
                    if error.code == PREFERENCE:
                        return VERIFY_NEXT
    return CHAT_NEXT if read else PREPROCESS_NEXT if texts else VERIFY_NEXT


def _count_shards_of_unit(slices: Sequence[FileSlice]) -> int:
    """Return how many shards, from this one on, a unit makes from a divided file."""
    _, remainder, modulus = slices[0]
    return min(-(-modulus // MAX_READS), MAX_OPEN_SHARDS, modulus - remainder)


def _check_rows(paths: Sequence[Path], loaded: LoadedTransform, options: TransformOptions) -> None:
    """Raise InputError if a built-in transform gives no record for the first records of any file.

    Then its arguments are wrong, not the records. A function of the user may drop all first records, and a call of it
    here could change its state.
    """
    problem = ""
    for path in paths if isinstance(loaded.function, BuiltinTransform) else ():
        try:
            rows, rejected = first_rows(path, (), FIRST_ROWS, FIRST_BYTES, settings=options.reading())
        except InputError:  # the unit of this file reports the error
            continue
        reasons = [(rejected.line, rejected.reason)] if rejected else []
        for row in rows:
            try:
                if loaded.function(row.row) is not None:
                    return
                reasons.append((row.line, f"it lacks a key of the transform; it has {list_names(row.row)}"))
            except RejectedRow as error:
                reasons.append((row.line, str(error)))
        if reasons and not problem:
            line, reason = reasons[0]
            unit = get_record_unit(path, options.reading(), ROWS if is_columnar(path.name, options.format) else LINES)
            problem = (
                f"{path}: --transform {loaded.call} gives no record for the first {len(reasons):,} records; {unit} "
                f"{line:,}: {reason}; correct the arguments of the transform, or choose another transform"
            )
    if problem:
        raise InputError(problem)
