"""Views: an `.idx` of ranges of a `.bin`, which Megatron-LM and tokenmill read like any other pair.

    VIEWS/NAME.HASH.idx          one sequence for each range; one document for each, or those of the pair
    VIEWS/NAME.HASH.bin          a link to the `.bin`
    VIEWS/NAME.HASH.view.json    ViewRecord

HASH is that of the pair's content and of the ranges, so a view never changes, and processes that write the same view at
the same time write the same bytes.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from tokenmill.core.buckets.mirror import find_address
from tokenmill.core.files.codec import content_id, readable_json
from tokenmill.core.files.tree import Tree
from tokenmill.core.machine import process_name
from tokenmill.datasets.blend_file import WeightedSource
from tokenmill.datasets.forgotten import NAME, read_record
from tokenmill.datasets.formats.indexed.reader import (
    DamagedPair,
    IndexedReader,
    ViewRecord,
    dtype_code,
    find_bin,
    find_source,
    map_pair,
    read_view,
    view_file,
)
from tokenmill.datasets.formats.indexed.writer import HEADER, MAGIC, VERSION
from tokenmill.datasets.sources import open_pairs
from tokenmill.datasets.weighted import Pair
from tokenmill.errors import InputError, RequestError
from tokenmill.samples.pair_order import BLOCK, release
from tokenmill.samples.phases.ranges import Array, Ranges, RangesBuilder


class KeptDocuments(NamedTuple):
    """Documents of a pair: their sequences, and the document indices of a view, None for one sequence in each."""

    ranges: Ranges
    indices: Array | None


def leave_out(reader: IndexedReader, documents: Array, directory: Path) -> KeptDocuments:
    """Return a pair without some documents, whose numbers are ascending; files of many ranges are in `directory`."""
    removed = reader.list_sequences(documents)
    builder = RangesBuilder(directory)
    for start in range(0, reader.sequences, BLOCK):
        low, high = removed.searchsorted([start, start + BLOCK])
        arrays = (array[start : start + BLOCK] for array in (reader.pointers, reader.lengths))
        builder.add(Ranges(*(np.delete(array, removed[low:high] - start) for array in arrays)))
        release(reader.pointers, reader.lengths)
    if _has_single_sequences(reader.document_indices):
        return KeptDocuments(builder.finish(), None)
    kept = np.delete(np.diff(reader.document_indices), documents)
    return KeptDocuments(builder.finish(), np.concatenate([[0], kept.cumsum()]))


def _has_single_sequences(indices: Array) -> bool:
    """Return whether each document has one sequence."""
    blocks = (indices[start : start + BLOCK + 1] for start in range(0, len(indices), BLOCK))
    return all((np.diff(block) == 1).all() for block in blocks)


def write_view(directory: Path, pair: Pair, ranges: Ranges, indices: Array | None = None) -> Pair:
    """Write a view of a pair unless it exists, and return it as a pair.

    Each range is a document, unless `indices` has the first range of each document, and the number of ranges.

    Raises:
        RequestError: a link cannot be made.
    """
    reader = pair.reader
    size = reader.dtype.itemsize
    content = _hash(pair, ranges, indices)
    prefix = directory / f"{Path(pair.prefix).name}.{content[:16]}"
    record = ViewRecord(
        source=os.path.relpath(Path(pair.prefix).parent.resolve() / Path(pair.prefix).name, directory.resolve()),
        content=content,
        bin_bytes=reader.ids.size * size,
        sequences=len(ranges.lengths),
        tokens=ranges.tokens,
        documents=None if indices is None else len(indices) - 1,
    )
    if read_view(prefix) != record or not is_linked(prefix, Path(pair.prefix)) or not Path(f"{prefix}.idx").is_file():
        directory.mkdir(parents=True, exist_ok=True)
        _link(Path(f"{prefix}.bin"), Path(f"{pair.prefix}.bin"))
        tree = Tree(directory)  # the callers remove leftovers of killed processes, once for all views
        tree.write_atomic(Path(f"{prefix}.idx"), _index(dtype_code(reader.dtype), ranges, indices))
        tree.write_atomic(view_file(prefix), readable_json(record.to_json()))
    return Pair(
        str(prefix),
        documents=record.sequences if record.documents is None else record.documents,
        sequences=record.sequences,
        tokens=record.tokens,
        bytes=record.tokens * size,
        dtype=pair.dtype,
        hashes=content,
    )


def _link(link: Path, target: Path) -> None:
    """Make a relative link to a `.bin`, so that views and datasets can be moved together; replace another link."""
    content = os.path.relpath(target.resolve(), link.parent.resolve())
    if link.is_symlink() and str(link.readlink()) == content:
        return
    temporary = link.with_name(f"{link.name}.{process_name()}.tmp")
    try:
        temporary.symlink_to(content)
        temporary.replace(link)
    except OSError as error:
        raise RequestError(
            f"{link.parent} cannot have links ({error.strerror}): a view links to the .bin of its dataset; choose a "
            "directory for the views on a file system with links"
        ) from error


def is_linked(prefix: Path, source: Path) -> bool:
    """Return whether the `.bin` of a view is that of its dataset."""
    try:
        linked, target = find_bin(prefix), Path(os.path.realpath(f"{source}.bin"))
        return linked == target if find_address(target) else linked.samefile(target)
    except OSError:
        return False


def _index(code: int, ranges: Ranges, indices: Array | None) -> Iterator[bytes]:
    count = len(ranges.lengths)
    entries = count + 1 if indices is None else len(indices)
    yield HEADER.pack(MAGIC, VERSION, code, count, entries)
    yield from (block.lengths.astype("<i4", copy=False).tobytes() for block in ranges.blocks())
    yield from (block.offsets.astype("<i8", copy=False).tobytes() for block in ranges.blocks())
    for start in range(0, entries, BLOCK):
        end = min(start + BLOCK, entries)
        block = np.arange(start, end) if indices is None else indices[start:end]
        yield block.astype("<i8", copy=False).tobytes()


def find_in_source(view: IndexedReader, source: IndexedReader, sequence: int, offset: int) -> tuple[int, int]:
    """Return the sequence of the source, and the offset in it, of a token of a view."""
    size = source.dtype.itemsize
    place = int(view.pointers[sequence]) + offset * size
    containing = int(source.pointers.searchsorted(place, "right")) - 1
    return containing, (place - int(source.pointers[containing])) // size


def list_views(path: Path) -> list[Path]:
    """Return the prefixes of the views in a directory, or that of a view by the path of one of its files."""
    if path.is_dir():
        return sorted(file.with_name(file.name.removesuffix(".view.json")) for file in path.glob("*.view.json"))
    prefix = path.with_name(path.name.removesuffix(".bin").removesuffix(".idx").removesuffix(".view.json"))
    return [prefix] if view_file(prefix).is_file() else []


def find_problems(prefix: Path) -> list[str]:
    """Check a view: its record, its ranges, and its dataset, whose content must be that of the record."""
    record = read_view(prefix)
    assert record is not None  # noqa: S101 - `list_views` found it
    source = find_source(prefix, record)
    remedy = f"delete {prefix.parent}, and run the command that made the views again"
    try:
        view, pair = map_pair(prefix), describe_pair(source)
    except DamagedPair as error:
        return [f"{error.path}: {error.description}; {remedy}"]
    except (InputError, RequestError) as error:
        return [str(error)]
    damage = _find_damage(prefix, view, pair, record)
    return [f"{damage}; {remedy}"] if damage else []


def find_record_problems(output: Path) -> list[str]:
    """Compare the views of `tokenmill forget` with its record, if a directory has one."""
    record, remedy = read_record(output) if output.is_dir() else None, "run the same tokenmill forget again"
    if record is None:
        return []
    if not record.complete:
        return [f"{output / NAME} is that of a command that was stopped; {remedy}"]
    views = {pair.view: pair.content for pair in record.pairs if pair.view}
    recorded = {name: read_view(output / name) for name in views}
    return [
        f"{output / name} is not the view of {output / NAME}; {remedy}"
        for name, view in recorded.items()
        if view is None or view.content != views[name]
    ]


def _find_damage(prefix: Path, view: IndexedReader, pair: Pair, record: ViewRecord) -> str:
    """Return how a view differs from its record and its dataset, empty if it does not."""
    source = find_source(prefix, record)
    if not is_linked(prefix, source):
        return f"{prefix}.bin is not the .bin of {source}"
    counts = (len(view.lengths), int(view.lengths.sum(dtype=np.int64)), view.dtype, view.documents)
    documents = record.sequences if record.documents is None else record.documents
    if counts != (record.sequences, record.tokens, pair.reader.dtype, documents) or (
        record.documents is None and not np.array_equal(view.document_indices, np.arange(record.sequences + 1))
    ):
        return f"{prefix}.idx is not that of its record"
    ranges, size = Ranges(view.pointers, view.lengths), view.dtype.itemsize
    if not all(_are_inside(block, record.bin_bytes, size) for block in ranges.blocks()):
        return f"{prefix}.idx names ranges outside {source}.bin"
    if _hash(pair, ranges, None if record.documents is None else view.document_indices) != record.content:
        return f"{prefix}.idx, or {source}, is not what the view was made from"
    return ""


def _are_inside(ranges: Ranges, bin_bytes: int, size: int) -> bool:
    ends = ranges.offsets + ranges.lengths.astype(np.int64) * size
    return bool((ranges.lengths >= 0).all() and (ranges.offsets >= 0).all() and (ends <= bin_bytes).all())


def describe_pair(prefix: Path) -> Pair:
    """Return a pair with its record, if it has one (RequestError)."""
    (dataset,) = open_pairs([WeightedSource(str(prefix))], None)
    return dataset.pairs[0]


def _hash(pair: Pair, ranges: Ranges, indices: Array | None) -> str:
    offsets, lengths = xxhash.xxh3_128(), xxhash.xxh3_128()
    for block in ranges.blocks():
        offsets.update(block.offsets.astype("<i8", copy=False).tobytes())
        lengths.update(block.lengths.astype("<i4", copy=False).tobytes())
    documents = [] if indices is None else [xxhash.xxh3_128(indices.astype("<i8", copy=False).tobytes()).hexdigest()]
    return content_id([pair.content, offsets.hexdigest(), lengths.hexdigest(), *documents])
