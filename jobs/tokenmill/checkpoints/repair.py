"""Repair of a run's checkpoints: which one an attempt resumes from, and which may be deleted.

A run's directory, as Megatron-LM (megatron/training/checkpointing.py) and tokenmill write to it:

    iter_0000100/                           a checkpoint (`torch_dist`)
    latest_checkpointed_iteration.txt       the tracker: an iteration, or `release` for a converted model in release/
    .tokenmill/aside/NAME-N                 tokenmill's: a directory that an attempt moved out of the way; N counts up
    .tokenmill/trash/NAME-N                 tokenmill's: a directory that is being deleted

Megatron-LM writes the tracker last, and not atomically.

Node 0 calls `repair_checkpoints` before an attempt, and `prune` during the attempt. Both decide first and then act in
steps of one rename each. If either is killed between two steps, the same call completes the work.
"""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from tokenmill.checkpoints import torch_dist
from tokenmill.checkpoints.metadata import Damage
from tokenmill.checkpoints.model_record import TOKENIZER
from tokenmill.checkpoints.torch_dist import RELEASE, Checkpoint
from tokenmill.core.buckets.tree import open_tree
from tokenmill.core.files.explain import explain_os_errors
from tokenmill.core.files.lease import remove_abandoned
from tokenmill.core.files.mounts import directory_cache_seconds, retry_while_stale
from tokenmill.core.files.paths import RECORDS_DIRECTORY
from tokenmill.core.files.publish import write_atomic
from tokenmill.core.files.tree import Tree, UnexpectedEntry
from tokenmill.errors import InputError, RequestError

TRACKER = "latest_checkpointed_iteration.txt"

MAX_FINISHED_ASIDE = 2
"""Finished checkpoints that are kept aside: after a tracker is set back, the number that retention keeps at least."""

MAX_UNFINISHED_ASIDE = 1
"""Interrupted saves that are kept aside for an inspection; each may be as large as a checkpoint."""

_ITERATION = re.compile(r"iter_\d{7,15}")


class InvalidTracker(InputError):
    """The tracker does not contain an iteration: its write was interrupted, or it is damaged."""


class ForeignTracker(InvalidTracker):
    """The tracker is not a regular file, or has another owner.

    A crash cannot cause this, so no attempt repairs it.
    """


@dataclass(frozen=True)
class StartPoint:
    """The iteration at which an attempt starts, and the repairs that were necessary for it."""

    iteration: int
    name: str | None
    """Directory of the checkpoint, None if the run starts without one."""
    actions: tuple[str, ...] = ()
    """A sentence for the log for each action."""
    bytes: int = field(default=0, compare=False)
    """Bytes of the checkpoint."""

    @property
    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint to load."""
        return self.name is not None


@dataclass(frozen=True)
class _RepairPlan:
    """A start point, and the steps that establish it."""

    start: StartPoint
    tracker: str | None = None
    """New content of the tracker, None if the tracker stays unchanged."""
    aside: tuple[str, ...] = ()
    """Names to move aside, oldest first."""


# -- reading


def read_tracked_iteration(path: Path) -> int | None:
    """Return the iteration in the tracker of a checkpoint directory: 0 for `release`, None without a tracker.

    Raises:
        InvalidTracker: the tracker contains no iteration, perhaps because Megatron-LM is writing it at this moment.
    """
    name = read_tracked_name(path)
    return None if name is None else torch_dist.parse_iteration(name)


def read_tracked_name(path: Path) -> str | None:
    """Return the name of the checkpoint in the tracker, which need not exist; None without a tracker.

    Raises:
        InvalidTracker: the tracker contains no iteration.
    """
    with explain_os_errors(path):
        try:
            with open_tree(path).open(TRACKER) as file:
                text = torch_dist.read_limited(file, TRACKER, torch_dist.MAX_SMALL_FILE_BYTES).strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnexpectedEntry as problem:
            raise ForeignTracker(f"cannot use the tracker {path / TRACKER} (correct or remove it): {problem}") from None
        except Damage as problem:
            raise InvalidTracker(f"{path}: {problem}; {_repair_remedy(path)}") from None
    if text == RELEASE.encode():
        return RELEASE
    # int() in Megatron-LM also accepts "1_0" and "+10", which Megatron-LM never writes.
    if not re.fullmatch(rb"[0-9]{1,15}", text):
        content = "is empty" if not text else f"contains {text[:40]!r}, which is not an iteration"
        raise InvalidTracker(f"{path / TRACKER} {content}; {_repair_remedy(path)}")
    return f"iter_{int(text):07d}"


def tracked_since(path: Path) -> float | None:
    """Return the time at which the tracker was written, None without a tracker."""
    status = open_tree(path).stat(TRACKER)
    return status.st_mtime if status else None


def list_checkpoints(path: Path, *, full: bool = False) -> list[Checkpoint]:
    """Return the state of every checkpoint of a directory, oldest first; `full` also compares recorded hashes."""
    with explain_os_errors(path):
        return [torch_dist.examine(path / name, full=full) for name in reversed(_list_names(path))]


def examine_tracked(path: Path, *, full: bool = False) -> Checkpoint | None:
    """Return the state of the checkpoint in the tracker, which need not exist; None without a tracker."""
    with explain_os_errors(path):
        name = read_tracked_name(path)
        return None if name is None else torch_dist.examine(path / name, full=full)


def _repair_remedy(path: Path) -> str:
    return f"run tokenmill checkpoint repair {path} to set it to the newest complete checkpoint"


def _list_names(path: Path) -> list[str]:
    """Return the names that Megatron-LM uses for checkpoints, newest first, `release` last."""
    try:
        names = os.listdir(path)  # noqa: PTH208 - names alone
    except FileNotFoundError:
        return []
    # A user made iter_100 or iter_0000100.bak: no tracker names it.
    iterations = [name for name in names if _ITERATION.fullmatch(name) and f"iter_{int(name[5:]):07d}" == name]
    return sorted(iterations, key=torch_dist.parse_iteration, reverse=True) + [RELEASE] * (RELEASE in names)


# -- before an attempt


def repair_checkpoints(
    path: Path,
    *,
    dry_run: bool = False,
    start_over: bool = False,
    save_bytes: int = 0,
    log: Callable[[str], None] = lambda _: None,
) -> StartPoint:
    """Put a run's checkpoints in order, and return where the run resumes; node 0 calls this before every attempt.

    - The tracker names a complete checkpoint: the run resumes from that one. Newer checkpoints are moved aside,
      complete or not. Either their save was interrupted before the tracker, and the next save to the same iteration
      would mix with their files. Or a user set the tracker back, after a loss spike for example. To resume from a newer
      one would override that user. The price is the loss of one save interval, and a checkpoint can be moved back.
    - The tracker is invalid or missing, or names an incomplete checkpoint: the run resumes from the newest complete
      checkpoint, older or newer, since no valid tracker contradicts it. The tracker is set to this checkpoint, and
      newer directories are moved aside.
    - There is no tracker, and no save ever finished: the run died in its first save. It starts again without a
      checkpoint, and the existing directories are moved aside.
    - There are no checkpoints: the run starts without one.
    - In every other case there was a checkpoint, and it is damaged. The call raises, so that a run never starts
      silently without a checkpoint.

    Directories older than the checkpoint to resume from stay, complete or not: Megatron-LM does not read them. A
    network file system may show an outdated state (`directory_cache_seconds`). If a repair seems necessary, the call
    therefore checks again until the caches have expired, and logs that it waits.

    An interrupted save that lies aside stays for an inspection, unless the next save needs its space: `save_bytes`
    are expected, or the bytes of the checkpoint to resume from.

    `dry_run` changes nothing, and `actions` then contains the planned actions. `start_over` replaces the error of
    damaged checkpoints: everything is moved aside, as long as no checkpoint is complete.

    Raises:
        RequestError: no checkpoint is complete, and there was one.
    """
    with explain_os_errors(path):
        plan = _plan_after_caches(path, start_over, log)
        if dry_run:
            return plan.start
        # The tracker first: from then on it names a complete checkpoint, and the newer ones can be moved.
        if plan.tracker is not None:
            write_atomic(path / TRACKER, plan.tracker.encode(), directory=path / RECORDS_DIRECTORY)
        for name in plan.aside:
            _move(path, name, "aside")
        is_short = path.is_dir() and shutil.disk_usage(path).free < max(save_bytes, plan.start.bytes)
        deleted = _delete_surplus(path, {False: 0 if is_short else MAX_UNFINISHED_ASIDE})
        return replace(plan.start, actions=(*plan.start.actions, *deleted))


def _plan_after_caches(path: Path, start_over: bool, log: Callable[[str], None]) -> _RepairPlan:
    """Return the plan; if it needs a repair, only after the caches of a network file system have expired."""

    def is_in_order() -> bool:
        """Return whether there is a checkpoint to resume from, and no repair is necessary."""
        try:
            plan = _plan_repair(path, start_over)
        except RequestError:
            return False
        return plan.start.has_checkpoint and not plan.aside and plan.tracker is None

    if (seconds := directory_cache_seconds(path)) and not is_in_order():
        log(f"{path} is on a network file system, which may show an outdated state: checking again for {seconds:.0f} s")
        retry_while_stale(is_in_order, path)
    return _plan_repair(path, start_over)


def _plan_repair(path: Path, start_over: bool) -> _RepairPlan:
    if path.exists() and not path.is_dir():
        raise RequestError(f"{path} is not a directory: set another path for checkpoints")
    names = _list_names(path)

    @cache
    def examine(name: str) -> Checkpoint:
        return torch_dist.examine(path / name)

    tracked_name, tracker_problem = None, ""
    try:
        tracked_name = read_tracked_name(path)
    except ForeignTracker:
        raise
    except InvalidTracker as problem:
        tracker_problem = str(problem).rpartition(";")[0]
    target = next((name for name in [tracked_name, *names] if name and examine(name).complete), None)
    if start_over:
        if target:
            raise RequestError(
                f"{path / target} is complete, and a run resumes from it; to start without a checkpoint, set another "
                "directory for checkpoints (in a chart: --set storage.checkpointPath=...)"
            )
        aside = [TRACKER] * os.path.lexists(path / TRACKER) + names[::-1]
        return _RepairPlan(
            StartPoint(0, None, tuple(f"{path / name} moved aside" for name in aside)), aside=tuple(aside)
        )
    if target:
        newer = [examine(name) for name in names[::-1] if name != RELEASE and _is_newer(name, target)]
        reason = tracker_problem or (examine(tracked_name).state if tracked_name else "")
        return _plan_resume(examine(target), reason, tracked_name, newer)
    if not names and not tracker_problem and tracked_name is None:
        return _RepairPlan(StartPoint(0, None))
    incomplete = [examine(name) for name in names[::-1]]
    # A link, or the older format: probably complete, and never an interrupted save of this run.
    foreign = [
        checkpoint
        for checkpoint in incomplete
        if checkpoint.path.is_symlink() or torch_dist.is_older_format(checkpoint.path)
    ]
    if (
        not tracker_problem
        and tracked_name is None
        and not foreign
        and not any(checkpoint.finished for checkpoint in incomplete)
    ):
        actions = [
            f"{checkpoint.path} moved aside: the first save of the run did not finish ({checkpoint.state})"
            for checkpoint in incomplete
        ]
        return _RepairPlan(StartPoint(0, None, tuple(actions)), aside=tuple(names[::-1]))
    raise _no_complete_checkpoint(path, tracked_name, tracker_problem, incomplete)


def _is_newer(name: str, target: str) -> bool:
    return target == RELEASE or torch_dist.parse_iteration(name) > torch_dist.parse_iteration(target)


def _plan_resume(complete: Checkpoint, problem: str, tracked_name: str | None, newer: list[Checkpoint]) -> _RepairPlan:
    """Plan a start from a complete checkpoint; `problem` is that of the tracker or of the checkpoint in the tracker."""
    target = complete.path.name
    actions: list[str] = []
    tracker = None
    if target != tracked_name:
        tracker = RELEASE if target == RELEASE else str(torch_dist.parse_iteration(target))
        reason = problem or "there was no tracker"
        if tracked_name:
            reason = f"the tracker named {tracked_name}, which is not complete ({problem})"
        actions.append(f"tracker set to {tracker}, the newest complete checkpoint: {reason}")
    for checkpoint in newer:
        state = (
            "it is complete, but the tracker never named it or was set back"
            if checkpoint.complete
            else checkpoint.state
        )
        actions.append(f"{checkpoint.path} moved aside: newer than the checkpoint to resume from ({state})")
    return _RepairPlan(
        StartPoint(complete.iteration, target, tuple(actions), complete.bytes),
        tracker,
        tuple(checkpoint.path.name for checkpoint in newer),
    )


def _no_complete_checkpoint(
    path: Path, tracked_name: str | None, tracker_problem: str, checkpoints: list[Checkpoint]
) -> RequestError:
    tracker = tracker_problem or (f"the tracker names {tracked_name}" if tracked_name else "there is no tracker")
    states = (
        "; ".join(f"{checkpoint.path.name}: {checkpoint.state}" for checkpoint in checkpoints[::-1][:4])
        or "there are no checkpoints"
    )
    return RequestError(
        f"no checkpoint in {path} is complete, and the run would start again from iteration 0: {tracker}; {states}. "
        "Restore a complete checkpoint, or set another directory for checkpoints (in a chart: --set "
        f"storage.checkpointPath=...), or move everything aside: tokenmill checkpoint repair {path} --start-over"
    )


# -- during an attempt


def mark_before_nan(path: Path, iteration: int) -> None:
    """Mark the checkpoint that Megatron-LM saved because the next iteration had NaN."""
    name = f"iter_{iteration:07d}"
    if (path / name).is_dir():
        Tree(path).write_atomic(f"{name}/{torch_dist.BEFORE_NAN}", b"the iteration after this checkpoint had NaN\n")


def find_good_iteration(path: Path, iteration: int) -> int:
    """Return the iteration of the newest checkpoint up to `iteration` that is not marked; 0 if there is none."""
    if not os.path.lexists(path / f"iter_{iteration:07d}" / torch_dist.BEFORE_NAN):
        return iteration
    names = [name for name in _list_names(path) if not os.path.lexists(path / name / torch_dist.BEFORE_NAN)]
    return max((number for number in map(torch_dist.parse_iteration, names) if number <= iteration), default=0)


def prune(path: Path, keep: int, *, at_start: bool = False) -> list[str]:
    """Delete complete checkpoints beyond the newest `keep` up to the tracker; return a sentence for each action.

    Checkpoints that were saved because of NaN do not count, so they never replace an older one.

    The checkpoint in the tracker stays, and so does every newer one. Incomplete checkpoints stay too
    (`repair_checkpoints` decides about them), and so do links, which Megatron-LM's retention also keeps, and `release`.
    Nothing is deleted while the tracker is invalid or missing, or names an incomplete checkpoint. A deletion starts
    with one rename into .tokenmill/trash, which Megatron-LM does not read. The next call completes an interrupted
    deletion.

    Of the directories that were moved aside, the newest MAX_FINISHED_ASIDE finished ones stay, and the newest
    MAX_UNFINISHED_ASIDE others. `repair_checkpoints` deletes only interrupted saves beyond that number, so that a run
    that dies in every save does not fill the disk. It keeps all others, because a user who set the tracker back may
    inspect them until the run continues; so does a call with `at_start`, which follows `repair_checkpoints`.
    """
    if keep < 2:
        raise RequestError(
            f"invalid checkpoint.keep {keep}: it must be at least 2, because one must remain when the newest is "
            "damaged; raise it"
        )
    actions: list[str] = []
    with explain_os_errors(path):
        try:
            tracked_name = read_tracked_name(path)
        except InvalidTracker:
            tracked_name = None
        tracked = torch_dist.examine(path / tracked_name) if tracked_name and tracked_name != RELEASE else None
        if tracked_name and tracked and tracked.complete:
            older = [name for name in _list_names(path) if name != RELEASE and _is_newer(tracked_name, name)]
            remaining = keep if tracked.before_nan else keep - 1
            for checkpoint in (torch_dist.examine(path / name) for name in older):
                if not checkpoint.complete:
                    continue
                if remaining > 0 or checkpoint.path.is_symlink():
                    remaining -= not checkpoint.before_nan
                    continue
                _move(path, checkpoint.path.name, "trash")
                actions.append(f"{checkpoint.path} deleted: {keep} newer checkpoints are kept")
        limits = {False: MAX_UNFINISHED_ASIDE}
        actions += _delete_surplus(path, limits if at_start else limits | {True: MAX_FINISHED_ASIDE})
    return actions


def _delete_surplus(path: Path, limits: dict[bool, int]) -> list[str]:
    """Delete directories aside beyond the limits, and everything in the trash; return a sentence for each action.

    `limits` has the number of directories to keep by whether their save finished; others are not deleted.
    """
    actions: list[str] = []
    tree, aside, trash = Tree(path), path / RECORDS_DIRECTORY / "aside", path / RECORDS_DIRECTORY / "trash"
    for _, name in sorted(_list_numbered(path, "aside"), reverse=True):
        finished = _is_finished(aside / name)
        if (aside / name).is_symlink() or not (aside / name).is_dir() or finished not in limits:
            continue
        limits[finished] -= 1
        if limits[finished] < 0:
            _move(path, f"{RECORDS_DIRECTORY}/aside/{name}", "trash")
            actions.append(f"{aside / name} deleted: newer ones are kept aside")
    for _, name in _list_numbered(path, "trash"):
        try:
            with tree.directory(trash) as handle:
                # Fails for a pipe or a symbolic link.
                os.close(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle))
                shutil.rmtree(name, dir_fd=handle)
        except OSError as problem:  # for example an open file on NFS: the run continues, and the next call tries again
            actions.append(f"{trash / name} is not deleted yet: {problem.strerror or problem}")
    remove_abandoned(tree, "", RECORDS_DIRECTORY, path / TOKENIZER.parent, path / TOKENIZER)
    return actions


def _is_finished(directory: Path) -> bool:
    return (directory / "metadata.json").exists()


def measure_aside(path: Path) -> tuple[int, int]:
    """Return the bytes below .tokenmill that a start deletes when space is short, and those that stay until a save."""
    aside, trash = path / RECORDS_DIRECTORY / "aside", path / RECORDS_DIRECTORY / "trash"
    sizes = {True: 0, False: 0}
    for directory in (*aside.glob("*"), *trash.glob("*")):
        sizes[directory.parent == aside and _is_finished(directory)] += torch_dist.measure(directory)[0]
    return sizes[False], sizes[True]


def _list_numbered(path: Path, kind: str) -> list[tuple[int, str]]:
    """Return the number N and the name NAME-N of every entry of aside or trash."""
    parent = path / RECORDS_DIRECTORY / kind
    for directory in (parent.parent, parent):
        if directory.is_symlink():
            raise RequestError(f"{directory} is a symbolic link, but tokenmill deletes files in it: remove the link")
    return [(int(match[1]), name) for name in Tree(path).names(parent) if (match := re.search(r"-(\d{1,18})$", name))]


def _move(path: Path, name: str, kind: str) -> None:
    """Move a directory into aside or trash, under a name that was never used there."""
    tree = Tree(path)
    number = 1 + max((number for number, _ in _list_numbered(path, kind)), default=0)
    directory, _, last = name.rpartition("/")
    tree.rename(name, f"{RECORDS_DIRECTORY}/{kind}/{last}-{number}", create=True)
    tree.fsync(f"{RECORDS_DIRECTORY}/{kind}")
    tree.fsync(directory)
