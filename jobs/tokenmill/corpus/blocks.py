"""Cut a file of a corpus into blocks of whole records, straight into memory that somebody else parses.

First step of reading, and all of it that touches the file: decompression into the caller's buffer (which encoder
processes share), refusal of what is damaged or something else, and the search for the last newline. Nothing here looks
into a record.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.corpus import json_cutter, unexpected_content
from tokenmill.corpus.block_kinds import LINES, ROWS, TEXT, TEXT_LINES, TOO_LONG, ReadSettings, too_long
from tokenmill.corpus.compression import REMEDY, open_decompressed
from tokenmill.corpus.parse import column_path
from tokenmill.corpus.records import BOM
from tokenmill.errors import InputError
from tokenmill.suffixes import LINE_SUFFIXES, strip_compression

if TYPE_CHECKING:
    from mmap import mmap

    import pyarrow as pa
    import pyarrow.parquet as pq

    from tokenmill.corpus.compression import Digest

_ARROW = (b"ARROW1", b"\xff\xff\xff\xff")
"""How a file and a stream of Arrow begin."""

STEP = 256 << 10
"""Bytes decompressed at a time, so that they are still in the cache when they are searched."""


class BlockBuffer(Protocol):
    """Memory that a block is put into; `grow` gives it at least so many bytes and keeps what is there."""

    @property
    def data(self) -> "bytearray | mmap":
        """The memory: not to be held across `grow`."""

    def grow(self, size: int) -> None: ...


class BlockReader(Protocol):
    """A file on its way into blocks.

    `kind` says what the last block is (`corpus.parse.parse_block`). `digested`: the digest was fed the file's bytes.
    `compressed` counts the bytes of the file behind what was handed out.
    """

    kind: str
    digested: bool
    finished: bool
    compressed: int

    def fill(self, room: BlockBuffer, begin: int, limit: int) -> int:
        """Put the next records into the room from `begin`, up to about `limit`; return where they end.

        With `begin` above 0 the room holds other files already: then all of this one is put there, or nothing.
        Only a record longer than that exceeds `limit`. Raises InputError where the file is damaged.
        """

    def close(self) -> None:
        """Close the file."""


def open_blocks(
    path: Path,
    keys: Sequence[str],
    *,
    display: str,
    digest: "Digest | None" = None,
    reading: ReadSettings = ReadSettings(),  # noqa: B008 - it is immutable
) -> BlockReader:
    """Open a file of records; RequestError for a column that is not there.

    `digest` is fed the file's bytes, but of Parquet, which is read here and there; its pages have checksums of their
    own.
    """
    match format_of(path, reading.format):
        case "parquet":
            return _Parquet(path, keys, display, reading)
        case "arrow":
            return _Arrow(path, keys, display, reading, digest)
        case "json":
            return _Json(path, keys, display, reading, digest)
        case "txt" if not reading.lines:
            return _Text(path, display, reading, digest)
        case other:
            return _Lines(path, display, reading, digest, TEXT_LINES if other == "txt" else LINES)


def format_of(path: Path, wanted: str | None) -> str:
    """Return the format of a file: the one wanted, else what its name says, else what its content says."""
    name = strip_compression(path.name.lower())[0]
    if wanted is None and name.endswith((".parquet", ".arrow")):
        return name.rpartition(".")[2]
    if wanted is None and not name.endswith(LINE_SUFFIXES):
        with path.open("rb") as file:
            head = file.read(8)
        if head.startswith((b"PAR1", *_ARROW)):
            return "parquet" if head.startswith(b"PAR1") else "arrow"
    return wanted or "jsonl"


def is_columnar(name: str, wanted: str | None) -> bool:
    """Tell whether a file of this name is read as columns, whose description stands at its end."""
    return (wanted or name.lower().rpartition(".")[2]) in ("parquet", "arrow")


class _Lines:
    """Whole lines; the last line of a file may lack its newline."""

    digested = True

    def __init__(self, path: Path, display: str, reading: ReadSettings, digest: "Digest | None", kind: str) -> None:
        self._source = open_decompressed(path, display=display, digest=digest, window=reading.window)
        self._most = reading.most
        self._rest = b""  # what was read behind the last block's end
        self._begun = False
        self.kind = self._kind = kind
        self.finished = False
        self.compressed = 0

    def fill(self, room: BlockBuffer, begin: int, limit: int) -> int:
        self.kind = self._kind
        at = begin + len(self._rest)
        room.grow(max(at, limit))
        room.data[begin:at] = self._rest
        searched, end = begin, 0
        while True:
            if at >= limit:
                end = begin if begin else room.data.rfind(b"\n", searched, at) + 1
                if end:
                    break
                if at > self._most:
                    return self._pass_over(room, at)
                searched = at
                if len(room.data) < at + STEP:
                    room.grow(2 * (at + STEP))
            # Not beyond the limit: what is behind the last newline is copied to the next block.
            stop = min(at + STEP, limit) if at < limit else at + STEP
            with memoryview(room.data) as view, view[at:stop] as space:
                got = self._source.readinto(space)
            if not self._begun:
                self._begun = True
                head = bytes(room.data[at : at + min(got, unexpected_content.HEAD)])
                unexpected_content.refuse(head, self._source.display, any_text=self._kind == TEXT_LINES)
            at += got
            if got == 0:
                end = at
                self.finished = True
                break
        self._rest = bytes(room.data[end:at])
        self.compressed = self._source.compressed_read
        return end

    def _pass_over(self, room: BlockBuffer, size: int) -> int:
        """Read on to the end of the record that fills the room, and put in its place why it is not taken."""
        head = bytes(room.data[: json_cutter.KEPT])
        if self.compressed == 0 and self._kind == LINES and (hint := unexpected_content.misread(head, alone=True)):
            raise unexpected_content.UnexpectedContent(f"{self._source.display}: {hint}")
        buffer = bytearray(STEP)
        end = -1
        while end < 0 and (got := self._source.readinto(memoryview(buffer))):
            end = buffer.find(b"\n", 0, got)
            size += got if end < 0 else end
            self._rest = bytes(buffer[end + 1 : got])
        if end < 0:
            self._rest, self.finished = b"", True
        self.kind, self.compressed = TOO_LONG, self._source.compressed_read
        return _put(room, 0, too_long(size, self._most, head))

    def close(self) -> None:
        self._source.close()


def _put(room: BlockBuffer, begin: int, data: bytes | memoryview) -> int:
    end = begin + len(data)
    room.grow(end)
    room.data[begin:end] = data
    return end


class _Pieces:
    """Records that were cut out in pieces of one kind each, none of them large unless it is one record."""

    digested = True

    def __init__(self, path: Path, display: str, reading: ReadSettings, digest: "Digest | None") -> None:
        self._source = open_decompressed(path, display=display, digest=digest, window=reading.window)
        self._most = reading.most
        self._pieces = self._cut()
        self._ready: deque[tuple[str, bytes]] = deque()
        self._size = 0
        self._ended = False
        self.kind = LINES
        self.finished = False
        self.compressed = 0

    def _cut(self) -> Iterator[tuple[str, bytes]]:
        """Yield the file's pieces with their kinds."""
        raise NotImplementedError

    def fill(self, room: BlockBuffer, begin: int, limit: int) -> int:
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
            end = _put(room, end, data)
            if self.kind == TOO_LONG:
                break
        self.finished = self._ended and not self._ready
        self.compressed = self._source.compressed_read
        return end

    def close(self) -> None:
        self._source.close()


class _Json(_Pieces):
    """JSON values however they stand in the file (`corpus.json_cutter`), one a line."""

    def __init__(
        self, path: Path, keys: Sequence[str], display: str, reading: ReadSettings, digest: "Digest | None"
    ) -> None:
        super().__init__(path, display, reading, digest)
        self._keys = keys

    def _cut(self) -> Iterator[tuple[str, bytes]]:
        buffer = bytearray(STEP)
        got = self._source.readinto(memoryview(buffer))
        unexpected_content.refuse(bytes(buffer[: min(got, unexpected_content.HEAD)]), self._source.display)
        cutter = json_cutter.JsonCutter(self._keys, self._most, self._source.display)
        data = bytes(buffer[:got]).removeprefix(BOM)
        while got:
            yield from self._lines(cutter.feed(data))
            got = self._source.readinto(memoryview(buffer))
            data = bytes(buffer[:got])
        yield from self._lines(cutter.finish())

    def _lines(self, records: Iterator[json_cutter.JsonValue]) -> Iterator[tuple[str, bytes]]:
        lines: list[bytes] = []
        for record in records:
            if record.size > self._most:
                yield LINES, b"".join(lines)
                lines.clear()
                yield TOO_LONG, too_long(record.size, self._most, record.data[: json_cutter.KEPT])
            else:
                # A carriage return is what a newline is in JSON: white space, and an error inside a string.
                lines += (record.data.replace(b"\n", b"\r"), b"\n")
        yield LINES, b"".join(lines)


class _Text(_Pieces):
    """A text that is one document."""

    def _cut(self) -> Iterator[tuple[str, bytes]]:
        text = bytearray()
        size = 0
        for block in self._source:
            if not size:
                unexpected_content.refuse(block[: unexpected_content.HEAD], self._source.display, any_text=True)
            size += len(block)
            if size <= self._most:
                text += block
        if size > self._most:
            yield TOO_LONG, too_long(size, self._most, bytes(text[: json_cutter.KEPT]))
        else:
            yield TEXT, bytes(text)


class _Rows:
    """Rows of the wanted columns of a file that has them in columns."""

    digested = False
    format = ""
    magic: tuple[bytes, ...] = ()
    _file: Any

    def __init__(self, path: Path, keys: Sequence[str], display: str, reading: ReadSettings) -> None:
        if codec := strip_compression(path.name)[1]:
            raise InputError(
                f"{display}: its name says that this {self.format} is compressed as {codec}; decompress it, since it "
                "cannot be read from its beginning to its end"
            )
        self._path, self._keys, self._display, self._most = path, keys, display, reading.most
        self._size = path.stat().st_size
        self._taken = 0
        self._parts: Iterator[pa.RecordBatch | bytes] | None = None
        self._next: pa.RecordBatch | bytes | None = None
        self.kind = ROWS
        self.finished = self._size == 0
        self.compressed = 0
        if self._size:
            with self._explained():
                self._open()

    def _open(self) -> None:
        """Open the file, and find the columns."""
        raise NotImplementedError

    def _batches(self, limit: int) -> "Iterator[pa.RecordBatch]":
        """Yield the rows of the columns, about `limit` bytes at a time where the file allows it."""
        raise NotImplementedError

    def _position(self) -> int:
        """Return how many bytes of the file are behind the rows taken."""
        raise NotImplementedError

    def fill(self, room: BlockBuffer, begin: int, limit: int) -> int:
        if begin or self.finished:
            return begin
        import pyarrow as pa

        with self._explained():
            if self._parts is None:
                self._parts = self._cut(limit)
                self._next = next(self._parts, None)
            part, sink = self._next, pa.BufferOutputStream()
            self.kind = TOO_LONG if isinstance(part, bytes) else ROWS
            if isinstance(part, bytes):
                sink.write(part)
                self._taken += 1
                part = next(self._parts, None)
            elif part is not None:
                with pa.ipc.new_stream(sink, part.schema) as stream:
                    while isinstance(part, pa.RecordBatch):
                        stream.write_batch(part)
                        self._taken += part.num_rows
                        part = next(self._parts, None)
                        if sink.tell() >= limit // 2:
                            break
            self._next = part
            written = sink.getvalue()
            self.finished = part is None
            self.compressed = self._size if self.finished else self._position()
        return _put(room, 0, memoryview(written))

    def _cut(self, limit: int) -> "Iterator[pa.RecordBatch | bytes]":
        for chunk in self._batches(limit):
            # A dictionary would be written whole with each piece.
            arrays = [a.dictionary_decode() if hasattr(a, "dictionary_decode") else a for a in chunk.columns]
            whole = chunk.from_arrays(arrays, chunk.schema.names)
            step = max(1, whole.num_rows * limit // max(whole.nbytes, 1))
            for start in range(0, whole.num_rows, step):
                yield from self._bounded(whole.slice(start, step))

    def _bounded(self, rows: "pa.RecordBatch") -> "Iterator[pa.RecordBatch | bytes]":
        """Yield rows, and in place of each that is too long why it is not taken."""
        if rows.nbytes <= self._most:
            yield rows
        elif rows.num_rows == 1:
            yield too_long(rows.nbytes, self._most, b"")
        else:
            half = rows.num_rows // 2
            yield from self._bounded(rows.slice(0, half))
            yield from self._bounded(rows.slice(half))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            with self._path.open("rb") as file:
                head = file.read(unexpected_content.HEAD)
            if not head.startswith(self.magic):
                unexpected_content.refuse(head, self._display)
            raise InputError(
                f"{self._display}: damaged {self.format} after row {self._taken:,}: {error}. {REMEDY}"
            ) from error

    def close(self) -> None:
        if self._size:
            self._file.close()


class _Parquet(_Rows):
    format = "Parquet"
    magic = (b"PAR1",)

    def _open(self) -> None:
        import pyarrow.parquet as pq

        # Column chunks are read through a buffer rather than whole: a row group may be larger than memory.
        self._file = pq.ParquetFile(self._path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
        self._names = [".".join(column_path(self._file.schema_arrow, key, self._display)) for key in self._keys]

    def _batches(self, limit: int) -> "Iterator[pa.RecordBatch]":
        rows = _rows_at_a_time(self._file.metadata, self._names, limit)
        yield from self._file.iter_batches(rows, columns=self._names, use_threads=False)

    def _position(self) -> int:
        return self._size * self._taken // max(int(self._file.metadata.num_rows), 1)


class _Arrow(_Rows):
    """Arrow's IPC format, as a stream (`save_to_disk` of datasets) or as a file."""

    digested = True
    format = "Arrow"
    magic = _ARROW

    def __init__(
        self, path: Path, keys: Sequence[str], display: str, reading: ReadSettings, digest: "Digest | None"
    ) -> None:
        self._digest = digest
        super().__init__(path, keys, display, reading)

    def _open(self) -> None:
        import pyarrow as pa

        self._file = pa.OSFile(str(self._path))
        self._seekable = self._file.read(len(_ARROW[0])) == _ARROW[0]
        self._file.seek(0)
        schema = (pa.ipc.open_file if self._seekable else pa.ipc.open_stream)(self._file).schema
        self._names = [column_path(schema, key, self._display)[0] for key in self._keys]
        self._columns = sorted({schema.names.index(name) for name in self._names})
        self._file.seek(0)

    def _batches(self, limit: int) -> "Iterator[pa.RecordBatch]":
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
            while block := self._file.read(1 << 20):
                self._digest.update(block)

    def _check_end(self) -> None:
        """Refuse a stream that ends without its end mark, as one that was cut between two batches does."""
        import pyarrow as pa

        end = self._file.tell()
        if end != self._size:
            raise pa.ArrowInvalid(f"something follows the end of the stream at byte {end:,}")
        self._file.seek(max(0, end - 4))
        if self._file.read(4) != bytes(4):
            raise pa.ArrowInvalid("the file is cut short: the stream has no end mark")

    def _position(self) -> int:
        return int(self._file.tell())


def _check_offsets(column: "pa.Array") -> None:
    """Refuse an array that points outside its data; text that is no UTF-8 is a bad record, and not refused here."""
    import pyarrow as pa

    views = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    binary = views.get(column.type)
    try:
        (column.view(binary) if binary else column).validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise


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
