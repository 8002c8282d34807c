"""Check a pair as Megatron-LM will read it.

Stands behind `tokenmill verify` and before training. Streams the `.bin` and maps the `.idx` (12 bytes a
sequence, the kernel's to take back), so that memory does not grow with them; says everything that is wrong,
each kind once, with its first place.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tokenmill.tokens.indexed import (
    REMAKE,
    Array,
    DamagedPair,
    Index,
    dtype_code,
    dtype_for,
    open_index,
)

CHUNK = 1 << 20
"""Entries of an index that are looked at together."""

BLOCK = 8 << 20
"""Bytes of a file in memory at once; a multiple of every dtype's size."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a file, and what to do about it."""

    path: Path
    what: str
    remedy: str = REMAKE

    def __str__(self) -> str:
        return f"{self.path}: {self.what}; {self.remedy}"


def check_pair(
    prefix: Path,
    *,
    vocab_size: int | None = None,
    eod: int | None = None,
    expected: Mapping[str, Any] | None = None,
    full: bool = True,
) -> list[Problem]:
    """Find what is wrong with `<prefix>.bin` and `<prefix>.idx`; an empty list is a sound pair.

    `vocab_size` is the tokenizer's number of entries, for dtype and range; `eod` the id that ends every
    document with tokens (None: none was appended); `expected` what a receipt says: any of `bin_bytes`,
    `idx_bytes`, `bin_xxh3`, `idx_xxh3` (128 bits, hexadecimal). `full` false leaves out what needs the
    files' whole content: structure and sizes are still checked, ids, EOD and hashes are not.
    """
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    expected = expected or {}
    problems: list[Problem] = []
    for path, key in ((bin_path, "bin"), (idx_path, "idx")):
        if not path.is_file():
            problems.append(Problem(path, "missing"))
        elif expected.get(f"{key}_bytes", path.stat().st_size) != path.stat().st_size:
            problems.append(
                Problem(path, f"{path.stat().st_size:,} bytes, its receipt says {expected[f'{key}_bytes']:,}")
            )
    if any(problem.what == "missing" for problem in problems):
        return problems
    index = None
    structure: list[Problem] = []
    try:
        index = open_index(idx_path)
    except DamagedPair as error:
        structure.append(Problem(error.path, error.what))
    if index is not None:
        if vocab_size is not None:
            problems += _check_dtype(idx_path, index, vocab_size)
        structure += (Problem(idx_path, what) for what in _structure(index))
        size = bin_path.stat().st_size
        if size != index.bin_bytes:
            structure.append(Problem(bin_path, f"{size:,} bytes, where {idx_path.name} ends at {index.bin_bytes:,}"))
    problems += structure
    if full:
        # Ids can be told apart, and found again, only where the index can be trusted.
        problems += _content(bin_path, None if structure else index, vocab_size, eod, expected.get("bin_xxh3"))
        if "idx_xxh3" in expected:
            digest = xxhash.xxh3_128()
            for block in _blocks(idx_path):
                digest.update(block)
            problems += _check_hash(idx_path, digest.hexdigest(), expected["idx_xxh3"])
    return problems


def _check_dtype(path: Path, index: Index, vocab_size: int) -> list[Problem]:
    wanted = dtype_for(vocab_size)
    if index.dtype == wanted:
        return []
    return [
        Problem(
            path,
            f"ids are {index.dtype.name} (code {dtype_code(index.dtype)}), but {vocab_size:,} vocabulary "
            f"entries go with {wanted.name} (code {dtype_code(wanted)})",
            "name the tokenizer the pair was made with, or make it again with this one",
        )
    ]


def _check_hash(path: Path, found: str, wanted: str) -> list[Problem]:
    if found == wanted:
        return []
    return [Problem(path, f"its content changed after it was written: xxh3-128 {found}, receipt {wanted}")]


def _structure(index: Index) -> list[str]:
    """Say what is wrong with lengths, pointers and document indices: the first place of each kind."""
    found: dict[str, str] = {}
    end = 0
    for at in range(0, len(index.lengths), CHUNK):
        lengths, pointers = index.lengths[at : at + CHUNK], index.pointers[at : at + CHUNK]
        if (bad := lengths <= 0).any():
            i = int(bad.argmax())
            found.setdefault("length", f"sequence {at + i} has the length {lengths[i]}; 1 is the least")
        ends = end + np.cumsum(lengths, dtype=np.int64) * index.dtype.itemsize
        wanted = np.concatenate(([end], ends[:-1]))
        if (bad := pointers != wanted).any():
            i = int(bad.argmax())
            found.setdefault(
                "pointer",
                f"the pointer of sequence {at + i} is {pointers[i]:,}, where the lengths before it make {wanted[i]:,}",
            )
        # The neighbour before the chunk belongs to its first comparison.
        if (bad := np.diff(index.pointers[max(at - 1, 0) : at + CHUNK]) < 0).any():
            i = max(at - 1, 0) + int(bad.argmax()) + 1
            found.setdefault("decreasing", f"pointers decrease at sequence {i}")
        end = int(ends[-1])
    documents = index.document_indices
    if documents[0] != 0:
        found["start"] = f"document indices start at {documents[0]} instead of 0"
    for at in range(0, len(documents), CHUNK):
        if (bad := np.diff(documents[at : at + CHUNK + 1]) < 0).any():
            found.setdefault("documents", f"document indices decrease at document {at + int(bad.argmax())}")
    if documents[-1] != len(index.lengths):
        found["end"] = f"document indices end at {documents[-1]}, not at the number of sequences, {len(index.lengths)}"
    return list(found.values())


def _content(
    path: Path, index: Index | None, vocab_size: int | None, eod: int | None, xxh3: str | None
) -> Iterator[Problem]:
    """Read a `.bin` once: hash, range of the ids, EOD at every document's end."""
    digest = xxhash.xxh3_128()
    limit = 2**31 if vocab_size is None else vocab_size
    outside = unended = 0
    first_outside = first_unended = (0, 0)  # token's position in the file, its id
    ends = iter(()) if index is None or eod is None else _document_ends(index)
    pending = np.empty(0, dtype=np.int64)
    start = 0
    for data in _blocks(path):
        digest.update(data)
        if index is None:
            continue
        ids = np.frombuffer(data, dtype=index.dtype)
        if ids.min() < 0 or ids.max() >= limit:
            bad = (ids < 0) | (ids >= limit)
            if not outside:
                first_outside = (start + int(bad.argmax()), int(ids[bad.argmax()]))
            outside += int(bad.sum())
        while (not pending.size or pending[-1] < start + len(ids)) and (more := next(ends, None)) is not None:
            pending = np.concatenate((pending, more))
        here = int(np.searchsorted(pending, start + len(ids)))
        places, pending = pending[:here], pending[here:]
        last = ids[places - start]
        if (bad := last != eod).any():
            if not unended:
                first_unended = (int(places[bad.argmax()]), int(last[bad.argmax()]))
            unended += int(bad.sum())
        start += len(ids)
    if xxh3 is not None:
        yield from _check_hash(path, digest.hexdigest(), xxh3)
    if index is not None and outside:
        position, token = first_outside
        document, offset = _locate(index, position)
        yield Problem(
            path,
            f"token {offset} of document {document} has the id {token}, outside 0..{limit - 1}; {outside:,} "
            "ids in all are outside the vocabulary",
            f"it was made with another tokenizer, or {REMAKE}",
        )
    if index is not None and unended:
        position, token = first_unended
        yield Problem(
            path,
            f"document {_locate(index, position)[0]} ends with token id {token} instead of EOD {eod}, as do "
            f"{unended:,} documents in all without EOD",
            "name the EOD the pair was made with, or make it again with --append-eod",
        )


def _document_ends(index: Index) -> Iterator[Array]:
    """Yield where each document's last token stands, in tokens from the file's beginning, CHUNK at a time."""
    for at in range(0, len(index.document_indices) - 1, CHUNK):
        documents = index.document_indices[at : at + CHUNK + 1]
        last = documents[1:][np.diff(documents) > 0] - 1
        yield index.pointers[last] // index.dtype.itemsize + index.lengths[last] - 1


def _locate(index: Index, position: int) -> tuple[int, int]:
    """Turn a token's position in the file into its document and its offset there."""
    # numpy's own search would first copy the array, which is not aligned in the file.
    sequence = bisect_right(index.pointers, position * index.dtype.itemsize) - 1
    document = bisect_right(index.document_indices, sequence) - 1
    start = int(index.pointers[index.document_indices[document]]) // index.dtype.itemsize
    return document, position - start


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block
