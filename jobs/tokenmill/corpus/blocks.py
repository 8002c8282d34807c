"""Cut a file of a corpus into blocks of whole records, straight into memory that somebody else parses.

First step of reading, and all of it that touches the file: decompression into the caller's buffer (which encoder
processes share), refusal of what is damaged, and the search for the last newline. Nothing here looks into a record.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tokenmill.corpus.compression import REMEDY, open_decompressed
from tokenmill.errors import InputError

if TYPE_CHECKING:
    from mmap import mmap

    import pyarrow as pa
    import pyarrow.parquet as pq

    from tokenmill.corpus.compression import Digest

STEP = 256 << 10
"""Bytes decompressed at a time, so that they are still in the cache when they are searched."""


class Room(Protocol):
    """Memory that a block is put into; `grow` gives it at least so many bytes and keeps what is there."""

    @property
    def data(self) -> "bytearray | mmap":
        """The memory: not to be held across `grow`."""

    def grow(self, size: int) -> None: ...


class Blocks(Protocol):
    """A file on its way into blocks.

    `rows`: a block is rows in Arrow's stream format rather than lines. `compressed` counts the bytes of the file
    behind what was handed out.
    """

    rows: bool
    finished: bool
    compressed: int

    def fill(self, room: Room, begin: int, limit: int) -> int:
        """Put the next records into the room from `begin`, up to about `limit`; return where they end.

        With `begin` above 0 the room holds other files already: then all of this one is put there, or nothing.
        Only a record longer than that exceeds `limit`. Raises InputError where the file is damaged.
        """

    def close(self) -> None:
        """Close the file."""


def open_blocks(path: Path, keys: Sequence[str], *, display: str, digest: "Digest | None" = None) -> Blocks:
    """Open a file of lines, plain or compressed, or of Parquet; RequestError for a Parquet column that is not there.

    `digest` is fed the bytes of a file of lines; of Parquet, which is read here and there, it is not, and pages have
    checksums of their own.
    """
    if is_parquet(path):
        return _Rows(path, keys, display)
    return _Lines(path, display, digest)


def is_parquet(path: Path) -> bool:
    """Tell by its name whether a file is Parquet."""
    return path.name.lower().endswith(".parquet")


class _Lines:
    """Whole lines; the last line of a file may lack its newline."""

    rows = False

    def __init__(self, path: Path, display: str, digest: "Digest | None") -> None:
        self._source = open_decompressed(path, display=display, digest=digest)
        self._rest = b""  # what was read behind the last block's end
        self.finished = False
        self.compressed = 0

    def fill(self, room: Room, begin: int, limit: int) -> int:
        at = begin + len(self._rest)
        room.grow(max(at, limit))
        room.data[begin:at] = self._rest
        searched, end = begin, 0
        while True:
            if at >= limit:
                end = begin if begin else room.data.rfind(b"\n", searched, at) + 1
                if end:
                    break
                searched = at
                if len(room.data) < at + STEP:
                    room.grow(2 * (at + STEP))
            # Not beyond the limit: what is behind the last newline is copied to the next block.
            stop = min(at + STEP, limit) if at < limit else at + STEP
            with memoryview(room.data) as view, view[at:stop] as space:
                got = self._source.readinto(space)
            at += got
            if got == 0:
                end = at
                self.finished = True
                break
        self._rest = bytes(room.data[end:at])
        self.compressed = self._source.compressed_read
        return end

    def close(self) -> None:
        self._source.close()


class _Rows:
    """Rows of the wanted columns of a Parquet file."""

    rows = True

    def __init__(self, path: Path, keys: Sequence[str], display: str) -> None:
        self._display = display
        self._size = path.stat().st_size
        self._taken = 0
        self.finished = self._size == 0
        self.compressed = 0
        if not self._size:
            return
        import pyarrow.parquet as pq

        from tokenmill.corpus.parse import column_path

        with self._explained():
            # Column chunks are read through a buffer rather than whole: a row group may be larger than memory.
            self._file = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
            names = [".".join(column_path(self._file.schema_arrow, key, display)) for key in keys]
            self._rows = self._file.metadata.num_rows
            self._names = names
        self._parts: Iterator[pa.RecordBatch] | None = None

    def fill(self, room: Room, begin: int, limit: int) -> int:
        if begin or self.finished:
            return begin
        import pyarrow as pa

        with self._explained():
            self._parts = self._parts or self._cut(limit)
            part = next(self._parts, None)
            sink = pa.BufferOutputStream()
            if part is not None:
                with pa.ipc.new_stream(sink, part.schema) as stream:
                    while part is not None:
                        stream.write_batch(part)
                        self._taken += part.num_rows
                        part = next(self._parts, None) if sink.tell() < limit // 2 else None
            written = sink.getvalue()
        self.finished = written.size == 0
        self.compressed = self._size if self.finished else self._size * self._taken // self._rows
        room.grow(written.size)
        room.data[: written.size] = memoryview(written)
        return int(written.size)

    def _cut(self, limit: int) -> "Iterator[pa.RecordBatch]":
        rows = _rows_at_a_time(self._file.metadata, self._names, limit)
        for chunk in self._file.iter_batches(rows, columns=self._names, use_threads=False):
            # A dictionary would be written whole with each piece.
            arrays = [a.dictionary_decode() if hasattr(a, "dictionary_decode") else a for a in chunk.columns]
            whole = chunk.from_arrays(arrays, chunk.schema.names)
            step = max(1, whole.num_rows * limit // max(whole.nbytes, 1))
            yield from (whole.slice(start, step) for start in range(0, whole.num_rows, step))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise InputError(
                f"{self._display}: damaged Parquet after row {self._taken:,}: {error}. {REMEDY}"
            ) from error

    def close(self) -> None:
        if self._size:
            self._file.close()


def _rows_at_a_time(metadata: "pq.FileMetaData", names: Sequence[str], batch_bytes: int) -> int:
    """Choose how many rows to decode at a time: about `batch_bytes`, by the file's average.

    Few at most, because a dictionary-encoded column may decode to far more than the metadata says.
    """
    total = 0
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names):
                total += column.total_uncompressed_size
    rows: int = batch_bytes * metadata.num_rows // max(total, 1)
    return max(1, min(1024, rows))
