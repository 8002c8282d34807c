"""Megatron-LM's indexed dataset, mapped for reading: a pair as verify, inspect and training open it.

`writer` gives its layout.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.errors import WITH_HASHES, InputError
from tokenmill.tokens.formats.indexed.writer import CODES, HEADER, MAGIC, VERSION

Array = npt.NDArray[Any]

DTYPES: dict[int, np.dtype[Any]] = {code: np.dtype(name).newbyteorder("<") for name, code in CODES.items()}
"""Dtypes of the ids by their code in the `.idx`."""

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


class Index(NamedTuple):
    """An `.idx` mapped read-only: the arrays are views of the file.

    `modes` has an int8 for each sequence in the pairs of multimodal datasets, and is empty in others.
    """

    dtype: np.dtype[Any]
    lengths: Array
    pointers: Array
    document_indices: Array
    modes: Array

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
    # The modes have no flag in the header. Megatron-LM reads them for multimodal datasets alone, and ignores them else.
    if entries < 1 or size not in (expected, expected + sequences):
        raise DamagedPair(
            path,
            f"{size:,} bytes; {sequences:,} sequences and {entries:,} document indices make {expected:,}",
        )
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    pointers_at = HEADER.size + 4 * sequences
    documents_at = pointers_at + 8 * sequences
    modes_at = documents_at + 8 * entries
    return Index(
        DTYPES[code],
        raw[HEADER.size : pointers_at].view("<i4"),
        raw[pointers_at:documents_at].view("<i8"),
        raw[documents_at:modes_at].view("<i8"),
        raw[modes_at:].view("i1"),
    )


class IndexedReader:
    """A pair mapped read-only; `prefix` is the path without `.bin` and `.idx`.

    Opening checks the header and the sizes alone (DamagedPair, an InputError); `check_pair` checks the rest.
    """

    def __init__(self, prefix: Path) -> None:
        self._idx, path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        index = open_index(self._idx)
        self.dtype, self.lengths, self.pointers, self.document_indices, self.modes = index
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
