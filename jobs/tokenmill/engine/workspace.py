"""One attempt at one unit: it writes hashed files in its own directory and commits them.

The order of an attempt:

    write and hash in the attempt's directory -> fsync -> rename to the final names -> fsync the directories -> receipt

The receipt commits the unit. A file counts as output only if a receipt has its name and size. So a rename that is not
atomic (blob storage) does no harm.

After an upgrade, pods of the old Job may run until their grace period ends. Therefore an attempt compares the plan id
on disk with the id of its own plan before the renames and again before the receipt, and stops if they differ.

`engine.executors` makes a Workspace for each attempt and passes it to `Stage.do`.
"""

import errno
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import xxhash

from tokenmill.core.buckets.tree import open_tree
from tokenmill.core.files.codec import readable_json
from tokenmill.core.files.hashing import COPY_CHUNK, hash_file, update_hash
from tokenmill.core.files.lease import HEARTBEAT_SECONDS, OWNER_FILE, Liveness
from tokenmill.core.files.mounts import retry_while_stale
from tokenmill.core.files.named_file import add_name, naming
from tokenmill.core.files.paths import join_inside
from tokenmill.core.files.tree import Tree
from tokenmill.engine.attempt import LeftoverAttempt, new_attempt_directory
from tokenmill.engine.contract import EmptyPair, FileEntry, InputFile, InputRange, Receipt
from tokenmill.engine.inputs import OpenInput
from tokenmill.engine.record import Counts, Plan, StageRecord, Unit, reconciles
from tokenmill.errors import (
    InputError,
    Stopped,
    Superseded,
    TokenmillError,
    TransientError,
    remake,
)

WRITE_BACK_BYTES = 8 << 20
"""Bytes between two requests to write dirty pages to disk, so that the fsync at the end has little left to write."""

DROP_DISTANCE_BYTES = 8 * WRITE_BACK_BYTES
"""Bytes that each request covers in addition, in a file that is not read soon; their clean pages leave the cache."""

_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)


class OutputFile:
    """A file that is written under a temporary name; its size and xxh3-128 are available when it is closed."""

    def __init__(
        self, path: Path, final: str, keep: int = 0, *, read_soon: bool = True, tree: Tree | None = None
    ) -> None:
        """Open `path` below `tree`, keep and hash its first `keep` bytes, and give it the name `final` at the commit.

        With `read_soon` false, the file leaves the page cache while it is written: new pages would cost more time than
        the writes.
        """
        self.path = path
        self.final = final
        self.bytes = keep
        self._fields: dict[str, Any] = {}
        self._digest = xxhash.xxh3_128()
        self._hashed = keep
        self._write_back_end = keep  # the offset up to which write-back was requested
        self._drop_distance = 0 if read_soon else DROP_DISTANCE_BYTES
        tree = tree or Tree(path.parent)
        # Not "ab": the kernel refuses copy_file_range into a file that is open for appending.
        self._file: IO[bytes] = tree.open(path, "r+b" if keep else "wb", buffering=0, single_link=True)
        if keep:
            self._file.truncate(keep)
            if update_hash(self._digest, path, keep, tree=tree) != keep:
                raise TokenmillError(
                    f"{path} has fewer than the {keep} bytes in its journal; remove it and run the same command again"
                )
        self._file.seek(keep)
        self._kernel_copy = hasattr(os, "copy_file_range")

    def write(self, data: Any) -> None:
        """Append and hash a bytes-like object."""
        view = memoryview(data).cast("B")
        self.hash(view)
        self.append(view)

    def append(self, data: Any) -> None:
        """Append bytes without hashing; the caller must pass the same bytes to `hash`, possibly in another thread."""
        view = memoryview(data)
        self.bytes += len(view)
        while view:
            view = view[self._file.write(view) :]
        self._write_back()

    def copy_from(self, source: IO[bytes], offset: int, length: int) -> None:
        """Append `length` bytes of an open file without hashing; the caller must pass the same bytes to `hash`.

        The kernel copies if it can: it shares blocks where the file system supports that, and elsewhere it avoids a
        copy through user space.
        """
        end = offset + length
        while self._kernel_copy and offset < end:
            try:
                moved = os.copy_file_range(source.fileno(), self._file.fileno(), end - offset, offset)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    add_name(error, f"copy {source.name} to", self.path)
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
                raise TransientError(
                    f"{source.name} became shorter while tokenmill read it; run the same command again"
                )
            self.append(data)
            offset += len(data)
        self._write_back()

    def _write_back(self) -> None:
        if self.bytes - self._write_back_end >= WRITE_BACK_BYTES and hasattr(os, "posix_fadvise"):
            # On Linux, this call starts to write dirty pages and does not wait. Pages that are being written stay in
            # memory, and clean pages leave it.
            begin = max(0, self._write_back_end - self._drop_distance)
            os.posix_fadvise(self._file.fileno(), begin, 0, os.POSIX_FADV_DONTNEED)
            self._write_back_end = self.bytes

    def hash(self, data: memoryview) -> None:
        """Hash the next of the appended bytes."""
        self._digest.update(data)
        self._hashed += len(data)

    def hashed(self) -> str:
        """Return the xxh3-128 of the bytes that were hashed so far."""
        return self._digest.hexdigest()

    def restart(self) -> None:
        """Discard all bytes; the next byte is the first byte of the file."""
        self._file.truncate(0)
        self._file.seek(0)
        self._digest = xxhash.xxh3_128()
        self.bytes = self._hashed = self._write_back_end = 0

    def sync(self) -> None:
        """Make the written bytes durable; a journal must call this before it records them."""
        with naming("sync", self.path):
            os.fdatasync(self._file.fileno())

    def describe(self, **fields: Any) -> None:
        """Set fields of this file's entry in the receipt and the manifest."""
        self._fields.update(fields)

    def close(self) -> None:
        """Make the file durable and close it."""
        if not self._file.closed:
            with naming("sync", self.path):
                os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Close the file without making it durable; an error of this call has no effect on the output."""
        with suppress(OSError):
            self._file.close()

    def entry(self) -> FileEntry:
        """Return the entry of this file for the receipt."""
        if self._hashed != self.bytes:
            raise TokenmillError(
                f"{self.final}: only {self._hashed} of {self.bytes} bytes are hashed. This is a bug in tokenmill: run "
                "the same command again, and report the bug"
            )
        return FileEntry(self.final, self.bytes, self.hashed(), **self._fields)


class Workspace:
    """One attempt at one unit: it opens inputs and outputs, reports progress, and raises Stopped on request."""

    def __init__(
        self,
        record: StageRecord,
        plan: Plan,
        unit: Unit,
        *,
        input_root: Path,
        should_stop: Callable[[], bool],
        advance: Callable[[int], None],
        leftovers: list[LeftoverAttempt],
        resumable: bool,
    ) -> None:
        """Start the attempt; take over or remove the leftovers of dead attempts at the unit."""
        self.record = record
        self.tree = record.tree
        self.plan = plan
        self.unit = unit
        self.input_root = input_root
        self.inputs: list[InputRange] = []
        """For the receipt: the position of each input's records in the output."""
        self.adopted: list[FileEntry] = []
        """For the receipt: outputs that already have their final name (`contract.IN_PLACE`)."""
        self.empty: list[EmptyPair] = []
        """For the receipt and the manifest: outputs that were not written because they are empty."""
        self._should_stop = should_stop
        self._advance = advance
        self._outputs: list[OutputFile] = []
        self._started = datetime.now(UTC)
        self._last_heartbeat = time.monotonic()
        self._advanced = 0
        self._resumable = resumable
        self.directory = self._start(leftovers)

    def _start(self, leftovers: list[LeftoverAttempt]) -> Path:
        same_plan = [leftover for leftover in leftovers if leftover.plan == self.plan.id]
        for leftover in leftovers:
            if leftover not in same_plan and leftover.liveness is Liveness.DEAD:
                leftover.remove()
        directory = new_attempt_directory(self.record, self.unit.id, self.plan.id)
        for leftover in sorted(same_plan, key=lambda leftover: leftover.last_heartbeat, reverse=True):
            if self._resumable and leftover.liveness is not Liveness.ALIVE and not self._has_files(directory):
                self._take_over(leftover, directory)
            if leftover.liveness is Liveness.DEAD:
                leftover.remove()
        return directory

    def _has_files(self, directory: Path) -> bool:
        return any(name != OWNER_FILE for name in self.tree.names(directory))

    def _take_over(self, leftover: LeftoverAttempt, directory: Path) -> None:
        """Move a dead attempt's files; copy them if the attempt may be alive, so that it can continue."""
        names = [name for name in self.tree.names(leftover.path) if name != OWNER_FILE]
        try:
            for name in names:
                # Open the file before and after the rename: it may be a link, or a second name of a user's file.
                with self.tree.open(leftover.path / name, single_link=True) as source:
                    if leftover.liveness is not Liveness.DEAD:
                        with self.tree.open(directory / name, "xb") as copy:
                            shutil.copyfileobj(source, copy, COPY_CHUNK)
                        continue
                self.tree.rename(leftover.path / name, directory / name)
                self.tree.open(directory / name, single_link=True).close()
        except FileNotFoundError:  # another worker took the rest; the stage checks the files that were taken so far
            return

    @contextmanager
    def reading(self, file: InputFile, size: int) -> Iterator[Path]:
        """Yield the path of an input; raise an error before or after the block if the input is not the planned one.

        The manifest has the size of a file that an earlier stage made, and the caller hashes its bytes (`check_hash`).
        The identity of a user's file is its size and modification time. Such a file must not change during the block.
        """
        maker = self.plan.upstream.maker
        if maker:
            self._check_size(file.path, size, maker)
        with open_tree(self.input_root).local_copies([file.path]) as root:
            path = root / file.path
            try:
                source = OpenInput(path)
            except FileNotFoundError as error:
                raise TransientError(
                    f"{path} vanished after it was planned; restore it and run the same command again"
                ) from error
            with source:
                if not maker and source.stamp.identity != file.identity:
                    raise self._make_change_error(path, "it is not the file that was planned")
                yield path
                if not maker and source.changed():
                    raise self._make_change_error(path, "it changed while it was read")
        if maker:
            self._check_size(file.path, size, maker)

    @staticmethod
    def _make_change_error(path: Path, change: str) -> TransientError:
        return TransientError(
            f"{path}: {change} (tokenmill compares size, modification time and inode), so another program writes "
            "to it; wait until the file is complete and run the same command again"
        )

    def _check_size(self, name: str, size: int, maker: str) -> None:
        """Refuse a file of an earlier stage that no longer has its recorded size."""
        files = open_tree(self.input_root)  # a Tree follows no links, and no file of a manifest is behind a link
        path = self.input_root / name
        if files.size(path) == size:
            return
        if not retry_while_stale(lambda: files.size(path) == size, path.parent):
            current = files.size(path)
            raise InputError(
                f"{path} {'is missing' if current is None else f'has {current} bytes'}, but the manifest of the "
                f"{maker} stage records {size} bytes: {remake(f'tokenmill {maker}', same_size=False)}, and "
                "then run this command again"
            )

    def check_hash(self, file: InputFile, digest: str) -> None:
        """Refuse an input whose xxh3-128 `digest` differs from the one that an earlier stage recorded."""
        maker = self.plan.upstream.maker
        if maker and digest != file.identity:
            raise InputError(
                f"{self.input_root / file.path} is damaged: its hash differs from the one in the manifest of the "
                f"{maker} stage; {remake(f'tokenmill {maker}')}, and then run this command again"
            )

    def path(self, name: str) -> Path:
        """Return the path of a file in this attempt's directory, such as the journal."""
        return self.directory / name

    def has_bytes(self, name: str, size: int, digest: str | None) -> bool:
        """Return whether a file of this attempt has at least `size` bytes, the first of which have this xxh3-128."""
        path = self.path(name)
        if (self.tree.size(path) or 0) < size:
            return False
        return digest is None or hash_file(path, size, tree=self.tree) == digest

    def open(self, final: str, *, temporary: str | None = None, keep: int = 0, read_soon: bool = True) -> OutputFile:
        """Open a file that the commit renames to `final` (relative to the output directory); see OutputFile."""
        join_inside(self.record.output, final)
        path = self.directory / (temporary or f"out-{len(self._outputs)}")
        output = OutputFile(path, final, keep, read_soon=read_soon, tree=self.tree)
        self._outputs.append(output)
        return output

    def drop(self, output: OutputFile) -> None:
        """Remove an output, so that it does not become part of the dataset."""
        output.abandon()
        self._outputs.remove(output)
        self.tree.unlink(output.path)

    def report_progress(self, advanced: int = 0) -> None:
        """Add to the input bytes done, renew the heartbeat, and raise Stopped on request; call this for every batch."""
        if advanced:
            self._advanced += advanced
            self._advance(advanced)
        now = time.monotonic()
        if now - self._last_heartbeat > HEARTBEAT_SECONDS:
            self._last_heartbeat = now
            try:
                self.tree.touch(self.directory / OWNER_FILE)
            except FileNotFoundError:
                self._check_superseded()
        if self._should_stop():
            raise Stopped(
                f"stopped while running {self.unit.id}; run the same command again, which continues from its journal"
            )

    def check_plan_unchanged(self) -> None:
        """Raise Superseded if the plan on disk is no longer the plan of this attempt."""
        current = self.record.plan_id()
        if current != self.plan.id:
            raise Superseded(
                f"{self.record.plan_path} is now plan {current}, not {self.plan.id}: another run replaced it, so unit "
                f"{self.unit.id} is not committed; wait for the newer run (see tokenmill status {self.record.output})"
            )

    def _check_superseded(self) -> None:
        """Raise an error if another worker removed this attempt's directory although the unit has no receipt."""
        self.check_plan_unchanged()
        if self.record.read_receipt(self.plan, self.unit) is None:
            raise TokenmillError(f"the attempt's directory {self.directory} vanished; run the same command again")

    def commit(self, counts: Counts) -> None:
        """Rename the files to their final names and write the receipt; keep a receipt of another attempt unchanged."""
        if not reconciles(counts):
            raise TokenmillError(
                f"the counts of unit {self.unit.id} do not add up: {counts['in']} in, {counts['out']} out, "
                f"{counts.get('rejected', 0)} rejected, {counts.get('dropped', 0)} dropped; its files are not kept. "
                "This is a bug in tokenmill: run the same command again, and report the bug"
            )
        for output in self._outputs:
            output.close()
        self.check_plan_unchanged()
        if self.record.read_receipt(self.plan, self.unit) is None:
            self._publish(counts)
        self.tree.unlink(self.record.failure_path(self.unit.id))
        self.tree.remove_tree(self.directory)
        # Bytes that report_progress did not add (of a part that an earlier attempt did) count as done now.
        self._advance(self.unit.weight - self._advanced)

    def _publish(self, counts: Counts) -> None:
        versions: dict[str, str] = {}
        try:
            for output in self._outputs:
                versions[output.final] = self.tree.publish(output.path, output.final)
        except FileNotFoundError:
            self._check_superseded()
            return
        for directory in sorted({final.rpartition("/")[0] for final in versions}):
            self.tree.fsync(directory)
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
            versions=versions if self.tree.versioned else {},
        )
        path, data = self.record.receipt_path(self.unit.id), readable_json(receipt.to_json())
        while True:
            known = self.tree.version(path) if self.tree.versioned else None
            try:
                self.check_plan_unchanged()
            except Superseded:
                self._withdraw(versions)
                raise
            if self.tree.replace(path, data, known) or self.record.read_receipt(self.plan, self.unit) is not None:
                return

    def _withdraw(self, versions: dict[str, str]) -> None:
        """Remove published files after another plan replaced the plan of this attempt.

        They may have replaced files of the new plan. A missing file is detected and made again, but wrong bytes of the
        same size are not. In a bucket they are, by their version, and objects with the same bytes have the same one.
        """
        plan = self.record.read_plan() if self.tree.versioned else None
        planned = {name for unit in plan.units for name in unit.outputs} if plan else set()
        for final, version in versions.items():
            if final not in planned and self.tree.version(final) == version:
                self.tree.unlink(final)

    def __enter__(self) -> "Workspace":
        """Enter the attempt."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files; after a failure, keep the directory only if a later attempt can resume it."""
        for output in self._outputs:
            output.abandon()
        if error is None or not self.tree.exists(self.directory):
            return
        self._advance(-self._advanced)
        if isinstance(error, Superseded) or not self._resumable:
            self.tree.remove_tree(self.directory)
