"""What a unit of work writes through: hashed files under temporary names, and the commit protocol.

    attempt's own directory -> write and hash -> fsync -> rename into place -> fsync directories -> receipt

The plan id on disk is compared before the renames and again before the receipt, since after an
upgrade the pods of the old plan live on for their grace period. A file without a receipt that names
it with its size is no data, so a rename that is not atomic (blob storage) does no harm either.
"""

import errno
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import xxhash

from tokenmill.errors import WITH_HASHES, InputError, Stopped, Superseded, TokenmillError, TransientError
from tokenmill.files.codec import readable_json
from tokenmill.files.hashing import COPY_CHUNK, update_hash
from tokenmill.files.lease import HEARTBEAT_SECONDS, OWNER, Liveness
from tokenmill.files.mounts import patiently
from tokenmill.files.paths import inside
from tokenmill.files.tree import Tree
from tokenmill.flow.attempt import LeftoverAttempt, new_attempt_directory
from tokenmill.flow.contract import EmptyPair, FileEntry, InputFile, InputRange, Receipt
from tokenmill.flow.record import Counts, Plan, StageRecord, Unit, reconciles
from tokenmill.inputs import OpenInput

WRITE_BACK = 8 << 20
"""Bytes written before the disk is set to work on them, so that little is left for the fsync at the end."""

WRITTEN = 8 * WRITE_BACK
"""Bytes before those which are let go of where they are on disk by now, in a file that nobody reads soon."""

_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)


class OutputFile:
    """A file being written under a temporary name; its bytes and xxh3-128 are known when it closes."""

    def __init__(
        self, path: Path, final: str, keep: int = 0, *, read_soon: bool = True, tree: Tree | None = None
    ) -> None:
        """Open `path`, which `tree` holds, for what will become `final`, after its first `keep` bytes (re-hashed).

        What is not `read_soon` does not stay in memory: new pages for it would cost more than writing it does.
        """
        self.path = path
        self.final = final
        self.bytes = keep
        self._about: dict[str, Any] = {}
        self._digest = xxhash.xxh3_128()
        self._hashed = keep
        self._begun = keep  # up to where write-back was begun
        self._written = 0 if read_soon else WRITTEN
        tree = tree or Tree(path.parent)
        # Not "ab": the kernel refuses copy_file_range into a file opened for appending.
        self._file: IO[bytes] = tree.open(path, "r+b" if keep else "wb", buffering=0, alone=True)
        if keep:
            os.truncate(self._file.fileno(), keep)
            if update_hash(self._digest, path, keep, tree=tree) != keep:
                raise TokenmillError(f"{path} is shorter than its journal says; remove it and run again")
        self._file.seek(keep)
        self._kernel_copy = hasattr(os, "copy_file_range")

    def write(self, data: Any) -> None:
        """Append a bytes-like object."""
        view = memoryview(data).cast("B")
        self.hash(view)
        self.append(view)

    def append(self, data: Any) -> None:
        """Append bytes that `hash` is given too, in their order; another thread may do that."""
        view = memoryview(data)
        self.bytes += len(view)
        while view:
            view = view[self._file.write(view) :]
        self._write_back()

    def copy_from(self, source: IO[bytes], offset: int, length: int) -> None:
        """Append so many bytes of an open file, in the kernel where it can, and leave them to `hash` as well.

        The kernel's copy shares blocks where the file system can and spares a copy through user space elsewhere.
        """
        end = offset + length
        while self._kernel_copy and offset < end:
            try:
                moved = os.copy_file_range(source.fileno(), self._file.fileno(), end - offset, offset)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                self._kernel_copy = False
                break
            if moved == 0:
                break
            offset += moved
            self.bytes += moved
        while offset < end:
            data = os.pread(source.fileno(), min(end - offset, COPY_CHUNK), offset)
            if not data:
                raise TransientError(f"{source.name} became shorter while it was read; run the same command again")
            self.append(data)
            offset += len(data)
        self._write_back()

    def _write_back(self) -> None:
        if self.bytes - self._begun >= WRITE_BACK and hasattr(os, "posix_fadvise"):
            # On Linux this begins to write what is dirty, without waiting; what is being written stays in memory, and
            # what is on disk does not.
            begin = max(0, self._begun - self._written)
            os.posix_fadvise(self._file.fileno(), begin, 0, os.POSIX_FADV_DONTNEED)
            self._begun = self.bytes

    def hash(self, data: memoryview) -> None:
        """Hash the next of the bytes that were appended."""
        self._digest.update(data)
        self._hashed += len(data)

    def restart(self) -> None:
        """Forget what was written: the next byte is the file's first."""
        self._file.truncate(0)
        self._file.seek(0)
        self._digest = xxhash.xxh3_128()
        self.bytes = self._hashed = self._begun = 0

    def sync(self) -> None:
        """Make what is written so far durable (a journal is about to say it is there)."""
        os.fdatasync(self._file.fileno())

    def describe(self, **about: Any) -> None:
        """Say more of this file in the receipt and the manifest."""
        self._about.update(about)

    def close(self) -> None:
        """Make the file durable."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Close without making durable."""
        self._file.close()

    def entry(self) -> FileEntry:
        """Return what the receipt says of this file."""
        if self._hashed != self.bytes:
            raise TokenmillError(
                f"{self.final}: {self._hashed} of {self.bytes} bytes hashed. This is a bug in tokenmill"
            )
        return FileEntry(self.final, self.bytes, self._digest.hexdigest(), **self._about)


class Workspace:
    """One attempt at one unit: where it reads, writes, reports progress and is told to stop."""

    def __init__(
        self,
        record: StageRecord,
        plan: Plan,
        unit: Unit,
        *,
        input_root: Path,
        should_stop: Callable[[], bool],
        advance: Callable[[int], None],
        found: list[LeftoverAttempt],
        resumable: bool,
    ) -> None:
        """Begin the attempt; leftovers of dead attempts at the unit are taken over or removed."""
        self.record = record
        self.tree = record.tree
        self.plan = plan
        self.unit = unit
        self.input_root = input_root
        self.inputs: list[InputRange] = []
        """Where each input's records begin in the output, for the receipt."""
        self.adopted: list[FileEntry] = []
        """Outputs that lie in their place already, for the receipt: `contract.IN_PLACE`."""
        self.empty: list[EmptyPair] = []
        """Outputs that were left out because they hold nothing, for the receipt and the manifest."""
        self._should_stop = should_stop
        self._advance = advance
        self._outputs: list[OutputFile] = []
        self._started = datetime.now(UTC)
        self._beat = time.monotonic()
        self._advanced = 0
        self._resumable = resumable
        self.directory = self._begin(found)

    def _begin(self, found: list[LeftoverAttempt]) -> Path:
        mine = [left for left in found if left.plan == self.plan.id]
        for left in found:
            if left not in mine and left.liveness is Liveness.DEAD:
                left.remove()
        directory = new_attempt_directory(self.record, self.unit.id, self.plan.id)
        for left in sorted(mine, key=lambda left: left.beat, reverse=True):
            if self._resumable and left.liveness is not Liveness.ALIVE and not self._taken(directory):
                self._take(left, directory)
            if left.liveness is Liveness.DEAD:
                left.remove()
        return directory

    def _taken(self, directory: Path) -> bool:
        return any(name != OWNER for name in self.tree.names(directory))

    def _take(self, left: LeftoverAttempt, directory: Path) -> None:
        """Take over a dead attempt's files; of one that may live only a copy, so that it can go on unharmed."""
        names = [name for name in self.tree.names(left.path) if name != OWNER]
        try:
            for name in names:
                # Opened before and after: what lies there may be a link, or another name of somebody's file.
                with self.tree.open(left.path / name, alone=True) as source:
                    if left.liveness is not Liveness.DEAD:
                        with self.tree.open(directory / name, "xb") as copy:
                            shutil.copyfileobj(source, copy, COPY_CHUNK)
                        continue
                self.tree.rename(left.path / name, directory / name)
                self.tree.open(directory / name, alone=True).close()
        except FileNotFoundError:  # another worker was quicker: what was taken so far is checked by the stage
            return

    @contextmanager
    def reading(self, file: InputFile, size: int) -> Iterator[Path]:
        """Give where an input lies; refuse one that is not what was planned, before it is read or afterwards.

        What an earlier stage made has its size in the manifest, and its bytes are hashed as they are read
        (`check_hash`). A file that somebody brought has its size and modification time in its identity, and must be
        one file from beginning to end.
        """
        path = self.input_root / file.path
        maker = self.plan.upstream.maker
        if maker:
            self._check_size(path, size, maker)
        try:
            source = OpenInput(path)
        except FileNotFoundError as error:
            raise TransientError(f"{path} vanished after it was planned; run the same command again") from error
        with source:
            if not maker and source.stamp.identity != file.identity:
                raise self._written_to(path, "it is not the file that was planned")
            yield path
            if not maker and source.changed():
                raise self._written_to(path, "it changed while it was read")
        if maker:
            self._check_size(path, size, maker)

    @staticmethod
    def _written_to(path: Path, why: str) -> TransientError:
        return TransientError(
            f"{path}: {why} (size, modification time and inode are compared): somebody writes to it. Run the same "
            "command again once it is whole"
        )

    def _check_size(self, path: Path, size: int, maker: str) -> None:
        """Refuse what an earlier stage made and has another size since."""
        files = Tree(self.input_root)  # what a manifest names lies behind no link
        if files.size(path) == size:
            return
        if not patiently(lambda: files.size(path) == size, path.parent):
            found = files.size(path)
            raise InputError(
                f"{path} {'is missing' if found is None else f'has {found} bytes'}, and the manifest of the {maker} "
                f"that made it says {size}: run tokenmill {maker} again, which makes only what is missing there, and "
                "then this command"
            )

    def check_hash(self, file: InputFile, digest: str) -> None:
        """Refuse an input whose bytes are not those that an earlier stage made; `digest` is their xxh3-128."""
        maker = self.plan.upstream.maker
        if maker and digest != file.identity:
            raise InputError(
                f"{self.input_root / file.path} is damaged: its bytes are not those that the manifest of the {maker} "
                f"that made it names; run tokenmill {maker} again with {WITH_HASHES}, which makes only what is damaged "
                "there, and then this command"
            )

    def path(self, name: str) -> Path:
        """Return where a file of this attempt lies, such as its journal."""
        return self.directory / name

    def open(self, final: str, *, temporary: str | None = None, keep: int = 0, read_soon: bool = True) -> OutputFile:
        """Open the file that will be `final` (relative to the output) once the unit commits; see OutputFile."""
        inside(self.record.output, final)
        path = self.directory / (temporary or f"out-{len(self._outputs)}")
        output = OutputFile(path, final, keep, read_soon=read_soon, tree=self.tree)
        self._outputs.append(output)
        return output

    def drop(self, output: OutputFile) -> None:
        """Take back an output: it will not be part of the dataset."""
        output.abandon()
        self._outputs.remove(output)
        self.tree.unlink(output.path)

    def checkpoint(self, advanced: int = 0) -> None:
        """Report bytes of input done, give the heartbeat, and stop here when asked to; call it every batch."""
        if advanced:
            self._advanced += advanced
            self._advance(advanced)
        now = time.monotonic()
        if now - self._beat > HEARTBEAT_SECONDS:
            self._beat = now
            try:
                self.tree.touch(self.directory / OWNER)
            except FileNotFoundError:
                self._superseded()
        if self._should_stop():
            raise Stopped(f"stopped while doing {self.unit.id}; what is journaled is kept, run the same command again")

    def fence(self) -> None:
        """Refuse to go on when the plan on disk is no longer the one this worker began with."""
        current = self.record.plan_id()
        if current != self.plan.id:
            raise Superseded(
                f"{self.record.plan_path} is now plan {current}, not {self.plan.id}: another run replaced it; "
                f"unit {self.unit.id} is not committed"
            )

    def _superseded(self) -> None:
        """Another worker removed this attempt's directory: fine when the unit has its receipt, a fault else."""
        self.fence()
        if self.record.read_receipt(self.plan, self.unit) is None:
            raise TokenmillError(f"the work directory {self.directory} vanished; run the same command again")

    def commit(self, counts: Counts) -> None:
        """Put the files in place and write the receipt; an earlier receipt of another attempt stands."""
        if not reconciles(counts):
            raise TokenmillError(
                f"unit {self.unit.id} does not reconcile: {counts['in']} in, {counts['out']} out, "
                f"{counts.get('rejected', 0)} rejected, {counts.get('dropped', 0)} dropped; nothing of it is kept. "
                "This is a bug in tokenmill"
            )
        for output in self._outputs:
            output.close()
        self.fence()
        if self.record.read_receipt(self.plan, self.unit) is None:
            self._publish(counts)
        self.tree.unlink(self.record.failure_path(self.unit.id))
        self.tree.remove_tree(self.directory)
        # What checkpoints did not report (a part done by an earlier attempt) counts as done now.
        self._advance(self.unit.weight - self._advanced)

    def _publish(self, counts: Counts) -> None:
        placed: dict[str, int] = {}
        try:
            for output in self._outputs:
                status = self.tree.stat(output.path)
                self.tree.rename(output.path, output.final, create=True)
                placed[output.final] = status.st_ino if status else 0
        except FileNotFoundError:
            self._superseded()
            return
        for directory in sorted({final.rpartition("/")[0] for final in placed}):
            self.tree.fsync(directory)
        try:
            self.fence()
        except Superseded:
            # They may lie where the new plan's files were: missing is noticed and made again, wrong bytes of the
            # same size are not.
            for final, inode in placed.items():
                status = self.tree.stat(final)
                if status is not None and status.st_ino == inode:
                    self.tree.unlink(final)
            raise
        receipt = Receipt(
            self.plan.id,
            self.unit.id,
            counts,
            [*self.adopted, *(output.entry() for output in self._outputs)],
            self.inputs,
            self.empty,
            self.unit.weight,
            started=self._started,
            finished=datetime.now(UTC),
            host=socket.gethostname(),
        )
        self.tree.write_atomic(self.record.receipt_path(self.unit.id), readable_json(receipt.to_json()))

    def __enter__(self) -> "Workspace":
        """Enter the attempt."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files; after a failure keep the directory only where a later attempt can resume it."""
        for output in self._outputs:
            output.abandon()
        if error is None or not self.tree.exists(self.directory):
            return
        self._advance(-self._advanced)
        if isinstance(error, Superseded) or not self._resumable:
            self.tree.remove_tree(self.directory)
