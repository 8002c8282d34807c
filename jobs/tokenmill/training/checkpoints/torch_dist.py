"""One checkpoint of Megatron-LM in the format torch_dist: is it whole, how large is it, how old.

A save writes it in this order (megatron/core/dist_checkpointing, torch.distributed.checkpoint):

    common.pt         what is no tensor (`torch_file`); only older Megatron-LM, whose metadata.json has a common_backend
    __R_I.distcp      rank R's tensors, file I, synced before the next
    .metadata         which bytes of which file hold what (`metadata`); written beside and renamed
    metadata.json     {"sharded_backend": "torch_dist", ...}: without it no torch_dist checkpoint
    integrity.json    SHA-256 of every file; only with --verify-integrity

None but .metadata is written atomically, and nothing stops a save into a directory that holds an older one.
"""

import contextlib
import errno
import hashlib
import json
import os
import stat
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO

from tokenmill.errors import RequestError
from tokenmill.files.tree import check_inside
from tokenmill.training.checkpoints.metadata import Damage, extents, shown
from tokenmill.training.checkpoints.torch_file import check_whole

COMMON = "common.pt"

RELEASE = "release"
"""Directory of a converted model."""

CLOCK_TOLERANCE = 10.0
"""Seconds by which a data file may be newer than what is written after it.

A save over an older checkpoint that was cut off has new data under an old .metadata and metadata.json, and where
the sizes are the same nothing but times tells. Times come from the file server (NFS, blob), to a second or two at
worst, or from each client's own clock (Lustre), which agree to well below a second where they are kept, and may be a
few seconds off where they are not. A cut-off save, on the other hand, comes at least a restart and the iterations
of a save interval later: tens of seconds. A checkpoint that was copied without its times may look cut off; touching
.metadata and metadata.json says that it is not.
"""

SMALL = 1 << 20
"""Bytes beyond which a file of a few bytes is somebody else's."""

LARGE = 1 << 30
"""The same of a file that grows with the run: 100 bytes or so for each shard of each tensor on each rank."""


class _Missing(Damage):
    """A file is not there."""


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


def iteration(name: str) -> int:
    """Return the iteration of a checkpoint from its directory's name."""
    return 0 if name == RELEASE else int(name.removeprefix("iter_"))


def examine(directory: Path, *, full: bool = False) -> Checkpoint:
    """Look at a checkpoint, which need not be there; `full` also compares recorded hashes."""
    problems: list[str] = []
    finished = False
    try:
        if not directory.is_dir():
            what = "is a link to nothing" if directory.is_symlink() else "is no directory"
            raise Damage(what if os.path.lexists(directory) else "is not there")
        about = _about(directory)
        finished = True
        if (backend := about.get("sharded_backend")) != "torch_dist":
            raise Damage(f"metadata.json names the format {repr(backend)[:100]}, not 'torch_dist'")
        common = _common_problems(directory, needed="common_backend" in about)
        problems = common + _data_problems(directory) or (_hash_problems(directory) if full else [])
    except Damage as problem:
        problems = [str(problem)]
    size, newest = _usage(directory)
    return Checkpoint(iteration(directory.name), directory, tuple(problems), finished, size, newest)


def older_format(directory: Path) -> bool:
    """Tell whether a checkpoint is in Megatron-LM's older format, torch."""
    return any(directory.glob("mp_rank_*"))


def read(file: IO[bytes], name: str, limit: int) -> bytes:
    """Read an open file whole; one over the limit is damage."""
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise Damage(f"{name} has {size:,} bytes")
    return file.read(limit)


def _part(directory: Path, name: str, limit: int) -> bytes:
    with _open(directory, name) as file:
        return read(file, name, limit)


def _open(directory: Path, name: str) -> BufferedReader:
    """Open a regular file of a checkpoint, as `_stat` finds it; what takes its place meanwhile is damage, too."""
    _stat(directory, name)
    handle = os.open(directory / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Damage(f"{shown(name)} is no file")
    return os.fdopen(handle, "rb")


def _about(directory: Path) -> dict[str, object]:
    """Return what metadata.json says of the format."""
    try:
        value = json.loads(_part(directory, "metadata.json", SMALL))
    except (ValueError, RecursionError):
        raise Damage("metadata.json is no JSON: the save was cut off") from None
    except _Missing:
        if older_format(directory):
            # Finished or not cannot be told; nothing of it is ever taken for a save of ours that was cut off.
            raise Damage("has no metadata.json: it is in Megatron-LM's older format, torch") from None
        other = " (or it is in another format, such as torch_dcp)" if (directory / ".metadata").exists() else ""
        raise Damage(f"has no metadata.json: the save was cut off{other}") from None
    return value if isinstance(value, dict) else {}


def _common_problems(directory: Path, *, needed: bool) -> list[str]:
    """Read common.pt, which Megatron-LM loads wherever there is one, and which needs to be there where it wrote one."""
    try:
        with _open(directory, COMMON) as file:
            check_whole(file, COMMON)
    except _Missing as problem:
        return [str(problem)] if needed else []
    except Damage as problem:
        return [str(problem)]
    return []


def _data_problems(directory: Path) -> list[str]:
    """Compare the data files with what .metadata says about them."""
    try:
        needed = extents(_part(directory, ".metadata", LARGE))
    except _Missing:
        raise Damage("has no .metadata: a save over it was cut off") from None
    problems: list[str] = []
    newest = (0.0, "")
    for name, size in sorted(needed.items()):
        try:
            found = _stat(directory, name)
        except Damage as problem:
            problems.append(str(problem))
            continue
        if found.st_size < size:
            problems.append(f"{shown(name)} has {found.st_size:,} bytes where .metadata needs {size:,}")
        newest = max(newest, (found.st_mtime, shown(name)))
    later = min((_stat(directory, name).st_mtime, name) for name in (".metadata", "metadata.json"))
    if newest[0] > later[0] + CLOCK_TOLERANCE:
        problems.append(
            f"{newest[1]} is {newest[0] - later[0]:,.0f} s newer than {later[1]}: a save over it was cut off (where it "
            f"was only copied without its times, say so: touch {directory}/.metadata {directory}/metadata.json)"
        )
    return problems


def _hash_problems(directory: Path) -> list[str]:
    """Compare the files with the hashes that --verify-integrity left; nothing where it left none."""
    try:
        manifest = json.loads(_part(directory, "integrity.json", LARGE))
        if manifest.get("algorithm", "sha256") != "sha256":
            return [f"integrity.json has hashes of {repr(manifest['algorithm'])[:100]}, not of 'sha256'"]
        named = {str(name): str(digest) for name, digest in manifest["files"].items()}
    except _Missing:
        return []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ["integrity.json holds no SHA-256 hashes: it was cut off"]
    problems: list[str] = []
    for name, digest in named.items():
        try:
            with _open(directory, name) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    problems.append(f"{shown(name)} has other bytes than integrity.json says")
        except _Missing:
            problems.append(f"{shown(name)}, of which integrity.json has the hash, is missing")
        except Damage as problem:
            problems.append(str(problem))
    return problems


def _stat(directory: Path, relative: str) -> os.stat_result:
    """Return the state of a regular file in a checkpoint.

    Raises:
        Damage: it is missing, the path or a link on it leads out of the checkpoint, or it is something else.
    """
    name = shown(relative)
    try:
        check_inside(directory, relative)
        file = directory / relative
        found = file.lstat()
        if stat.S_ISLNK(found.st_mode) or "/" in relative:
            if not file.resolve().is_relative_to(directory.resolve()):
                raise Damage(f"{name} is a link that leads out of the checkpoint")
            found = file.stat()
    except RequestError:
        raise Damage(f"{name}, which .metadata or integrity.json names, is outside the checkpoint") from None
    except FileNotFoundError:
        raise _Missing(f"{name} is missing") from None
    except (ValueError, RuntimeError):  # no name at all in UTF-8; a link to itself
        raise Damage(f"{name} leads nowhere") from None
    except OSError as problem:
        if problem.errno not in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR):
            raise
        raise Damage(f"{name} leads nowhere: {problem.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise Damage(f"{name} is no file")
    return found


def _usage(directory: Path) -> tuple[int, float]:
    """Return the bytes of all files below a directory, and the time of the newest."""
    total, newest = 0, 0.0
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                found = os.lstat(os.path.join(place, name))  # noqa: PTH118 - thousands of files
                total, newest = total + found.st_size, max(newest, found.st_mtime)
    return total, newest
