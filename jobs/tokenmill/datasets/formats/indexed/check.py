"""Check a pair as Megatron-LM will read it, for `tokenmill verify`, `tokenmill adopt` and before training.

The check reads the `.bin` as a stream and maps the `.idx` (12 bytes for each sequence, which the kernel can page out),
so its memory does not grow with the files. It reports every kind of problem once, with the first place.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tokenmill.core.buckets.mirror import find_address
from tokenmill.core.buckets.tree import is_file, open_tree
from tokenmill.core.files.named_file import open_file
from tokenmill.datasets.formats.base import REMAKE, Problem
from tokenmill.datasets.formats.indexed.reader import (
    Array,
    DamagedPair,
    Index,
    dtype_code,
    dtype_for,
    file_size,
    measure_documents,
    open_index,
)

if TYPE_CHECKING:
    from tokenmill.engine.contract import FileEntry

CHUNK = 1 << 20
"""Index entries that are checked at a time."""

BLOCK = 8 << 20
"""Bytes of a file in memory at a time; a multiple of the size of every dtype."""


@dataclass(frozen=True)
class Examination:
    """The problems of a pair, its index if that can be mapped, and the xxh3-128 of its files by suffix.

    The hashes are hexadecimal; only files that were read completely have one.
    """

    problems: list[Problem]
    index: Index | None
    hashes: dict[str, str]


def check_pair(
    prefix: Path,
    *,
    vocab_size: int | None = None,
    eod: int | None = None,
    row_tokens: int | None = None,
    files: "Mapping[str, FileEntry] | None" = None,
    full: bool = True,
    foreign_remedy: str | None = None,
) -> list[Problem]:
    """Return the problems of `<prefix>.bin` and `<prefix>.idx`; a valid pair has none.

    `files` has the entries of both files in the receipt, by suffix. `row_tokens` is the number of tokens of each
    document of a packed pair. `examine` explains the other arguments.
    """
    files = files or {}
    problems: list[Problem] = []
    remedy = foreign_remedy or REMAKE
    for suffix, entry in files.items():
        path = Path(f"{prefix}.{suffix}")
        if is_file(path) and file_size(path) != entry.bytes:
            description = f"it has {file_size(path):,} bytes, but its receipt has {entry.bytes:,}"
            problems.append(Problem(path, description, remedy))
    examination = examine(prefix, vocab_size=vocab_size, eod=eod, full=full, foreign_remedy=foreign_remedy)
    problems += examination.problems
    if row_tokens and examination.index and not examination.problems:
        problems += _check_sizes(Path(f"{prefix}.idx"), examination.index, row_tokens, remedy)
    for suffix, digest in examination.hashes.items():
        if suffix in files and (recorded := files[suffix].xxh3_128) != digest:
            description = (
                f"its content changed after it was written: its xxh3-128 is {digest}, its receipt has {recorded}"
            )
            problems.append(Problem(Path(f"{prefix}.{suffix}"), description, remedy))
    return problems


def examine(
    prefix: Path,
    *,
    vocab_size: int | None = None,
    eod: int | None = None,
    full: bool = True,
    foreign_remedy: str | None = None,
    read_blocks: Callable[[Path], Iterable[bytes]] | None = None,
    heartbeat: Callable[[], None] = lambda: None,
) -> Examination:
    """Examine a pair without its receipt.

    `vocab_size` is the number of entries of the tokenizer, for the dtype and the range of the ids. `eod` is the id that
    ends every document with tokens (None: no id is required). If `full` is false, only the structure and the sizes are
    checked, not the ids, EOD and hashes, which need the files' complete content. `foreign_remedy` is the remedy for a
    pair that another tool made: its ids may have any integer dtype that holds the vocabulary. `read_blocks` yields the
    bytes of a file, BLOCK at a time. `heartbeat` is called before each CHUNK of the index.
    """
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    remedy = foreign_remedy or REMAKE
    problems = [Problem(path, "missing", remedy) for path in (bin_path, idx_path) if not is_file(path)]
    if problems:
        return Examination(problems, None, {})
    index = None
    structure: list[Problem] = []
    try:
        index = open_index(idx_path)
    except DamagedPair as error:
        structure.append(Problem(error.path, error.description, remedy))
    if index is not None:
        problems += _check_dtype(idx_path, index, vocab_size, foreign_remedy)
        structure += (Problem(idx_path, description, remedy) for description in _check_structure(index, heartbeat))
        size = file_size(bin_path)
        if size != index.bin_bytes:
            description = f"it has {size:,} bytes, but {idx_path.name} requires {index.bin_bytes:,}"
            structure.append(Problem(bin_path, description, remedy))
    problems += structure
    if not full:
        return Examination(problems, index, {})
    # The ids can be read and located only with a valid index.
    valid_index = index if index is not None and not structure and index.dtype.kind != "f" else None
    content = _ContentCheck(bin_path, valid_index, vocab_size, eod)
    digests = {"bin": xxhash.xxh3_128(), "idx": xxhash.xxh3_128()}
    read_blocks = read_blocks or _read_blocks
    for data in read_blocks(bin_path):
        digests["bin"].update(data)
        content.add(data)
    for data in read_blocks(idx_path):
        digests["idx"].update(data)
    problems += content.problems(foreign_remedy)
    return Examination(problems, index, {suffix: digest.hexdigest() for suffix, digest in digests.items()})


def _check_dtype(path: Path, index: Index, vocab_size: int | None, foreign_remedy: str | None) -> list[Problem]:
    ids = f"its ids are {index.dtype.name} (code {dtype_code(index.dtype)})"
    remedy = "specify the tokenizer that made the pair, or make the pair again with this one"
    if index.dtype.kind == "f":
        return [Problem(path, f"{ids}, but token ids must be integers", foreign_remedy or REMAKE)]
    if vocab_size is None:
        return []
    if foreign_remedy:
        maximum = int(np.iinfo(index.dtype).max)
        if maximum >= vocab_size - 1:
            return []
        description = (
            f"{ids}, which hold at most {maximum:,}, but the tokenizer has {vocab_size:,} vocabulary entries: another "
            "tokenizer made the pair, or larger ids were truncated"
        )
        return [Problem(path, description, remedy)]
    expected = dtype_for(vocab_size)
    if index.dtype == expected:
        return []
    description = f"{ids}, but {vocab_size:,} vocabulary entries need {expected.name} (code {dtype_code(expected)})"
    return [Problem(path, description, remedy)]


def _check_structure(index: Index, heartbeat: Callable[[], None]) -> list[str]:
    """Return the problems of lengths, pointers and document indices: the first place of each kind."""
    problems: dict[str, str] = {}
    end = 0
    for first in range(0, len(index.lengths), CHUNK):
        heartbeat()
        lengths, pointers = index.lengths[first : first + CHUNK], index.pointers[first : first + CHUNK]
        if (bad := lengths <= 0).any():
            i = int(bad.argmax())
            problems.setdefault("length", f"sequence {first + i} has the length {lengths[i]}; the minimum is 1")
        ends = end + np.cumsum(lengths, dtype=np.int64) * index.dtype.itemsize
        expected = np.concatenate(([end], ends[:-1]))
        if (bad := pointers != expected).any():
            i = int(bad.argmax())
            problems.setdefault(
                "pointer",
                f"the pointer of sequence {first + i} is {pointers[i]:,}, but the lengths before it add up to "
                f"{expected[i]:,}",
            )
        # The first comparison includes the last pointer of the previous chunk.
        if (bad := np.diff(index.pointers[max(first - 1, 0) : first + CHUNK]) < 0).any():
            i = max(first - 1, 0) + int(bad.argmax()) + 1
            problems.setdefault("decreasing", f"pointers decrease at sequence {i}")
        end = int(ends[-1])
    documents = index.document_indices
    if documents[0] != 0:
        problems["start"] = f"document indices start at {documents[0]} instead of 0"
    for first in range(0, len(documents), CHUNK):
        heartbeat()
        if (bad := np.diff(documents[first : first + CHUNK + 1]) < 0).any():
            problems.setdefault("documents", f"document indices decrease at document {first + int(bad.argmax())}")
    if documents[-1] != len(index.lengths):
        problems["end"] = (
            f"document indices end at {documents[-1]}, not at the number of sequences, {len(index.lengths)}"
        )
    return list(problems.values())


def _check_sizes(path: Path, index: Index, row_tokens: int, remedy: str) -> list[Problem]:
    """Return the problem of rows with another number of tokens; the structure of the index is valid."""
    for number, sizes in enumerate(measure_documents(index, CHUNK)):
        if (wrong := sizes != row_tokens).any():
            place = int(wrong.argmax())
            description = f"row {number * CHUNK + place:,} has {sizes[place]:,} tokens instead of {row_tokens:,}"
            return [Problem(path, description, remedy)]
    return []


class _ContentCheck:
    """Checks a `.bin` block by block: the range of the ids, and EOD at the end of every document."""

    def __init__(self, path: Path, index: Index | None, vocab_size: int | None, eod: int | None) -> None:
        """Start the check of a file; without an index, its blocks are not checked."""
        self._path = path
        self._index = index
        self._limit = 2**31 if vocab_size is None else vocab_size
        self._eod = eod
        self._ends = iter(()) if index is None or eod is None else _document_ends(index)
        self._pending = np.empty(0, dtype=np.int64)
        self._start = 0
        self._outside = self._unended = 0
        self._first_outside = self._first_unended = (0, 0)  # the token's position in the file, its id

    def add(self, data: bytes) -> None:
        """Check the next block."""
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
        count = int(np.searchsorted(self._pending, end))
        positions, self._pending = self._pending[:count], self._pending[count:]
        last = ids[positions - start]
        if (bad := last != self._eod).any():
            if not self._unended:
                self._first_unended = (int(positions[bad.argmax()]), int(last[bad.argmax()]))
            self._unended += int(bad.sum())
        self._start = end

    def problems(self, foreign_remedy: str | None) -> Iterator[Problem]:
        """Yield the problems of all blocks, each kind once."""
        if self._index is not None and self._outside:
            position, token = self._first_outside
            document, offset = _locate(self._index, position)
            yield Problem(
                self._path,
                f"token {offset} of document {document} has the id {token}, outside 0..{self._limit - 1}; "
                f"{self._outside:,} ids in all are outside the vocabulary",
                f"specify the tokenizer that made the pair; otherwise {foreign_remedy or REMAKE}",
            )
        if self._index is not None and self._unended:
            position, token = self._first_unended
            remedy = "adopt it with --no-append-eod" if foreign_remedy else "make it again with --append-eod"
            yield Problem(
                self._path,
                f"document {_locate(self._index, position)[0]} ends with token id {token} instead of EOD {self._eod}, "
                f"as do {self._unended:,} documents in all without EOD",
                f"specify the pair's own EOD with --eod-token, or {remedy}",
            )


def _document_ends(index: Index) -> Iterator[Array]:
    """Yield the position of each document's last token, in tokens from the file's start, CHUNK at a time."""
    for first in range(0, len(index.document_indices) - 1, CHUNK):
        documents = index.document_indices[first : first + CHUNK + 1]
        last = documents[1:][np.diff(documents) > 0] - 1
        yield index.pointers[last] // index.dtype.itemsize + index.lengths[last] - 1


def _locate(index: Index, position: int) -> tuple[int, int]:
    """Return the document of the token at a position of the file, and the token's offset in the document."""
    # numpy's own search would first copy the array, which is not aligned in the file.
    sequence = bisect_right(index.pointers, position * index.dtype.itemsize) - 1
    document = bisect_right(index.document_indices, sequence) - 1
    start = int(index.pointers[index.document_indices[document]]) // index.dtype.itemsize
    return document, position - start


def _read_blocks(path: Path) -> Iterator[bytes]:
    with open_tree(path.parent).open(path) if find_address(path) else open_file(path) as file:
        while block := file.read(BLOCK):
            yield block
