"""Megatron-LM's checkpoints of a run: which are whole, which one a start resumes from, which may go.

A directory of torch_dist checkpoints, in the order in which a save writes it (megatron/training/checkpointing.py,
megatron/core/dist_checkpointing, torch.distributed.checkpoint):

    iter_0000100/__R_I.distcp               rank R's tensors, file I, synced before the next
    iter_0000100/.metadata                  pickle of torch.distributed.checkpoint's Metadata: which bytes of which file
                                            hold what; written beside and renamed
    iter_0000100/metadata.json              {"sharded_backend": "torch_dist", ...}: without it no torch_dist checkpoint
    iter_0000100/integrity.json             SHA-256 of every file; only with --verify-integrity
    latest_checkpointed_iteration.txt       the tracker: an iteration, or `release` for a converted model in release/
    .tokenmill/aside/NAME-N                 ours: what a start moved out of the way, N counts up
    .tokenmill/trash/NAME-N                 ours: what is being deleted

None but .metadata is written atomically, and nothing stops a save into a directory that holds an older one.

Node 0 calls `prepare` before a start and `prune` while the run goes on. Both decide first and then act in steps of
one rename each, so that after a kill between any two the same call comes to the same end.
"""

import contextlib
import errno
import gc
import hashlib
import io
import json
import os
import pickle
import re
import resource
import shutil
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenmill.errors import InputError, RequestError
from tokenmill.files import (
    RECORDS,
    abandoned,
    check_inside,
    explained,
    fsync_directory,
    patiently,
    settle_seconds,
    write_atomic,
)

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"

CLOCK_TOLERANCE = 10.0
"""Seconds by which a data file may be newer than what is written after it.

A save over an older checkpoint that was cut off has new data under an old .metadata and metadata.json, and where
the sizes are the same nothing but times tells. Times come from the file server (NFS, blob), to a second or two at
worst, or from each client's own clock (Lustre), which agree to well below a second where they are kept, and may be a
few seconds off where they are not. A cut-off save, on the other hand, comes at least a restart and the iterations
of a save interval later: tens of seconds. A checkpoint that was copied without its times may look cut off; touching
.metadata and metadata.json says that it is not.
"""

ASIDE_FINISHED = 2
"""Checkpoints kept aside whose save was finished: a rollback moves as many as retention had kept, two at least."""

ASIDE_UNFINISHED = 1
"""Cut-off saves kept aside, for somebody who wants to know; each may be as large as a checkpoint."""

_SMALL = 1 << 20
"""Bytes beyond which a file of a few bytes is somebody else's."""

_ITERATION = re.compile(r"iter_\d{7,15}")


class TornTracker(InputError):
    """The tracker names no iteration: cut off while it was written, or damaged."""


class _Damage(Exception):
    """Why a checkpoint is not whole, in words."""


@dataclass(frozen=True)
class Checkpoint:
    """One directory of a run's checkpoints, as it was found."""

    iteration: int
    """0 for `release`, as Megatron-LM counts it."""
    path: Path
    problems: tuple[str, ...]
    """Why it is not whole; empty when it is."""
    finished: bool
    """Whether its save came to the end: one that did and is damaged has lost something, one that did not never was."""
    bytes: int
    mtime: float
    """Of the newest file, in seconds since 1970."""

    @property
    def complete(self) -> bool:
        """Whether a run can resume from it."""
        return not self.problems

    @property
    def state(self) -> str:
        """`complete`, or why it is not, in a line."""
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        return f"{self.problems[0]}{more}" if self.problems else "complete"


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

    @property
    def clear(self) -> bool:
        """Whether there is a checkpoint to resume from and nothing to do."""
        return self.start.resume and not self.aside and self.tracker is None


# -- looking


def read_tracker(path: Path) -> int | None:
    """Read the iteration that the tracker of a checkpoint directory names: 0 for `release`, None without a tracker.

    Raises:
        TornTracker: it names none; a reader in the middle of a run may also have met Megatron-LM writing it.
    """
    named = tracked(path)
    return None if named is None else _iteration(named)


def tracked(path: Path) -> str | None:
    """Return the name of the checkpoint that the tracker names, which need not be there; None without a tracker."""
    with explained(path):
        try:
            text = _read(path / TRACKER, _SMALL).strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except _Damage as problem:
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
        return [_look(path, name, full=full) for name in reversed(_names(path))]


def look(path: Path, *, full: bool = False) -> Checkpoint | None:
    """Look at the checkpoint that the tracker names, whether it is there or not; None without a tracker."""
    with explained(path):
        named = tracked(path)
        return None if named is None else _look(path, named, full=full)


def _to_repair(path: Path) -> str:
    return f"tokenmill checkpoint repair {path} sets it to the newest whole checkpoint"


def _iteration(name: str) -> int:
    return 0 if name == RELEASE else int(name.removeprefix("iter_"))


def _names(path: Path) -> list[str]:
    """List the names of what Megatron-LM would take for checkpoints, newest first, `release` last."""
    try:
        found = os.listdir(path)  # noqa: PTH208 - names alone
    except FileNotFoundError:
        return []
    # iter_100 and iter_0000100.bak are somebody's own: no tracker leads there.
    iterations = [name for name in found if _ITERATION.fullmatch(name) and f"iter_{int(name[5:]):07d}" == name]
    return sorted(iterations, key=_iteration, reverse=True) + [RELEASE] * (RELEASE in found)


def _look(path: Path, name: str, *, full: bool = False) -> Checkpoint:
    directory = path / name
    problems: list[str] = []
    finished = False
    try:
        if not directory.is_dir():
            what = "is a link to nothing" if directory.is_symlink() else "is no directory"
            raise _Damage(what if os.path.lexists(directory) else "is not there")
        backend = _backend(directory)
        finished = True
        if backend != "torch_dist":
            raise _Damage(f"metadata.json names the format {backend!r}, not 'torch_dist'")
        problems = _data_problems(directory) or (_hash_problems(directory) if full else [])
    except _Damage as problem:
        problems = [str(problem)]
    size, newest = _usage(directory)
    return Checkpoint(_iteration(name), directory, tuple(problems), finished, size, newest)


def _backend(directory: Path) -> object:
    """Return the format that metadata.json names."""
    try:
        value = json.loads(_part(directory, "metadata.json", _SMALL))
    except (ValueError, RecursionError):
        raise _Damage("metadata.json is no JSON: the save was cut off") from None
    except FileNotFoundError:
        if any(directory.glob("mp_rank_*")):
            # Finished or not cannot be told; nothing of it is ever taken for a save of ours that was cut off.
            raise _Damage("has no metadata.json: it is in Megatron-LM's older format, torch") from None
        other = " (or it is in another format, such as torch_dcp)" if (directory / ".metadata").exists() else ""
        raise _Damage(f"has no metadata.json: the save was cut off{other}") from None
    return value.get("sharded_backend") if isinstance(value, dict) else None


def _data_problems(directory: Path) -> list[str]:
    """Compare the data files with what .metadata says about them."""
    try:
        extents = _extents(_part(directory, ".metadata"))
    except FileNotFoundError:
        raise _Damage("has no .metadata: a save over it was cut off") from None
    problems: list[str] = []
    newest, newest_name = 0.0, ""
    for name, needed in sorted(extents.items()):
        try:
            found = _stat(directory, name)
        except FileNotFoundError:
            problems.append(f"{_shown(name)} is missing")
            continue
        except _Damage as problem:
            problems.append(str(problem))
            continue
        if found.st_size < needed:
            problems.append(f"{_shown(name)} has {found.st_size:,} bytes where .metadata needs {needed:,}")
        if found.st_mtime > newest:
            newest, newest_name = found.st_mtime, _shown(name)
    later = min((_stat(directory, name).st_mtime, name) for name in (".metadata", "metadata.json"))
    if newest > later[0] + CLOCK_TOLERANCE:
        problems.append(
            f"{newest_name} is {newest - later[0]:,.0f} s newer than {later[1]}: a save over it was cut off (where it "
            f"was only copied without its times, say so: touch {directory}/.metadata {directory}/metadata.json)"
        )
    return problems


def _hash_problems(directory: Path) -> list[str]:
    """Compare the files with the hashes that --verify-integrity left; nothing where it left none."""
    try:
        manifest = json.loads(_part(directory, "integrity.json", 64 * _SMALL))
        if manifest.get("algorithm", "sha256") != "sha256":
            return [f"integrity.json has hashes of {manifest['algorithm']!r}, not of 'sha256'"]
        named = {str(name): str(digest) for name, digest in manifest["files"].items()}
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ["integrity.json holds no SHA-256 hashes: it was cut off"]
    problems: list[str] = []
    for name, digest in named.items():
        try:
            _stat(directory, name)
            with (directory / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    problems.append(f"{_shown(name)} has other bytes than integrity.json says")
        except FileNotFoundError:
            problems.append(f"{_shown(name)}, of which integrity.json has the hash, is missing")
        except _Damage as problem:
            problems.append(str(problem))
    return problems


def _stat(directory: Path, relative: str) -> os.stat_result:
    """Return the state of a regular file in a checkpoint.

    Raises:
        _Damage: the path, or a link on it, leads out of the checkpoint, or there is something else than a file.
    """
    shown = _shown(relative)
    try:
        check_inside(directory, relative)
        file = directory / relative
        found = file.lstat()
        if stat.S_ISLNK(found.st_mode) or "/" in relative:
            if not file.resolve().is_relative_to(directory.resolve()):
                raise _Damage(f"{shown} is a link that leads out of the checkpoint")
            found = file.stat()
    except RequestError:
        raise _Damage(f"{shown}, which .metadata or integrity.json names, is outside the checkpoint") from None
    except (ValueError, RuntimeError):  # no name at all in UTF-8; a link to itself
        raise _Damage(f"{shown} leads nowhere") from None
    except OSError as problem:
        if problem.errno not in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR):
            raise
        raise _Damage(f"{shown} leads nowhere: {problem.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise _Damage(f"{shown} is no file")
    return found


def _shown(name: str) -> str:
    """Return a name that came from a file as it may be printed."""
    return name if name.isprintable() and len(name) <= 100 else ascii(name[:100])


def _part(directory: Path, relative: str, limit: int | None = None) -> bytes:
    _stat(directory, relative)
    return _read(directory / relative, limit)


def _read(file: Path, limit: int | None = None) -> bytes:
    """Read a file whole; what is no file, or over the limit, is damage."""
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # without it a pipe of this name would hang the start
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _Damage(f"{file.name} is no file")
        if limit is not None and found.st_size > limit:
            raise _Damage(f"{file.name} has {found.st_size:,} bytes")
        with os.fdopen(fd, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(fd)


def _usage(directory: Path) -> tuple[int, float]:
    """Return the bytes of all files below a directory, and the time of the newest."""
    total, newest, left = 0, 0.0, [directory]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left.append(Path(entry.path))
                        continue
                    found = entry.stat(follow_symlinks=False)
                    total, newest = total + found.st_size, max(newest, found.st_mtime)
        except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile, or none
            continue
    return total, newest


# -- .metadata, without torch and without trusting it


class _Inert:
    """Stands for anything of torch's in .metadata: takes every argument and state, and keeps and does nothing."""

    __slots__ = ()

    def __new__(cls, *_: object, **__: object) -> "_Inert":
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


class _Choice(_Inert):
    """Stands for an enum."""

    __slots__ = ()


class _Kept(_Inert):
    """Stands for a class of which some fields matter."""

    __slots__: tuple[str, ...] = ()

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            for name in self.__slots__:
                setattr(self, name, state.get(name))


class _Metadata(_Kept):
    __slots__ = ("storage_data",)


class _Storage(_Kept):
    """A stretch of a data file: torch.distributed.checkpoint.filesystem._StorageInfo."""

    __slots__ = ("length", "offset", "relative_path")


class _Member(_Inert):
    """Stands for getattr, with which early Python 3.11 pickles an enum's members; of anything else it is refused."""

    __slots__ = ()

    def __new__(cls, owner: object, _name: object) -> "_Member":
        if owner is not _Choice:
            raise _Damage(".metadata takes attributes of what is no enum: do not load it")
        return super().__new__(cls)  # type: ignore[return-value]


_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_STANDS_FOR: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Metadata,
    (_MEGATRON, "MCoreMetadata"): _Metadata,  # its subclass, in checkpoints of Megatron Core 0.14 and 0.15
    (_MEGATRON, "MCoreSavePlan"): _Inert,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Storage,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): _Inert,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Choice,
    **{
        (_METADATA, name): _Inert
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    },
    # Megatron-LM adds every rank's plan.
    (_PLANNER, "WriteItemType"): _Choice,
    **{(_PLANNER, name): _Inert for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem")},
    ("torch", "Size"): _Inert,
    ("torch.serialization", "_get_layout"): _Inert,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "getattr"): _Member,
    **{(module, "PosixPath"): _Inert for module in ("pathlib", "pathlib._local")},
}
_DTYPE = re.compile(r"bool|(b?float|complex|q?u?int|bits)\d[0-9a-z_]*")


class _Reader(pickle.Unpickler):
    """Reads .metadata with stand-ins in place of every class it may name; another name is refused, nothing is run.

    What Megatron-LM itself would do with it later is to run whatever it names: refusing here also protects the run.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = _STANDS_FOR.get((module_name, global_name))
        if found is None and module_name == "torch" and _DTYPE.fullmatch(global_name):
            found = _Inert
        if found is None:
            name = _shown(f"{module_name}.{global_name}")
            raise _Damage(f".metadata names {name}, which no checkpoint needs: do not load it")
        return found


def _extents(data: bytes) -> dict[str, int]:
    """Return the bytes that every data file must have at least, by its path in the checkpoint."""
    collecting = gc.isenabled()
    gc.disable()  # a large run's has a million objects, which the collector would look through again and again
    try:
        with _bounded_memory(len(data)):
            found = _Reader(io.BytesIO(data)).load()
    except _Damage:
        raise
    except Exception as problem:  # the pickle machine raises almost anything at damaged input
        raise _Damage(f".metadata is damaged: {str(problem) or type(problem).__name__}") from None
    finally:
        if collecting:
            gc.enable()
    storage = getattr(found, "storage_data", None)
    if not isinstance(found, _Metadata) or not isinstance(storage, dict) or not storage:
        raise _Damage(".metadata names no data")
    extents: dict[str, int] = {}
    for entry in storage.values():
        path, offset, length = (getattr(entry, name, None) for name in ("relative_path", "offset", "length"))
        if not (isinstance(path, str) and type(offset) is int and type(length) is int and min(offset, length) >= 0):
            raise _Damage(".metadata is damaged: an entry names no stretch of a file")
        extents[path] = max(extents.get(path, 0), offset + length)
    return extents


@contextlib.contextmanager
def _bounded_memory(size: int) -> Iterator[None]:
    """Let this process grow by a hundred bytes for each of a pickle's, and a GiB, and refuse it more.

    One wrong byte can ask the pickle machine for a table of 2**32 places, and the pod would die of it.
    """
    try:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = in_use + (1 << 30) + 100 * size
        if soft == resource.RLIM_INFINITY or soft > most:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    except (OSError, ValueError):  # not Linux
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


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
    outcome: _Plan | RequestError

    def clear() -> bool:
        nonlocal outcome
        try:
            outcome = _plan(path, start_over)
        except RequestError as refusal:
            outcome = refusal
        return isinstance(outcome, _Plan) and outcome.clear

    if not clear() and (seconds := settle_seconds(path)):
        say(f"{path} is on a network file system, which may show an old state: looking again for {seconds:.0f} s")
        patiently(clear, path)
    if isinstance(outcome, RequestError):
        raise outcome
    return outcome


def _plan(path: Path, start_over: bool) -> _Plan:
    if path.exists() and not path.is_dir():
        raise RequestError(f"{path} is no directory: give another one for checkpoints")
    names = _names(path)
    looked: dict[str, Checkpoint] = {}

    def at(name: str) -> Checkpoint:
        if name not in looked:
            looked[name] = _look(path, name)
        return looked[name]

    named, torn = None, ""
    try:
        named = tracked(path)
    except TornTracker as problem:
        torn = str(problem).rpartition(";")[0]
    if named and at(named).complete:
        target: str | None = named
    else:
        target = next((name for name in names if at(name).complete), None)
    if start_over:
        if target:
            raise RequestError(
                f"{path / target} is whole, and a run resumes from it; to begin anew give the run another directory "
                "for checkpoints (in a chart: --set checkpoint.path=...)"
            )
        over = [TRACKER] * os.path.lexists(path / TRACKER) + names[::-1]
        return _Plan(Start(0, None, tuple(f"{path / name} moved aside" for name in over)), aside=tuple(over))
    if target:
        newer = [at(name) for name in names[::-1] if name != RELEASE and _later(name, target)]
        return _resume(path, target, torn or (at(named).state if named else ""), named, newer)
    if not names and not torn and named is None:
        return _Plan(Start(0, None))
    begun = [at(name) for name in names[::-1]]
    if not torn and named is None and not any(one.finished or _foreign(one.path) for one in begun):
        done = [f"{one.path} moved aside: the run's first save was never finished ({one.state})" for one in begun]
        return _Plan(Start(0, None, tuple(done)), aside=tuple(names[::-1]))
    raise _nothing_whole(path, named, torn, begun)


def _later(name: str, target: str) -> bool:
    return target == RELEASE or _iteration(name) > _iteration(target)


def _resume(path: Path, target: str, wrong: str, named: str | None, newer: list[Checkpoint]) -> _Plan:
    """Plan a start from a whole checkpoint; `wrong` is what is wrong with the tracker or with what it names."""
    done: list[str] = []
    tracker = None
    if target != named:
        tracker = RELEASE if target == RELEASE else str(_iteration(target))
        why = wrong or "there was none"
        if named:
            why = f"it named {named}, which is not whole ({wrong})"
        done.append(f"tracker set to {tracker}, the newest whole checkpoint: {why}")
    for one in newer:
        state = "it is whole, but the tracker was never set to it, or was set back" if one.complete else one.state
        done.append(f"{one.path} moved aside: newer than where the run resumes ({state})")
    return _Plan(Start(_iteration(target), target, tuple(done)), tracker, tuple(one.path.name for one in newer))


def _foreign(directory: Path) -> bool:
    """Tell whether a directory is none of torch_dist's: a whole checkpoint of another format, as likely as not."""
    return directory.is_symlink() or any(directory.glob("mp_rank_*"))


def _nothing_whole(path: Path, named: str | None, torn: str, found: list[Checkpoint]) -> RequestError:
    tracker = torn or (f"the tracker names {named}" if named else "there is no tracker")
    states = "; ".join(f"{one.path.name}: {one.state}" for one in found[::-1][:4]) or "there are none"
    return RequestError(
        f"no checkpoint in {path} is whole, and the run would begin again from nothing: {tracker}; {states}. "
        f"Bring a whole one back, or give the run another directory (in a chart: --set checkpoint.path=...), or move "
        f"what is there out of the way: tokenmill checkpoint repair {path} --start-over"
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
        if named and named != RELEASE and _look(path, named).complete:
            older = [name for name in _names(path) if name != RELEASE and _later(named, name)]
            left = keep - 1
            for one in (_look(path, name) for name in older):
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
    records = path / RECORDS
    aside, trash = records / "aside", records / "trash"
    for name in sorted(_numbered(aside), key=_number, reverse=True):
        finished = (aside / name / "metadata.json").exists()
        if (aside / name).is_symlink() or not (aside / name).is_dir() or finished not in kept:
            continue
        kept[finished] -= 1
        if kept[finished] < 0:
            _move(aside, name, "trash", records)
            done.append(f"{aside / name} deleted: newer ones lie aside")
    for name in _numbered(trash):
        try:
            shutil.rmtree(trash / name)
        except OSError as problem:  # an open file's name on NFS, say: the run goes on, and the next call tries again
            done.append(f"{trash / name} is not deleted yet: {problem.strerror or problem}")
    for file in records.iterdir() if records.is_dir() else ():
        if abandoned(file):
            file.unlink(missing_ok=True)
    return done


def _numbered(place: Path) -> list[str]:
    """List what lies aside or in the trash: NAME-N."""
    if not place.is_dir():
        return []
    return [each.name for each in place.iterdir() if re.search(r"-\d+$", each.name)]


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _move(path: Path, name: str, kind: str, records: Path | None = None) -> None:
    """Rename an entry of `path` out of Megatron-LM's sight, to a name that was not used there before."""
    place = (records or path / RECORDS) / kind
    place.mkdir(parents=True, exist_ok=True)
    number = 1 + max(map(_number, _numbered(place)), default=0)
    (path / name).rename(place / f"{name}-{number}")
    fsync_directory(place)
    fsync_directory(path)
