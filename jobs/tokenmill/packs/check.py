"""Check packed shards as a trainer reads them, for `tokenmill verify`.

Megatron-Bridge accepts rows that train nothing, masks with other values than 0 and 1, negative ids and empty sequences
(`validate_row`). This module reports them, and ids outside the vocabulary, rows above the pack size, and labels that
belong to the next sequence.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from tokenmill.core.files.named_file import open_file
from tokenmill.core.typed_json import decode_json
from tokenmill.engine.contract import FileEntry
from tokenmill.errors import remake
from tokenmill.packs.contract import BLEND, SHARD, TRAINED, PackBasis
from tokenmill.packs.writers import SHARD_FORMATS
from tokenmill.packs.writers.parquet import ShardReader

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

REMEDY = remake("the same tokenmill pack")

LINE_BYTES, BYTES_PER_TOKEN = 1 << 20, 4096
"""Bytes of the longest line of JSONL, and its bytes for each token: a sequence has 2 tokens and the name of a file."""

MAX_BLEND_BYTES = 64 << 20
"""Bytes of the largest blend.json: some hundred thousand shards."""

READ_BY_BRIDGE = ("parquet", "pq")
"""The suffixes of the files that Megatron-Bridge reads in a directory of packed data."""


class RowLimits(NamedTuple):
    """The limits of all rows of a pack.

    Attributes:
        pack_size: the size of a row.
        fill: what fills a row, stored or loss tokens.
        vocabulary: the number of valid ids.
        multiple: the multiple of the positions of each sequence.
    """

    pack_size: int
    fill: str
    vocabulary: int
    multiple: int = 1


def get_limits(basis: PackBasis) -> RowLimits:
    """Return the limits of the rows of a pack."""
    return RowLimits(basis.pack_size, basis.fill, basis.vocabulary, basis.multiple)


_Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class StoredRow(msgspec.Struct, forbid_unknown_fields=True):
    """A row in the columns of a shard (`packs.writers.parquet`); the last two describe each sequence."""

    input_ids: list[_Int]
    loss_mask: list[_Int]
    seq_start_id: list[_Int]
    source: list[str] = []
    row: list[_Int] = []


class _CheckedRow(NamedTuple):
    """The ids, the mask and the starts of a row, and the number of its sources and of its records there."""

    input_ids: Sequence[int]
    loss_mask: Sequence[int]
    seq_start_id: Sequence[int]
    sources: int
    records: int


def check_output(path: Path, entry: FileEntry, basis: PackBasis) -> list[str]:
    """Return the problems of one file of a pack, each with its remedy; the hash is checked elsewhere."""
    if entry.role == BLEND:
        return _check_blend(path, SHARD_FORMATS[basis.format].suffix)
    if entry.role != SHARD or basis.format == "npy":  # reading a pickle could run code
        return []
    limits = get_limits(basis)
    problems: dict[str, tuple[int, str, int]] = {}
    rows = sequences = tokens = 0
    try:
        for number, row in enumerate(_read(path, entry, basis)):
            rows, sequences, tokens = rows + 1, sequences + len(row.seq_start_id), tokens + len(row.input_ids)
            for kind, description in _find_all(row, limits):
                first, text, count = problems.get(kind, (number, description, 0))
                problems[kind] = first, text, count + 1
    except ValueError as error:
        problems["format"] = rows, f"it cannot be read as {basis.format} ({error})", 1
    messages = [
        f"{path}: row {first}: {text}{_count_more(count - 1)}; {REMEDY}" for first, text, count in problems.values()
    ]
    counted = {"rows": (rows, entry.records), "sequences": (sequences, entry.sequences), "ids": (tokens, entry.tokens)}
    if wrong := [(name, *values) for name, values in counted.items() if values[1] not in (None, -1, values[0])]:
        name, counted_now, recorded = wrong[0]
        if "format" not in problems:
            messages.append(f"{path}: it has {counted_now:,} {name}, but its receipt has {recorded:,}; {REMEDY}")
    return messages


def _count_more(count: int) -> str:
    return f" (and {count:,} more row{'s' * (count > 1)})" if count else ""


def _find_all(row: _CheckedRow, limits: RowLimits) -> Iterator[tuple[str, str]]:
    yield from find_problems(row.input_ids, row.loss_mask, row.seq_start_id, limits)
    sequences = len(row.seq_start_id)
    if (row.sources, row.records) != (sequences, sequences):
        yield "source", f"it has {row.sources} sources and {row.records} records for {sequences} sequences"


def find_problems(
    input_ids: Sequence[int], loss_mask: Sequence[int], seq_start_id: Sequence[int], limits: RowLimits
) -> Iterator[tuple[str, str]]:
    """Yield the kind and the description of each problem of a row; some problems hide all later ones."""
    import numpy as np

    ids, mask, starts = (np.asarray(values, dtype=np.int64) for values in (input_ids, loss_mask, seq_start_id))
    if not len(ids):
        yield "empty", "it has no ids"
        return
    if len(mask) != len(ids):
        yield "mask length", f"its loss_mask has {len(mask):,} values for {len(ids):,} ids"
        return
    if not len(starts) or starts[0] != 0:
        yield "first", f"its seq_start_id begins with {starts[:5].tolist()} instead of 0"
        return
    if (bad := np.flatnonzero(np.diff(starts) <= 0)).size or starts[-1] >= len(ids):
        place = int(bad[0]) + 1 if bad.size else len(starts) - 1
        yield (
            "starts",
            f"sequence {place} starts at {starts[place]} in {len(ids)} ids, so a sequence is empty or outside",
        )
        return
    filled = len(ids) - len(starts) * (limits.fill == TRAINED)
    if filled > limits.pack_size:
        yield "size", f"it has {filled:,} {limits.fill} tokens, but the pack size is {limits.pack_size:,}"
    if ids.min() < 0 or ids.max() >= limits.vocabulary:
        place = int(((ids < 0) | (ids >= limits.vocabulary)).argmax())
        yield "ids", f"id {place} is {ids[place]}, but the ids of the tokenizer are 0 to {limits.vocabulary - 1:,}"
    if ((mask != 0) & (mask != 1)).any():
        place = int(((mask != 0) & (mask != 1)).argmax())
        yield "values", f"value {place} of loss_mask is {mask[place]}, neither 0 nor 1"
        return
    lengths = np.diff(starts, append=len(ids))
    if (wrong := np.flatnonzero((lengths - 1) % limits.multiple)).size:
        place = int(wrong[0])
        yield (
            "padding",
            f"sequence {place} has {lengths[place]} ids, and one less is not a multiple of {limits.multiple}",
        )
    if not mask.any():
        yield "untrained", "it trains no token: its loss_mask has only zeros"
    last = np.append(starts[1:], len(ids)) - 1
    if mask[last].any():
        place = int(mask[last].argmax())
        yield (
            "last",
            f"loss_mask is 1 at the last id of sequence {place}, whose next token belongs to another sequence",
        )


def _read(path: Path, entry: FileEntry, basis: PackBasis) -> Iterator[_CheckedRow]:
    """Yield the rows of a shard (ValueError); a part of the file is in memory at a time."""
    if basis.format == "parquet":
        with ShardReader(path, entry.records, basis.pack_size) as shard:
            for rows in shard.read():
                for number in range(rows.row_count):
                    ids, mask, starts = (rows.get(name, number) for name in ("input_ids", "loss_mask", "seq_start_id"))
                    counts = rows.count_values("source", number), rows.count_values("row", number)
                    yield _CheckedRow(ids, mask, starts, *counts)
        return
    with open_file(path) as file:
        for line in iter_lines(file, basis.pack_size):
            row = decode_json(line, StoredRow)
            yield _CheckedRow(row.input_ids, row.loss_mask, row.seq_start_id, len(row.source), len(row.row))


def iter_lines(file: IO[bytes], pack_size: int) -> Iterator[bytes]:
    """Yield the lines of a JSONL shard.

    Raises:
        ValueError: a line is longer than the line of any row of a pack.
    """
    longest = LINE_BYTES + BYTES_PER_TOKEN * pack_size
    while line := file.readline(longest + 1):
        if len(line) > longest:
            raise ValueError(f"the line has more than {longest:,} bytes")
        yield line


def _check_blend(path: Path, suffix: str) -> list[str]:
    """Return the problems of a blend: a path that leads to another place, or a file that is not in it.

    The paths are absolute, so they are wrong after a move. Megatron-Bridge reads every file of a directory, also one
    that another program has written there.
    """
    try:
        if path.stat().st_size > MAX_BLEND_BYTES:
            raise ValueError(f"it has more than {MAX_BLEND_BYTES:,} bytes")
        content = json.loads(path.read_bytes())
        names = {entry for entries in content.values() for entry in (entries or [])[1::2]}
        shards = {Path(name) for name in names if "://" not in name}  # the receipts list the objects of a bucket
        missing = [entry for entry in sorted(shards) if not entry.exists()]
    except (ValueError, AttributeError, TypeError, RecursionError, OSError) as error:
        return [f"{path}: it is not a blend ({error}); {REMEDY}"]
    if missing:
        return [
            f"{path}: it names {len(missing)} files that do not exist, such as {missing[0]}, because the output was "
            "moved or the path differs on this machine; delete the file and run the same tokenmill pack again, which "
            "writes it with the current path"
        ]
    suffixes = READ_BY_BRIDGE if suffix in READ_BY_BRIDGE else (suffix,)
    directories = sorted({shard.parent for shard in shards})
    foreign = [
        file
        for directory in directories
        for file in sorted(directory.iterdir())
        if file.name.endswith(tuple(f".{name}" for name in suffixes)) and file not in shards
    ]
    return [
        f"{file}: the pack did not make this file, but a trainer that reads the directory reads it; move it to another "
        "directory"
        for file in foreign[:10]
    ]
