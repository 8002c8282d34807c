"""Megatron-LM's indexed dataset: assembled from encoder batches, streamed to disk, mapped for reading.

Stands at the end of preprocess (batches of token ids come in, one `.bin` and `.idx` go out) and at the
beginning of verify, inspect and training (a pair is opened). Source of the layout and of the rules for
empty documents and EOD: Megatron-LM, `megatron/core/datasets/indexed_dataset.py` and
`tools/preprocess_data.py`. All little-endian:

    .bin  token ids of all sequences, one after the other, nothing between them
    .idx  0   9 bytes  magic "MMIDIDX", two NULs
          9   u64      version, 1
          17  u8       code of the ids' dtype, see DTYPES
          18  u64      S, number of sequences
          26  u64      D + 1, number of documents plus one
          34  i32[S]   length of each sequence, in tokens
              i64[S]   where each sequence begins in the .bin, in bytes
              i64[D+1] first sequence of each document; the last entry is S
"""

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from tokenmill.errors import WITH_HASHES, InputError, RequestError

Array = npt.NDArray[Any]

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\0\0"
VERSION = 1
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1)
}
"""Dtype codes of the format; training data is 8 (uint16) or 4 (int32)."""

CHUNK = 1 << 20
"""Entries of an index that are in memory at once."""

REMAKE = (
    f"the pair is damaged or not ours; run the same tokenmill preprocess again with {WITH_HASHES}, which makes only "
    "what is damaged"
)


class DamagedPair(InputError):
    """A `.bin` or `.idx` that Megatron-LM could not read, or would read wrongly."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}; {REMAKE}")
        self.path = path
        self.what = what


class SupportsWrite(Protocol):
    """Takes bytes, all of them at once, as a buffered file or a hashing writer does."""

    def write(self, data: memoryview, /) -> object: ...


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Choose the ids' dtype as Megatron-LM does: uint16 below 65,500 vocabulary entries, else int32."""
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


def dtype_code(dtype: npt.DTypeLike) -> int:
    """Look up a dtype's code; a dtype without one is the caller's mistake (ValueError)."""
    wanted = np.dtype(dtype)
    for code, known in DTYPES.items():
        if known == wanted:
            return code
    raise ValueError(f"the indexed dataset has no code for dtype {wanted}")


def assemble(
    ids: Array,
    offsets: Array,
    sequences_per_document: Array | None,
    eod: int | None,
    dtype: npt.DTypeLike,
    *,
    ended: bool = False,
) -> tuple[Array, Array, Array]:
    """Apply Megatron-LM's rules for empty text and EOD to one encoder batch.

    Sentence i is `ids[offsets[i]:offsets[i+1]]`, and `sequences_per_document` counts each document's
    sentences (None: one each). A sentence without tokens vanishes; EOD ends the last remaining sequence of
    each document; a document without tokens has no sequence and no EOD, but stays a document.
    `ended` says that the encoder put EOD behind each sentence, empty ones too: most often that is all there is to do.

    Returns the ids as they go into the `.bin`, the lengths of the sequences (int32, EOD counted) and the
    number of sequences of each document. The ids may share memory with the input. An id that `dtype` cannot hold
    is a RequestError.
    """
    dtype = np.dtype(dtype)
    starts = np.asarray(offsets).astype(np.int64)
    ids = ids[starts[0] : starts[-1]]
    largest = max(int(ids.max()) if ids.size else 0, eod or 0)
    if largest > np.iinfo(dtype).max:
        raise RequestError(
            f"token id {largest} does not fit {dtype.name}, which goes with the tokenizer's vocabulary size; "
            "the tokenizer's files contradict each other: take those of its own release"
        )
    # Ids are never negative, so that uint32 is int32 as it stands.
    ids = ids.view(dtype) if ids.dtype.itemsize == dtype.itemsize else ids.astype(dtype)

    all_lengths = np.diff(starts)
    if ended and sequences_per_document is None and bool((all_lengths > 1).all()):
        eod = None
    elif ended:
        is_text = np.ones(len(ids), dtype=bool)
        is_text[np.cumsum(all_lengths) - 1] = False
        ids = ids[is_text]
        all_lengths = all_lengths - 1
    kept = all_lengths > 0
    lengths = all_lengths[kept]
    if sequences_per_document is None:
        counts = kept.astype(np.int64)
    else:
        kept_before = np.concatenate(([0], np.cumsum(kept)))
        first = np.concatenate(([0], np.cumsum(sequences_per_document)))
        counts = np.diff(kept_before[first])
    if eod is not None:
        last = np.cumsum(counts)[counts > 0] - 1
        places = np.cumsum(lengths)[last] + np.arange(len(last))
        is_text = np.ones(len(ids) + len(last), dtype=bool)
        is_text[places] = False
        with_eod = np.empty(len(is_text), dtype=dtype)
        with_eod[is_text] = ids
        with_eod[places] = eod
        ids = with_eod
        lengths[last] += 1
    if lengths.size and lengths.max() > np.iinfo(np.int32).max:
        raise RequestError(
            f"a text has {int(lengths.max()):,} tokens; the format holds {np.iinfo(np.int32).max:,}: split it"
        )
    return ids, lengths.astype(np.int32), counts


class IndexedWriter:
    """Stream one `.bin` and build its `.idx` on disk, so that memory is bounded by the batch.

    The lengths are written where they will stand in the `.idx`, into the file `index`; how many sequences each
    document has goes to `index` + ".documents", from the first document on that has not just one. `mark` makes
    both durable and returns what `resume` needs to go on from there. The `.bin` is the caller's: it must be
    durable before the mark is recorded, and truncated to the mark's `bin_bytes` on resuming.
    """

    def __init__(self, write_bin: SupportsWrite, index: Path, dtype: npt.DTypeLike, *, _mode: str = "w+b") -> None:
        self.dtype = np.dtype(dtype)
        self.sequences = 0
        self.documents = 0
        self.tokens = 0
        self._even = 0  # documents at the beginning that have one sequence each
        self._code = dtype_code(self.dtype)
        self._bin = write_bin
        self._index: IO[bytes] = index.open(_mode)
        self._index.seek(HEADER.size)
        self._documents_path = Path(f"{index}.documents")
        self._documents: IO[bytes] | None = None

    @classmethod
    def resume(cls, state: Mapping[str, Any], write_bin: SupportsWrite, index: Path) -> Self:
        """Go on from a mark: what was written after it is cut off.

        Files that are missing or shorter than the mark are an InputError: the unit must start over.
        """
        try:
            writer = cls(write_bin, index, DTYPES[state["dtype_code"]], _mode="r+b")
            writer.sequences = int(state["sequences"])
            writer.documents = int(state["documents"])
            writer.tokens = int(state["tokens"])
            writer._even = int(state["even"])
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
        return self.tokens * self.dtype.itemsize

    @property
    def index_bytes(self) -> int:
        """Count the bytes of the `.idx` that lie in the file `index`: header and lengths."""
        return HEADER.size + 4 * self.sequences

    def add(self, ids: Array, lengths: Array, sequences_per_document: Array | None) -> None:
        """Append a batch as `assemble` returns it; None for documents of one sequence each.

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
        self.tokens += ids.size
        self.sequences += lengths.size
        self.documents += documents

    def mark(self) -> dict[str, int]:
        """Make what `index` holds durable and return the state to resume from, fit for JSON."""
        for file in (self._index, self._documents):
            if file is not None:
                file.flush()
                os.fdatasync(file.fileno())
        return {
            "dtype_code": self._code,
            "sequences": self.sequences,
            "documents": self.documents,
            "even": self._even,
            "tokens": self.tokens,
            "bin_bytes": self.bin_bytes,
        }

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
        for chunk in _chunks(self._index, "<i4", self.sequences):
            ends = start + np.cumsum(chunk, dtype=np.int64) * self.dtype.itemsize
            _write(out, np.concatenate(([start], ends[:-1])).astype("<i8", copy=False))
            start = int(ends[-1])
        for first in range(0, self._even + 1, CHUNK):
            _write(out, np.arange(first, min(first + CHUNK, self._even + 1), dtype="<i8"))
        if self._documents is not None:
            self._documents.flush()
            self._documents.seek(0)
            for chunk in _chunks(self._documents, "<i8", self.documents - self._even):
                _write(out, chunk)

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


def _chunks(file: IO[bytes], dtype: str, count: int) -> Iterator[Array]:
    """Yield so many of a file's entries from its position on, CHUNK at a time."""
    while count:
        taken = min(CHUNK, count)
        yield np.frombuffer(file.read(taken * np.dtype(dtype).itemsize), dtype=dtype)
        count -= taken


class Index(NamedTuple):
    """An `.idx` mapped read-only: the arrays are views of the file."""

    dtype: np.dtype[Any]
    lengths: Array
    pointers: Array
    document_indices: Array

    @property
    def bin_bytes(self) -> int:
        """Where the last sequence ends: the size the `.bin` must have."""
        if not self.lengths.size:
            return 0
        return int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize


def open_index(path: Path) -> Index:
    """Map an `.idx`, checking its header and that its size agrees with its counts; else DamagedPair."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(HEADER.size)
    except FileNotFoundError:
        raise DamagedPair(path, "missing") from None
    if not header.startswith(MAGIC):
        raise DamagedPair(path, f"not an indexed dataset: begins with {header[:9]!r} instead of {MAGIC!r}")
    if len(header) < HEADER.size:
        raise DamagedPair(path, f"ends after {size} bytes, inside its {HEADER.size}-byte header")
    _, version, code, sequences, entries = HEADER.unpack(header)
    if version != VERSION:
        raise DamagedPair(path, f"version {version} at offset 9; Megatron-LM reads version {VERSION}")
    if code not in DTYPES:
        raise DamagedPair(path, f"dtype code {code} at offset 17 does not exist")
    expected = HEADER.size + 12 * sequences + 8 * entries
    if entries < 1 or size != expected:
        raise DamagedPair(
            path,
            f"{size:,} bytes; {sequences:,} sequences and {entries:,} document indices make {expected:,}",
        )
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    pointers_at = HEADER.size + 4 * sequences
    documents_at = pointers_at + 8 * sequences
    return Index(
        DTYPES[code],
        raw[HEADER.size : pointers_at].view("<i4"),
        raw[pointers_at:documents_at].view("<i8"),
        raw[documents_at:].view("<i8"),
    )


class IndexedReader:
    """A pair mapped read-only; `prefix` is the path without `.bin` and `.idx`.

    Opening checks the header and the sizes alone (DamagedPair, an InputError); `check_pair` checks the rest.
    """

    def __init__(self, prefix: Path) -> None:
        self._idx, path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        index = open_index(self._idx)
        self.dtype, self.lengths, self.pointers, self.document_indices = index
        self.sequences = len(self.lengths)
        self.documents = len(self.document_indices) - 1
        if not path.is_file():
            raise DamagedPair(path, "missing")
        size = path.stat().st_size
        if size != index.bin_bytes:
            raise DamagedPair(path, f"{size:,} bytes, where {self._idx.name} ends at {index.bin_bytes:,}")
        # An empty file cannot be mapped.
        self.ids: Array = np.memmap(path, self.dtype, mode="r") if size else np.empty(0, self.dtype)

    def sequence(self, number: int) -> Array:
        """Return the ids of one sequence, a view of the file; IndexError past the last."""
        if not 0 <= number < self.sequences:
            raise IndexError(f"sequence {number} of {self.sequences}")
        return self._ids(number, number + 1)

    def document(self, number: int) -> Array:
        """Return the ids of a document's sequences in a row, a view of the file; IndexError past the last."""
        if not 0 <= number < self.documents:
            raise IndexError(f"document {number} of {self.documents}")
        first, end = self.document_indices[number : number + 2].tolist()
        return self._ids(first, end)

    def _ids(self, first: int, end: int) -> Array:
        if first == end:
            return self.ids[:0]
        if not 0 <= first < end <= self.sequences:
            raise DamagedPair(self._idx, f"a document is said to hold sequences {first} to {end}")
        size = self.dtype.itemsize
        start, last = int(self.pointers[first]), int(self.pointers[end - 1])
        stop = last // size + int(self.lengths[end - 1])
        if start % size or not 0 <= start // size <= stop <= self.ids.size:
            raise DamagedPair(self._idx, f"sequences {first} to {end} lie outside the .bin")
        return self.ids[start // size : stop]
