"""Copy the pairs of a run from their buckets to the disk of this node, for Megatron-LM, which maps them.

The copies are at the paths that stand for the objects (`core.buckets.mirror`), so that every part of a run names a pair
by the same path, whether it reads ranges of the object or the copy. The copy of another version is replaced.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tokenmill.core.buckets.copies import FILES_AT_ONCE, BucketFile, copy_files
from tokenmill.core.buckets.mirror import find_address, find_root, show_addresses
from tokenmill.core.buckets.tree import open_bucket
from tokenmill.core.files.explain import is_full
from tokenmill.core.printing import format_bytes
from tokenmill.datasets.weighted import Pair
from tokenmill.errors import MachineError, RequestError
from tokenmill.train import settings as s
from tokenmill.train.data.flags import MAP_FLAG, OBJECT_STORAGE_FLAG, reads_buckets_itself

HASH_DIGITS = 32
"""Hex digits of the hash of a file; a pair with a record has those of the `.bin` and the `.idx`."""


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
    with ThreadPoolExecutor(FILES_AT_ONCE) as executor:
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
    copy_files(files[0].path.parent, files, log)


def _find_missing(pair: Pair) -> list[BucketFile]:
    """Return the files of a pair without a copy of their version."""
    hashes = [pair.hashes[:HASH_DIGITS], pair.hashes[HASH_DIGITS:]] if len(pair.hashes) == 2 * HASH_DIGITS else ["", ""]
    files = []
    for suffix, hash_ in zip((".bin", ".idx"), hashes, strict=True):
        path = Path(f"{pair.prefix}{suffix}")
        tree = open_bucket(path.parent)
        if not tree.is_copied(path):
            files.append(BucketFile(path, tree.describe(path)[0], hash_))
    return files
