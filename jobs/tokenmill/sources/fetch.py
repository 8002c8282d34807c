"""Download one file of a source, resume after failures, and verify the bytes.

`stages.download` writes the bytes into the output file of a unit (`fetch`). `tokenize.stream` writes a shard into its
scratch directory (`fetch_to`), where the shard stays until its unit is finished. A refused request is repeated until
the deadline.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tokenmill.core.files.hashing import update_hash
from tokenmill.core.files.named_file import open_file
from tokenmill.core.files.publish import get_size
from tokenmill.core.printing import printable
from tokenmill.engine.contract import RemoteFile
from tokenmill.errors import REPLACE_OPTION, RequestError, TransientError
from tokenmill.sources.body_check import HEAD_BYTES, WRONG_CONTENT_REMEDY, find_truncation, find_wrong_content
from tokenmill.sources.retry import FailureCounts, RetryableError, RetryPolicy, retry_call
from tokenmill.sources.source import Body, Source, SourceChanged

MAX_WRONG_DOWNLOADS = 3
"""Complete downloads of a file with a wrong hash before the download fails."""
MAX_REFUSALS = 5
"""Consecutive responses with status 401, 403 or 404 before the download fails."""
NO_ACCESS_REMEDY = (
    "check that the file still exists in this revision of the source, and that the credentials (for the Hub: "
    "HF_TOKEN) give access to it"
)

PART_BYTES = 8 << 20
"""Bytes of a large file per request: large enough that the latency of a response does not matter."""
MIN_DIVIDED_BYTES = 16 * PART_BYTES
"""Remaining bytes from which a file is fetched over several connections."""


class Sink(Protocol):
    """The destination of the bytes: a file that only grows at its end, or starts again empty."""

    path: Path
    bytes: int
    """Number of bytes in the file, including those of an earlier attempt (see `resumable_bytes`)."""

    def write(self, data: Any) -> None:
        """Append a bytes-like object; the sink must not use the object after the call."""

    def restart(self) -> None:
        """Remove all bytes."""


class ScratchFile:
    """A temporary file: it is not synced to disk, and only `fetch` hashes it."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        """Open `path` and keep its first `keep` bytes."""
        self.path = path
        self.bytes = keep
        self._file = open_file(path, "r+b" if keep else "wb", buffering=0)
        self._file.truncate(keep)
        self._file.seek(keep)

    def write(self, data: Any) -> None:
        """Append a bytes-like object."""
        view = memoryview(data).cast("B")
        self.bytes += len(view)
        while len(view):
            view = view[self._file.write(view) :]

    def restart(self) -> None:
        """Remove all bytes."""
        self._file.truncate(0)
        self._file.seek(0)
        self.bytes = 0

    def __enter__(self) -> "ScratchFile":
        """Return the open file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file without deleting it."""
        self._file.close()


class ConnectionPool:
    """The number of connections that all files in progress share: one per file, and spare ones for large files."""

    def __init__(self, limit: int) -> None:
        """Create a pool of `limit` connections."""
        self.limit = limit
        self._used = 0
        self._waiting = 0
        self._freed = threading.Condition()

    def acquire(self, on_wait: Callable[[], None]) -> None:
        """Acquire the connection of a file.

        While no connection is free, the pool calls `on_wait` twice a second; `on_wait` may raise to stop the wait.
        """
        with self._freed:
            self._waiting += 1
            try:
                while self._used >= self.limit:
                    if not self._freed.wait(0.5):
                        on_wait()
                self._used += 1
            finally:
                self._waiting -= 1

    def try_acquire_spare(self) -> bool:
        """Acquire one more connection if no file waits for it, and return whether that succeeded."""
        with self._freed:
            spare = self._used + self._waiting < self.limit
            self._used += spare
            return spare

    def release(self) -> None:
        """Release one connection."""
        with self._freed:
            self._used -= 1
            self._freed.notify()

    def is_contended(self) -> bool:
        """Return whether a file waits for a connection; a file with several connections must then release one."""
        return self._waiting > 0


def resumable_bytes(file: RemoteFile, path: Path) -> int:
    """Return how many bytes of an earlier attempt at `path` the next attempt can keep.

    The result is 0 for a file without a hash, because only the hash proves that the bytes are correct. The result is
    also 0 when `path` has more bytes than the source file.
    """
    size = get_size(path) or 0
    file_hash = file.sha256 or file.git_sha1
    return size if file_hash and (file.size is None or size <= file.size) else 0


def fetch_to(
    source: Source,
    file: RemoteFile,
    revision: str | None,
    path: Path,
    *,
    deadline: float,
    on_progress: Callable[[int], None],
    pool: ConnectionPool | None = None,
) -> None:
    """Fetch a file to a local path, and resume after the bytes of an earlier attempt; see `fetch`."""
    with ScratchFile(path, resumable_bytes(file, path)) as scratch:
        fetch(source, file, revision, scratch, deadline=deadline, on_progress=on_progress, pool=pool)


def fetch_head(
    source: Source, file: RemoteFile, revision: str | None, path: Path, length: int, policy: RetryPolicy
) -> None:
    """Fetch the first `length` bytes of a file for inspection; no hash verifies them.

    Raises RequestError when the source permanently refuses the file, and TransientError after the policy's deadline.
    """

    def fetch_once() -> None:
        with ScratchFile(path) as scratch:
            for block in source.open(file, revision, 0, min(length, file.size or length), plain=True):
                scratch.write(block[: length - scratch.bytes])
                if scratch.bytes >= length:
                    break

    name = printable(file.path)
    retry_call(
        fetch_once,
        policy,
        describe=lambda failure: f"{name}: {failure}",
        permanent_error=partial(_permanent_error, name),
    )


def fetch(
    source: Source,
    file: RemoteFile,
    revision: str | None,
    sink: Sink,
    *,
    deadline: float,
    on_progress: Callable[[int], None],
    pool: ConnectionPool | None = None,
) -> None:
    """Fetch a complete file into a sink and verify its hash; a large file uses all spare connections of `pool`.

    `deadline` is a time of the monotonic clock. `on_progress` receives the number of new bytes since its last call.
    The number is negative when bytes must be fetched again. During a pause `on_progress` runs twice a second. It may
    raise to stop the download. Raises RequestError when the source permanently refuses the file. Raises
    TransientError when the content stays wrong or the deadline passes.
    """
    pool = pool or ConnectionPool(1)
    pool.acquire(lambda: on_progress(0))
    try:
        _FileFetch(source, file, revision, sink, deadline, on_progress, pool).run()
    finally:
        pool.release()


class _FileFetch:
    """The download of one file, with all its retries."""

    def __init__(
        self,
        source: Source,
        file: RemoteFile,
        revision: str | None,
        sink: Sink,
        deadline: float,
        on_progress: Callable[[int], None],
        pool: ConnectionPool,
    ) -> None:
        self.source = source
        self.file = file
        self.revision = revision
        self.name = printable(file.path)
        self.sink = sink
        self.deadline = deadline
        self.on_progress = on_progress
        self.digest = self._new_digest()
        self.pool = pool
        self.buffered_parts: dict[int, list[bytes]] = {}
        self.wrong_downloads = 0

    def run(self) -> None:
        """Fetch until the file is complete and verified; raise after a permanent refusal or the deadline."""
        if self.sink.bytes:
            update_hash(self.digest, self.sink.path, self.sink.bytes)
            self.on_progress(self.sink.bytes)
        policy = RetryPolicy(self.deadline, self._should_stop)
        name, previous_bytes = self.name, self.sink.bytes

        def progressed() -> bool:
            nonlocal previous_bytes
            grown, previous_bytes = self.sink.bytes > previous_bytes, self.sink.bytes
            return grown

        retry_call(
            self._attempt,
            policy,
            describe=lambda failure: f"{name}: {failure}",
            permanent_error=partial(_permanent_error, name),
            progressed=progressed,
        )

    def _should_stop(self) -> bool:
        self.on_progress(0)
        return False

    def _attempt(self) -> None:
        """Fetch the rest of the file; return when the file is complete and verified."""
        try:
            problem = self._stream() or self._check()
            if problem is None:
                return
            self.wrong_downloads += 1
            if self.wrong_downloads >= MAX_WRONG_DOWNLOADS:
                self._restart()
                raise TransientError(
                    f"{self.name}: {problem} after {self.wrong_downloads} complete downloads; the server, or a proxy "
                    "or cache in front of it, sends wrong bytes. The downloaded bytes were discarded; run the same "
                    "command again"
                )
            raise RetryableError(problem, restart=True)
        except SourceChanged as changed:
            raise RequestError(
                f"{self.name} changed since it was planned; if the source is a directory, run tokenmill download with "
                f"{REPLACE_OPTION}, which keeps unchanged files; for any other source, use another output directory"
            ) from changed
        except RetryableError as failure:
            if failure.restart:
                self.on_progress(-self.sink.bytes)
                self._restart()
            raise

    def _new_digest(self) -> Any:
        if self.file.git_sha1 and not self.file.sha256:
            return hashlib.sha1(b"blob %d\0" % (self.file.size or 0), usedforsecurity=False)
        return hashlib.sha256()

    def _restart(self) -> None:
        self.buffered_parts.clear()
        self.sink.restart()
        self.digest = self._new_digest()

    def _stream(self) -> str | None:
        """Fetch the rest of the file; return the problem when the source has more bytes than the listing."""
        size = self.file.size
        if size is not None and self.sink.bytes == size:
            return None
        start = self.sink.bytes
        divided = (
            size is not None and self.pool.limit > 1 and size - start >= MIN_DIVIDED_BYTES and not self.wrong_downloads
        )
        stop = _part_end(start, size) if divided else None
        body = self.source.open(self.file, self.revision, start, stop, plain=self.wrong_downloads > 0)
        total = getattr(body, "total", None)
        if None not in (size, total) and total != size:
            body.close()  # type: ignore[attr-defined]
            return f"the server reports a size of {total} bytes, but {size} were listed"
        problem = self._append(body)
        if problem is None and size is not None and body.stop is not None:
            problem = self._append_parts(body, size)
        if problem is None and size is not None and self.sink.bytes < size:
            raise RetryableError(f"the connection closed at byte {self.sink.bytes} of {size}")
        return problem

    def _append(self, blocks: Iterable[bytes | memoryview]) -> str | None:
        size = self.file.size
        file_hash = self.file.sha256 or self.file.git_sha1
        for block in blocks:
            if (
                not self.sink.bytes
                and not file_hash
                and (content := find_wrong_content(bytes(block[:HEAD_BYTES]), self.file.path))
            ):
                raise RetryableError(
                    f"the server sent wrong content: {content}", refused=True, restart=True, remedy=WRONG_CONTENT_REMEDY
                )
            if size is not None and self.sink.bytes + len(block) > size:
                return f"the response has more than the {size} bytes that were listed"
            self.sink.write(block)
            self.digest.update(block)
            self.on_progress(len(block))
        return None

    def _append_parts(self, body: Body, size: int) -> str | None:
        """Fetch the rest in parts, over all connections that are spare at the time.

        The file grows only at its end, so an interrupted attempt leaves no hole and the hash can follow. A part that
        arrives early waits in memory. The buffer holds one part per connection and two more.
        """
        prefetcher = _PartPrefetcher(body, self.sink.bytes, size, self.pool, self.buffered_parts)
        try:
            problem = None
            blocks: Iterable[bytes | memoryview]
            while self.sink.bytes < size and problem is None:
                start = self.sink.bytes
                if prefetcher.start_threads(start):
                    blocks = prefetcher.read(start, lambda: self.on_progress(0))
                else:
                    blocks = _read_part(body, start, _part_end(start, size))
                problem = self._append(blocks)
            return problem
        finally:
            prefetcher.stop()

    def _check(self) -> str | None:
        """Return the problem of a completely fetched file, or None when the file is correct."""
        listed_hash = self.file.sha256 or self.file.git_sha1
        if listed_hash and self.digest.hexdigest() != listed_hash:
            algorithm = "sha256" if self.file.sha256 else "git hash"
            return f"{algorithm} is {self.digest.hexdigest()}, but the listing has {listed_hash}"
        return find_truncation(self.sink.path, self.file.path) if self.file.size is None and not listed_hash else None


def _permanent_error(name: str, failure: RetryableError, counts: FailureCounts) -> Exception | None:
    """Return the error of a file that was refused MAX_REFUSALS times in a row; None for fewer refusals."""
    if counts.refused < MAX_REFUSALS:
        return None
    return RequestError(f"{name}: {failure}, {counts.refused} times in a row; {failure.remedy or NO_ACCESS_REMEDY}")


def _part_end(start: int, size: int | None) -> int:
    """Return the end of the part that contains the byte `start`.

    All parts have the same size, except the first and the last.
    """
    end = (start // PART_BYTES + 1) * PART_BYTES
    return end if size is None else min(size, end)


def _read_part(body: Body, start: int, stop: int) -> Iterator[bytes | memoryview]:
    """Yield the bytes of one part; raise RetryableError when the part is shorter or longer."""
    try:
        part = body.open_part(start, stop)
    except RetryableError as failure:
        failure.restart = False  # the next request from this offset decides whether the earlier bytes are usable
        raise
    missing = stop - start
    for block in part:
        if len(block) > missing:
            raise RetryableError(
                f"the server sent more than the {stop - start} bytes from byte {start} that were requested"
            )
        missing -= len(block)
        yield block
    if missing:
        raise RetryableError(f"the connection closed at byte {stop - missing} of the part that ends at byte {stop}")


class _PartPrefetcher:
    """Threads that fetch the parts of one file before the writer needs them; parts may arrive in any order."""

    def __init__(
        self, body: Body, start: int, size: int, pool: ConnectionPool, buffered_parts: dict[int, list[bytes]]
    ) -> None:
        self._body = body
        self._size = size
        self._pool = pool
        self._fetched = buffered_parts
        self._failed: dict[int, tuple[list[bytes], BaseException]] = {}
        self._claimed: set[int] = set()
        self._written = start
        self._threads = 0
        self._stopped = False
        self._changed = threading.Condition()

    def start_threads(self, start: int) -> bool:
        """Start one thread per spare connection; return whether a thread delivers the part at `start`.

        The first thread uses the connection of the writer, which waits for the parts.
        """
        with self._changed:
            self._written = start
            parts_left = -((self._next_start() - self._size) // PART_BYTES)
            while self._threads < parts_left and self._pool.try_acquire_spare():
                if not self._threads:
                    self._start_thread(borrowed=False)
                self._start_thread(borrowed=True)
            self._changed.notify_all()
            return self._threads > 0 or start in self._fetched

    def _start_thread(self, *, borrowed: bool) -> None:
        self._threads += 1
        # A daemon thread, because it may wait for a silent server when the process must exit.
        threading.Thread(target=self._run_thread, args=(borrowed,), daemon=True).start()

    def read(self, start: int, on_wait: Callable[[], None]) -> Iterator[bytes]:
        """Yield the part at `start` when it has arrived.

        When its thread failed, yield the bytes that arrived, then raise the thread's exception.
        """
        while True:
            with self._changed:
                if start in self._fetched or start in self._failed or not self._threads:
                    blocks = self._fetched.pop(start, None)
                    if blocks is not None:
                        self._written = _part_end(start, self._size)  # otherwise a thread would claim the part again
                    break
                self._changed.wait(0.5)
            on_wait()
        yield from blocks or ()
        if start in self._failed:
            partial_blocks, error = self._failed[start]
            yield from partial_blocks
            raise error

    def stop(self) -> None:
        """Make each thread end at its next block."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _run_thread(self, borrowed: bool) -> None:
        try:
            while (start := self._claim_part(borrowed)) is not None:
                self._fetch_part(start)
        finally:
            with self._changed:
                self._threads -= 1
                self._changed.notify_all()
            if borrowed:
                self._pool.release()

    def _claim_part(self, borrowed: bool) -> int | None:
        """Return the start of the next part that no thread has claimed; None when this thread must end."""
        with self._changed:
            while True:
                start = self._next_start()
                if self._stopped or self._failed or start >= self._size or (borrowed and self._pool.is_contended()):
                    return None
                if start - self._written < (self._threads + 2) * PART_BYTES:
                    self._claimed.add(start)
                    return start
                self._changed.wait()

    def _next_start(self) -> int:
        start = self._written
        while start in self._fetched or start in self._claimed or start in self._failed:
            start = _part_end(start, self._size)
        return start

    def _fetch_part(self, start: int) -> None:
        blocks: list[bytes] = []
        try:
            for block in _read_part(self._body, start, _part_end(start, self._size)):
                if self._stopped:
                    return
                blocks.append(bytes(block))
        except BaseException as error:  # `read` raises it in the thread that waits for the part
            self._store_result(start, self._failed, (blocks, error))
        else:
            self._store_result(start, self._fetched, blocks)

    def _store_result(self, start: int, results: dict[int, Any], result: Any) -> None:
        with self._changed:
            self._claimed.discard(start)
            if not self._stopped:  # after a stop the part may belong to discarded bytes
                results[start] = result
            self._changed.notify_all()
