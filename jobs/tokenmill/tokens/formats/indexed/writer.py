"""Megatron-LM's indexed dataset, written: batches of token ids come in, one `.bin` and `.idx` go out.

The layout, all little-endian (source: Megatron-LM, `megatron/core/datasets/indexed_dataset.py`):

    .bin  token ids of all sequences, one after the other, nothing between them
    .idx  0   9 bytes  magic "MMIDIDX", two NULs
          9   u64      version, 1
          17  u8       code of the ids' dtype, see CODES
          18  u64      S, number of sequences
          26  u64      D + 1, number of documents plus one
          34  i32[S]   length of each sequence, in tokens
              i64[S]   where each sequence begins in the .bin, in bytes
              i64[D+1] first sequence of each document; the last entry is S
              i8[S]    mode of each sequence: in multimodal datasets alone, never written here
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from tokenmill.errors import InputError
from tokenmill.flow.contract import Count, Record

Array = npt.NDArray[Any]

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\0\0"
VERSION = 1
CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}
"""Codes of the ids' dtypes, by numpy's names; training data is 8 (uint16) or 4 (int32)."""

CHUNK = 1 << 14
"""Entries of an index that are in memory at once."""


class WriterState(Record, frozen=True, gc=False):
    """How far a pair is: what IndexedWriter.mark made durable, and IndexedWriter.resume goes on from."""

    dtype_code: Count
    sequences: Count
    documents: Count
    even: Count
    tokens: Count
    bin_bytes: Count


class SupportsWrite(Protocol):
    """Takes bytes, all of them at once, as a buffered file or a hashing writer does."""

    def write(self, data: memoryview, /) -> object: ...


class IndexedWriter:
    """Stream one `.bin` and build its `.idx` on disk, so that memory is bounded by the batch.

    The lengths are written where they will stand in the `.idx`, into the file `index`; how many sequences each
    document has goes to `index` + ".documents", from the first document on that has not just one. `mark` makes
    both durable and returns what `resume` needs to go on from there. The `.bin` is the caller's: it must be
    durable before the mark is recorded, and truncated to the mark's `bin_bytes` on resuming.
    """

    def __init__(self, write_bin: SupportsWrite, index: Path, dtype: str, *, _mode: str = "w+b") -> None:
        """Begin a pair of ids of a dtype, one of CODES."""
        self.dtype = dtype
        self.sequences = 0
        self.documents = 0
        self.tokens = 0
        self._even = 0  # documents at the beginning that have one sequence each
        self._code = CODES[dtype]
        self._itemsize = int(dtype.lstrip("uintfloa")) // 8
        self._bin = write_bin
        self._index: IO[bytes] = index.open(_mode)
        self._index.seek(HEADER.size)
        self._documents_path = Path(f"{index}.documents")
        self._documents: IO[bytes] | None = None

    @classmethod
    def resume(cls, state: WriterState, write_bin: SupportsWrite, index: Path) -> Self:
        """Go on from a mark: what was written after it is cut off.

        Files that are missing or shorter than the mark are an InputError: the unit must start over.
        """
        (dtype,) = (name for name, code in CODES.items() if code == state.dtype_code)
        try:
            writer = cls(write_bin, index, dtype, _mode="r+b")
            writer.sequences = state.sequences
            writer.documents = state.documents
            writer.tokens = state.tokens
            writer._even = state.even
            if writer._even < writer.documents:
                writer._documents = writer._documents_path.open("r+b")
        except FileNotFoundError as error:
            raise InputError(f"{error.filename}: missing, though a journal counts on it; start the unit over") from None
        for file, size in (
            (writer._index, HEADER.size + 4 * writer.sequences),
            (writer._documents, 8 * (writer.documents - writer._even)),
        ):
            if file is None:
                continue
            found = file.seek(0, os.SEEK_END)
            if found < size:
                writer.close()
                raise InputError(f"{file.name}: {found} bytes where a journal counts on {size}; start the unit over")
            file.truncate(size)
            file.seek(size)
        return writer

    @property
    def bin_bytes(self) -> int:
        """Count the bytes given to the `.bin` so far."""
        return self.tokens * self._itemsize

    @property
    def index_bytes(self) -> int:
        """Count the bytes of the `.idx` that lie in the file `index`: header and lengths."""
        return HEADER.size + 4 * self.sequences

    def add(self, ids: Array, lengths: Array, sequences_per_document: Array | None) -> None:
        """Append a batch as `tokens.assemble` returns it; None for documents of one sequence each.

        A batch that contradicts itself is a ValueError.
        """
        counts = sequences_per_document
        if int(lengths.sum(dtype=np.int64)) != ids.size or (counts is not None and int(counts.sum()) != lengths.size):
            raise ValueError("lengths must sum to the number of ids, sequences per document to that of lengths")
        documents = lengths.size if counts is None else counts.size
        _write(self._bin, ids.astype(self.dtype, copy=False))
        _write(self._index, lengths.astype("<i4", copy=False))
        if self._documents is None and (counts is None or bool((counts == 1).all())):
            self._even += documents
        else:
            if self._documents is None:
                self._documents = self._documents_path.open("w+b")
            # The entry of a document is where the next one begins: Megatron-LM's leading 0 is not among them.
            ends = self.sequences + (np.arange(1, documents + 1) if counts is None else np.cumsum(counts))
            _write(self._documents, ends.astype("<i8", copy=False))
        self._count(ids.size, lengths.size, documents)

    def _count(self, tokens: int, sequences: int, documents: int) -> None:
        self.tokens += tokens
        self.sequences += sequences
        self.documents += documents

    def mark(self) -> WriterState:
        """Make what `index` holds durable and return the state to resume from."""
        for file in (self._index, self._documents):
            if file is not None:
                file.flush()
                os.fdatasync(file.fileno())
        return WriterState(self._code, self.sequences, self.documents, self._even, self.tokens, self.bin_bytes)

    def write_header(self) -> None:
        """Complete the beginning of the `.idx` in place: the first `index_bytes` of the file `index`."""
        self._index.flush()
        os.pwrite(self._index.fileno(), HEADER.pack(MAGIC, VERSION, self._code, self.sequences, self.documents + 1), 0)

    def write_rest(self, out: SupportsWrite) -> None:
        """Write what follows in the `.idx`: where each sequence and each document begins."""
        start = 0
        self._index.flush()
        self._index.seek(HEADER.size)
        # Not to the file's end: the rest may be written to this very file.
        for lengths in _chunks(self._index, 4, self.sequences):
            starts, start = _starts(lengths, start, self._itemsize)
            out.write(starts)
        for first in range(0, self._even + 1, CHUNK):
            out.write(np.arange(first, min(first + CHUNK, self._even + 1), dtype="<i8").data.cast("B"))
        if self._documents is not None:
            self._documents.flush()
            self._documents.seek(0)
            for chunk in _chunks(self._documents, 8, self.documents - self._even):
                out.write(memoryview(chunk))

    def close(self) -> None:
        """Close the files and leave them where they are: to resume from, or for the `.idx`."""
        self._index.close()
        if self._documents is not None:
            self._documents.close()

    def discard(self) -> None:
        """Close and remove them: the attempt is given up, or the pair has no tokens."""
        self.close()
        for name in (self._index.name, self._documents_path):
            Path(name).unlink(missing_ok=True)


def _write(out: SupportsWrite | IO[bytes], array: Array) -> None:
    if array.size:  # an empty array has no byte view
        out.write(np.ascontiguousarray(array).data.cast("B"))


def _chunks(file: IO[bytes], size: int, count: int) -> Iterator[bytes]:
    """Read so many entries of a size from a file's position on, CHUNK at a time."""
    while count:
        taken = min(CHUNK, count)
        yield file.read(taken * size)
        count -= taken


def _starts(lengths: bytes, start: int, itemsize: int) -> tuple[memoryview, int]:
    """Return where sequences of these int32 lengths begin from `start` on, int64, and where the last ends, in bytes."""
    places = np.zeros(len(lengths) // 4 + 1, "<i8")
    np.cumsum(np.frombuffer(lengths, "<i4"), out=places[1:])
    places = start + places * itemsize
    return places[:-1].data.cast("B"), int(places[-1])
