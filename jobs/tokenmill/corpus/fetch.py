"""Fetch one file of a source, whatever its server does, until its bytes are there and right.

`stages.download` fetches through it into what a unit commits, and a stage that needs a shard only for a
while into its scratch directory (`fetch_to`). What a server refuses is asked again until the deadline.
"""

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tokenmill.corpus.source import RemoteFile, Retry, Source
from tokenmill.errors import RequestError, TransientError
from tokenmill.files import size_of, update_hash

WRONG_HASHES = 3
"""Whole downloads of a file with a wrong hash before it is given up."""
REFUSALS = 5
"""Consecutive 401, 403 or 404 answers before they are believed."""
BACKOFF_SECONDS = (1.0, 60.0)


class Sink(Protocol):
    """Where the bytes go: a file that is only ever appended to, or begun again."""

    path: Path
    bytes: int
    """How many of the file's first bytes are in it; what a dead attempt left counts (see `worth_keeping`)."""

    def write(self, data: Any) -> None:
        """Append a bytes-like object, which is not to be used after the call."""

    def restart(self) -> None:
        """Forget all bytes."""


class Scratch:
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

    def __enter__(self) -> "Scratch":
        """Use it until it is closed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it; it stays where it is."""
        self._file.close()


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
) -> None:
    """Fetch a file to a local path, going on from what a dead attempt left there; see `fetch`."""
    with Scratch(path, worth_keeping(file, path)) as scratch:
        fetch(source, file, revision, scratch, give_up_at=give_up_at, checkpoint=checkpoint)


def fetch(
    source: Source,
    file: RemoteFile,
    revision: str | None,
    sink: Sink,
    *,
    give_up_at: float,
    checkpoint: Callable[[int], None],
) -> None:
    """Fetch a file into a sink, until it is whole and has its hash.

    `give_up_at` is a time of the monotonic clock; `checkpoint` is called with the bytes that came since (less
    than 0 when they are fetched again), at least twice a second while waiting, and may raise to stop here. Raises
    RequestError when the file is refused for good, TransientError when it stays wrong or the time is up.
    """
    _Fetch(source, file, revision, sink, give_up_at, checkpoint).run()


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
    ) -> None:
        self.source = source
        self.file = file
        self.revision = revision
        self.name = file.path if file.path.isprintable() else repr(file.path)  # it goes to logs and terminals
        self.sink = sink
        self.deadline = give_up_at
        self.checkpoint = checkpoint
        self.digest = self._new_digest()
        self.fruitless = self.refused = self.wrong = self.restarts = 0

    def run(self) -> None:
        """Fetch until the file is whole and right; raises when it is refused for good or time is up."""
        if self.sink.bytes:
            update_hash(self.digest, self.sink.path, self.sink.bytes)
            self.checkpoint(self.sink.bytes)
        while True:
            before = self.sink.bytes
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
                raise Retry(problem, restart=True)
            except Retry as retry:
                if retry.restart:
                    self.restarts += 1
                    self.checkpoint(-self.sink.bytes)
                    self._restart()
                progress = self.sink.bytes > before
                self.fruitless = 0 if progress else self.fruitless + 1
                self.refused = self.refused + 1 if retry.refused else 0
                if self.refused >= REFUSALS:
                    raise RequestError(
                        f"{self.name}: {retry}, {self.refused} times in a row; the repository needs a token with "
                        "access (HF_TOKEN), or the file is gone from this revision"
                    ) from retry
                self._pause(retry)

    def _new_digest(self) -> Any:
        if self.file.git_sha1 and not self.file.sha256:
            return hashlib.sha1(b"blob %d\0" % (self.file.size or 0), usedforsecurity=False)
        return hashlib.sha256()

    def _restart(self) -> None:
        self.sink.restart()
        self.digest = self._new_digest()

    def _stream(self) -> str | None:
        """Fetch the rest of the file; return what is wrong when there is more of it than there should be."""
        size = self.file.size
        if size is not None and self.sink.bytes == size:
            return None
        for block in self.source.read(self.file, self.revision, self.sink.bytes):
            if size is not None and self.sink.bytes + len(block) > size:
                return f"it has more than the {size} bytes that were listed"
            self.sink.write(block)
            self.digest.update(block)
            self.checkpoint(len(block))
        if size is not None and self.sink.bytes < size:
            raise Retry(f"the connection closed at byte {self.sink.bytes} of {size}")
        return None

    def _check(self) -> str | None:
        """Return what is wrong with a whole file, None when nothing is."""
        want = self.file.sha256 or self.file.git_sha1
        if want and self.digest.hexdigest() != want:
            kind = "sha256" if self.file.sha256 else "git hash"
            return f"{kind} is {self.digest.hexdigest()}, the listing says {want}"
        return None

    def _pause(self, retry: Retry) -> None:
        """Wait as long as the server asked, else longer each time without progress; jitter parts the workers."""
        low, high = BACKOFF_SECONDS
        backoff = min(high, low * 2 ** min(self.fruitless, 10)) * random.uniform(0.5, 1.0)
        if retry.after is not None:
            backoff = retry.after + random.uniform(0.0, 0.5)
        elif retry.restart:
            backoff = min(high, low * 2 ** min(self.restarts - 1, 10)) * random.uniform(0.5, 1.0)
        elif not self.fruitless:
            backoff = random.uniform(0.0, low / 4)
        if time.monotonic() + backoff > self.deadline:
            raise TransientError(f"{self.name}: {retry}; the deadline of this run has come") from retry
        until = time.monotonic() + backoff
        while (left := until - time.monotonic()) > 0:
            self.checkpoint(0)
            time.sleep(min(left, 0.5))
