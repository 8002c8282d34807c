"""Files of a conversion: written under a temporary name, hashed, made durable, renamed, and recorded.

`importer` and `exporter` write their large files here. A file counts as finished when the record of its name has its
size and hash; a conversion that was killed continues with the first unfinished file.

    write and hash .tokenmill/<action>/NAME.part -> fsync -> rename to NAME -> record .tokenmill/<action>/NAME.json
"""

import hashlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenmill.core.files.codec import read_json, readable_json
from tokenmill.core.files.hashing import sha256_of
from tokenmill.core.files.lease import Lease, LeaseClaim, Liveness, current_process, new_token, remove_abandoned
from tokenmill.core.files.named_file import naming
from tokenmill.core.files.tree import Tree
from tokenmill.core.machine import available_cpus, available_memory
from tokenmill.core.printing import format_bytes
from tokenmill.core.typed_json import convert_json
from tokenmill.errors import RequestError

BLOCK_BYTES = 16 << 20
"""Bytes that are read, hashed and written at a time."""

MAX_BLOCKS_AHEAD = 4
"""Blocks of a file that may wait for the threads that hash and write them."""

MAX_FILES_AT_ONCE = 4
"""Files that are written at the same time, each with its threads and blocks."""

DEAD_AFTER_SECONDS = 120.0
"""Time without a heartbeat after which a conversion on another machine counts as dead."""


class Abandoned(Exception):
    """Another file of the same conversion failed."""


class FileRecord(msgspec.Struct, frozen=True):
    """A finished file of a conversion, and the content that it was made for."""

    contract: str
    """Hash of everything that determines the content of the file."""
    bytes: int
    sha256: str


class FileToWrite(NamedTuple):
    """A planned file of a conversion."""

    name: str
    """Path below the output directory."""
    contract: str
    encode: Callable[[], Iterator[bytes | memoryview]]
    """Returns the bytes of the file, as consecutive parts."""


class ConversionOutput:
    """The output directory of a conversion."""

    def __init__(self, directory: Path, action: str) -> None:
        """Name the directory and the action, `import` or `export`."""
        self.directory, self.action = directory, action
        self.tree = Tree(directory)
        self.records = directory / ".tokenmill" / action
        self._bytes_done = self._files_done = 0
        self._lock = threading.Lock()
        self._abandoned = threading.Event()

    def count(self) -> tuple[int, int]:
        """Return the bytes and the files that this process has written or taken over."""
        with self._lock:
            return self._bytes_done, self._files_done

    def check_space(self, needed: int, written: Iterable[Path], noun: str) -> None:
        """Refuse a conversion of `needed` bytes, of which `written` files exist, before anything is written.

        Raises:
            RequestError: the file system has too little space.
        """
        existing = next(path for path in (self.directory, *self.directory.resolve().parents) if path.is_dir())
        free, left = shutil.disk_usage(existing).free, needed - sum(path.stat().st_size for path in written)
        if free < left:
            raise RequestError(
                f"the {noun} needs {format_bytes(left)}, but {self.directory} has {format_bytes(free)} of free space; "
                "free space there, or use a larger volume"
            )

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Refuse a second conversion into the same directory while this one runs.

        Raises:
            RequestError: another process is converting into the directory.
        """
        self.tree.make_directory(self.records)
        claim = LeaseClaim(token=new_token(), owner=current_process())
        lease = Lease(self.tree, self.records / "lease.json", claim)
        holder = lease.watch()
        if holder is not None and holder.liveness is Liveness.DEAD:
            lease.break_stale(holder.claim)
        elif holder is not None and not self._wait_for_end(lease):
            raise RequestError(
                f"another process is writing to {self.directory} ({self.action}); wait until it ends, or use another "
                "directory"
            )
        with lease.hold() as acquired:
            if not acquired:
                raise RequestError(f"another process has started to write to {self.directory}; wait until it ends")
            remove_abandoned(self.tree, "", self.records, *self.tree.directories())
            yield

    def _wait_for_end(self, lease: Lease[LeaseClaim]) -> bool:
        """Watch a holder on another machine, which is dead if its file does not change; return whether it ended."""
        waiter = threading.Event()
        while True:
            holder = lease.watch(DEAD_AFTER_SECONDS)
            if holder is None:
                return True
            if holder.liveness is Liveness.DEAD:
                lease.break_stale(holder.claim)
                return True
            if holder.liveness is Liveness.ALIVE or holder.changed:
                return False
            waiter.wait(1.0)

    def finished(self, name: str, contract: str) -> FileRecord | None:
        """Return the record of a file if it is finished and its bytes have the recorded hash.

        The hash is computed again, because a machine that failed may have lost bytes of a file that was renamed.
        """
        try:
            record = convert_json(read_json(self._record_path(name), tree=self.tree), FileRecord)
        except msgspec.ValidationError:
            return None
        path = self.directory / name
        if record.contract != contract or self.tree.size(path) != record.bytes:
            return None
        if sha256_of(path, tree=self.tree) != record.sha256:
            return None
        self._add_bytes(record.bytes)
        return record

    def write_files(self, files: Sequence[FileToWrite], memory_each: int = 0) -> list[FileRecord]:
        """Write the files that are not finished; return the records of all.

        Several files are written at the same time, as many as CPUs and memory allow.

        Args:
            files: the files in the order of their records.
            memory_each: bytes of memory that encoding a file needs, in addition to the blocks that wait.
        """
        fitting = available_memory() // (memory_each + 2 * MAX_BLOCKS_AHEAD * BLOCK_BYTES)

        def write(file: FileToWrite) -> FileRecord:
            record = self.finished(file.name, file.contract) or self.write(file.name, file.contract, file.encode())
            with self._lock:
                self._files_done += 1
            return record

        threads = ThreadPoolExecutor(max(1, min(MAX_FILES_AT_ONCE, available_cpus(), fitting, len(files))))
        try:
            futures = [threads.submit(write, file) for file in files]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()  # raises the error of a failed file while others are still written
            return [future.result() for future in futures]
        except BaseException:
            self._abandoned.set()
            raise
        finally:
            threads.shutdown(cancel_futures=True)

    def write(self, name: str, contract: str, parts: Iterable[bytes | memoryview]) -> FileRecord:
        """Write a file from consecutive parts, and record it."""
        temporary = self.records / f"{name.replace('/', '-')}.part"
        digest, size = hashlib.sha256(), 0
        with self.tree.open(temporary, "wb", buffering=0) as file, _BackgroundCalls() as calls:

            def write_all(data: bytes | memoryview) -> None:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]

            for part in parts:
                calls.run(digest.update, write_all, part)
                size += len(part)
                self._add_bytes(len(part))
                if self._abandoned.is_set():
                    raise Abandoned
            calls.finish()
            with naming("sync", temporary):
                os.fsync(file.fileno())
        record = FileRecord(contract, size, digest.hexdigest())
        self.tree.rename(temporary, self.directory / name, create=True)
        self.tree.fsync(name.rpartition("/")[0])
        self.tree.write_atomic(self._record_path(name), readable_json(msgspec.to_builtins(record)))
        return record

    def remove_unused(self, names: Iterable[str]) -> None:
        """Remove the temporary files and the records of all files but these."""
        kept = {self._record_path(name).name for name in names}
        for name in self.tree.names(self.records):
            if name.endswith((".part", ".json")) and name not in {*kept, "lease.json", f"{self.action}.json"}:
                self.tree.unlink(self.records / name)

    def _add_bytes(self, size: int) -> None:
        with self._lock:
            self._bytes_done += size

    def _record_path(self, name: str) -> Path:
        return self.records / f"{name.replace('/', '-')}.json"


class _BackgroundCalls:
    """Two threads, one that hashes and one that writes: each takes the parts in order, and few parts wait."""

    def __enter__(self) -> "_BackgroundCalls":
        self._threads = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]
        self._waiting: deque[Future[Any]] = deque()
        self._pending: list[bytes | memoryview] = []
        self._pending_bytes = 0
        self._calls: tuple[Any, Any] | None = None
        return self

    def run(self, hash_: Any, write: Any, part: bytes | memoryview) -> None:
        """Hash and write a part; small parts wait until there are enough of them."""
        self._calls = hash_, write
        if len(part) < BLOCK_BYTES // 4:
            self._pending.append(part)
            self._pending_bytes += len(part)
            if self._pending_bytes < BLOCK_BYTES:
                return
            part = self._take_pending()
        elif self._pending:
            self._submit(self._take_pending())
        self._submit(part)

    def _take_pending(self) -> bytes:
        data = b"".join(self._pending)
        self._pending, self._pending_bytes = [], 0
        return data

    def _submit(self, part: bytes | memoryview) -> None:
        for thread, call in zip(self._threads, self._calls or (), strict=False):
            self._waiting.append(thread.submit(call, part))
        while len(self._waiting) > 2 * MAX_BLOCKS_AHEAD:
            self._waiting.popleft().result()

    def finish(self) -> None:
        """Wait for all calls, and raise the first error."""
        if self._pending:
            self._submit(self._take_pending())
        while self._waiting:
            self._waiting.popleft().result()

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)
