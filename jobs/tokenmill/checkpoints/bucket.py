"""The checkpoints of a run in a bucket: upload, completeness, retention, and copies on the disk of a node.

    iter_0000100/...                        the files of a checkpoint, with the names that the framework gave them
    iter_0000100/tokenmill-checkpoint.json  the record: first that an upload started, last all files, with hashes
    latest_checkpointed_iteration.txt       the tracker, written after a complete record
    .tokenmill/...                          records of the run (`train.runtime.attempts`)

A checkpoint is complete if its record has all files, and the objects have the recorded sizes. Everything below a record
of an unfinished upload is what a killed node left: node 0 deletes it before the next attempt. Objects without a record
are not from tokenmill: they are never read and never deleted. On the disk, the same names are below the directory that
stands for the address (`core.buckets.mirror`); each node writes and reads its own files there.

`train.runtime.uploads` calls `begin`, `upload` and `complete` for each finished save.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tokenmill.checkpoints.metadata import Damage, read_extents
from tokenmill.checkpoints.repair import TRACKER, InvalidTracker, StartPoint, read_tracked_iteration
from tokenmill.checkpoints.torch_dist import BEFORE_NAN, Checkpoint
from tokenmill.core.buckets.copies import BucketFile, copy_files
from tokenmill.core.buckets.tree import open_bucket
from tokenmill.core.files.codec import read_json, readable_json
from tokenmill.core.files.hashing import hash_file
from tokenmill.core.files.paths import RECORDS_DIRECTORY
from tokenmill.core.files.tree import Tree, check_inside
from tokenmill.core.machine import process_name
from tokenmill.core.typed_json import convert_json
from tokenmill.errors import InputError, RequestError, TransientError

RECORD = "tokenmill-checkpoint.json"
LAST_FILES = (".metadata", "metadata.json")
"""Files that a save of Megatron-LM writes last; they are uploaded last, too."""
UPLOADS_AT_ONCE = 4
"""Files that a node uploads at the same time, each in parts (`core.buckets.client`)."""
FOREIGN = "tokenmill did not upload it: it has no valid record"
_NAME = re.compile(r"(?:iter_|checkpoint-)(\d{1,15})")
"""Directories of Megatron-LM, and of the programs of other frameworks."""


class RecordedFile(msgspec.Struct, frozen=True):
    """A file of a checkpoint: its path below the checkpoint, its bytes and its xxh3-128."""

    name: str
    size: int
    hash: str


class CheckpointRecord(msgspec.Struct, frozen=True):
    """The content of the record of a checkpoint."""

    complete: bool
    files: list[RecordedFile]
    format: int = 1


class DamagedCheckpoint(InputError):
    """Objects of a checkpoint are missing, or have another content than the record."""


class BucketCheckpoints:
    """The checkpoints of a run below a prefix of a bucket.

    The errors of all methods are those of `core.buckets.tree.BucketTree`.
    """

    def __init__(self, path: Path) -> None:
        """Open the bucket; `path` is the directory that stands for the address."""
        self.path = path
        self.tree = open_bucket(path)

    # -- reading

    def list_checkpoints(self) -> list[Checkpoint]:
        """Return the state of every checkpoint, oldest first."""
        names = [name for name in self.tree.directories("") if _NAME.fullmatch(name)]
        return sorted(map(self.examine, names), key=lambda checkpoint: checkpoint.iteration)

    def examine(self, name: str) -> Checkpoint:
        """Return the state of a checkpoint; it is not `finished` if its upload was started and did not end."""
        objects = self.tree.list_objects(name)
        record = self.read_record(name) if RECORD in objects else None
        if record is None:
            problems = [FOREIGN]
        elif not record.complete:
            problems = ["its upload was interrupted"]
        else:
            sizes = {path: entry.size for path, entry in objects.items()}
            wrong = [file.name for file in record.files if sizes.get(file.name) != file.size]
            problems = [f"{file} is missing or has another size than in the record" for file in wrong]
        return Checkpoint(
            parse_name(name),
            self.path / name,
            tuple(problems),
            record is None or record.complete,
            sum(entry.size for entry in objects.values()),
            max((entry.written for entry in objects.values()), default=0.0),
            BEFORE_NAN in objects,
        )

    def _is_foreign(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.problems == (FOREIGN,)

    def read_record(self, name: str) -> CheckpointRecord | None:
        """Return the record of a checkpoint; None if it is missing or damaged."""
        try:
            record = convert_json(read_json(self.path / name / RECORD, tree=self.tree), CheckpointRecord)
            for file in record.files:
                check_inside(self.path / name, file.name)
        except (msgspec.ValidationError, RequestError):
            return None
        return record

    def check_access(self) -> None:
        """Write, read, list and delete an object.

        Raises:
            RequestError: there is no such bucket, or these credentials may not do that.
        """
        self.tree.make_directory("")
        path = f"{RECORDS_DIRECTORY}/access-{process_name()}.tmp"
        self.tree.write_atomic(path, b"tokenmill checks that it may write here\n")
        self.tree.read(path)
        self.tree.directories("")
        self.tree.delete_objects([path])

    # -- before an attempt

    def find_start(self, log: Callable[[str], None]) -> StartPoint:
        """Return where the run resumes, delete interrupted uploads, and copy the checkpoint; node 0 calls it.

        The tracker decides: newer checkpoints stay, because a user may have set the tracker back, and the next save of
        their iteration replaces them. Without a valid tracker, or if its checkpoint is damaged, the newest one that is
        complete is used, and the tracker is set to it.

        Raises:
            RequestError: no checkpoint is complete, and there was one; or there are checkpoints of another program.
        """
        self.tree.sweep_uploads()
        self._copy_small_files(log)
        checkpoints, tracked, reason = self.list_checkpoints(), None, "there was no tracker"
        try:
            tracked = read_tracked_iteration(self.path)
        except InvalidTracker as problem:
            reason = str(problem).rpartition(";")[0]
        unfinished = [checkpoint for checkpoint in checkpoints if not checkpoint.finished]
        for checkpoint in unfinished:
            self._delete(checkpoint.path.name)
            log(f"{checkpoint.path} deleted: {checkpoint.state}")
        finished = [checkpoint for checkpoint in reversed(checkpoints) if checkpoint.finished]
        candidates = sorted(finished, key=lambda checkpoint: checkpoint.iteration != tracked)
        for checkpoint in candidates:
            state = self._try(checkpoint, log)
            if state == "complete":
                foreign = [c.path for c in finished if c.iteration > checkpoint.iteration and self._is_foreign(c)]
                if foreign:
                    raise RequestError(f"{foreign[0]}: {FOREIGN}; delete its objects, or set another address")
                if checkpoint.iteration != tracked:
                    self._set_tracker(checkpoint.iteration)
                    log(f"tracker set to {checkpoint.iteration}, the newest complete checkpoint: {reason}")
                return StartPoint(checkpoint.iteration, checkpoint.path.name, (), checkpoint.bytes)
            reason = f"{checkpoint.path.name}: {state}"
            log(f"{checkpoint.path} cannot be used: {state}")
        if finished or tracked:
            raise RequestError(
                f"no checkpoint in {self.path} is complete, and the run would start again from iteration 0: {reason}. "
                "Restore a complete checkpoint, or delete the objects there, or set another address (in a chart: --set "
                "storage.checkpointPath=...)"
            )
        self.keep_local(None)
        return StartPoint(0, None)

    def _copy_small_files(self, log: Callable[[str], None]) -> None:
        """Copy what the programs of an earlier start wrote next to the checkpoints, such as a log of the progress."""
        names = set(self.tree.names()) - set(self.tree.directories()) - {TRACKER}
        files = [BucketFile(self.path / name, self.tree.size(name) or 0, "") for name in sorted(names)]
        for file in files:
            file.path.unlink(missing_ok=True)
        if files:
            copy_files(self.path, files, log)

    def _try(self, checkpoint: Checkpoint, log: Callable[[str], None]) -> str:
        """Copy a checkpoint; return `complete`, or why it cannot be used."""
        if checkpoint.complete:
            try:
                self.download(checkpoint.path.name, log)
            except DamagedCheckpoint as problem:
                return str(problem)
        return checkpoint.state

    def prepare_node(self, name: str | None, log: Callable[[str], None]) -> None:
        """Put the checkpoint from which node 0 starts on the disk of another node.

        Raises:
            TransientError: it is damaged; node 0 will choose another one.
        """
        try:
            if name is None:
                self.keep_local(None)
            else:
                self.download(name, log)
        except DamagedCheckpoint as problem:
            raise TransientError(f"{self.path / name if name else self.path}: {problem}") from problem

    def download(self, name: str, log: Callable[[str], None]) -> None:
        """Copy the files of a checkpoint to the disk unless they are there, and let the local tracker name it.

        Other checkpoints on the disk are deleted: they are copies, or a killed attempt did not upload them.

        Raises:
            DamagedCheckpoint: an object has another content than the record.
        """
        self.keep_local(name)
        record = self.read_record(name)
        if record is None or not record.complete:
            raise DamagedCheckpoint("it has no record of a complete upload")
        directory = self.path / name
        with ThreadPoolExecutor(UPLOADS_AT_ONCE) as executor:
            present = list(executor.map(lambda file: _is_equal(directory / file.name, file), record.files))
        missing = [file for file, is_present in zip(record.files, present, strict=True) if not is_present]
        for file in missing:
            (directory / file.name).unlink(missing_ok=True)
        if missing:
            try:
                copy_files(directory, [BucketFile(directory / f.name, f.size, f.hash) for f in missing], log)
            except FileNotFoundError as problem:
                raise DamagedCheckpoint(f"{problem.filename} is missing") from None
            except InputError as problem:
                raise DamagedCheckpoint(str(problem).rpartition(";")[0]) from None
        self._local.write_atomic(TRACKER, str(parse_name(name)).encode())

    @property
    def _local(self) -> Tree:
        return Tree(self.path)

    def local_iteration(self) -> int:
        """Return the iteration of the last save on the disk of this node, 0 before there is one."""
        text = self._local.read(TRACKER) or b""
        return int(text) if text.strip().isdigit() else 0

    def keep_local(self, name: str | None) -> None:
        """Delete all checkpoints on the disk of this node but one, and the local tracker."""
        self._local.unlink(TRACKER)
        self.delete_local(lambda other: other != name)

    def delete_local(self, selects: Callable[[str], bool]) -> None:
        """Delete checkpoints on the disk of this node, selected by their names."""
        for name in self._local.directories(""):
            if _NAME.fullmatch(name) and selects(name):
                shutil.rmtree(self.path / name, ignore_errors=True)

    # -- during an attempt

    def begin(self, name: str) -> None:
        """Delete what an earlier attempt uploaded of a checkpoint, and record that its upload has started.

        Raises:
            RequestError: there are objects of another program.
        """
        if (checkpoint := self.examine(name)).bytes and self._is_foreign(checkpoint):
            raise RequestError(f"{checkpoint.path}: {FOREIGN}; delete its objects, or set another address")
        self._delete(name)
        self._write_record(name, CheckpointRecord(complete=False, files=[]))

    def upload(self, name: str, selects: Callable[[str], bool] = lambda _: True) -> list[RecordedFile]:
        """Upload the files of a checkpoint on this disk that `selects` accepts by name, and return them.

        Raises:
            FileNotFoundError: a file, or the checkpoint, was deleted.
        """
        directory = self.path / name
        selected = sorted(path for path in directory.rglob("*") if path.is_file() and selects(path.name))

        def upload_file(path: Path) -> RecordedFile:
            file = RecordedFile(str(path.relative_to(directory)), path.stat().st_size, hash_file(path))
            self.tree.copy_in(path)
            return file

        with ThreadPoolExecutor(UPLOADS_AT_ONCE) as executor:
            return list(executor.map(upload_file, selected))

    def complete(self, name: str, files: Sequence[RecordedFile]) -> None:
        """Record that all files of a checkpoint are uploaded, and set the tracker to it.

        Raises:
            DamagedCheckpoint: files are missing that `.metadata` names.
        """
        self._check_extents(name, files)
        self._write_record(name, CheckpointRecord(complete=True, files=sorted(files, key=lambda file: file.name)))
        self._set_tracker(parse_name(name))

    def _check_extents(self, name: str, files: Iterable[RecordedFile]) -> None:
        metadata, sizes = self.path / name / ".metadata", {file.name: file.size for file in files}
        if not metadata.exists():  # another framework
            return
        try:
            needed = read_extents(metadata.read_bytes())
        except Damage as problem:
            raise DamagedCheckpoint(f"{name}: {problem}") from None
        if missing := [file for file, size in needed.items() if sizes.get(file, -1) < size]:
            raise DamagedCheckpoint(f"{name}: no node has uploaded {missing[0]}, which .metadata names")

    def mark_before_nan(self, iteration: int) -> None:
        """Mark the checkpoint that Megatron-LM saved because the next iteration had NaN."""
        for checkpoint in self.list_checkpoints():
            if checkpoint.iteration == iteration and checkpoint.complete:
                name = f"{checkpoint.path.name}/{BEFORE_NAN}"
                self.tree.write_atomic(name, b"the iteration after this checkpoint had NaN\n")

    def find_good_iteration(self, iteration: int) -> int:
        """Return the iteration of the newest complete checkpoint up to `iteration` that is not marked, or 0."""
        good = [entry.iteration for entry in self.list_checkpoints() if entry.complete and not entry.before_nan]
        return max((number for number in good if number <= iteration), default=0)

    def prune(self, keep: int) -> list[str]:
        """Delete complete checkpoints beyond the newest `keep` up to the tracker; return a sentence for each.

        The rules are those of `repair.prune`.
        """
        checkpoints, tracked = self.list_checkpoints(), read_tracked_iteration(self.path)
        named = next((c for c in checkpoints if c.iteration == tracked and c.complete), None)
        actions: list[str] = []
        if named is None:
            return actions
        remaining = keep if named.before_nan else keep - 1
        for checkpoint in reversed(checkpoints):
            if not checkpoint.complete or checkpoint.iteration >= named.iteration:
                continue
            if remaining > 0:
                remaining -= not checkpoint.before_nan
                continue
            self._delete(checkpoint.path.name)
            actions.append(f"{checkpoint.path} deleted: {keep} newer checkpoints are kept")
        return actions

    def _delete(self, name: str) -> None:
        """Delete the objects of a checkpoint: the record last, so that a killed deletion is completed later."""
        objects = [path for path in self.tree.list_objects(name) if path != RECORD]
        if objects:
            self._write_record(name, CheckpointRecord(complete=False, files=[]))
            self.tree.delete_objects(f"{name}/{path}" for path in objects)
        self.tree.delete_objects([f"{name}/{RECORD}"])

    def _write_record(self, name: str, record: CheckpointRecord) -> None:
        self.tree.write_atomic(f"{name}/{RECORD}", readable_json(msgspec.to_builtins(record)))

    def _set_tracker(self, iteration: int) -> None:
        self.tree.write_atomic(TRACKER, str(iteration).encode())


def parse_name(name: str) -> int:
    """Return the iteration of a checkpoint from its name."""
    match = _NAME.fullmatch(name)
    assert match is not None  # noqa: S101 - the caller has selected such names
    return int(match[1])


def _is_equal(path: Path, file: RecordedFile) -> bool:
    """Return whether a file on the disk has the recorded content."""
    return path.is_file() and path.stat().st_size == file.size and hash_file(path) == file.hash
