"""Fetch one file of a source, whatever its server does, until its bytes are there and right.

`stages.download` fetches through it into what a unit commits, and a stage that needs a shard only for a
while into its scratch directory (`fetch_to`). What a server refuses is asked again until the deadline.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tokenmill.corpus.body_check import HEAD, IN_ITS_PLACE, impostor, unfinished
from tokenmill.corpus.retry import FailureCounts, RetryableError, RetryPolicy, retrying
from tokenmill.corpus.source import Body, Source, SourceChanged
from tokenmill.errors import WITH_REPLACE, RequestError, TransientError
from tokenmill.files.hashing import update_hash
from tokenmill.files.publish import size_of
from tokenmill.flow.contract import RemoteFile

WRONG_HASHES = 3
"""Whole downloads of a file with a wrong hash before it is given up."""
REFUSALS = 5
"""Consecutive 401, 403 or 404 answers before they are believed."""
NO_ACCESS = "the repository needs a token with access (HF_TOKEN), or the file is gone from this revision"

PART = 8 << 20
"""Bytes of a large file that one request asks for: enough that the wait for each answer is no matter."""
LARGE = 16 * PART
"""What a file must have left to be fetched over several connections."""


class Sink(Protocol):
    """Where the bytes go: a file that is only ever appended to, or begun again."""

    path: Path
    bytes: int
    """How many of the file's first bytes are in it; what a dead attempt left counts (see `worth_keeping`)."""

    def write(self, data: Any) -> None:
        """Append a bytes-like object, which is not to be used after the call."""

    def restart(self) -> None:
        """Forget all bytes."""


class ScratchFile:
    """A file that needs to outlive nothing: not synced, and hashed by `fetch` alone."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        """Open `path`, going on after its first `keep` bytes."""
        self.path = path
        self.bytes = keep
        self._file = path.open("r+b" if keep else "wb", buffering=0)
        self._file.truncate(keep)
        self._file.seek(keep)

    def write(self, data: Any) -> None:
        """Append a bytes-like object."""
        view = memoryview(data).cast("B")
        self.bytes += len(view)
        while len(view):
            view = view[self._file.write(view) :]

    def restart(self) -> None:
        """Forget all bytes."""
        self._file.truncate(0)
        self._file.seek(0)
        self.bytes = 0

    def __enter__(self) -> "ScratchFile":
        """Use it until it is closed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it; it stays where it is."""
        self._file.close()


class ConnectionPool:
    """The connections that the files fetched at a time share: one each, and the large ones take what is spare."""

    def __init__(self, limit: int) -> None:
        """Allow so many."""
        self.limit = limit
        self._used = 0
        self._waiting = 0
        self._freed = threading.Condition()

    def take(self, waiting: Callable[[], None]) -> None:
        """Take the one that every file has; `waiting` is called twice a second until there is one, and may raise."""
        with self._freed:
            self._waiting += 1
            try:
                while self._used >= self.limit:
                    if not self._freed.wait(0.5):
                        waiting()
                self._used += 1
            finally:
                self._waiting -= 1

    def take_spare(self) -> bool:
        """Take one more if there is one that no file waits for."""
        with self._freed:
            spare = self._used + self._waiting < self.limit
            self._used += spare
            return spare

    def give(self) -> None:
        """Give one back."""
        with self._freed:
            self._used -= 1
            self._freed.notify()

    def wanted(self) -> bool:
        """Tell whether a file waits for one: who has several is to give one back."""
        return self._waiting > 0


def worth_keeping(file: RemoteFile, path: Path) -> int:
    """Return how many bytes of what a dead attempt left at `path` are worth going on from.

    None without a hash, which alone tells whether they are right; none when there are more than the file has.
    """
    there = size_of(path) or 0
    hashed = file.sha256 or file.git_sha1
    return there if hashed and (file.size is None or there <= file.size) else 0


def fetch_to(
    source: Source,
    file: RemoteFile,
    revision: str | None,
    path: Path,
    *,
    give_up_at: float,
    checkpoint: Callable[[int], None],
    lines: ConnectionPool | None = None,
) -> None:
    """Fetch a file to a local path, going on from what a dead attempt left there; see `fetch`."""
    with ScratchFile(path, worth_keeping(file, path)) as scratch:
        fetch(source, file, revision, scratch, give_up_at=give_up_at, checkpoint=checkpoint, lines=lines)


def fetch_head(
    source: Source, file: RemoteFile, revision: str | None, path: Path, length: int, policy: RetryPolicy
) -> None:
    """Fetch the first `length` bytes of a file, to look at: no hash tells whether they are right.

    Raises RequestError when the file is refused for good, TransientError when the policy's time is up.
    """

    def question() -> None:
        with ScratchFile(path) as scratch:
            for block in source.open(file, revision, 0, min(length, file.size or length), plain=True):
                scratch.write(block[: length - scratch.bytes])
                if scratch.bytes >= length:
                    break

    name = _shown(file)
    retrying(question, policy, problem=lambda retry: f"{name}: {retry}", final=partial(_final, name))


def fetch(
    source: Source,
    file: RemoteFile,
    revision: str | None,
    sink: Sink,
    *,
    give_up_at: float,
    checkpoint: Callable[[int], None],
    lines: ConnectionPool | None = None,
) -> None:
    """Fetch a file into a sink, until it is whole and has its hash; a large one over all `lines` that are spare.

    `give_up_at` is a time of the monotonic clock; `checkpoint` is called with the bytes that came since (less
    than 0 when they are fetched again), twice a second in a pause, and may raise to stop here. Raises RequestError
    when the file is refused for good, TransientError when it stays wrong or the time is up.
    """
    lines = lines or ConnectionPool(1)
    lines.take(lambda: checkpoint(0))
    try:
        _Fetch(source, file, revision, sink, give_up_at, checkpoint, lines).run()
    finally:
        lines.give()


class _Fetch:
    """One file's way through everything a server may do."""

    def __init__(
        self,
        source: Source,
        file: RemoteFile,
        revision: str | None,
        sink: Sink,
        give_up_at: float,
        checkpoint: Callable[[int], None],
        lines: ConnectionPool,
    ) -> None:
        self.source = source
        self.file = file
        self.revision = revision
        self.name = _shown(file)
        self.sink = sink
        self.deadline = give_up_at
        self.checkpoint = checkpoint
        self.digest = self._new_digest()
        self.lines = lines
        self.ahead: dict[int, list[bytes]] = {}
        self.wrong = 0

    def run(self) -> None:
        """Fetch until the file is whole and right; raises when it is refused for good or time is up."""
        if self.sink.bytes:
            update_hash(self.digest, self.sink.path, self.sink.bytes)
            self.checkpoint(self.sink.bytes)
        policy = RetryPolicy(self.deadline, self._stopped)
        name, before = self.name, self.sink.bytes

        def progressed() -> bool:
            nonlocal before
            further, before = self.sink.bytes > before, self.sink.bytes
            return further

        retrying(
            self._attempt,
            policy,
            problem=lambda retry: f"{name}: {retry}",
            final=partial(_final, name),
            progressed=progressed,
        )

    def _stopped(self) -> bool:
        self.checkpoint(0)
        return False

    def _attempt(self) -> None:
        """Go on fetching; return when the file is whole and right."""
        try:
            problem = self._stream() or self._check()
            if problem is None:
                return
            self.wrong += 1
            if self.wrong >= WRONG_HASHES:
                self._restart()
                raise TransientError(
                    f"{self.name}: {problem} after {self.wrong} whole downloads; the server, or a proxy or "
                    "cache before it, gives wrong bytes. Nothing of it is kept; run the same command again"
                )
            raise RetryableError(problem, restart=True)
        except SourceChanged as changed:
            raise RequestError(
                f"{self.name} changed since it was planned; a directory is planned anew by tokenmill download with "
                f"{WITH_REPLACE}, which keeps what did not change; of another source, use another output directory"
            ) from changed
        except RetryableError as retry:
            if retry.restart:
                self.checkpoint(-self.sink.bytes)
                self._restart()
            raise

    def _new_digest(self) -> Any:
        if self.file.git_sha1 and not self.file.sha256:
            return hashlib.sha1(b"blob %d\0" % (self.file.size or 0), usedforsecurity=False)
        return hashlib.sha256()

    def _restart(self) -> None:
        self.ahead.clear()
        self.sink.restart()
        self.digest = self._new_digest()

    def _stream(self) -> str | None:
        """Fetch the rest of the file; return what is wrong when there is more of it than there should be."""
        size = self.file.size
        if size is not None and self.sink.bytes == size:
            return None
        start = self.sink.bytes
        divided = size is not None and self.lines.limit > 1 and size - start >= LARGE and not self.wrong
        stop = _part_end(start, size) if divided else None
        body = self.source.open(self.file, self.revision, start, stop, plain=self.wrong > 0)
        total = getattr(body, "total", None)
        if None not in (size, total) and total != size:
            body.close()  # type: ignore[attr-defined]
            return f"the server has {total} bytes of it, and {size} were listed"
        problem = self._append(body)
        if problem is None and size is not None and body.stop is not None:
            problem = self._parts(body, size)
        if problem is None and size is not None and self.sink.bytes < size:
            raise RetryableError(f"the connection closed at byte {self.sink.bytes} of {size}")
        return problem

    def _append(self, blocks: Iterable[bytes | memoryview]) -> str | None:
        size = self.file.size
        hashed = self.file.sha256 or self.file.git_sha1
        for block in blocks:
            if not self.sink.bytes and not hashed and (what := impostor(bytes(block[:HEAD]), self.file.path)):
                raise RetryableError(
                    f"what the server gives is {what}", refused=True, restart=True, remedy=IN_ITS_PLACE
                )
            if size is not None and self.sink.bytes + len(block) > size:
                return f"it has more than the {size} bytes that were listed"
            self.sink.write(block)
            self.digest.update(block)
            self.checkpoint(len(block))
        return None

    def _parts(self, body: Body, size: int) -> str | None:
        """Fetch the rest part by part, over as many connections as are spare at the time.

        Only what continues the file is written, so that a dead attempt leaves no hole and the hash follows; what
        came before its turn waits in memory, a part for each connection and two.
        """
        parts = _Parts(body, self.sink.bytes, size, self.lines, self.ahead)
        try:
            problem = None
            blocks: Iterable[bytes | memoryview]
            while self.sink.bytes < size and problem is None:
                start = self.sink.bytes
                if parts.staffed(start):
                    blocks = parts.take(start, lambda: self.checkpoint(0))
                else:
                    blocks = _exactly(body, start, _part_end(start, size))
                problem = self._append(blocks)
            return problem
        finally:
            parts.stop()

    def _check(self) -> str | None:
        """Return what is wrong with a whole file, None when nothing is."""
        want = self.file.sha256 or self.file.git_sha1
        if want and self.digest.hexdigest() != want:
            kind = "sha256" if self.file.sha256 else "git hash"
            return f"{kind} is {self.digest.hexdigest()}, the listing says {want}"
        return unfinished(self.sink.path, self.file.path) if self.file.size is None and not want else None


def _shown(file: RemoteFile) -> str:
    """Name a file in logs and terminals."""
    return file.path if file.path.isprintable() else repr(file.path)


def _final(name: str, retry: RetryableError, failures: FailureCounts) -> Exception | None:
    """Return the error of a file that was refused too often in a row for the next try to be worth while."""
    if failures.refused < REFUSALS:
        return None
    return RequestError(f"{name}: {retry}, {failures.refused} times in a row; {retry.remedy or NO_ACCESS}")


def _part_end(start: int, size: int | None) -> int:
    """Return where the part ends that holds a byte; all but the first and the last are of one size."""
    end = (start // PART + 1) * PART
    return end if size is None else min(size, end)


def _exactly(body: Body, start: int, stop: int) -> Iterator[bytes | memoryview]:
    """Yield the bytes of one part; raises Retry where they are fewer or more."""
    try:
        part = body.part(start, stop)
    except RetryableError as retry:
        retry.restart = False  # whether what came before is of use is for the next request from there to say
        raise
    left = stop - start
    for block in part:
        if len(block) > left:
            raise RetryableError(
                f"the server gave more than the {stop - start} bytes from {start} that it was asked for"
            )
        left -= len(block)
        yield block
    if left:
        raise RetryableError(f"the connection closed at byte {stop - left} of the part to {stop}")


class _Parts:
    """Threads that fetch the parts of one file ahead of who writes them, in whatever order they come."""

    def __init__(self, body: Body, start: int, size: int, lines: ConnectionPool, ahead: dict[int, list[bytes]]) -> None:
        self._body = body
        self._size = size
        self._lines = lines
        self._done = ahead
        self._failed: dict[int, tuple[list[bytes], BaseException]] = {}
        self._claimed: set[int] = set()
        self._written = start
        self._threads = 0
        self._stopped = False
        self._changed = threading.Condition()

    def staffed(self, start: int) -> bool:
        """Start as many threads as connections are spare; tell whether the part at `start` comes by one of them.

        The first thread has the connection of who waits for it.
        """
        with self._changed:
            self._written = start
            left = -((self._next() - self._size) // PART)
            while self._threads < left and self._lines.take_spare():
                if not self._threads:
                    self._start(borrowed=False)
                self._start(borrowed=True)
            self._changed.notify_all()
            return self._threads > 0 or start in self._done

    def _start(self, *, borrowed: bool) -> None:
        self._threads += 1
        # A daemon: it may wait for a silent server when this process is to end.
        threading.Thread(target=self._work, args=(borrowed,), daemon=True).start()

    def take(self, start: int, wait: Callable[[], None]) -> Iterator[bytes]:
        """Yield the part at `start` once it is there; raises what kept it from coming, after what came of it."""
        while True:
            with self._changed:
                if start in self._done or start in self._failed or not self._threads:
                    blocks = self._done.pop(start, None)
                    if blocks is not None:
                        self._written = _part_end(start, self._size)  # else it would be claimed again
                    break
                self._changed.wait(0.5)
            wait()
        yield from blocks or ()
        if start in self._failed:
            came, error = self._failed[start]
            yield from came
            raise error

    def stop(self) -> None:
        """Let the threads end, at their next block."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _work(self, borrowed: bool) -> None:
        try:
            while (start := self._claim(borrowed)) is not None:
                self._fetch(start)
        finally:
            with self._changed:
                self._threads -= 1
                self._changed.notify_all()
            if borrowed:
                self._lines.give()

    def _claim(self, borrowed: bool) -> int | None:
        """Return the next part that nobody has, None when there is nothing more to do."""
        with self._changed:
            while True:
                start = self._next()
                if self._stopped or self._failed or start >= self._size or (borrowed and self._lines.wanted()):
                    return None
                if start - self._written < (self._threads + 2) * PART:
                    self._claimed.add(start)
                    return start
                self._changed.wait()

    def _next(self) -> int:
        start = self._written
        while start in self._done or start in self._claimed or start in self._failed:
            start = _part_end(start, self._size)
        return start

    def _fetch(self, start: int) -> None:
        came: list[bytes] = []
        try:
            for block in _exactly(self._body, start, _part_end(start, self._size)):
                if self._stopped:
                    return
                came.append(bytes(block))
        except BaseException as error:  # it is raised where the part is waited for
            self._end(start, self._failed, (came, error))
        else:
            self._end(start, self._done, came)

    def _end(self, start: int, where: dict[int, Any], what: Any) -> None:
        with self._changed:
            self._claimed.discard(start)
            if not self._stopped:  # else it may belong to bytes that were given up
                where[start] = what
            self._changed.notify_all()
