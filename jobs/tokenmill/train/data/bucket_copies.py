"""Copy the pairs of a run from their buckets to the disk of this node, for Megatron-LM, which maps them.

The copies are at the paths that stand for the objects (`core.buckets.mirror`), so that every part of a run names a pair
by the same path, whether it reads ranges of the object or the copy. The copy of another version is replaced.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import xxhash

from tokenmill.core.buckets.mirror import find_address, find_root, show_addresses
from tokenmill.core.buckets.tree import open_bucket
from tokenmill.core.files.explain import is_full
from tokenmill.core.printing import format_bytes
from tokenmill.datasets.weighted import Pair
from tokenmill.errors import InputError, MachineError, RequestError
from tokenmill.train import settings as s
from tokenmill.train.data.flags import MAP_FLAG, OBJECT_STORAGE_FLAG, reads_buckets_itself

FILES_AT_ONCE = 16
"""Files that are copied at the same time, each over one connection."""
LOG_SECONDS = 30.0
HASH_DIGITS = 32
"""Hex digits of the hash of a file; a pair with a record has those of the `.bin` and the `.idx`."""


class _BucketFile(NamedTuple):
    path: Path
    size: int
    hash: str
    """Empty for a pair without a record."""


class _CopyStopped(Exception):
    """Another file could not be copied, or the run was stopped."""


def list_remote(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs in buckets, each once."""
    return list({pair.prefix: pair for pair in pairs if find_address(Path(pair.prefix))}.values())


@contextmanager
def explain_full_scratch() -> Iterator[None]:
    """Raise MachineError if the disk of the copies is full: a retry on this machine cannot help."""
    try:
        yield
    except OSError as error:
        if not is_full(error) or not find_address(Path(str(error.filename))):
            raise
        raise MachineError(
            f"no space left for {show_addresses(str(error.filename))} in {tempfile.gettempdir()}; set TMPDIR to a "
            "larger disk (in the chart: scratch.sizeLimit)"
        ) from error


def check_own_reader(settings: s.Settings, pairs: Sequence[Pair]) -> list[str]:
    """Return a line for the log if Megatron-LM reads the buckets of a run itself.

    Raises:
        RequestError: its reader cannot read them.
    """
    remote = list_remote(pairs)
    if not remote or not reads_buckets_itself(settings):
        return []
    if settings.training.phases is not None:
        raise RequestError(f"{OBJECT_STORAGE_FLAG} cannot read the views of training.phases; remove it from extraArgs")
    if MAP_FLAG not in settings.extra_args:
        raise RequestError(f"{OBJECT_STORAGE_FLAG} needs {MAP_FLAG}; add it to extraArgs")
    other = next((pair for pair in remote if show_addresses(pair.prefix).partition(":")[0] != "s3"), None)
    if other:
        raise RequestError(
            f"{show_addresses(other.prefix)}: Megatron-LM reads only s3:// itself; remove {OBJECT_STORAGE_FLAG} from "
            "extraArgs, and each node copies the pairs"
        )
    return [
        "warning: Megatron-LM reads the bucket itself (it needs boto3): it fetches 256 MiB for nearly each sample of a "
        f"shuffled dataset; without {OBJECT_STORAGE_FLAG} in extraArgs, each node copies the pairs once"
    ]


def copy_pairs(pairs: Sequence[Pair], log: Callable[[str], None]) -> None:
    """Copy pairs in buckets, in their order, unless their copies are there.

    Raises:
        MachineError: the disk is too small.
        InputError: an object has another content than its record.
        TransientError: the store does not answer.
    """
    remote = list_remote(pairs)
    if not remote:
        return
    started, stop, progress = time.monotonic(), threading.Event(), _Progress()
    executor = ThreadPoolExecutor(FILES_AT_ONCE)
    try:
        files = [file for files in executor.map(_find_missing, remote) for file in files]
        if not files:
            return
        total, place = sum(file.size for file in files), find_root(files[0].path)
        free = shutil.disk_usage(place).free
        if free < total:
            raise MachineError(
                f"Megatron-LM reads a copy of the {len(remote):,} pairs in buckets, which needs {format_bytes(total)} "
                f"more, but {place} has {format_bytes(free)} free; set TMPDIR to a larger disk (in the chart: "
                "scratch.sizeLimit), or train with a loader of tokenmill.data, which reads ranges"
            )
        log(f"copying {len(files):,} files, {format_bytes(total)}, from {show_addresses(str(files[0].path.parent))}")
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


def _find_missing(pair: Pair) -> list[_BucketFile]:
    """Return the files of a pair without a copy of their version."""
    hashes = [pair.hashes[:HASH_DIGITS], pair.hashes[HASH_DIGITS:]] if len(pair.hashes) == 2 * HASH_DIGITS else ["", ""]
    files = []
    for suffix, hash_ in zip((".bin", ".idx"), hashes, strict=True):
        path = Path(f"{pair.prefix}{suffix}")
        tree = open_bucket(path.parent)
        if not tree.is_copied(path):
            files.append(_BucketFile(path, tree.describe(path)[0], hash_))
    return files


def _copy(file: _BucketFile, stop: threading.Event, progress: _Progress) -> None:
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
