"""The selection of a stage's input: the output of an earlier stage, or the user's own files.

A stage calls `find_upstream` in its `prepare`. If the path has the outputs of several earlier stages, the function
selects the one that is last in the order of `stages.registry` and logs its choice. If that output is not finished, the
command fails, unless `--from` names another stage. A directory without state files of tokenmill contains user files.

`find_records` also finds the state files of all stages for `engine.status` and `datasets.dataset`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenmill.core.buckets.mirror import find_address
from tokenmill.core.buckets.tree import is_directory, is_file, open_tree
from tokenmill.core.files.codec import JsonText, content_id, pack, unpack
from tokenmill.core.files.mounts import directory_cache_seconds, retry_while_stale
from tokenmill.core.files.paths import RECORDS_DIRECTORY
from tokenmill.core.files.tree import Tree
from tokenmill.core.printing import format_bytes
from tokenmill.core.typed_json import convert_json
from tokenmill.engine.attempt import is_planning
from tokenmill.engine.contract import InputFile, Origin, Part, RemoteFile, StageKind, Upstream
from tokenmill.engine.inputs import (
    LOST_AND_FOUND,
    DirectoryWalk,
    FileStamp,
    describe_unreadable,
    explain_directory_errors,
    is_output,
    reject_special,
    walk_files,
)
from tokenmill.engine.lineage import source_parts
from tokenmill.engine.progress import Reporter
from tokenmill.engine.record import PLANNING, Manifest, StageRecord, complete
from tokenmill.engine.selection import Selection, SelectionSource, matches, select
from tokenmill.errors import RequestError, remake

Usable = Sequence[str] | Callable[[str], bool] | None
"""Which user files a stage reads: suffixes of their names, or a predicate of the path; None means all."""

MAX_COPIED_HEADS = 4
"""Files of a bucket that are copied to find the format and the texts for checks."""
SEARCH_DEPTH = 2
"""Number of directory levels below a dataset's root that are searched for outputs of its stages."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that a stage may read; `identity` changes when the content changes.

    `origin` is the JSON of the file's parts, or the name of a file that is itself a source. `remote` describes how to
    download a file that is not on the disk. `records` and `blank` count its lines, if the stage that made the file
    counted them.
    """

    path: str
    bytes: int
    identity: str
    origin: str | JsonText = field(repr=False)
    remote: RemoteFile | None = None
    records: int | None = None
    blank: int | None = None

    @property
    def parts(self) -> list[Part]:
        """The source records of the file."""
        if isinstance(self.origin, str):
            return source_parts(self.origin)
        return convert_json(unpack(self.origin), list[Part])

    @property
    def input(self) -> InputFile:
        """The description of this file in the spec of a unit."""
        counted = (self.records, self.blank) if None not in (self.records, self.blank) else (None, None)
        return InputFile(self.path, self.identity, self.bytes, self.parts, *counted, self.remote)

    @property
    def sources(self) -> list[str]:
        """The names of the source files of its records; its own path if it has no record of a source file."""
        return list(dict.fromkeys(part.source for part in self.parts)) or [self.path]


@dataclass(frozen=True)
class StageInput:
    """The input of a stage; `upstream` identifies its content in the plan, and `notes` are for the log."""

    root: Path
    files: list[DataFile]
    upstream: Upstream
    source: Origin
    notes: list[str]

    def announce(self, reporter: Reporter, worker: int = 0, workers: int = 1) -> None:
        """Log what is read, and warn of damaged files; each of several workers looks at its share of the files.

        Raises:
            RequestError: all files are damaged.
        """
        reporter.detail(self.notes[0])  # the line about the start of the stage names the directory
        for note in self.notes[1:]:
            reporter.log(note)
        files = self.files[worker::workers]
        damaged = self._find_damaged(files)
        if damaged and len(damaged) == len(files) and len(self.damaged) == len(self.files):
            raise RequestError(self._describe_damage(sorted(self.damaged), f"its {len(self.files)} files"))
        if damaged:
            checked = f"its {len(files)} files" if workers == 1 else f"the {len(files)} files that this worker checked"
            problem = self._describe_damage(damaged, checked)
            reporter.warn(f"{problem}. Units that read these files will fail, and all other units run")

    @cached_property
    def damaged(self) -> frozenset[str]:
        """The paths of files that are missing or do not have the size in their manifest.

        The first access looks at every file. The units that read these files will fail, and planning reads samples from
        other files.
        """
        return frozenset(self._find_damaged(self.files))

    def _find_damaged(self, files: Sequence[DataFile]) -> list[str]:
        if self.upstream.maker is None:
            return []
        tree = open_tree(self.root)
        with tree.reading_many():
            return [file.path for file in files if tree.size(file.path) != file.bytes]

    def _describe_damage(self, damaged: list[str], checked: str) -> str:
        maker = self.upstream.maker
        return (
            f"{maker} in {self.root} was finished, but {len(damaged)} of {checked} are missing or have another size "
            f"now: {', '.join(damaged[:5])}{', ...' if len(damaged) > 5 else ''}; "
            f"{remake(f'tokenmill {maker}', same_size=False)}"
        )

    @property
    def identities(self) -> dict[str, str]:
        """The identities of the files, by path."""
        return {file.path: file.identity for file in self.files}

    @contextmanager
    def open_heads(self) -> Iterator[list[Path]]:
        """Yield the paths of undamaged files; of files in a bucket, copies of the first ones."""
        names = [file.path for file in self.readable]
        if find_address(self.root):
            names = names[:MAX_COPIED_HEADS]
        with open_tree(self.root).local_copies(names) as root:
            yield [root / name for name in names]

    @property
    def readable(self) -> list[DataFile]:
        """The files that are not in `damaged`."""
        return [file for file in self.files if file.path not in self.damaged]


def find_records(
    root: Path, kinds: Sequence[StageKind], depth: int = SEARCH_DEPTH, unread: list[Path] | None = None
) -> Iterator[StageRecord]:
    """Yield the records of stages of these kinds in `root` and below it, also of stages without a plan.

    If `root` is a file, its directory is searched, because the output of a single file is next to it by default. A
    directory that this user cannot read may contain records: it is added to `unread`, or is an error without that list.
    The lost+found directory of a volume is ignored.
    """
    children: list[str] = []
    if find_address(root):
        yield from _find_bucket_records(open_tree(root), kinds, depth)
        return
    try:
        root = root.parent if root.is_file() else root
        for kind in kinds if root.is_dir() and Tree(root).exists(RECORDS_DIRECTORY) else ():
            record = StageRecord(root, kind)
            if record.tree.is_directory(record.directory):
                yield record
        if depth and root.is_dir():
            with os.scandir(root) as entries:  # scandir calls stat for none of the 59,166 files of a flat directory
                # Do not follow links: a record that is written through one, such as a manifest, would be elsewhere.
                children = sorted(
                    entry.path
                    for entry in entries
                    if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
                )
    except PermissionError as error:
        if root.name == LOST_AND_FOUND:
            return
        if unread is None:
            raise RequestError(describe_unreadable(root)) from error
        unread.append(root)
        return
    for child in children:
        yield from find_records(Path(child), kinds, depth - 1, unread)


def _find_bucket_records(tree: Tree, kinds: Sequence[StageKind], depth: int) -> Iterator[StageRecord]:
    names = tree.directories()
    stages = set(tree.directories(RECORDS_DIRECTORY)) if RECORDS_DIRECTORY in names else set()
    yield from (StageRecord(tree.root, kind) for kind in kinds if kind.name in stages)
    for name in names if depth else ():
        if not name.startswith("."):
            yield from _find_bucket_records(open_tree(tree.root / name), kinds, depth - 1)


def select_records(path: Path, kinds: Sequence[StageKind], stage: str | None) -> list[StageRecord]:
    """Return the stages that were started in `path` or below it, in the order of `kinds`; with `stage`, only these."""
    records = sorted(find_records(path, kinds), key=lambda record: (kinds.index(record.kind), record.output))
    selected = [record for record in records if stage in (None, record.stage)]
    if not selected and stage is not None:
        started = ", ".join(dict.fromkeys(record.stage for record in records)) or "none"
        raise RequestError(
            f"--stage {stage}: no such stage was started in {path} or below it (started stages: {started}); choose "
            "another stage or directory"
        )
    return selected


def _is_started(record: StageRecord) -> bool:
    """Return whether a stage has a plan, or a process that may be alive is making one."""
    planning = is_planning(record)  # check this first: a planner that ends in between has published its plan
    return planning or record.tree.size(record.plan_path) is not None


def find_upstream(
    path: Path,
    stage: str,
    earlier: Sequence[StageKind],
    *,
    only: str | None = None,
    usable: Usable = None,
    selection: Selection | None = None,
    output: Path | None = None,
) -> StageInput:
    """Return the input of `stage` at `path`: the output of one of the `earlier` stages, or user files.

    `earlier` is in the order of the data flow. `only` is the stage of --from. `usable` restricts the files of a
    directory; a stage checks the content of a single file instead. `selection` restricts the files by patterns, split
    and sample.

    Raises:
        RequestError: there is no input, the stage to read is not finished, or there are two equally late stages.
    """
    with explain_directory_errors(path):
        return _find_upstream(path, stage, earlier, only, _InputFilter(usable, selection or Selection()), output)


@dataclass(frozen=True)
class _InputFilter:
    """The rule that selects the files of a directory: usable files that match the user's selection."""

    accepted: Usable
    selection: Selection

    def is_usable(self, path: str) -> bool:
        return self.accepted(path) if callable(self.accepted) else path.lower().endswith(tuple(self.accepted or ("",)))

    def apply(
        self, root: Path, files: list[DataFile], walk: DirectoryWalk | None = None, *, by_name: bool = False
    ) -> tuple[list[DataFile], list[str]]:
        """Return the files to read, and notes about the others; raise an error if no file is left."""
        hidden = [name for name in walk.hidden if self.is_usable(name)] if walk else []
        obstacles = walk.obstacles if walk else ()
        if not (self.selection.include or by_name or obstacles or any(self.is_usable(file.path) for file in files)):
            counted = (([file.path for file in files], "other files"), (hidden, "hidden files"))
            others = "".join(f"; it has {len(names)} {kind}, such as {names[0]!r}" for names, kind in counted if names)
            if callable(self.accepted):
                raise RequestError(
                    f"no data files in {root}{others}; every file name has another format than --format: choose "
                    "another --format, or rename the files"
                )
            suffixes = " ".join(name for name in self.accepted or () if name.count(".") == 1)
            raise RequestError(
                f"no data files in {root}{others}; a file name must end in {suffixes}, compressed or not: rename the "
                "files, or use --format jsonl (or another format) to read other names"
            )
        source = SelectionSource(
            str(root),
            self.is_usable,
            strict=walk is None,
            by_name=by_name,
            obstacles=obstacles,
            second_names=walk.second_names if walk else (),
        )
        selected, notes = select(
            files, self.selection, source, path=lambda file: file.path, sources=lambda file: file.sources
        )
        notes += walk.notes if walk else []
        return selected, notes + ([f"ignoring {len(hidden)} hidden files, such as {hidden[0]!r}"] if hidden else [])

    def check_unread(self, root: Path, directory: Path) -> None:
        """Refuse a directory below the root that this user cannot read, unless --exclude matches it."""
        if directory == root:
            raise RequestError(describe_unreadable(directory))
        folder = f"{directory.relative_to(root)}/"
        if not matches(folder, self.selection.exclude):
            raise RequestError(f"{describe_unreadable(directory)}, or leave it out with --exclude '{folder}*'")


def _find_upstream(
    path: Path, stage: str, earlier: Sequence[StageKind], only: str | None, rule: _InputFilter, output: Path | None
) -> StageInput:
    in_bucket = find_address(path) is not None
    if not in_bucket:
        check_exists(path)
        reject_special(path)
    if path.is_file():
        return _list_plain_files(path.parent, DirectoryWalk([path.name], [], [], [], [], []), rule, by_name=True)
    unread: list[Path] = []
    records = _find_started(path, stage, earlier, only, unread)
    for directory in unread:
        rule.check_unread(path, directory)
    if not records and in_bucket:
        raise RequestError(
            f"{path} has no output of {', '.join(kind.name for kind in earlier)}; download its files first, or name it "
            "as the source of preprocess, chat or transform"
        )
    if not records:
        return _list_user_files(path, earlier, rule, output)
    return _read_stage(_select_last_stage(path, records, stage, earlier), rule)


def check_exists(path: Path) -> None:
    """Raise RequestError if the input of a stage does not exist."""
    if find_address(path):
        exists = is_file(path) or is_directory(path)
    else:
        exists = path.exists() or retry_while_stale(path.exists, path.parent)
    if not exists:
        raise RequestError(
            f"{path} does not exist; specify a directory of your own files, the output directory of an earlier stage, "
            "or a file"
        )


def _find_started(
    path: Path, stage: str, earlier: Sequence[StageKind], only: str | None, unread: list[Path] | None = None
) -> list[StageRecord]:
    """Return the records of the `earlier` stages that were started in `path` or below it; `only` selects one stage."""
    names = [kind.name for kind in earlier]
    if only is not None and only not in names:
        raise RequestError(f"--from {only}: {stage} reads one of {', '.join(names)}; choose one of these stages")
    records = [record for record in find_records(path, earlier, unread=unread) if only in (None, record.stage)]
    records = [record for record in records if _is_started(record)]
    if not records and only is not None:
        raise RequestError(
            f"--from {only}: no {only} was started in {path} or below it; run tokenmill {only} first (see "
            f"tokenmill status {path})"
        )
    return records


class FinishedStage(NamedTuple):
    """The finished output of an earlier stage, and notes about the outputs that were not selected."""

    record: StageRecord
    manifest: Manifest
    notes: list[str]


def find_finished(
    path: Path, stage: str, earlier: Sequence[StageKind], *, only: str | None = None
) -> FinishedStage | None:
    """Return the output of the last of the `earlier` stages in `path` or below it; None if there is no output.

    Unlike `find_upstream`, this function returns the complete manifest, for a stage that reads pairs instead of files.

    Raises:
        RequestError: the path is missing, the stage to read is not finished, or there are two equally late stages.
    """
    with explain_directory_errors(path):
        records = _find_started(path, stage, earlier, only)
        return _select_last_stage(path, records, stage, earlier) if records else None


def _select_last_stage(
    path: Path, records: list[StageRecord], stage: str, earlier: Sequence[StageKind]
) -> FinishedStage:
    records = sorted(records, key=lambda record: earlier.index(record.kind))
    present = {record.stage for record in records}
    # The output of a stale input is stale too. The records are in the order of the stages, so one pass finds all.
    current: set[str] = set()
    candidates, notes = [], []
    for record in records:
        upstream, manifest = _load_manifest(record)
        if upstream.maker in present and upstream.manifest not in current:
            notes.append(f"ignoring {record.stage} in {record.output}: it was made from an older {upstream.maker}")
        else:
            candidates.append((record, manifest))
            current |= {manifest.hash} if manifest else set()
    rank = max(earlier.index(record.kind) for record, _ in candidates)
    last = [candidate for candidate in candidates if earlier.index(candidate[0].kind) == rank]
    if len(last) > 1:
        names = "\n".join(f"  {record.output}" for record, _ in last)
        raise RequestError(
            f"there is more than one {last[0][0].stage} in {path}; specify one of these directories:\n{names}"
        )
    record, manifest = last[0]
    if manifest is None:
        raise RequestError(_describe_remedy(record, stage))
    return FinishedStage(record, manifest, notes)


def _load_manifest(record: StageRecord) -> tuple[Upstream, Manifest | None]:
    """Return a stage's input and its manifest; write the manifest if only this step is missing.

    A mount may cache old directory entries, so a stage counts as unfinished only after these entries have expired. A
    recorded manifest is valid even without its files, which the user may delete after the next stage is finished.
    """

    def read() -> tuple[Upstream, Manifest | None]:
        recorded = record.stored_manifest(record.plan_id())
        if recorded is not None:
            return recorded.upstream, recorded
        plan = record.read_plan()
        if plan is None:
            return Upstream(), None
        return plan.upstream, complete(record, plan, write=os.access(record.directory, os.W_OK)).manifest

    result = read()
    if result[1] is None and directory_cache_seconds(record.output) > 0:
        return retry_while_stale(lambda: (again := read())[1] and again, record.directory) or read()
    return result


def describe_unfinished(record: StageRecord) -> str:
    """Return the progress of an unfinished stage, its first missing unit and its last failure."""
    name, plan = f"{record.stage} in {record.output}", record.read_plan()
    if plan is None:
        return f"{name} was started and has no plan yet"
    completion = complete(record, plan, write=False)
    done = completion.plan.weight - sum(unit.weight for unit in completion.missing)
    text = (
        f"{name} is not finished: {completion.done} of {len(completion.plan.units)} units, "
        f"{format_bytes(done)} of {format_bytes(completion.plan.weight)}; first missing: {completion.missing[0].id}"
    )
    failures = [failure for failure in record.failures() if failure.unit in {u.id for u in completion.missing}]
    if failures:
        text += f". The last failure: {failures[0].unit}: {failures[0].message}"
    return text


def _describe_remedy(record: StageRecord, stage: str) -> str:
    if record.tree.size(record.plan_path) is None:
        return (
            f"{describe_unfinished(record)}, so {stage} has no input; wait for it, or run the same tokenmill "
            f"{record.stage} again"
        )
    return (
        f"{describe_unfinished(record)}. Finish it first (run the same tokenmill {record.stage} again), or choose "
        "another stage with --from"
    )


def _read_stage(finished: FinishedStage, rule: _InputFilter) -> StageInput:
    record, manifest, notes = finished
    files = [
        DataFile(
            entry.path,
            entry.bytes,
            entry.xxh3_128,
            pack([part.to_json() for part in entry.parts or []]),
            records=entry.records,
            blank=entry.blank,
        )
        for entry in manifest.files
        if entry.role is None
    ]
    usable = sum(rule.is_usable(file.path) for file in files)
    files, file_notes = rule.apply(record.output, files)
    summary = f"reading {len(files)} files of {record.stage} in {record.output}"
    upstream, source = Upstream(record.stage, manifest.hash), manifest.source
    if len(files) != usable:  # not set for all files, so that the plan equals the one that earlier versions made
        upstream = msgspec.structs.replace(upstream, files=content_id(sorted(file.path for file in files)))
    return StageInput(record.output, files, upstream, source, [*notes, summary, *file_notes])


def _list_user_files(root: Path, earlier: Sequence[StageKind], rule: _InputFilter, output: Path | None) -> StageInput:
    """List the user's own directory, without the outputs of tokenmill below it."""
    if output is not None:
        check_no_overlap(root, output)
    if is_output(root):
        raise RequestError(
            f"{root} is an output of tokenmill that this stage does not read; specify the directory from which it was "
            f"made (see tokenmill status {root})"
        )
    walk = walk_files(root, output)
    for record in [] if walk.files else find_records(root, earlier, depth=0):
        for failure in record.failures():
            if failure.unit == PLANNING:
                message = (
                    f"{record.stage} in {root} failed and has no files; correct the cause and run tokenmill "
                    f"{record.stage} again: {failure.message}"
                )
                raise RequestError(message)
    dataset = _list_plain_files(root, walk, rule)
    if walk.outputs:
        outputs = ", ".join(str(path) for path in walk.outputs[:3])
        dataset.notes.append(f"ignoring outputs of tokenmill: {outputs}{', ...' if len(walk.outputs) > 3 else ''}")
    return dataset


def check_no_overlap(root: Path, output: Path) -> None:
    """Refuse an output directory that is the directory of the user's own files."""
    if output.resolve() == root.resolve():
        raise RequestError(f"{root} cannot be both input and output; specify another output directory")


def _list_plain_files(root: Path, walk: DirectoryWalk, rule: _InputFilter, *, by_name: bool = False) -> StageInput:
    """List files that no stage made; their identity is their size and modification time."""
    files = []
    for name in walk.files:
        stamp = FileStamp.of(os.stat(f"{root}/{name}"))  # noqa: PTH116 - 59,166 Path objects would take longer
        files.append(DataFile(name, stamp.size, stamp.identity, name))
    files, file_notes = rule.apply(root, files, walk, by_name=by_name)
    listing = content_id([[file.path, file.identity] for file in files])
    # The plan contains no absolute path, so the same files have the same plan in every directory.
    upstream = Upstream(None, listing=listing)
    notes = [f"reading {len(files)} files in {root}", *file_notes]
    return StageInput(root, files, upstream, Origin(f"file:{root.name}"), notes)
