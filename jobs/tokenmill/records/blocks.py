"""Read an input file into blocks of complete records, in memory that the caller provides.

First step of reading. All file access of this step is here: decompression into the caller's buffer (encoder processes
share the buffer), rejection of damaged or unexpected content, and the search for the last newline. `records.parse`
parses the records; this module does not.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.errors import InputError
from tokenmill.records import json_cutter, unexpected_content
from tokenmill.records.block_kinds import LINES, OVERSIZED, ROWS, TEXT, TEXT_LINES, ReadSettings, describe_oversized
from tokenmill.records.compression import COMPLETE_COPY, open_decompressed
from tokenmill.records.parse import find_column_path, find_record_columns
from tokenmill.records.records import BOM
from tokenmill.records.suffixes import LINE_SUFFIXES, strip_compression

if TYPE_CHECKING:
    from mmap import mmap

    import pyarrow as pa
    import pyarrow.parquet as pq

    from tokenmill.records.compression import Digest

_ARROW_MAGIC = (b"ARROW1", b"\xff\xff\xff\xff")
"""First bytes of an Arrow file and of an Arrow stream."""

STEP_BYTES = 256 << 10
"""Bytes per decompression step. The newline search then reads these bytes from the CPU cache."""


class BlockBuffer(Protocol):
    """Memory for one block. `grow` enlarges the memory to at least `size` bytes and keeps the content."""

    @property
    def data(self) -> "bytearray | mmap":
        """The memory. The caller must not keep this object across a call of `grow`."""

    def grow(self, size: int) -> None: ...


class BlockReader(Protocol):
    """A reader that cuts one input file into blocks.

    `kind` is the kind of the last block (`records.parse.parse_block`). `digested` is true when the reader feeds the
    file's bytes to the digest. `compressed` is the number of the file's bytes behind all blocks up to now. `unread` has
    the columns of a columnar file that are not in the blocks and contain values.
    """

    kind: str
    unread: Sequence[str]
    digested: bool
    finished: bool
    compressed: int

    def fill(self, buffer: BlockBuffer, begin: int, limit: int) -> int:
        """Write the next records into the buffer from `begin` up to about `limit`, and return their end.

        If `begin` is above 0, the buffer already contains other files. The reader then writes the complete file or
        nothing. The end exceeds `limit` only when a single record does.

        Raises:
            InputError: the file is damaged.
        """

    def close(self) -> None:
        """Close the file."""


def open_blocks(
    path: Path,
    keys: Sequence[str],
    *,
    display: str,
    digest: "Digest | None" = None,
    settings: ReadSettings = ReadSettings(),  # noqa: B008 - it is immutable
    complete: bool = False,
) -> BlockReader:
    """Open a file of records for reading in blocks.

    The reader feeds the file's bytes to `digest`. The Parquet reader does not: it reads the file in random order, and
    Parquet pages have their own checksums. With `complete`, the blocks are for `records.parse.parse_records`, and of a
    columnar file contain the columns of `keys` that exist, of any type; otherwise all of them, which contain text.

    Raises:
        RequestError: the file has no column with the name of a key.
    """
    match detect_format(path, settings.format):
        case "parquet":
            return _ParquetReader(path, keys, display, settings, complete=complete)
        case "arrow":
            return _ArrowReader(path, keys, display, settings, digest, complete=complete)
        case "json":
            return _JsonReader(path, keys, display, settings, digest)
        case "txt" if not settings.document_per_line:
            return _TextReader(path, display, settings, digest)
        case line_format:
            return _LineReader(path, display, settings, digest, TEXT_LINES if line_format == "txt" else LINES)


def detect_format(path: Path, requested: str | None) -> str:
    """Return the format of a file: the requested one, or the one that the name or the content indicates."""
    name = strip_compression(path.name.lower())[0]
    if requested is None and name.endswith((".parquet", ".arrow")):
        return name.rpartition(".")[2]
    if requested is None and not name.endswith(LINE_SUFFIXES):
        with path.open("rb") as file:
            head = file.read(8)
        if head.startswith((b"PAR1", *_ARROW_MAGIC)):
            return "parquet" if head.startswith(b"PAR1") else "arrow"
    return requested or "jsonl"


def is_columnar(name: str, requested: str | None) -> bool:
    """Return whether a file is in a columnar format, with its metadata at the end of the file."""
    return (requested or name.lower().rpartition(".")[2]) in ("parquet", "arrow")


class _LineReader:
    """A reader of lines. The last line of a file can lack its newline."""

    digested = True
    unread: Sequence[str] = ()

    def __init__(self, path: Path, display: str, settings: ReadSettings, digest: "Digest | None", kind: str) -> None:
        self._source = open_decompressed(path, display=display, digest=digest, max_window=settings.zstd_window)
        self._max_record_bytes = settings.max_record_bytes
        self._remainder = b""  # bytes that were read after the end of the last block
        self._started = False
        self.kind = self._kind = kind
        self.finished = False
        self.compressed = 0

    def fill(self, buffer: BlockBuffer, begin: int, limit: int) -> int:
        self.kind = self._kind
        filled = begin + len(self._remainder)
        buffer.grow(max(filled, limit))
        buffer.data[begin:filled] = self._remainder
        search_start, end = begin, 0
        while True:
            if filled >= limit:
                end = begin if begin else buffer.data.rfind(b"\n", search_start, filled) + 1
                if end:
                    break
                if filled > self._max_record_bytes:
                    return self._skip_oversized(buffer, filled)
                search_start = filled
                if len(buffer.data) < filled + STEP_BYTES:
                    buffer.grow(2 * (filled + STEP_BYTES))
            # Do not read past the limit: the bytes after the last newline must be copied to the next block.
            stop = min(filled + STEP_BYTES, limit) if filled < limit else filled + STEP_BYTES
            with memoryview(buffer.data) as view, view[filled:stop] as target:
                count = self._source.readinto(target)
            if not self._started:
                self._started = True
                head = bytes(buffer.data[filled : filled + min(count, unexpected_content.HEAD_BYTES)])
                unexpected_content.reject_unexpected(head, self._source.display, any_text=self._kind == TEXT_LINES)
            filled += count
            if count == 0:
                end = filled
                self.finished = True
                break
        self._remainder = bytes(buffer.data[end:filled])
        self.compressed = self._source.compressed_read
        return end

    def _skip_oversized(self, buffer: BlockBuffer, size: int) -> int:
        """Read to the end of the record that fills the buffer, and replace the record with the reason."""
        head = bytes(buffer.data[: json_cutter.KEPT_BYTES])
        if (
            self.compressed == 0
            and self._kind == LINES
            and (hint := unexpected_content.describe_mismatch(head, no_documents=True))
        ):
            raise unexpected_content.UnexpectedContent(f"{self._source.display}: {hint}")
        chunk = bytearray(STEP_BYTES)
        end = -1
        while end < 0 and (count := self._source.readinto(memoryview(chunk))):
            end = chunk.find(b"\n", 0, count)
            size += count if end < 0 else end
            self._remainder = bytes(chunk[end + 1 : count])
        if end < 0:
            self._remainder, self.finished = b"", True
        self.kind, self.compressed = OVERSIZED, self._source.compressed_read
        return _copy_into(buffer, 0, describe_oversized(size, self._max_record_bytes, head))

    def close(self) -> None:
        self._source.close()


def _copy_into(buffer: BlockBuffer, begin: int, data: bytes | memoryview) -> int:
    end = begin + len(data)
    buffer.grow(end)
    buffer.data[begin:end] = data
    return end


class _PieceReader:
    """A reader of pieces. Each piece has one kind and is small, unless a single record is large."""

    digested = True
    unread: Sequence[str] = ()

    def __init__(self, path: Path, display: str, settings: ReadSettings, digest: "Digest | None") -> None:
        self._source = open_decompressed(path, display=display, digest=digest, max_window=settings.zstd_window)
        self._max_record_bytes = settings.max_record_bytes
        self._pieces = self._cut_pieces()
        self._ready: deque[tuple[str, bytes]] = deque()
        self._size = 0
        self._ended = False
        self.kind = LINES
        self.finished = False
        self.compressed = 0

    def _cut_pieces(self) -> Iterator[tuple[str, bytes]]:
        """Yield the file's pieces with their kinds."""
        raise NotImplementedError

    def fill(self, buffer: BlockBuffer, begin: int, limit: int) -> int:
        while not self._ended and self._size < limit - begin:
            piece = next(self._pieces, None)
            if piece is None:
                self._ended = True
            elif piece[1]:
                self._ready.append(piece)
                self._size += len(piece[1])
        if begin and (not self._ended or self._size > limit - begin or len({kind for kind, _ in self._ready}) > 1):
            return begin
        end = begin
        if self._ready:
            self.kind = self._ready[0][0]
        while self._ready and self._ready[0][0] == self.kind and (end == begin or end < limit):
            data = self._ready.popleft()[1]
            self._size -= len(data)
            end = _copy_into(buffer, end, data)
            if self.kind == OVERSIZED:
                break
        self.finished = self._ended and not self._ready
        self.compressed = self._source.compressed_read
        return end

    def close(self) -> None:
        self._source.close()


class _JsonReader(_PieceReader):
    """A reader of JSON values in any layout (`records.json_cutter`). Blocks contain one value per line."""

    def __init__(
        self, path: Path, keys: Sequence[str], display: str, settings: ReadSettings, digest: "Digest | None"
    ) -> None:
        super().__init__(path, display, settings, digest)
        self._keys = keys

    def _cut_pieces(self) -> Iterator[tuple[str, bytes]]:
        chunk = bytearray(STEP_BYTES)
        count = self._source.readinto(memoryview(chunk))
        unexpected_content.reject_unexpected(
            bytes(chunk[: min(count, unexpected_content.HEAD_BYTES)]), self._source.display
        )
        cutter = json_cutter.JsonCutter(self._keys, self._max_record_bytes, self._source.display)
        data = bytes(chunk[:count]).removeprefix(BOM)
        while count:
            yield from self._join_lines(cutter.feed(data))
            count = self._source.readinto(memoryview(chunk))
            data = bytes(chunk[:count])
        yield from self._join_lines(cutter.finish())

    def _join_lines(self, records: Iterator[json_cutter.JsonValue]) -> Iterator[tuple[str, bytes]]:
        lines: list[bytes] = []
        for record in records:
            if record.size > self._max_record_bytes:
                yield LINES, b"".join(lines)
                lines.clear()
                yield (
                    OVERSIZED,
                    describe_oversized(record.size, self._max_record_bytes, record.data[: json_cutter.KEPT_BYTES]),
                )
            else:
                # JSON treats a carriage return as a newline: both are white space, and both are errors in a string.
                lines += (record.data.replace(b"\n", b"\r"), b"\n")
        yield LINES, b"".join(lines)


class _TextReader(_PieceReader):
    """A reader of a text file that is one document."""

    def _cut_pieces(self) -> Iterator[tuple[str, bytes]]:
        text = bytearray()
        size = 0
        for chunk in self._source:
            if not size:
                unexpected_content.reject_unexpected(
                    chunk[: unexpected_content.HEAD_BYTES], self._source.display, any_text=True
                )
            size += len(chunk)
            if size <= self._max_record_bytes:
                text += chunk
        if size > self._max_record_bytes:
            yield OVERSIZED, describe_oversized(size, self._max_record_bytes, bytes(text[: json_cutter.KEPT_BYTES]))
        else:
            yield TEXT, bytes(text)


class _RowReader:
    """A reader of rows, for columnar formats. Blocks contain only the requested columns."""

    digested = False
    unread: Sequence[str] = ()
    format = ""
    magic: tuple[bytes, ...] = ()
    _file: Any

    def __init__(
        self, path: Path, keys: Sequence[str], display: str, settings: ReadSettings, *, complete: bool
    ) -> None:
        if codec := strip_compression(path.name)[1]:
            raise InputError(
                f"{display}: the name indicates {self.format} data that is compressed as {codec}, and this format "
                "requires random access; decompress the file"
            )
        self._path, self._keys, self._display, self._max_record_bytes = path, keys, display, settings.max_record_bytes
        self._complete = complete
        self._size = path.stat().st_size
        self._rows_read = 0
        self._parts: Iterator[pa.RecordBatch | bytes] | None = None
        self._next_part: pa.RecordBatch | bytes | None = None
        self.kind = ROWS
        self.finished = False
        self.compressed = 0
        with self._explain_errors():
            self._open()

    def _open(self) -> None:
        """Open the file, and find the columns."""
        raise NotImplementedError

    def _find_paths(self, schema: "pa.Schema") -> list[list[str]]:
        """Return the paths of the columns to read; raise RequestError if a required column is missing."""
        if self._complete:
            names = find_record_columns(schema, self._keys, self._display)
            self.unread = [field.name for field in schema if field.name not in names and str(field.type) != "null"]
            return [[name] for name in names]
        return [find_column_path(schema, key, self._display) for key in self._keys]

    def _read_batches(self, limit: int) -> "Iterator[pa.RecordBatch]":
        """Yield the rows of the columns in batches of about `limit` bytes, if the file layout permits this size."""
        raise NotImplementedError

    def _position(self) -> int:
        """Return how many bytes of the file belong to the rows that were read."""
        raise NotImplementedError

    def fill(self, buffer: BlockBuffer, begin: int, limit: int) -> int:
        if begin or self.finished:
            return begin
        import pyarrow as pa

        with self._explain_errors():
            if self._parts is None:
                self._parts = self._cut_parts(limit)
                self._next_part = next(self._parts, None)
            part, sink = self._next_part, pa.BufferOutputStream()
            self.kind = OVERSIZED if isinstance(part, bytes) else ROWS
            if isinstance(part, bytes):
                sink.write(part)
                self._rows_read += 1
                part = next(self._parts, None)
            elif part is not None:
                with pa.ipc.new_stream(sink, part.schema) as stream:
                    while isinstance(part, pa.RecordBatch):
                        stream.write_batch(part)
                        self._rows_read += part.num_rows
                        part = next(self._parts, None)
                        if sink.tell() >= limit // 2:
                            break
            self._next_part = part
            written = sink.getvalue()
            self.finished = part is None
            self.compressed = self._size if self.finished else self._position()
        return _copy_into(buffer, 0, memoryview(written))

    def _cut_parts(self, limit: int) -> "Iterator[pa.RecordBatch | bytes]":
        for batch in self._read_batches(limit):
            # Decode dictionaries: Arrow would write the complete dictionary with each slice.
            arrays = [a.dictionary_decode() if hasattr(a, "dictionary_decode") else a for a in batch.columns]
            decoded = batch.from_arrays(arrays, batch.schema.names)
            step = max(1, decoded.num_rows * limit // max(decoded.nbytes, 1))
            for start in range(0, decoded.num_rows, step):
                yield from self._replace_oversized(decoded.slice(start, step))

    def _replace_oversized(self, rows: "pa.RecordBatch") -> "Iterator[pa.RecordBatch | bytes]":
        """Yield rows, with the reason in place of each oversized row."""
        if rows.nbytes <= self._max_record_bytes:
            yield rows
        elif rows.num_rows == 1:
            yield describe_oversized(rows.nbytes, self._max_record_bytes, b"")
        else:
            half = rows.num_rows // 2
            yield from self._replace_oversized(rows.slice(0, half))
            yield from self._replace_oversized(rows.slice(half))

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Convert an error of pyarrow to an InputError that names the file and the row."""
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            with self._path.open("rb") as file:
                head = file.read(unexpected_content.HEAD_BYTES)
            if not head.startswith(self.magic):
                unexpected_content.reject_unexpected(head, self._display)
            raise InputError(
                f"{self._display}: damaged {self.format} after row {self._rows_read:,}: {error}. "
                f"Replace the file with {COMPLETE_COPY}"
            ) from error

    def close(self) -> None:
        self._file.close()


class _ParquetReader(_RowReader):
    format = "Parquet"
    magic = (b"PAR1",)

    def _open(self) -> None:
        import pyarrow.parquet as pq

        # A row group can be larger than memory: read column chunks through a buffer, not at once.
        self._file = pq.ParquetFile(self._path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
        self._names = [".".join(path) for path in self._find_paths(self._file.schema_arrow)]

    def _read_batches(self, limit: int) -> "Iterator[pa.RecordBatch]":
        rows = _choose_batch_rows(self._file.metadata, self._names, limit)
        yield from self._file.iter_batches(rows, columns=self._names, use_threads=False)

    def _position(self) -> int:
        return self._size * self._rows_read // max(int(self._file.metadata.num_rows), 1)


class _ArrowReader(_RowReader):
    """A reader of Arrow's IPC format, as a stream (`save_to_disk` of the datasets library) or as a file."""

    digested = True
    format = "Arrow"
    magic = _ARROW_MAGIC

    def __init__(
        self,
        path: Path,
        keys: Sequence[str],
        display: str,
        settings: ReadSettings,
        digest: "Digest | None",
        *,
        complete: bool,
    ) -> None:
        self._digest = digest
        super().__init__(path, keys, display, settings, complete=complete)

    def _open(self) -> None:
        import pyarrow as pa

        self._file = pa.OSFile(str(self._path))
        self._seekable = self._file.read(len(_ARROW_MAGIC[0])) == _ARROW_MAGIC[0]
        self._file.seek(0)
        schema = (pa.ipc.open_file if self._seekable else pa.ipc.open_stream)(self._file).schema
        self._names = [path[0] for path in self._find_paths(schema)]
        self._columns = sorted({schema.names.index(name) for name in self._names})
        self._file.seek(0)

    def _read_batches(self, limit: int) -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa

        options = pa.ipc.IpcReadOptions(included_fields=self._columns, use_threads=False)
        if self._seekable:
            file = pa.ipc.open_file(self._file, options=options)
            batches = map(file.get_batch, range(file.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(self._file, options=options))
        for batch in batches:
            for column in batch.columns:
                _check_offsets(column)
            yield batch
        if not self._seekable:
            self._check_end()
        if self._digest is not None:
            self._file.seek(0)
            while chunk := self._file.read(1 << 20):
                self._digest.update(chunk)

    def _check_end(self) -> None:
        """Raise ArrowInvalid when the end mark of the stream is missing, as in a file cut between two batches."""
        import pyarrow as pa

        end = self._file.tell()
        if end != self._size:
            raise pa.ArrowInvalid(f"unexpected data after the end of the stream at byte {end:,}")
        self._file.seek(max(0, end - 4))
        if self._file.read(4) != bytes(4):
            raise pa.ArrowInvalid("the file is truncated: the stream has no end mark")

    def _position(self) -> int:
        return int(self._file.tell())


def _check_offsets(column: "pa.Array") -> None:
    """Raise ArrowInvalid when the offsets of an array point outside its data.

    Invalid UTF-8 does not raise here: `records.parse` rejects only the bad record.
    """
    import pyarrow as pa

    views = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    binary = views.get(column.type)
    try:
        (column.view(binary) if binary else column).validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise


def _choose_batch_rows(metadata: "pq.FileMetaData", names: Sequence[str], batch_bytes: int) -> int:
    """Return how many rows to decode at a time: about `batch_bytes`, for rows of the file's average size.

    The maximum is 1,024 rows: a dictionary-encoded column can decode to far more bytes than the metadata indicates.
    """
    total = 0
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names):
                total += column.total_uncompressed_size
    rows: int = batch_bytes * metadata.num_rows // max(total, 1)
    return max(1, min(1024, rows))
