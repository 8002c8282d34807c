"""Map a pair of Megatron-LM's indexed dataset for reading, as verify, inspect and training open it.

`writer` describes the layout.
"""

import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple, cast
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from tokenmill.core.buckets.mirror import find_address
from tokenmill.core.buckets.tree import open_bucket
from tokenmill.core.files.named_file import open_file
from tokenmill.core.machine import raise_file_limit
from tokenmill.core.typed_json import decode_json
from tokenmill.datasets.formats.base import REMAKE
from tokenmill.datasets.formats.indexed.writer import CODES, HEADER, MAGIC, VERSION
from tokenmill.engine.contract import Record
from tokenmill.errors import InputError, RequestError

Array = npt.NDArray[Any]

DTYPES: dict[int, np.dtype[Any]] = {code: np.dtype(name).newbyteorder("<") for name, code in CODES.items()}
"""Dtypes of the ids by their code in the `.idx`."""


FREE_FILES = 128
"""Open files that remain for everything but pairs, as far as the hard limit of the process allows."""

MAX_VIEW_BYTES = 1 << 16
"""Bytes of a ViewRecord that are read."""

MIN_FREE_FILES = 16
"""Open files that must remain."""


class DamagedPair(InputError):
    """A `.bin` or `.idx` file that Megatron-LM would fail to read, or would read incorrectly."""

    def __init__(self, path: Path, description: str) -> None:
        super().__init__(f"{path}: {description}; {REMAKE}")
        self.path = path
        self.description = description


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the ids' dtype that Megatron-LM chooses: uint16 below 65,500 vocabulary entries, otherwise int32."""
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


def dtype_code(dtype: npt.DTypeLike) -> int:
    """Return a dtype's code; raise ValueError, for an error of the caller, if it has none."""
    requested = np.dtype(dtype)
    for code, known in DTYPES.items():
        if known == requested:
            return code
    raise ValueError(f"the indexed dataset has no code for dtype {requested}")


class Index(NamedTuple):
    """An `.idx` mapped read-only: the arrays are views of the file.

    `modes` has an int8 for each sequence in the pairs of multimodal datasets, and is empty in other pairs.
    """

    dtype: np.dtype[Any]
    lengths: Array
    pointers: Array
    document_indices: Array
    modes: Array

    @property
    def bin_bytes(self) -> int:
        """The end of the last sequence in bytes, which is the required size of the `.bin`."""
        if not self.lengths.size:
            return 0
        return int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize


def measure_documents(index: Index, block: int) -> Iterator[Array]:
    """Yield the tokens of the documents of a valid index (int64), for `block` documents at a time."""
    indices = index.document_indices
    for first in range(0, len(indices) - 1, block):
        bounds = np.asarray(indices[first : first + block + 1])
        ends = np.concatenate(([0], np.cumsum(index.lengths[int(bounds[0]) : int(bounds[-1])], dtype=np.int64)))
        yield np.diff(ends[bounds - bounds[0]])


def open_index(path: Path) -> Index:
    """Map an `.idx`; raise DamagedPair if its header is invalid or its size does not match its counts.

    An `.idx` in a bucket is copied to the local disk, once for each of its versions.
    """
    path = copy_index(path)
    try:
        size = path.stat().st_size
        with open_file(path) as file:
            header = file.read(HEADER.size)
            _reserve_files(path, file)
    except FileNotFoundError:
        raise DamagedPair(path, "missing") from None
    if not header.startswith(MAGIC):
        raise DamagedPair(path, f"not an indexed dataset: it begins with {header[:9]!r} instead of {MAGIC!r}")
    if len(header) < HEADER.size:
        raise DamagedPair(path, f"it ends after {size} bytes, inside its {HEADER.size}-byte header")
    _, version, code, sequences, entries = HEADER.unpack(header)
    if version != VERSION:
        raise DamagedPair(path, f"version {version} at offset 9, but Megatron-LM reads version {VERSION}")
    if code not in DTYPES:
        raise DamagedPair(path, f"unknown dtype code {code} at offset 17")
    expected = HEADER.size + 12 * sequences + 8 * entries
    # The header has no flag for the modes. Megatron-LM reads them only for multimodal datasets, and ignores them in
    # other datasets.
    if entries < 1 or size not in (expected, expected + sequences):
        raise DamagedPair(
            path,
            f"it has {size:,} bytes, but {sequences:,} sequences and {entries:,} document indices need {expected:,}",
        )
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    pointers_offset = HEADER.size + 4 * sequences
    documents_offset = pointers_offset + 8 * sequences
    modes_offset = documents_offset + 8 * entries
    return Index(
        DTYPES[code],
        raw[HEADER.size : pointers_offset].view("<i4"),
        raw[pointers_offset:documents_offset].view("<i8"),
        raw[documents_offset:modes_offset].view("<i8"),
        raw[modes_offset:].view("i1"),
    )


class ViewRecord(Record, frozen=True):
    """The record of a view, whose `.idx` names ranges of the `.bin` of another pair (`samples.phases.views`).

    `source` is the prefix of that pair, relative to the directory of the record; `bin_bytes` is the size of its `.bin`.
    `documents` is None if each document has one sequence.
    """

    source: str
    content: str
    bin_bytes: int
    sequences: int
    tokens: int
    documents: int | None = None


def view_file(prefix: Path) -> Path:
    """Return the path of the record of a view."""
    return Path(f"{prefix}.view.json")


def read_view(prefix: Path) -> ViewRecord | None:
    """Return the record of a view; None for any other pair."""
    path = view_file(prefix)
    try:
        with open_file(path) as file:
            return decode_json(file.read(MAX_VIEW_BYTES), ViewRecord)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RequestError(f"{path} is damaged ({error}); delete the view, and run the same command again") from error


def find_source(prefix: Path, record: ViewRecord) -> Path:
    """Return the prefix of the pair of a view."""
    return Path(os.path.normpath(prefix.parent.resolve() / record.source))


def list_origins(prefix: Path) -> Iterator[Path]:
    """Yield the prefix of the pair of a view, then that of which this pair is a view; nothing for any other pair."""
    while (view := read_view(prefix)) is not None:
        prefix = find_source(prefix, view)
        yield prefix


def _reserve_files(path: Path, file: IO[bytes]) -> None:
    """Raise the limit of open files before maps exceed it: each map of a pair's two files keeps its file open.

    Raises:
        RequestError: the hard limit allows no more.
    """
    handle = os.dup(file.fileno())  # the lowest free number, so it shows how many files are open
    os.close(handle)
    limit = raise_file_limit(handle + FREE_FILES)
    if handle + MIN_FREE_FILES > limit:
        raise RequestError(
            f"cannot open {path}: each pair needs two open files, and this process may have {limit:,}; raise the limit "
            "(ulimit -n), or run tokenmill join, which writes fewer, larger pairs"
        )


class IndexedReader:
    """A pair mapped read-only; `prefix` is the path without `.bin` and `.idx`.

    The constructor checks only the header and the sizes (DamagedPair, an InputError); `check_pair` checks the rest.
    The index of a pair in a bucket is copied, and `ids` reads ranges of the object.
    """

    def __init__(self, prefix: Path) -> None:
        self._idx, path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        index = open_index(self._idx)
        self.dtype, self.lengths, self.pointers, self.document_indices, self.modes = index
        self.sequences = len(self.lengths)
        self.documents = len(self.document_indices) - 1
        target = find_bin(prefix)
        try:
            self._prefix, self._state = prefix, _describe_files(prefix)
            remote = open_bucket(target.parent).open_array(target, self.dtype) if find_address(target) else None
        except FileNotFoundError:
            raise DamagedPair(path, "missing") from None
        size = path.stat().st_size if remote is None else remote.bytes
        if size != index.bin_bytes and not ((view := read_view(prefix)) and view.bin_bytes == size >= index.bin_bytes):
            raise DamagedPair(path, f"it has {size:,} bytes, but {self._idx.name} requires {index.bin_bytes:,}")
        if remote is not None:
            self.ids = cast("Array", remote)
        else:  # an empty file cannot be mapped
            self.ids = np.memmap(path, self.dtype, mode="r") if size else np.empty(0, self.dtype)

    @cached_property
    def tokens(self) -> int:
        """The number of tokens of all sequences; a view has other ones than its `.bin`."""
        view = read_view(self._prefix)
        return int(self.ids.size) if view is None else view.tokens

    def __reduce__(self) -> tuple[Callable[..., "IndexedReader"], tuple[object, ...]]:
        """Map the pair again in another process, instead of copying its ids there."""
        return _open_again, (self._prefix, self._state)

    def list_sequences(self, documents: Array) -> Array:
        """Return the numbers of the sequences of some documents, in the order of the documents."""
        end = self.document_indices[documents + 1]
        counts = end - self.document_indices[documents]
        numbers: Array = np.arange(counts.sum()) + (end - counts.cumsum()).repeat(counts)
        return numbers

    def sequence(self, number: int) -> Array:
        """Return the ids of one sequence, as a view of the file; raise IndexError after the last sequence."""
        if not 0 <= number < self.sequences:
            raise IndexError(f"sequence {number} of {self.sequences}")
        return self._ids(number, number + 1)

    def document(self, number: int) -> Array:
        """Return the ids of all sequences of a document, as a view of the file; raise IndexError after the last one."""
        if not 0 <= number < self.documents:
            raise IndexError(f"document {number} of {self.documents}")
        first, end = self.document_indices[number : number + 2].tolist()
        return self._ids(first, end)

    def _ids(self, first: int, end: int) -> Array:
        if first == end:
            return self.ids[:0]
        if not 0 <= first < end <= self.sequences:
            raise DamagedPair(self._idx, f"a document has the sequences {first} to {end} of {self.sequences}")
        size = self.dtype.itemsize
        start, last = int(self.pointers[first]), int(self.pointers[end - 1])
        stop = last // size + int(self.lengths[end - 1])
        if start % size or not 0 <= start // size <= stop <= self.ids.size:
            raise DamagedPair(self._idx, f"sequences {first} to {end} are outside the .bin file")
        return self.ids[start // size : stop]


def map_pair(prefix: Path) -> IndexedReader:
    """Map a pair; return the reader that this process has already, if the files are unchanged.

    The parts of a run (train, validation, test) have the same pairs, and each map keeps a file open.
    """
    try:
        key = (str(prefix.absolute()), *_describe_files(prefix))
    except FileNotFoundError:
        return IndexedReader(prefix)  # which names the missing file
    reader = _open_readers.get(key)
    if reader is None:
        reader = _open_readers[key] = IndexedReader(prefix)
    return reader


_open_readers = WeakValueDictionary[tuple[object, ...], IndexedReader]()


def find_bin(prefix: Path) -> Path:
    """Return the path of the `.bin` of a pair; of a view, that of its dataset."""
    path = Path(f"{prefix}.bin")
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def copy_index(path: Path) -> Path:
    """Return the path of an `.idx`, or of a local copy of one in a bucket (DamagedPair)."""
    if find_address(path) is None:
        return path
    try:
        return open_bucket(path.parent).local(path)
    except FileNotFoundError:
        raise DamagedPair(path, "missing") from None


def file_size(path: Path) -> int:
    """Return the bytes of a file of a pair (FileNotFoundError)."""
    return _describe_file(path)[0]


def _describe_files(prefix: Path) -> list[tuple[int, object]]:
    """Return the size of the files of a pair, and the time of the last change or the version of the object."""
    return [_describe_file(Path(f"{prefix}.idx")), _describe_file(find_bin(prefix))]


def _describe_file(path: Path) -> tuple[int, object]:
    if find_address(path):
        return open_bucket(path.parent).describe(path)
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _open_again(prefix: Path, state: list[tuple[int, object]]) -> IndexedReader:
    reader = map_pair(prefix)
    if _describe_files(prefix) != state:
        raise DamagedPair(Path(f"{prefix}.bin"), "it was replaced while a program was reading it")
    return reader
