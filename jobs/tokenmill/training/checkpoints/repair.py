"""Megatron-LM's checkpoints of a run: which one a start resumes from, which may go.

A run's directory, as Megatron-LM (megatron/training/checkpointing.py) and we write to it:

    iter_0000100/                           a checkpoint (`torch_dist`)
    latest_checkpointed_iteration.txt       the tracker: an iteration, or `release` for a converted model in release/
    .tokenmill/aside/NAME-N                 ours: what a start moved out of the way, N counts up
    .tokenmill/trash/NAME-N                 ours: what is being deleted

The tracker is written last, and not atomically.

Node 0 calls `prepare` before a start and `prune` while the run goes on. Both decide first and then act in steps of
one rename each, so that after a kill between any two the same call comes to the same end.
"""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tokenmill.errors import InputError, RequestError
from tokenmill.files.explain import explained
from tokenmill.files.lease import abandoned
from tokenmill.files.mounts import patiently, settle_seconds
from tokenmill.files.paths import RECORDS
from tokenmill.files.publish import write_atomic
from tokenmill.files.tree import Tree, UnexpectedEntry
from tokenmill.training.checkpoints import torch_dist as distcp
from tokenmill.training.checkpoints.metadata import Damage
from tokenmill.training.checkpoints.torch_dist import RELEASE, Checkpoint

TRACKER = "latest_checkpointed_iteration.txt"

ASIDE_FINISHED = 2
"""Checkpoints kept aside whose save was finished: a rollback moves as many as retention had kept, two at least."""

ASIDE_UNFINISHED = 1
"""Cut-off saves kept aside, for somebody who wants to know; each may be as large as a checkpoint."""

_ITERATION = re.compile(r"iter_\d{7,15}")


class TornTracker(InputError):
    """The tracker names no iteration: cut off while it was written, or damaged."""


class ForeignTracker(TornTracker):
    """The tracker is no file, or somebody else's: nothing that a crash leaves, and no start repairs it."""


@dataclass(frozen=True)
class Start:
    """Where a run begins, and what was done so that it can."""

    iteration: int
    name: str | None
    """The checkpoint's directory; None when the run begins from nothing."""
    done: tuple[str, ...] = ()
    """Sentences for the log."""

    @property
    def resume(self) -> bool:
        """Whether there is a checkpoint to load."""
        return self.name is not None


@dataclass(frozen=True)
class _Plan:
    """A start, and the steps to it."""

    start: Start
    tracker: str | None = None
    """What to write into the tracker; None leaves it."""
    aside: tuple[str, ...] = ()
    """What to move aside, oldest first."""


# -- looking


def read_tracker(path: Path) -> int | None:
    """Read the iteration that the tracker of a checkpoint directory names: 0 for `release`, None without a tracker.

    Raises:
        TornTracker: it names none; a reader in the middle of a run may also have met Megatron-LM writing it.
    """
    named = tracked(path)
    return None if named is None else distcp.iteration(named)


def tracked(path: Path) -> str | None:
    """Return the name of the checkpoint that the tracker names, which need not be there; None without a tracker."""
    with explained(path):
        try:
            with Tree(path).open(TRACKER) as file:
                text = distcp.read(file, TRACKER, distcp.SMALL).strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnexpectedEntry as problem:
            raise ForeignTracker(f"{path / TRACKER} is no file to go by: {problem}") from None
        except Damage as problem:
            raise TornTracker(f"{path}: {problem}; {_to_repair(path)}") from None
    if text == RELEASE.encode():
        return RELEASE
    # int() in Megatron-LM takes "1_0" and "+10" too, which it never writes.
    if not re.fullmatch(rb"[0-9]{1,15}", text):
        found = "is empty" if not text else f"holds {text[:40]!r}, which is no iteration"
        raise TornTracker(f"{path / TRACKER} {found}; {_to_repair(path)}")
    return f"iter_{int(text):07d}"


def scan(path: Path, *, full: bool = False) -> list[Checkpoint]:
    """Look at every checkpoint of a directory, oldest first; `full` also compares recorded hashes."""
    with explained(path):
        return [distcp.examine(path / name, full=full) for name in reversed(_names(path))]


def look(path: Path, *, full: bool = False) -> Checkpoint | None:
    """Look at the checkpoint that the tracker names, whether it is there or not; None without a tracker."""
    with explained(path):
        named = tracked(path)
        return None if named is None else distcp.examine(path / named, full=full)


def _to_repair(path: Path) -> str:
    return f"tokenmill checkpoint repair {path} sets it to the newest whole checkpoint"


def _names(path: Path) -> list[str]:
    """List the names of what Megatron-LM would take for checkpoints, newest first, `release` last."""
    try:
        found = os.listdir(path)  # noqa: PTH208 - names alone
    except FileNotFoundError:
        return []
    # iter_100 and iter_0000100.bak are somebody's own: no tracker leads there.
    iterations = [name for name in found if _ITERATION.fullmatch(name) and f"iter_{int(name[5:]):07d}" == name]
    return sorted(iterations, key=distcp.iteration, reverse=True) + [RELEASE] * (RELEASE in found)


# -- before a start


def prepare(
    path: Path,
    *,
    dry_run: bool = False,
    start_over: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Start:
    """Put a run's checkpoints in order and return where it begins: node 0 does so before every start.

    - The tracker names a whole checkpoint: that one. Newer ones are moved aside, whole or not: a save that was cut
      off before the tracker, which the next save to the same iteration would mix with its own files, or what
      somebody left behind who set the tracker back (a loss spike, say). To take up a newer one in spite of the
      tracker would overrule them; to lose one interval of work is the price, and it can be moved back.
    - The tracker is torn, missing, or names what is not whole: the newest whole checkpoint, older or newer, since
      nobody's word stands against it; the tracker is set to it, and newer directories are moved aside.
    - No tracker, and no save ever came to its end: the run dies in its first save and begins again from nothing, and
      what is there is moved aside.
    - Nothing at all: from nothing.
    - Anything else was once a checkpoint and is damaged: refused, never a silent start from nothing.

    Older directories than the one to resume from are left as they are, whole or not: nothing reads them.
    A network file system may show an old state (`settle_seconds`), so whatever needs to be done is looked at again
    until its caches have expired; `say` is told when that takes time.

    `dry_run` changes nothing, and `done` says what would be done. `start_over` answers the refusal: everything is
    moved aside, as long as none of it is whole.

    Raises:
        RequestError: no checkpoint is whole, and there was one.
    """
    with explained(path):
        plan = _settled(path, start_over, say)
        if dry_run:
            return plan.start
        # The tracker first: from then on it names a whole checkpoint, and what is newer goes.
        if plan.tracker is not None:
            write_atomic(path / TRACKER, plan.tracker.encode(), directory=path / RECORDS)
        for name in plan.aside:
            _move(path, name, "aside")
        deleted = _tidy(path, {False: ASIDE_UNFINISHED})
        return replace(plan.start, done=(*plan.start.done, *deleted))


def _settled(path: Path, start_over: bool, say: Callable[[str], None]) -> _Plan:
    def clear() -> bool:
        """Tell whether there is a checkpoint to resume from and nothing to do."""
        try:
            plan = _plan(path, start_over)
        except RequestError:
            return False
        return plan.start.resume and not plan.aside and plan.tracker is None

    if (seconds := settle_seconds(path)) and not clear():
        say(f"{path} is on a network file system, which may show an old state: looking again for {seconds:.0f} s")
        patiently(clear, path)
    return _plan(path, start_over)


def _plan(path: Path, start_over: bool) -> _Plan:
    if path.exists() and not path.is_dir():
        raise RequestError(f"{path} is no directory: give another one for checkpoints")
    names = _names(path)

    @cache
    def at(name: str) -> Checkpoint:
        return distcp.examine(path / name)

    named, torn = None, ""
    try:
        named = tracked(path)
    except ForeignTracker:
        raise
    except TornTracker as problem:
        torn = str(problem).rpartition(";")[0]
    target = next((name for name in [named, *names] if name and at(name).complete), None)
    if start_over:
        if target:
            raise RequestError(
                f"{path / target} is whole, and a run resumes from it; to begin anew give the run another directory "
                "for checkpoints (in a chart: --set storage.checkpointPath=...)"
            )
        over = [TRACKER] * os.path.lexists(path / TRACKER) + names[::-1]
        return _Plan(Start(0, None, tuple(f"{path / name} moved aside" for name in over)), aside=tuple(over))
    if target:
        newer = [at(name) for name in names[::-1] if name != RELEASE and _later(name, target)]
        return _resume(path, target, torn or (at(named).state if named else ""), named, newer)
    if not names and not torn and named is None:
        return _Plan(Start(0, None))
    begun = [at(name) for name in names[::-1]]
    # A link, or the older format: whole, as likely as not, and none of a save of ours that was cut off.
    foreign = [one for one in begun if one.path.is_symlink() or distcp.older_format(one.path)]
    if not torn and named is None and not foreign and not any(one.finished for one in begun):
        done = [f"{one.path} moved aside: the run's first save was never finished ({one.state})" for one in begun]
        return _Plan(Start(0, None, tuple(done)), aside=tuple(names[::-1]))
    raise _nothing_whole(path, named, torn, begun)


def _later(name: str, target: str) -> bool:
    return target == RELEASE or distcp.iteration(name) > distcp.iteration(target)


def _resume(path: Path, target: str, wrong: str, named: str | None, newer: list[Checkpoint]) -> _Plan:
    """Plan a start from a whole checkpoint; `wrong` is what is wrong with the tracker or with what it names."""
    done: list[str] = []
    tracker = None
    if target != named:
        tracker = RELEASE if target == RELEASE else str(distcp.iteration(target))
        why = wrong or "there was none"
        if named:
            why = f"it named {named}, which is not whole ({wrong})"
        done.append(f"tracker set to {tracker}, the newest whole checkpoint: {why}")
    for one in newer:
        state = "it is whole, but the tracker was never set to it, or was set back" if one.complete else one.state
        done.append(f"{one.path} moved aside: newer than where the run resumes ({state})")
    return _Plan(Start(distcp.iteration(target), target, tuple(done)), tracker, tuple(one.path.name for one in newer))


def _nothing_whole(path: Path, named: str | None, torn: str, found: list[Checkpoint]) -> RequestError:
    tracker = torn or (f"the tracker names {named}" if named else "there is no tracker")
    states = "; ".join(f"{one.path.name}: {one.state}" for one in found[::-1][:4]) or "there are none"
    return RequestError(
        f"no checkpoint in {path} is whole, and the run would begin again from nothing: {tracker}; {states}. "
        f"Bring a whole one back, or give the run another directory (in a chart: --set storage.checkpointPath=...), or "
        f"move what is there out of the way: tokenmill checkpoint repair {path} --start-over"
    )


# -- during a run


def prune(path: Path, keep: int) -> list[str]:
    """Delete whole checkpoints beyond the newest `keep` of those up to the tracker; return what was done.

    The tracker's own stays, whatever is newer stays, and so does what is not whole (`prepare` judges that), a link
    (Megatron-LM's retention leaves those too) and `release`. With a torn or missing tracker, or one that names what
    is not whole, nothing is deleted. A checkpoint leaves by one rename into .tokenmill/trash, from where nothing reads,
    and is deleted there; what a kill leaves in there goes the next time.

    Of what starts moved aside, the newest ASIDE_FINISHED whose save was finished stay, and the newest
    ASIDE_UNFINISHED of the others. A start itself deletes cut-off saves beyond that, lest a run that dies in every
    save fill the disk, and nothing else: whoever set the tracker back may look at all of it until the run goes on.
    """
    if keep < 2:
        raise RequestError(f"checkpoint.keep is {keep}: at least 2, so that one is left when the newest is damaged")
    done: list[str] = []
    with explained(path):
        try:
            named = tracked(path)
        except TornTracker:
            named = None
        if named and named != RELEASE and distcp.examine(path / named).complete:
            older = [name for name in _names(path) if name != RELEASE and _later(named, name)]
            left = keep - 1
            for one in (distcp.examine(path / name) for name in older):
                if not one.complete:
                    continue
                if left > 0 or one.path.is_symlink():
                    left -= 1
                    continue
                _move(path, one.path.name, "trash")
                done.append(f"{one.path} deleted: {keep} newer ones are kept")
        done += _tidy(path, {True: ASIDE_FINISHED, False: ASIDE_UNFINISHED})
    return done


def _tidy(path: Path, kept: dict[bool, int]) -> list[str]:
    """Delete what lies aside beyond so many, by whether its save was finished, and what lies in the trash.

    Returns what was done.
    """
    done: list[str] = []
    tree, aside, trash = Tree(path), path / RECORDS / "aside", path / RECORDS / "trash"
    for _, name in sorted(_numbered(path, "aside"), reverse=True):
        finished = (aside / name / "metadata.json").exists()
        if (aside / name).is_symlink() or not (aside / name).is_dir() or finished not in kept:
            continue
        kept[finished] -= 1
        if kept[finished] < 0:
            _move(path, f"{RECORDS}/aside/{name}", "trash")
            done.append(f"{aside / name} deleted: newer ones lie aside")
    for _, name in _numbered(path, "trash"):
        try:
            with tree.directory(trash) as place:
                os.close(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place))  # no pipe, no link
                shutil.rmtree(name, dir_fd=place)
        except OSError as problem:  # an open file's name on NFS, say: the run goes on, and the next call tries again
            done.append(f"{trash / name} is not deleted yet: {problem.strerror or problem}")
    for name in tree.names(RECORDS) if path.is_dir() else ():
        if abandoned(path / RECORDS / name):
            tree.unlink(f"{RECORDS}/{name}")
    return done


def _numbered(path: Path, kind: str) -> list[tuple[int, str]]:
    """List what lies aside or in the trash, as N and NAME-N."""
    place = path / RECORDS / kind
    for directory in (place.parent, place):
        if directory.is_symlink():
            raise RequestError(f"{directory} is a link, and what lies in there gets deleted: remove it")
    return [(int(found[1]), name) for name in Tree(path).names(place) if (found := re.search(r"-(\d{1,18})$", name))]


def _move(path: Path, name: str, kind: str) -> None:
    """Rename what lies in Megatron-LM's sight, or aside, into a place under a name that was not used there before."""
    tree = Tree(path)
    number = 1 + max((number for number, _ in _numbered(path, kind)), default=0)
    directory, _, last = name.rpartition("/")
    tree.rename(name, f"{RECORDS}/{kind}/{last}-{number}", create=True)
    tree.fsync(f"{RECORDS}/{kind}")
    tree.fsync(directory)
