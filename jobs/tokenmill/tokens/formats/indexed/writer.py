"""Write Megatron-LM's indexed dataset: batches of token ids come in, a `.bin` and an `.idx` file go out.

The layout, all little-endian (source: Megatron-LM, `megatron/core/datasets/indexed_dataset.py`):

    .bin  token ids of all sequences, without separators
    .idx  0   9 bytes  magic "MMIDIDX", two NULs
          9   u64      version, 1
          17  u8       code of the ids' dtype, see CODES
          18  u64      S, number of sequences
          26  u64      D + 1, number of documents plus one
          34  i32[S]   length of each sequence, in tokens
              i64[S]   start of each sequence in the .bin, in bytes
              i64[D+1] first sequence of each document; the last entry is S
              i8[S]    mode of each sequence: only in multimodal datasets, never written here
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
"""Codes of the ids' dtypes, by numpy's names; training data has 8 (uint16) or 4 (int32)."""

CHUNK = 1 << 14
"""Index entries in memory at a time."""


class WriterState(Record, frozen=True, gc=False):
    """The durable part of a pair: IndexedWriter.save_state returns it, IndexedWriter.resume continues from it."""

    dtype_code: Count
    sequences: Count
    documents: Count
    even: Count
    tokens: Count
    bin_bytes: Count


class SupportsWrite(Protocol):
    """An object that writes all bytes in one call, such as a buffered file or a hashing writer."""

    def write(self, data: memoryview, /) -> object: ...


class IndexedWriter:
    """Write a `.bin` as a stream and build its `.idx` on disk, so that memory is bounded by the batch.

    The file `index` receives the lengths at their offset in the `.idx`. The file `index` + ".documents" receives the
    number of sequences of each document, starting with the first document that does not have exactly one. `save_state`
    makes both files durable and returns the state for `resume`. The caller owns the `.bin`: it must be durable before
    the state is recorded, and must be truncated to the state's `bin_bytes` before resuming.
    """

    def __init__(self, write_bin: SupportsWrite, index: Path, dtype: str, *, _mode: str = "w+b") -> None:
        """Start a pair whose ids have a dtype of CODES."""
        self.dtype = dtype
        self.sequences = 0
        self.documents = 0
        self.tokens = 0
        self._even = 0  # documents at the start of the pair that have one sequence each
        self._code = CODES[dtype]
        self._itemsize = int(dtype.lstrip("uintfloa")) // 8
        self._bin = write_bin
        self._index: IO[bytes] = index.open(_mode)
        self._index.seek(HEADER.size)
        self._documents_path = Path(f"{index}.documents")
        self._documents: IO[bytes] | None = None

    @classmethod
    def resume(cls, state: WriterState, write_bin: SupportsWrite, index: Path) -> Self:
        """Return a writer that continues from a state, and cut off the data written after the state was saved.

        Raises:
            InputError: a file is missing or too short for the state, so the unit must start again.
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
            raise InputError(f"{error.filename}: missing, but required by a journal; start the unit again") from None
        for file, size in (
            (writer._index, HEADER.size + 4 * writer.sequences),
            (writer._documents, 8 * (writer.documents - writer._even)),
        ):
            if file is None:
                continue
            actual = file.seek(0, os.SEEK_END)
            if actual < size:
                writer.close()
                raise InputError(f"{file.name}: {actual} bytes, but a journal requires {size}; start the unit again")
            file.truncate(size)
            file.seek(size)
        return writer

    @property
    def bin_bytes(self) -> int:
        """The bytes written to the `.bin` so far."""
        return self.tokens * self._itemsize

    @property
    def index_bytes(self) -> int:
        """The bytes of the `.idx` that are in the file `index`: header and lengths."""
        return HEADER.size + 4 * self.sequences

    def add(self, ids: Array, lengths: Array, sequences_per_document: Array | None) -> None:
        """Append a batch from `tokens.assemble`; None means one sequence in each document.

        Raises:
            ValueError: the lengths do not match the ids or the documents.
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
            # A document's entry is the first sequence of the next document. Megatron-LM's leading 0 is not stored here.
            ends = self.sequences + (np.arange(1, documents + 1) if counts is None else np.cumsum(counts))
            _write(self._documents, ends.astype("<i8", copy=False))
        self._count(ids.size, lengths.size, documents)

    def _count(self, tokens: int, sequences: int, documents: int) -> None:
        self.tokens += tokens
        self.sequences += sequences
        self.documents += documents

    def save_state(self) -> WriterState:
        """Make the files of the index durable and return the state to resume from."""
        for file in (self._index, self._documents):
            if file is not None:
                file.flush()
                os.fdatasync(file.fileno())
        return WriterState(self._code, self.sequences, self.documents, self._even, self.tokens, self.bin_bytes)

    def write_header(self) -> None:
        """Complete the first `index_bytes` of the `.idx` in the file `index`."""
        self._index.flush()
        os.pwrite(self._index.fileno(), HEADER.pack(MAGIC, VERSION, self._code, self.sequences, self.documents + 1), 0)

    def write_rest(self, out: SupportsWrite) -> None:
        """Write the rest of the `.idx`: the start of each sequence and of each document."""
        start = 0
        self._index.flush()
        self._index.seek(HEADER.size)
        # Do not read to the file's end: `out` may append to this file.
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
        """Close the files and keep them on disk, to resume from or to become the `.idx`."""
        self._index.close()
        if self._documents is not None:
            self._documents.close()

    def discard(self) -> None:
        """Close and delete the files, when the attempt is abandoned or the pair has no tokens."""
        self.close()
        for name in (self._index.name, self._documents_path):
            Path(name).unlink(missing_ok=True)


def _write(out: SupportsWrite | IO[bytes], array: Array) -> None:
    if array.size:  # an empty array has no byte view
        out.write(np.ascontiguousarray(array).data.cast("B"))


def _chunks(file: IO[bytes], size: int, count: int) -> Iterator[bytes]:
    """Yield `count` entries of `size` bytes from the file's position on, CHUNK at a time."""
    while count:
        taken = min(CHUNK, count)
        yield file.read(taken * size)
        count -= taken


def _starts(lengths: bytes, start: int, itemsize: int) -> tuple[memoryview, int]:
    """Return the int64 starts in bytes of sequences with these int32 lengths, and the end of the last sequence."""
    offsets = np.zeros(len(lengths) // 4 + 1, "<i8")
    np.cumsum(np.frombuffer(lengths, "<i4"), out=offsets[1:])
    offsets = start + offsets * itemsize
    return offsets[:-1].data.cast("B"), int(offsets[-1])
