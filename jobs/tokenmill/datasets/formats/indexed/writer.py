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
import xxhash

from tokenmill.core.files.named_file import naming, open_file
from tokenmill.engine.contract import Count, Hash, Record
from tokenmill.errors import InputError, TransientError

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
    """The durable part of a pair: IndexedWriter.save_state returns it, IndexedWriter.resume continues from it.

    The hashes are xxh3-128 of the bytes that were written, so that bytes that a file system lost are detected.
    """

    dtype_code: Count
    sequences: Count
    documents: Count
    even: Count
    tokens: Count
    bin_bytes: Count
    bin_hash: Hash
    lengths_hash: Hash
    documents_hash: Hash | None = None


class SupportsWrite(Protocol):
    """An object that writes all bytes in one call, such as a buffered file or a hashing writer."""

    def write(self, data: memoryview, /) -> object: ...


class _Entries:
    """A temporary file of index entries of one size, and the hash of the entries that were written to it."""

    def __init__(self, path: Path, size: int, keep: int | None = None) -> None:
        """Open a new file, or keep the first `keep` entries of an existing one.

        Raises:
            InputError: the file is missing or too short, so the unit must start again.
        """
        self.path = path
        self.count = keep or 0
        self._size = size
        self._digest = xxhash.xxh3_128()
        try:
            self._file: IO[bytes] = open_file(path, "w+b" if keep is None else "r+b")
        except FileNotFoundError as error:
            raise InputError(f"{path}: missing, but required by a journal; start the unit again") from error
        actual = self._file.seek(0, os.SEEK_END)
        if actual < self.count * size:
            self._file.close()
            raise InputError(
                f"{path}: {actual} bytes, but a journal requires {self.count * size}; start the unit again"
            )
        self._file.seek(0)
        for chunk in self._chunks():
            self._digest.update(chunk)
        self._file.truncate()

    def append(self, entries: Array) -> None:
        """Append entries whose dtype has the size of the file's entries."""
        data = np.ascontiguousarray(entries).tobytes()
        self._digest.update(data)
        self._file.write(data)
        self.count += entries.size

    def save(self) -> str:
        """Make the entries durable; return the hash of what was written."""
        self._file.flush()
        with naming("sync", self.path):
            os.fdatasync(self._file.fileno())
        return self._digest.hexdigest()

    def read(self) -> Iterator[bytes]:
        """Yield the entries, CHUNK at a time.

        Raises:
            TransientError: the file has other bytes than were written to it.
        """
        self._file.flush()
        self._file.seek(0)
        digest = xxhash.xxh3_128()
        for chunk in self._chunks():
            digest.update(chunk)
            yield chunk
        if digest.digest() != self._digest.digest():
            raise TransientError(
                f"{self.path} does not have the bytes that tokenmill wrote to it, so its file system lost data; run "
                "the same command again, and check the file system if the error occurs again"
            )

    def _chunks(self) -> Iterator[bytes]:
        for first in range(0, self.count, CHUNK):
            yield self._file.read(min(CHUNK, self.count - first) * self._size)

    def close(self) -> None:
        """Close the file and keep it on disk."""
        self._file.close()


class IndexedWriter:
    """Write a `.bin` as a stream and collect its `.idx` on disk, so that memory is bounded by the batch.

    The file `index` + ".lengths" receives the length of each sequence. The file `index` + ".documents" receives the
    number of sequences of each document, starting with the first document that does not have exactly one. `save_state`
    makes both files durable and returns the state for `resume`. The caller owns the `.bin`: it must be durable before
    the state is recorded, and must be truncated to the state's `bin_bytes` before resuming. `write_index` writes the
    `.idx`.
    """

    def __init__(
        self, write_bin: SupportsWrite, index: Path, dtype: str, *, _resume: WriterState | None = None
    ) -> None:
        """Start a pair whose ids have a dtype of CODES."""
        state = _resume
        self.dtype = dtype
        self.documents = state.documents if state else 0
        self.tokens = state.tokens if state else 0
        self._even = state.even if state else 0  # documents at the start of the pair that have one sequence each
        self._code = CODES[dtype]
        self._itemsize = int(dtype.lstrip("uintfloa")) // 8
        self._bin = write_bin
        self._documents_path = Path(f"{index}.documents")
        self._lengths = _Entries(Path(f"{index}.lengths"), 4, state.sequences if state else None)
        uneven = self.documents - self._even
        self._documents = _Entries(self._documents_path, 8, uneven) if uneven else None

    @classmethod
    def resume(cls, state: WriterState, write_bin: SupportsWrite, index: Path) -> Self:
        """Return a writer that continues from a state, and cut off the data written after the state was saved.

        Raises:
            InputError: a file is missing or too short for the state, so the unit must start again.
        """
        (dtype,) = (name for name, code in CODES.items() if code == state.dtype_code)
        return cls(write_bin, index, dtype, _resume=state)

    @property
    def sequences(self) -> int:
        """The number of sequences so far."""
        return self._lengths.count

    @property
    def bin_bytes(self) -> int:
        """The bytes written to the `.bin` so far."""
        return self.tokens * self._itemsize

    def add(self, ids: Array, lengths: Array, sequences_per_document: Array | None) -> None:
        """Append a batch from `tokenize.assemble`; None means one sequence in each document.

        Raises:
            ValueError: the lengths do not match the ids or the documents.
        """
        counts = sequences_per_document
        if int(lengths.sum(dtype=np.int64)) != ids.size or (counts is not None and int(counts.sum()) != lengths.size):
            raise ValueError("lengths must sum to the number of ids, sequences per document to that of lengths")
        documents = lengths.size if counts is None else counts.size
        if ids.size:  # an empty array has no byte view
            self._bin.write(np.ascontiguousarray(ids.astype(self.dtype, copy=False)).data.cast("B"))
        if self._documents is None and (counts is None or bool((counts == 1).all())):
            self._even += documents
        else:
            if self._documents is None:
                self._documents = _Entries(self._documents_path, 8)
            # A document's entry is the first sequence of the next document. Megatron-LM's leading 0 is not stored here.
            ends = self.sequences + (np.arange(1, documents + 1) if counts is None else np.cumsum(counts))
            self._documents.append(ends.astype("<i8", copy=False))
        self._lengths.append(lengths.astype("<i4", copy=False))
        self.tokens += ids.size
        self.documents += documents

    def save_state(self, bin_hash: str) -> WriterState:
        """Make the files of the index durable and return the state to resume from.

        `bin_hash` is the xxh3-128 of the bytes that were written to the `.bin`.
        """
        lengths_hash = self._lengths.save()
        documents_hash = self._documents.save() if self._documents else None
        return WriterState(
            self._code,
            self.sequences,
            self.documents,
            self._even,
            self.tokens,
            self.bin_bytes,
            bin_hash,
            lengths_hash,
            documents_hash,
        )

    def write_index(self, out: SupportsWrite) -> None:
        """Write the `.idx`: the header, and the length and the start of each sequence, and those of each document."""
        out.write(memoryview(HEADER.pack(MAGIC, VERSION, self._code, self.sequences, self.documents + 1)))
        for lengths in self._lengths.read():
            out.write(memoryview(lengths))
        start = 0
        for lengths in self._lengths.read():
            starts, start = _starts(lengths, start, self._itemsize)
            out.write(starts)
        for first in range(0, self._even + 1, CHUNK):
            out.write(np.arange(first, min(first + CHUNK, self._even + 1), dtype="<i8").data.cast("B"))
        if self._documents is not None:
            for chunk in self._documents.read():
                out.write(memoryview(chunk))

    def close(self) -> None:
        """Close the files and keep them on disk, to resume from."""
        for entries in (self._lengths, self._documents):
            if entries is not None:
                entries.close()

    def discard(self) -> None:
        """Close and delete the files, when the pair is complete, abandoned or without tokens."""
        self.close()
        for path in (self._lengths.path, self._documents_path):
            path.unlink(missing_ok=True)


def _starts(lengths: bytes, start: int, itemsize: int) -> tuple[memoryview, int]:
    """Return the int64 starts in bytes of sequences with these int32 lengths, and the end of the last sequence."""
    offsets = np.zeros(len(lengths) // 4 + 1, "<i8")
    np.cumsum(np.frombuffer(lengths, "<i4"), out=offsets[1:])
    offsets = start + offsets * itemsize
    return offsets[:-1].data.cast("B"), int(offsets[-1])
