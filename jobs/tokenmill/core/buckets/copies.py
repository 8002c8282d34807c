"""Copies of many objects on the disk of this machine, checked against their recorded hashes.

The copies are at the paths that stand for the objects (`core.buckets.mirror`).
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

from tokenmill.core.buckets.mirror import show_addresses
from tokenmill.core.buckets.tree import open_bucket
from tokenmill.core.printing import format_bytes
from tokenmill.errors import InputError

FILES_AT_ONCE = 16
"""Files that are copied at the same time, each over one connection."""
LOG_SECONDS = 30.0


class BucketFile(NamedTuple):
    """An object to copy: the path that stands for it, its bytes, and its xxh3-128 in hexadecimal digits."""

    path: Path
    size: int
    hash: str
    """Empty without a record of the hash."""


class _CopyStopped(Exception):
    """Another file could not be copied, or the run was stopped."""


def copy_files(root: Path, files: Sequence[BucketFile], log: Callable[[str], None]) -> None:
    """Copy objects below a bucket's prefix, for which `root` stands, to the disk.

    Raises:
        FileNotFoundError: there is no such object.
        InputError: an object has another content than its record.
        TransientError: the store does not answer.
    """
    total, started, progress = sum(file.size for file in files), time.monotonic(), _Progress()
    stop, executor = threading.Event(), ThreadPoolExecutor(FILES_AT_ONCE)
    try:
        log(f"copying {len(files):,} files, {format_bytes(total)}, from {show_addresses(str(root))}")
        copies = [executor.submit(_copy, file, stop, progress) for file in files]
        for copy in copies:
            while not copy.done():
                progress.wait(LOG_SECONDS)
                if progress.seconds > LOG_SECONDS:
                    log(f"copied {format_bytes(progress.take())} of {format_bytes(total)}")
            copy.result()
        seconds = max(time.monotonic() - started, 1e-3)
        log(f"copied {format_bytes(total)} in {seconds:,.0f} s ({format_bytes(total / seconds)}/s)")
    finally:
        stop.set()
        executor.shutdown(cancel_futures=True)


class _Progress:
    """The bytes that were copied, and the time since the last line about them."""

    def __init__(self) -> None:
        self.bytes, self._logged = 0, time.monotonic()
        self._changed = threading.Condition()

    def add(self, count: int) -> None:
        with self._changed:
            self.bytes += count

    def end(self) -> None:
        """Wake the thread that waits for a file."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._logged

    def take(self) -> int:
        self._logged = time.monotonic()
        return self.bytes


def _copy(file: BucketFile, stop: threading.Event, progress: _Progress) -> None:
    digest = xxhash.xxh3_128()

    def pass_on(blocks: Iterator[memoryview]) -> Iterator[memoryview]:
        for block in blocks:
            if stop.is_set():
                raise _CopyStopped
            digest.update(block)
            progress.add(len(block))
            yield block
        if file.hash and digest.hexdigest() != file.hash:
            raise InputError(
                f"{file.path} has another content than its record (xxh3-128 {digest.hexdigest()}, recorded "
                f"{file.hash}); run tokenmill verify on its directory"
            )

    try:
        open_bucket(file.path.parent).copy_out(file.path, pass_on)
    finally:
        progress.end()
