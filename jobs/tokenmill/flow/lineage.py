"""What a stage reads: the files of a finished stage, or plain files somebody brought.

Given a dataset's root, the furthest finished stage made from it is taken, and said; one that was
started and is not finished is refused. Files that no record of ours names are listed as they lie.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tokenmill.errors import RequestError
from tokenmill.files.codec import JsonText, content_id, pack, unpack
from tokenmill.files.mounts import patiently, settle_seconds
from tokenmill.files.paths import RECORDS
from tokenmill.files.tree import Tree
from tokenmill.flow.attempt import is_planning
from tokenmill.flow.contract import InputFile, Kind, Origin, Part, RemoteFile, Upstream
from tokenmill.flow.progress import Reporter, size
from tokenmill.flow.provenance import whole
from tokenmill.flow.record import PLANNING, Manifest, StageRecord, complete
from tokenmill.inputs import (
    LOST_AND_FOUND,
    Stamp,
    Walk,
    is_output,
    reading_directory,
    refuse_special,
    unreadable,
    walk_files,
)
from tokenmill.selection import Offer, Selection, matches, select

Usable = Sequence[str] | Callable[[str], bool] | None
"""Which plain files a stage reads: endings of their names, or a test of the path; None is all."""

SEARCH_DEPTH = 2
"""How far below a dataset's root the outputs of its stages are looked for."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file a stage may read: `identity` changes when its content does.

    `origin` is the JSON of its parts, or the name of the source file that it is. `remote` says how to fetch one that
    is not here yet.
    `records` and `blank` are its lines, where the stage that made it counted them.
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
        """Where its records came from."""
        if isinstance(self.origin, str):
            return whole(self.origin)
        return msgspec.convert(unpack(self.origin), list[Part])

    @property
    def input(self) -> InputFile:
        """What a unit that reads this file says of it."""
        counted = (self.records, self.blank) if None not in (self.records, self.blank) else (None, None)
        return InputFile(self.path, self.identity, self.bytes, self.parts, *counted, self.remote)

    @property
    def sources(self) -> list[str]:
        """The names of the source files that it was made from; its own where it holds nothing of any."""
        return list(dict.fromkeys(part.source for part in self.parts)) or [self.path]


@dataclass(frozen=True)
class StageInput:
    """What a stage reads: `upstream` goes into its plan and names the content, `notes` and `warnings` are to be said.

    `damaged` are the paths of files that are not there as their manifest has them: the units that read them
    will fail, and planning looks into others.
    """

    root: Path
    files: list[DataFile]
    upstream: Upstream
    source: Origin
    notes: list[str]
    warnings: Sequence[str] = ()
    damaged: frozenset[str] = frozenset()

    def announce(self, reporter: Reporter) -> None:
        """Say what is read, and warn of what is not there."""
        for note in self.notes:
            reporter.say(note)
        for warning in self.warnings:
            reporter.warn(warning)

    @property
    def identities(self) -> dict[str, str]:
        """The identities of the files, by path."""
        return {file.path: file.identity for file in self.files}

    @property
    def readable(self) -> list[DataFile]:
        """The files that are not damaged, as far as is known."""
        return [file for file in self.files if file.path not in self.damaged]


def find_records(
    root: Path, kinds: Sequence[Kind], depth: int = SEARCH_DEPTH, unread: list[Path] | None = None
) -> Iterator[StageRecord]:
    """Yield the stages of these kinds that left records in `root` and below it, begun or refused while planning.

    A file stands for its directory: what is made from a single one lies beside it, unless said otherwise. A directory
    that this user may not read may hold records: it goes to `unread`, or is refused without such a list. The lost+found
    of a volume is passed over.
    """
    children: list[str] = []
    try:
        root = root.parent if root.is_file() else root
        for kind in kinds if root.is_dir() and Tree(root).exists(RECORDS) else ():
            record = StageRecord(root, kind)
            if record.tree.is_directory(record.directory):
                yield record
        if depth and root.is_dir():
            with os.scandir(root) as entries:  # of 59,166 files in a flat directory none is looked at
                # Through no link: what is written into a stage's records, such as a manifest, would lie elsewhere.
                children = sorted(
                    entry.path
                    for entry in entries
                    if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
                )
    except PermissionError as error:
        if root.name == LOST_AND_FOUND:
            return
        if unread is None:
            raise RequestError(unreadable(root)) from error
        unread.append(root)
        return
    for child in children:
        yield from find_records(Path(child), kinds, depth - 1, unread)


def records_of(path: Path, kinds: Sequence[Kind], stage: str | None) -> list[StageRecord]:
    """Return which stages of `kinds` were begun in `path` or below, in that order; or those called `stage` alone."""
    records = sorted(find_records(path, kinds), key=lambda record: (kinds.index(record.kind), record.output))
    found = [record for record in records if stage in (None, record.stage)]
    if not found and stage is not None:
        there = ", ".join(dict.fromkeys(record.stage for record in records)) or "none"
        raise RequestError(f"--stage {stage}: no such stage was begun in {path} or below it; there are: {there}")
    return found


def _begun(record: StageRecord) -> bool:
    """Tell whether a stage has a plan, or somebody who may be alive is making one."""
    planning = is_planning(record)  # before: one that ends in between has made the plan
    return planning or record.tree.size(record.plan_path) is not None


def upstream_of(
    path: Path,
    stage: str,
    earlier: Sequence[Kind],
    *,
    only: str | None = None,
    usable: Usable = None,
    selection: Selection | None = None,
    output: Path | None = None,
) -> StageInput:
    """Return what `stage` reads when it is given `path`: the output of one of the `earlier` stages, or plain files.

    `earlier` are in the order data flows through them; `only` is the one that the user chose with --from. `usable`
    restricts the files of a directory, and one that is named is judged by its content; `selection` restricts by
    patterns, split and sample. Raises RequestError when there is nothing, when the stage to read is unfinished, or
    when two finished stages are equally far.
    """
    with reading_directory(path):
        return _upstream_of(path, stage, earlier, only, _Choice(usable, selection or Selection()), output)


@dataclass(frozen=True)
class _Choice:
    """Which of a directory's files a stage reads: the usable ones, of them what the user selected."""

    takes: Usable
    selection: Selection

    def usable(self, path: str) -> bool:
        return self.takes(path) if callable(self.takes) else path.lower().endswith(tuple(self.takes or ("",)))

    def of(
        self, root: Path, files: list[DataFile], walk: Walk | None = None, *, by_name: bool = False
    ) -> tuple[list[DataFile], list[str]]:
        """Return the files to read, and notes on the others; refuse when nothing is left."""
        hidden = [name for name in walk.hidden if self.usable(name)] if walk else []
        obstacles = walk.obstacles if walk else ()
        if not (self.selection.include or by_name or obstacles or any(self.usable(file.path) for file in files)):
            counted = (([file.path for file in files], "other files"), (hidden, "hidden files"))
            seen = "".join(f"; it has {len(names)} {what}, such as {names[0]!r}" for names, what in counted if names)
            if callable(self.takes):
                raise RequestError(f"no data files in {root}{seen}; each name is of another format than --format")
            plain = " ".join(name for name in self.takes or () if name.count(".") == 1)
            raise RequestError(
                f"no data files in {root}{seen}; wanted names ending in {plain}, compressed or not; --format jsonl (or "
                "another) takes files under other names"
            )
        offer = Offer(
            str(root),
            self.usable,
            strict=walk is None,
            by_name=by_name,
            obstacles=obstacles,
            second_names=walk.second_names if walk else (),
        )
        wanted, notes = select(
            files, self.selection, offer, path=lambda file: file.path, sources=lambda file: file.sources
        )
        notes += walk.notes if walk else []
        return wanted, notes + ([f"left out {len(hidden)} hidden files, such as {hidden[0]!r}"] if hidden else [])

    def check_unread(self, root: Path, place: Path) -> None:
        """Refuse a directory below the root that this user may not read, unless --exclude leaves it out."""
        if place == root:
            raise RequestError(unreadable(place))
        folder = f"{place.relative_to(root)}/"
        if not matches(folder, self.selection.exclude):
            raise RequestError(f"{unreadable(place)}, or leave it out with --exclude '{folder}*'")


def _upstream_of(
    path: Path, stage: str, earlier: Sequence[Kind], only: str | None, choice: _Choice, output: Path | None
) -> StageInput:
    if not path.exists() and not patiently(path.exists, path.parent):
        raise RequestError(
            f"{path} does not exist; give a directory of your own files, the output directory of an earlier stage, or "
            "a file"
        )
    refuse_special(path)
    if path.is_file():
        return _plain(path.parent, Walk([path.name], [], [], [], [], []), choice, by_name=True)
    names = [kind.name for kind in earlier]
    if only is not None and only not in names:
        raise RequestError(f"--from {only}: {stage} reads one of {', '.join(names)}")
    unread: list[Path] = []
    records = [record for record in find_records(path, earlier, unread=unread) if only in (None, record.stage)]
    records = [record for record in records if _begun(record)]
    for place in unread:
        choice.check_unread(path, place)
    if not records:
        if only is not None:
            raise RequestError(f"no {only} was made in {path}; see tokenmill status {path}")
        return _brought(path, earlier, choice, output)
    return _furthest(path, records, stage, earlier, choice)


def _furthest(
    path: Path, records: list[StageRecord], stage: str, earlier: Sequence[Kind], choice: _Choice
) -> StageInput:
    records = sorted(records, key=lambda record: earlier.index(record.kind))
    present = {record.stage for record in records}
    current: set[str] = set()  # what was made from something stale is stale: in the stages' order, this settles it
    candidates, notes = [], []
    for record in records:
        above, manifest = _look(record)
        if above.maker in present and above.manifest not in current:
            notes.append(f"{record.stage} in {record.output} was made from an older {above.maker}; not taken")
        else:
            candidates.append((record, manifest))
            current |= {manifest.hash} if manifest else set()
    rank = max(earlier.index(record.kind) for record, _ in candidates)
    best = [found for found in candidates if earlier.index(found[0].kind) == rank]
    if len(best) > 1:
        names = "\n".join(f"  {record.output}" for record, _ in best)
        raise RequestError(f"more than one {best[0][0].stage} lies in {path}; name the one to read:\n{names}")
    record, manifest = best[0]
    if manifest is None:
        raise RequestError(_finish_first(record, stage))
    return _dataset(record, manifest, choice, notes)


def _look(record: StageRecord) -> tuple[Upstream, Manifest | None]:
    """Return what a stage was made from, and its manifest, completing it where only that was left to do.

    "Not finished" is concluded only once the mount's caches must have told the truth. A recorded
    manifest stands though its files may be gone: they may be deleted to save space once the next
    stage is made.
    """

    def look() -> tuple[Upstream, Manifest | None]:
        recorded = record.stored_manifest(record.plan_id())
        if recorded is not None:
            return recorded.upstream, recorded
        plan = record.read_plan()
        if plan is None:
            return Upstream(), None
        return plan.upstream, complete(record, plan, write=os.access(record.directory, os.W_OK)).manifest

    found = look()
    if found[1] is None and settle_seconds(record.output) > 0:
        return patiently(lambda: (again := look())[1] and again, record.directory) or look()
    return found


def unfinished(record: StageRecord) -> str:
    """Say how far a stage is that was started and is not finished, what is missing first, and why it failed last."""
    where, plan = f"{record.stage} in {record.output}", record.read_plan()
    if plan is None:
        return f"{where} was started and has no plan yet"
    found = complete(record, plan, write=False)
    done = found.plan.weight - sum(unit.weight for unit in found.missing)
    text = (
        f"{where} is not finished: {found.done} of {len(found.plan.units)} units, "
        f"{size(done)} of {size(found.plan.weight)}; first missing: {found.missing[0].id}"
    )
    failures = [failure for failure in record.failures() if failure.unit in {u.id for u in found.missing}]
    if failures:
        text += f". Its last failure: {failures[0].unit}: {failures[0].message}"
    return text


def _finish_first(record: StageRecord, stage: str) -> str:
    if record.tree.size(record.plan_path) is None:
        return f"{unfinished(record)}: {stage} has nothing to read; wait for it, or run it again"
    return (
        f"{unfinished(record)}. Finish it first (tokenmill {record.stage}, the same command again), or choose another "
        "with --from"
    )


def _dataset(record: StageRecord, manifest: Manifest, choice: _Choice, notes: list[str]) -> StageInput:
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
    usable = sum(choice.usable(file.path) for file in files)
    files, left_out = choice.of(record.output, files)
    damaged = [file.path for file in files if record.tree.size(file.path) != file.bytes]
    warnings = []
    if damaged:
        problem = (
            f"{record.stage} in {record.output} was finished, but {len(damaged)} of its {len(files)} files are missing "
            f"or have another size now: {', '.join(damaged[:5])}{', ...' if len(damaged) > 5 else ''}; run tokenmill "
            f"{record.stage} again: it makes only those"
        )
        if len(damaged) == len(files):
            raise RequestError(problem)
        warnings = [f"{problem}. What is made from them will fail, the rest is done"]
    said = f"reading {len(files)} files of {record.stage} in {record.output}"
    upstream, source = Upstream(record.stage, manifest.hash), manifest.source
    if len(files) != usable:  # not always: so a plan of all files is the one that earlier versions made
        upstream = msgspec.structs.replace(upstream, files=content_id(sorted(file.path for file in files)))
    return StageInput(record.output, files, upstream, source, [*notes, said, *left_out], warnings, frozenset(damaged))


def _brought(root: Path, earlier: Sequence[Kind], choice: _Choice, output: Path | None) -> StageInput:
    """List a directory that somebody brought, without what tokenmill made of it below."""
    if output is not None:
        check_apart(root, output)
    if is_output(root):
        raise RequestError(
            f"{root} holds an output of tokenmill that this stage does not read (tokenmill status {root}); give the "
            "directory that it was made from"
        )
    walk = walk_files(root, output)
    for record in [] if walk.files else find_records(root, earlier, depth=0):
        for failure in record.failures():
            if failure.unit == PLANNING:
                said = f"{record.stage} in {root} has nothing to read, since it failed: {failure.message}"
                raise RequestError(said)
    dataset = _plain(root, walk, choice)
    if walk.ours:
        left_out = ", ".join(str(path) for path in walk.ours[:3])
        dataset.notes.append(f"left out {left_out}{', ...' if len(walk.ours) > 3 else ''}: outputs of tokenmill")
    return dataset


def check_apart(root: Path, output: Path) -> None:
    """Refuse to write among the files that somebody brought."""
    if output.resolve() == root.resolve():
        raise RequestError(f"{root} cannot be both input and output; give an output directory of its own")


def _plain(root: Path, walk: Walk, choice: _Choice, *, by_name: bool = False) -> StageInput:
    """List files that no stage of ours made; their identity is size and modification time."""
    files = []
    for name in walk.files:
        stamp = Stamp.of(os.stat(f"{root}/{name}"))  # noqa: PTH116 - for 59,166 files a Path each would take longer
        files.append(DataFile(name, stamp.size, stamp.identity, name))
    files, left_out = choice.of(root, files, walk, by_name=by_name)
    listing = content_id([[file.path, file.identity] for file in files])
    # No absolute path: the same files give the same plan wherever they lie.
    upstream = Upstream(None, listing=listing)
    notes = [f"reading {len(files)} files in {root}", *left_out]
    return StageInput(root, files, upstream, Origin(f"file:{root.name}"), notes)
