"""Check a pair as Megatron-LM will read it.

Stands behind `tokenmill verify` and before training. Streams the `.bin` and maps the `.idx` (12 bytes a
sequence, the kernel's to take back), so that memory does not grow with them; says everything that is wrong,
each kind once, with its first place.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tokenmill.tokens.formats.base import Problem
from tokenmill.tokens.formats.indexed.reader import (
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
class Examination:
    """What is wrong with a pair, its index where that can be mapped, and its files' xxh3-128 by suffix.

    The hashes are hexadecimal, and only those of files that were read whole.
    """

    problems: list[Problem]
    index: Index | None
    hashes: dict[str, str]


def check_pair(
    prefix: Path,
    *,
    vocab_size: int | None = None,
    eod: int | None = None,
    expected: Mapping[str, Any] | None = None,
    full: bool = True,
    foreign: str | None = None,
) -> list[Problem]:
    """Find what is wrong with `<prefix>.bin` and `<prefix>.idx`; an empty list is a sound pair.

    `expected` is what a receipt says: any of `bin_bytes`, `idx_bytes`, `bin_xxh3`, `idx_xxh3` (128 bits,
    hexadecimal). `examine` explains the other arguments.
    """
    expected = expected or {}
    problems: list[Problem] = []
    remake = foreign or REMAKE
    for key in ("bin", "idx"):
        path = Path(f"{prefix}.{key}")
        if path.is_file() and expected.get(f"{key}_bytes", path.stat().st_size) != path.stat().st_size:
            what = f"{path.stat().st_size:,} bytes, its receipt says {expected[f'{key}_bytes']:,}"
            problems.append(Problem(path, what, remake))
    examination = examine(prefix, vocab_size=vocab_size, eod=eod, full=full, foreign=foreign)
    problems += examination.problems
    for key, digest in examination.hashes.items():
        if (recorded := expected.get(f"{key}_xxh3", digest)) != digest:
            what = f"its content changed after it was written: xxh3-128 {digest}, receipt {recorded}"
            problems.append(Problem(Path(f"{prefix}.{key}"), what, remake))
    return problems


def examine(
    prefix: Path,
    *,
    vocab_size: int | None = None,
    eod: int | None = None,
    full: bool = True,
    foreign: str | None = None,
    blocks: Callable[[Path], Iterable[bytes]] | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Examination:
    """Look at a pair alone, without what a receipt says of it.

    `vocab_size` is the tokenizer's number of entries, for dtype and range; `eod` the id that ends every
    document with tokens (None: none is expected). `full` false leaves out what needs the files' whole
    content: structure and sizes are still checked, ids, EOD and hashes are not. `foreign` is the remedy for a
    pair that another tool made: its ids may have any integer dtype that holds the vocabulary. `blocks` yields
    a file's bytes, BLOCK at a time; `beat` is called before each CHUNK of the index.
    """
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    remake = foreign or REMAKE
    problems = [Problem(path, "missing", remake) for path in (bin_path, idx_path) if not path.is_file()]
    if problems:
        return Examination(problems, None, {})
    index = None
    structure: list[Problem] = []
    try:
        index = open_index(idx_path)
    except DamagedPair as error:
        structure.append(Problem(error.path, error.what, remake))
    if index is not None:
        problems += _check_dtype(idx_path, index, vocab_size, foreign)
        structure += (Problem(idx_path, what, remake) for what in _structure(index, beat))
        size = bin_path.stat().st_size
        if size != index.bin_bytes:
            what = f"{size:,} bytes, where {idx_path.name} ends at {index.bin_bytes:,}"
            structure.append(Problem(bin_path, what, remake))
    problems += structure
    if not full:
        return Examination(problems, index, {})
    # Ids can be told apart, and found again, only where the index can be trusted.
    trusted = index if index is not None and not structure and index.dtype.kind != "f" else None
    content = _Content(bin_path, trusted, vocab_size, eod)
    digests = {"bin": xxhash.xxh3_128(), "idx": xxhash.xxh3_128()}
    blocks = blocks or _blocks
    for data in blocks(bin_path):
        digests["bin"].update(data)
        content.take(data)
    for data in blocks(idx_path):
        digests["idx"].update(data)
    problems += content.problems(foreign)
    return Examination(problems, index, {key: digest.hexdigest() for key, digest in digests.items()})


def _check_dtype(path: Path, index: Index, vocab_size: int | None, foreign: str | None) -> list[Problem]:
    ids = f"ids are {index.dtype.name} (code {dtype_code(index.dtype)})"
    remedy = "name the tokenizer the pair was made with, or make it again with this one"
    if index.dtype.kind == "f":
        return [Problem(path, f"{ids}, and token ids are integers", foreign or REMAKE)]
    if vocab_size is None:
        return []
    if foreign:
        largest = int(np.iinfo(index.dtype).max)
        if largest >= vocab_size - 1:
            return []
        what = (
            f"{ids}, which hold at most {largest:,}, but the tokenizer has {vocab_size:,} vocabulary entries: it did "
            "not make them, or larger ids were cut off"
        )
        return [Problem(path, what, remedy)]
    wanted = dtype_for(vocab_size)
    if index.dtype == wanted:
        return []
    what = f"{ids}, but {vocab_size:,} vocabulary entries go with {wanted.name} (code {dtype_code(wanted)})"
    return [Problem(path, what, remedy)]


def _structure(index: Index, beat: Callable[[], None]) -> list[str]:
    """Say what is wrong with lengths, pointers and document indices: the first place of each kind."""
    found: dict[str, str] = {}
    end = 0
    for at in range(0, len(index.lengths), CHUNK):
        beat()
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
        beat()
        if (bad := np.diff(documents[at : at + CHUNK + 1]) < 0).any():
            found.setdefault("documents", f"document indices decrease at document {at + int(bad.argmax())}")
    if documents[-1] != len(index.lengths):
        found["end"] = f"document indices end at {documents[-1]}, not at the number of sequences, {len(index.lengths)}"
    return list(found.values())


class _Content:
    """What a `.bin` holds, block by block: the range of the ids, and EOD at every document's end."""

    def __init__(self, path: Path, index: Index | None, vocab_size: int | None, eod: int | None) -> None:
        """Begin a file; without an index its blocks are not looked at."""
        self._path = path
        self._index = index
        self._limit = 2**31 if vocab_size is None else vocab_size
        self._eod = eod
        self._ends = iter(()) if index is None or eod is None else _document_ends(index)
        self._pending = np.empty(0, dtype=np.int64)
        self._start = 0
        self._outside = self._unended = 0
        self._first_outside = self._first_unended = (0, 0)  # token's position in the file, its id

    def take(self, data: bytes) -> None:
        """Look at the next block."""
        if self._index is None:
            return
        ids, start = np.frombuffer(data, dtype=self._index.dtype), self._start
        if ids.min() < 0 or ids.max() >= self._limit:
            bad = (ids < 0) | (ids >= self._limit)
            if not self._outside:
                self._first_outside = (start + int(bad.argmax()), int(ids[bad.argmax()]))
            self._outside += int(bad.sum())
        end = start + len(ids)
        while (not self._pending.size or self._pending[-1] < end) and (more := next(self._ends, None)) is not None:
            self._pending = np.concatenate((self._pending, more))
        here = int(np.searchsorted(self._pending, end))
        places, self._pending = self._pending[:here], self._pending[here:]
        last = ids[places - start]
        if (bad := last != self._eod).any():
            if not self._unended:
                self._first_unended = (int(places[bad.argmax()]), int(last[bad.argmax()]))
            self._unended += int(bad.sum())
        self._start = end

    def problems(self, foreign: str | None) -> Iterator[Problem]:
        """Yield what was wrong with the blocks, each kind once."""
        if self._index is not None and self._outside:
            position, token = self._first_outside
            document, offset = _locate(self._index, position)
            yield Problem(
                self._path,
                f"token {offset} of document {document} has the id {token}, outside 0..{self._limit - 1}; "
                f"{self._outside:,} ids in all are outside the vocabulary",
                f"it was made with another tokenizer, or {foreign or REMAKE}",
            )
        if self._index is not None and self._unended:
            position, token = self._first_unended
            how = "adopt it with --no-append-eod" if foreign else "make it again with --append-eod"
            yield Problem(
                self._path,
                f"document {_locate(self._index, position)[0]} ends with token id {token} instead of EOD {self._eod}, "
                f"as do {self._unended:,} documents in all without EOD",
                f"name the EOD the pair was made with, or {how}",
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
