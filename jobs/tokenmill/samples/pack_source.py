"""Find an output of tokenmill pack and the shards of one part of it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.core.buckets.tree import is_directory
from tokenmill.datasets.split import FILE_NAMES, SPLITS
from tokenmill.errors import RequestError
from tokenmill.samples.packed_samples import PackShard

if TYPE_CHECKING:
    from tokenmill.engine.contract import FileEntry, Origin
    from tokenmill.engine.record import StageRecord


COPIES_AT_ONCE = 8
"""Shards in a bucket that are copied to the local disk at the same time."""


@dataclass(frozen=True)
class PackPart:
    """A part of a finished pack: its shards, what identifies their content, and its tokenizer's fingerprint."""

    path: str
    shards: tuple[PackShard, ...]
    hashes: tuple[str, ...]
    pack_size: int
    tokenizer: str
    origin: "Origin"


def find_pack(path: Path) -> "StageRecord | None":
    """Return the record of the pack in a directory, or in the one above a directory of a split."""
    from tokenmill.engine.record import StageRecord
    from tokenmill.packs.kind import PACK

    path = path.absolute()
    for directory in (path, path.parent) if path.name in FILE_NAMES else (path,):
        record = StageRecord(directory, PACK)
        if is_directory(directory) and record.tree.size(record.plan_path) is not None:
            return record
    return None


def list_parts(record: "StageRecord", path: Path) -> list[str]:
    """Return the parts of a pack that have rows; a pack that is not finished has train, which `open_part` refuses."""
    from tokenmill.engine.record import complete
    from tokenmill.packs.view import list_shards

    named = FILE_NAMES.get(path.name) if path.absolute() != record.output.absolute() else None
    plan = record.read_plan()
    manifest = complete(record, plan, write=False).manifest if plan and named is None else None
    parts = {_get_part(entry) for entry in list_shards(manifest) if entry.records} if manifest else {named or "train"}
    return sorted(parts, key=SPLITS.index)


def open_part(record: "StageRecord", path: Path, part: str) -> PackPart:
    """Return the shards of a part of a pack.

    Raises:
        RequestError: the pack is not finished, its format cannot be read, or it has no such part.
    """
    from tokenmill.engine.record import complete
    from tokenmill.engine.stage_input import describe_unfinished
    from tokenmill.packs.contract import PackBasis, PackDetails
    from tokenmill.packs.view import list_shards

    plan = record.read_plan()
    manifest = complete(record, plan, write=False).manifest if plan else None
    if plan is None or manifest is None:
        command = plan.command if plan else "pack"
        raise RequestError(f"{describe_unfinished(record)}; run the same tokenmill {command} again to finish it")
    basis, entries = PackBasis.from_json(plan.basis), list_shards(manifest)
    if basis.format != "parquet":
        raise RequestError(
            f"{record.output} has the format {basis.format}, whose rows cannot be read in random order; run tokenmill "
            "pack with --format parquet"
        )
    named = FILE_NAMES.get(path.name) if path.absolute() != record.output.absolute() else None
    if named not in (None, part):
        raise RequestError(f"{path} is the part {named}, not {part}; set part to {named}, or open {record.output}")
    shards = [entry for entry in entries if _get_part(entry) == part and entry.records]
    if not shards:
        parts = sorted({_get_part(entry) for entry in entries}, key=SPLITS.index)
        raise RequestError(
            f"{record.output} has no rows for {part}, only for {', '.join(parts)}; choose one of them, or run "
            "tokenmill pack with --valid-shards or --test-shards"
        )
    with ThreadPoolExecutor(COPIES_AT_ONCE) as executor:  # rows are read in random order: a bucket is copied
        paths = list(executor.map(record.tree.local, [entry.path for entry in shards]))
    return PackPart(
        path=str(path),
        shards=tuple(PackShard(path, entry.records or 0) for path, entry in zip(paths, shards, strict=True)),
        hashes=tuple(entry.xxh3_128 for entry in shards),
        pack_size=basis.pack_size,
        tokenizer=PackDetails.from_json(plan.details).tokenizer.fingerprint,
        origin=manifest.source,
    )


def _get_part(entry: "FileEntry") -> str:
    directory, slash, _ = entry.path.partition("/")
    return FILE_NAMES.get(directory, "train") if slash else "train"
