"""Read one row of a pack and its tokenizer, for `tokenmill inspect`.

A pack has no tokenizer of its own. The directory of the output that was packed has it, which is the parent directory by
default.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import NamedTuple

from tokenmill.core.files.hashing import sha256_of
from tokenmill.core.files.named_file import open_file
from tokenmill.core.files.paths import join_inside
from tokenmill.core.typed_json import decode_json
from tokenmill.datasets.contract import PairBasis, ResolvedTokenizer, parse_basis
from tokenmill.engine.contract import FileEntry, StageKind
from tokenmill.engine.record import Manifest, Plan, StageRecord
from tokenmill.engine.stage_input import find_records
from tokenmill.errors import InputError, RequestError
from tokenmill.packs.check import REMEDY, StoredRow, find_problems, get_limits, iter_lines
from tokenmill.packs.contract import SHARD, PackBasis, PackDetails
from tokenmill.packs.writers.parquet import COLUMNS, ShardReader
from tokenmill.tokenize.encoder_store import Encoders
from tokenmill.tokenize.mask_view import MaskedSequence

SEARCHED_PARENTS = 2
"""Number of directories above a pack that are searched for its tokenizer, with their subdirectories."""

UNREADABLE = ("empty", "mask length", "first", "starts", "ids")
"""Problems of a row (`packs.check`) with which its sequences cannot be shown."""


class PackedRow(NamedTuple):
    """A row: its shard and its number there; its sequences, whose masks are not shifted, and the source of each."""

    shard: FileEntry
    number: int
    sequences: list[MaskedSequence]
    sources: list[tuple[str, int]]


def list_shards(manifest: Manifest) -> list[FileEntry]:
    """Return the entries of the shards, in the order of their rows."""
    return [entry for entry in manifest.files if entry.role == SHARD]


def read_packed_row(record: StageRecord, plan: Plan, manifest: Manifest, number: int, file: str | None) -> PackedRow:
    """Return row `number` of all shards, or of the shard `file`; -1 is the last row.

    Position i of the stored mask belongs to the token i + 1, so the mask of each sequence is shifted to the right. The
    first token of a sequence is never trained.

    Raises:
        RequestError: there is no such shard or row, or reading its format could run foreign code.
        InputError: the row is damaged.
    """
    basis, shards = PackBasis.from_json(plan.basis), list_shards(manifest)
    if file is not None:
        named = [entry for entry in shards if entry.path == file]
        named = named or [entry for entry in shards if Path(entry.path).name == Path(file).name]
        if len(named) != 1:
            known = ", ".join(entry.path for entry in (named or shards)[:5])
            more = ", ..." if len(named or shards) > 5 else ""
            raise RequestError(f"invalid --file {file}: the output has {known}{more}; specify one of them")
        shards = named
    if basis.format == "npy":
        raise RequestError(
            f"{record.output} has the format npy, and tokenmill does not read it, because a pickle can run code; run "
            "tokenmill pack with --format parquet to see rows"
        )
    ends = list(accumulate(entry.records or 0 for entry in shards))
    chosen = number + ends[-1] if number < 0 else number
    if not 0 <= chosen < ends[-1]:
        raise RequestError(
            f"invalid --row {number}: there {'are' if ends[-1] != 1 else 'is'} {ends[-1]:,} "
            f"row{'s' * (ends[-1] != 1)}, counted from 0; choose a smaller number"
        )
    index = bisect_right(ends, chosen)
    shard, local = shards[index], chosen - (ends[index - 1] if index else 0)
    path = join_inside(record.output, shard.path)
    try:
        read = _read_parquet_row if basis.format == "parquet" else _read_json_row
        row = read(record.tree.local(shard.path), local, shard.records, basis.pack_size)
    except ValueError as error:
        raise InputError(f"{path}: row {local} cannot be read ({error}); {REMEDY}") from error
    for kind, problem in find_problems(row.input_ids, row.loss_mask, row.seq_start_id, get_limits(basis)):
        if kind in UNREADABLE:
            raise InputError(f"{path}: row {local}: {problem}; {REMEDY}")
    return PackedRow(shard, local, list(_cut_sequences(row)), list(zip(row.source, row.row, strict=False)))


def _cut_sequences(row: StoredRow) -> Iterator[MaskedSequence]:
    for start, end in pairwise([*row.seq_start_id, len(row.input_ids)]):
        labels = row.loss_mask[start : end - 1]
        yield MaskedSequence(row.input_ids[start:end], [False, *(value != 0 for value in labels)])


def _read_parquet_row(path: Path, number: int, rows: int | None, pack_size: int) -> StoredRow:
    """Return a row of a Parquet file; only its row group is read (ValueError)."""
    with ShardReader(path, rows, pack_size) as shard:
        if number >= shard.rows:
            raise ValueError(f"the file has {shard.rows:,} rows")
        group, first = shard.find_group(number)
        stored = shard.read_group(group)
        return StoredRow(**{name: stored.get(name, number - first).tolist() for name in COLUMNS})


def _read_json_row(path: Path, number: int, _: int | None, pack_size: int) -> StoredRow:
    """Return a line of a file as a row (ValueError)."""
    with open_file(path) as file:
        line = next(islice(iter_lines(file, pack_size), number, None), None)
    if line is None:
        raise ValueError("the file has fewer lines")
    return decode_json(line, StoredRow)


def find_tokenizer(record: StageRecord, plan: Plan, kinds: Sequence[StageKind], directory: Path | None) -> Path:
    """Return the backend JSON of the tokenizer of a pack.

    It is in an output of `kinds` in `directory` or below it, or `directory` is a directory of a tokenizer. Without
    `directory`, the outputs in and near the directories above the pack are searched.

    Raises:
        RequestError: there is no tokenizer with the recorded fingerprint.
    """
    tokenizer = PackDetails.from_json(plan.details).tokenizer
    parents = [*record.output.absolute().parents][:SEARCHED_PARENTS]
    for place, depth in [(directory, 2)] if directory else [(parent, depth) for parent in parents for depth in (0, 1)]:
        for candidate in find_records(place, kinds, depth, unread=[]):
            if backend := _find_backend(candidate, tokenizer):
                return backend
    if directory and (path := _find_file(directory, tokenizer)):
        return path
    name = f"{tokenizer.reference} (fingerprint {tokenizer.fingerprint[:12]})"
    if directory:
        raise RequestError(
            f"invalid --tokenizer {directory}: the rows have the tokenizer {name}, which is not there; specify the "
            "output that was packed, or the directory of this tokenizer"
        )
    raise RequestError(
        f"the tokenizer {name} of {record.output} is not near this directory; specify the output that was packed with "
        "--tokenizer"
    )


def _find_backend(record: StageRecord, tokenizer: ResolvedTokenizer) -> Path | None:
    """Return the backend JSON in an output of pairs, if the output has the same tokenizer."""
    plan = record.read_plan()
    if plan is None:
        return None
    basis: PairBasis = parse_basis(plan)
    path = Encoders(record).backend(basis)
    return path if basis.tokenizer == tokenizer.fingerprint and path.is_file() else None


def _find_file(directory: Path, tokenizer: ResolvedTokenizer) -> Path | None:
    """Return the tokenizer.json in a directory or in its directory `tokenizer`, if it has the recorded hash."""
    expected = tokenizer.files.get("tokenizer.json")
    for place in (directory, directory / "tokenizer"):
        path = place / "tokenizer.json"
        if expected and path.is_file() and sha256_of(path) == expected:
            return path
    return None
