"""One checkpoint of Megatron-LM in the format torch_dist: is it complete, its size, its age.

`repair` examines the checkpoints of a run with it. A save writes these files, in this order
(megatron/core/dist_checkpointing, torch.distributed.checkpoint):

    common.pt         everything except tensors (`torch_file`); only an older Megatron-LM, whose metadata.json has a
                      common_backend
    __R_I.distcp      rank R's tensors, file I, synced before the next file
    .metadata         the bytes of each file that a tensor has (`metadata`); written under another name and renamed
    metadata.json     {"sharded_backend": "torch_dist", ...}: without it the directory is not a torch_dist checkpoint
    integrity.json    SHA-256 of every file; only with --verify-integrity

Only .metadata is written atomically, and Megatron-LM also saves into a directory that contains an older checkpoint.
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

from tokenmill.checkpoints.metadata import Damage, read_extents
from tokenmill.checkpoints.torch_file import check_torch_file
from tokenmill.core.files.tree import check_inside
from tokenmill.core.printing import MAX_NAME, printable
from tokenmill.errors import RequestError

COMMON = "common.pt"

BEFORE_NAN = "tokenmill-before-nan.txt"
"""File of tokenmill in a checkpoint that Megatron-LM saved because the next iteration had NaN."""

RELEASE = "release"
"""Directory of a converted model."""

CLOCK_TOLERANCE_SECONDS = 10.0
"""Seconds by which a data file may be newer than the files that a save writes after it.

A save over an older checkpoint that was interrupted leaves new data under an old .metadata and metadata.json. If the
sizes are equal, only the times show it. Times come from the file server (NFS, blob), and are exact to a second or two
at worst. Or they come from each client's own clock (Lustre): synchronized clocks agree to well below a second, others
may be a few seconds off. An interrupted save, on the other hand, is later by at least a restart and the iterations of a
save interval: tens of seconds. A checkpoint that was copied without its times may look interrupted; touching .metadata
and metadata.json corrects that.
"""

MAX_SMALL_FILE_BYTES = 1 << 20
"""Maximum bytes of a file that has a few bytes in a checkpoint; a larger one is not Megatron-LM's."""

MAX_LARGE_FILE_BYTES = 1 << 30
"""Maximum bytes of a file that grows with the run: about 100 bytes for each shard of each tensor on each rank."""


class _MissingFile(Damage):
    """A file does not exist."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of one directory of a run's checkpoints."""

    iteration: int
    """Iteration of the checkpoint; 0 for `release`, as in Megatron-LM."""
    path: Path
    problems: tuple[str, ...]
    """Why the checkpoint is incomplete; empty if it is complete."""
    finished: bool
    """Whether the save finished: a finished but damaged checkpoint has lost data, an unfinished one never had it."""
    bytes: int
    mtime: float
    """Modification time of the newest file, in seconds since 1970."""
    before_nan: bool = False
    """Whether the checkpoint was saved because the next iteration had NaN, which its weights may cause."""

    @property
    def complete(self) -> bool:
        """Return whether a run can resume from the checkpoint."""
        return not self.problems

    @property
    def state(self) -> str:
        """Return `complete`, or a line about why it is not."""
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        return f"{self.problems[0]}{more}" if self.problems else "complete"


def parse_iteration(name: str) -> int:
    """Return the iteration of a checkpoint from the name of its directory."""
    return 0 if name == RELEASE else int(name.removeprefix("iter_"))


def examine(directory: Path, *, full: bool = False) -> Checkpoint:
    """Return the state of a checkpoint, which need not exist; `full` also compares recorded hashes."""
    problems: list[str] = []
    finished = False
    try:
        if not directory.is_dir():
            reason = "is a dangling symbolic link" if directory.is_symlink() else "is not a directory"
            raise Damage(reason if os.path.lexists(directory) else "does not exist")
        save_format = _read_format(directory)
        finished = True
        if (backend := save_format.get("sharded_backend")) != "torch_dist":
            raise Damage(f"metadata.json names the format {repr(backend)[:100]}, not 'torch_dist'")
        common = _check_common(directory, needed="common_backend" in save_format)
        problems = common + _check_data(directory) or (_check_hashes(directory) if full else [])
    except Damage as problem:
        problems = [str(problem)]
    size, newest = measure(directory)
    before_nan = os.path.lexists(directory / BEFORE_NAN)
    return Checkpoint(parse_iteration(directory.name), directory, tuple(problems), finished, size, newest, before_nan)


def is_older_format(directory: Path) -> bool:
    """Return whether a checkpoint is in Megatron-LM's older format, torch."""
    return any(directory.glob("mp_rank_*"))


def read_limited(file: IO[bytes], name: str, limit: int) -> bytes:
    """Read an open file completely.

    Raises:
        Damage: the file has more than `limit` bytes.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size > limit:
        raise Damage(f"{name} has {size:,} bytes, which is too many")
    return file.read(limit)


def _read_file(directory: Path, name: str, limit: int) -> bytes:
    with _open_file(directory, name) as file:
        return read_limited(file, name, limit)


def _open_file(directory: Path, name: str) -> BufferedReader:
    """Open a regular file of a checkpoint after the checks of `_stat_file`.

    Raises:
        Damage: the path is not a regular file, or became something else between the check and the open.
    """
    _stat_file(directory, name)
    handle = os.open(directory / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Damage(f"{printable(name, MAX_NAME)} is not a regular file")
    return os.fdopen(handle, "rb")


def _read_format(directory: Path) -> dict[str, object]:
    """Return the content of metadata.json, which names the format."""
    try:
        value = json.loads(_read_file(directory, "metadata.json", MAX_SMALL_FILE_BYTES))
    except (ValueError, RecursionError):
        raise Damage("metadata.json is not JSON: the save was interrupted") from None
    except _MissingFile:
        if is_older_format(directory):
            # This format does not show whether its save finished. It never counts as an interrupted save of this run.
            raise Damage("has no metadata.json: it is in Megatron-LM's older format, torch") from None
        other = " (or it is in another format, such as torch_dcp)" if (directory / ".metadata").exists() else ""
        raise Damage(f"has no metadata.json: the save was interrupted{other}") from None
    return value if isinstance(value, dict) else {}


def _check_common(directory: Path, *, needed: bool) -> list[str]:
    """Check common.pt, which Megatron-LM loads if it exists, and which must exist if Megatron-LM wrote it."""
    try:
        with _open_file(directory, COMMON) as file:
            check_torch_file(file, COMMON)
    except _MissingFile as problem:
        return [str(problem)] if needed else []
    except Damage as problem:
        return [str(problem)]
    return []


def _check_data(directory: Path) -> list[str]:
    """Compare the sizes and times of the data files with .metadata."""
    try:
        needed_bytes = read_extents(_read_file(directory, ".metadata", MAX_LARGE_FILE_BYTES))
    except _MissingFile:
        raise Damage("has no .metadata: a save over it was interrupted") from None
    problems: list[str] = []
    newest = (0.0, "")
    for name, size in sorted(needed_bytes.items()):
        try:
            status = _stat_file(directory, name)
        except Damage as problem:
            problems.append(str(problem))
            continue
        if status.st_size < size:
            problems.append(
                f"{printable(name, MAX_NAME)} has {status.st_size:,} bytes, but .metadata requires {size:,}"
            )
        newest = max(newest, (status.st_mtime, printable(name, MAX_NAME)))
    later = min((_stat_file(directory, name).st_mtime, name) for name in (".metadata", "metadata.json"))
    if newest[0] > later[0] + CLOCK_TOLERANCE_SECONDS:
        problems.append(
            f"{newest[1]} is {newest[0] - later[0]:,.0f} s newer than {later[1]}: a save over it was interrupted (if "
            f"the checkpoint was copied without its times, run: touch {directory}/.metadata {directory}/metadata.json)"
        )
    return problems


def _check_hashes(directory: Path) -> list[str]:
    """Compare the files with the hashes that --verify-integrity wrote, if there are any."""
    try:
        manifest = json.loads(_read_file(directory, "integrity.json", MAX_LARGE_FILE_BYTES))
        if manifest.get("algorithm", "sha256") != "sha256":
            return [f"integrity.json has hashes of {repr(manifest['algorithm'])[:100]}, not of 'sha256'"]
        digests = {str(name): str(digest) for name, digest in manifest["files"].items()}
    except _MissingFile:
        return []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ["integrity.json contains no SHA-256 hashes: it is truncated"]
    problems: list[str] = []
    for name, digest in digests.items():
        try:
            with _open_file(directory, name) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    problems.append(f"{printable(name, MAX_NAME)} does not match its hash in integrity.json")
        except _MissingFile:
            problems.append(f"{printable(name, MAX_NAME)} is missing, but integrity.json has its hash")
        except Damage as problem:
            problems.append(str(problem))
    return problems


def _stat_file(directory: Path, relative: str) -> os.stat_result:
    """Return the status of a regular file in a checkpoint.

    Raises:
        Damage: the file is missing or not a regular file, or its path or a link leads out of the checkpoint.
    """
    name = printable(relative, MAX_NAME)
    try:
        check_inside(directory, relative)
        file = directory / relative
        status = file.lstat()
        if stat.S_ISLNK(status.st_mode) or "/" in relative:
            if not file.resolve().is_relative_to(directory.resolve()):
                raise Damage(f"{name} is a symbolic link that leads out of the checkpoint")
            status = file.stat()
    except RequestError:
        raise Damage(f"{name} is outside the checkpoint, but .metadata or integrity.json names it") from None
    except FileNotFoundError:
        raise _MissingFile(f"{name} is missing") from None
    except (ValueError, RuntimeError):  # a name that is not valid UTF-8; a link to itself
        raise Damage(f"{name} is not a valid path") from None
    except OSError as problem:
        if problem.errno not in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR):
            raise
        raise Damage(f"{name} is not a valid path: {problem.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise Damage(f"{name} is not a regular file")
    return status


def measure(directory: Path) -> tuple[int, float]:
    """Return the bytes of all files below a directory, and the modification time of the newest."""
    total, newest = 0, 0.0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                status = os.lstat(os.path.join(parent, name))  # noqa: PTH118 - thousands of files
                total, newest = total + status.st_size, max(newest, status.st_mtime)
    return total, newest
