"""Decompress input files in blocks, and reject damaged data.

First step of reading a file: extract writes these blocks to disk, and `records.blocks` cuts them into blocks of
records. The block size and the codec's window limit the memory. The file size and the size that a hostile file declares
do not matter. Each damaged file raises an error. The usual stream readers do not: they end without an error at a
truncated zstd frame, and they ignore data after the last bzip2 or gzip stream.
"""

import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self, cast

from tokenmill.core.files.named_file import open_file
from tokenmill.errors import InputError
from tokenmill.records import unexpected_content
from tokenmill.records.block_kinds import DEFAULT_ZSTD_WINDOW, MAX_ZSTD_WINDOW
from tokenmill.records.suffixes import strip_compression

_FEED_BYTES = 128 << 10  # compressed bytes per decoder call: each call can wait for another Python thread
_XZ_MEMORY = 512 << 20
_MAGIC = {"gz": b"\x1f\x8b", "bz2": b"BZh", "xz": b"\xfd7zXZ\0"}
_BZ2_BLOCK = b"1AY&SY"
"""Bytes 4 to 9 of a bzip2 file that is not empty. The magic and the block size before them can be ordinary text."""

_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_SKIPPABLE = 0x184D2A50  # the low four bits can have any value
_ZSTD_BLOCK = 128 << 10  # maximum size of a decompressed block
_ZSTD_RLE = 1  # block type: one byte, repeated


def detect_codec(head: bytes) -> str | None:
    """Return the codec that the first bytes of a file indicate, None if the bytes match no codec."""
    magic = _uint(head[:4])
    if magic == _ZSTD_MAGIC or magic & ~0xF == _ZSTD_SKIPPABLE:
        return "zst"
    if head.startswith(_MAGIC["bz2"]):
        return "bz2" if head[4:10] == _BZ2_BLOCK else None
    return next((codec for codec, magic in _MAGIC.items() if head.startswith(magic)), None)


_RWF_DONTCACHE = 0x80
"""Flag of preadv2(2) since Linux 6.14, for file systems that support it; Python has no constant for this flag yet."""


class _UncachedFile:
    """A file that is read once from start to end, and that does not fill the page cache.

    Pages that were in the cache before remain there. New pages would evict other data. They can also cost more than
    the read itself on a virtual machine whose host reclaims unused memory (tests/bench/README.md).
    """

    def __init__(self, path: Path) -> None:
        self._file = open_file(path, buffering=0)
        self._offset = 0
        self._bypass_cache = sys.platform == "linux"
        self._buffer = bytearray()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def head(self, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, 0)

    def read(self, size: int) -> bytes:
        if not self._bypass_cache:
            return self._file.read(size)
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        with memoryview(self._buffer)[:size] as view:
            return bytes(view[: self.readinto(view)])

    def readinto(self, buffer: bytearray | memoryview) -> int:
        if self._bypass_cache:
            try:
                count = os.preadv(self._file.fileno(), [buffer], self._offset, _RWF_DONTCACHE)
            except OSError:  # the kernel, file system or sandbox lacks the flag; other errors occur again below
                self._bypass_cache = False
                if self._offset:
                    self._file.seek(self._offset)
            else:
                self._offset += count
                return count
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        self._buffer = bytearray()  # release the memory without the garbage collector: see DecompressedReader.close


class DecompressedReader:
    """A reader of one file's decompressed bytes, as blocks of at most `chunk` bytes or into the caller's buffers.

    All blocks and buffers except the last are full, also when the frames of the file are small. The file's suffix
    determines the codec; without a codec suffix, the first bytes do. `compressed_read` counts the file's bytes that
    were read for the output up to now. A plain file of 0 bytes has no blocks. A compressed file of 0 bytes is
    truncated, because compressed data without content has a frame.

    `digest`, a hash object, receives the file's own bytes: all of them, once the reader is at the end of the file.
    `max_window` is the largest accepted window of a zstd frame, in bytes.

    Raises:
        InputError: the data is damaged, truncated or followed by other data. The message names the file and the offset.
    """

    def __init__(
        self,
        path: Path,
        *,
        display: str | None = None,
        chunk: int = 1 << 20,
        digest: "Digest | None" = None,
        max_window: int = DEFAULT_ZSTD_WINDOW,
    ) -> None:
        self.display = display or str(path)
        self.compressed_read = 0
        self._chunk = chunk
        self._digest = digest
        self._max_window = max_window
        self._file = _UncachedFile(path)
        self.codec = strip_compression(path.name)[1] or detect_codec(self._file.head(10))
        self._stream = self._open_stream()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        block = b"" if self._file.closed else self._stream.read(self._chunk)
        if not block:
            self.close()
            raise StopIteration
        return block

    def readinto(self, buffer: memoryview) -> int:
        """Decompress the next bytes into a buffer, and return their number.

        The number is smaller than the buffer only at the end of the data. Later calls return 0.
        """
        return self._stream.readinto(buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. The iterator yields no more blocks."""
        self._file.close()
        # Break the reference cycle: a decoder uses too much memory to wait for the garbage collector.
        vars(self).pop("_stream", None)

    def _open_stream(self) -> "_DecodedStream":
        match self.codec:
            case None:
                return _PlainStream(self)
            case "zst":
                return _ZstdStream(self)
            case "gz":
                import zlib

                return _ConcatenatedStreams(self, _GzipMember, (zlib.error,))
            case "bz2":
                import bz2

                return _ConcatenatedStreams(self, bz2.BZ2Decompressor, (OSError, ValueError))
            case _:
                import lzma

                return _ConcatenatedStreams(
                    self, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY), (lzma.LZMAError,)
                )

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._account(data)
        return data

    def _account(self, data: bytes | memoryview) -> None:
        self.compressed_read += len(data)
        if self._digest is not None:
            self._digest.update(data)

    def _damage_error(self, offset: int, reason: str) -> InputError:
        return InputError(
            f"{self.display}: damaged {self.codec} data near byte {offset:,}: {reason}. "
            f"Replace the file with {COMPLETE_COPY}"
        )

    def _truncation_error(self) -> InputError:
        size = self._file.size()
        end = f"the file ends at byte {size:,} in the middle of a frame" if size else "the file has 0 bytes"
        return InputError(f"{self.display}: truncated {self.codec} data: {end}. Replace the file with {COMPLETE_COPY}")

    def _foreign_data_error(self, offset: int) -> InputError:
        if offset == 0:
            unexpected_content.reject_unexpected(self._file.head(unexpected_content.HEAD_BYTES), self.display)
            return InputError(
                f"{self.display}: the name indicates {self.codec} data, but the content has another format. "
                f"Replace the file with {COMPLETE_COPY}"
            )
        return InputError(
            f"{self.display}: unexpected data after the {self.codec} data, at byte {offset:,}. "
            f"Replace the file with {COMPLETE_COPY}"
        )

    def _window_error(self, offset: int, window: int) -> InputError:
        size = f"{-(-window >> 20):,} MiB"
        if window > MAX_ZSTD_WINDOW:
            remedy = "use a copy without --long (zstd -d --long=31 -c OLD | zstd -o NEW)"
        else:
            remedy = (
                f"set --zstd-window {-(-window >> 20)}MiB (in a chart: --set dataset.zstdWindow="
                f"{-(-window >> 20)}MiB); the decoder then uses up to this much memory for each open file"
            )
        return InputError(
            f"{self.display}: the zstd frame at byte {offset:,} needs a window of {size}, more than the limit of "
            f"{self._max_window >> 20:,} MiB. Replace the file or raise the limit: {remedy}."
        )


COMPLETE_COPY = "a complete copy; if tokenmill downloaded it, delete it and run tokenmill download again."
"""The end of the remedy for a damaged file."""


def open_decompressed(
    path: Path,
    *,
    display: str | None = None,
    chunk: int = 1 << 20,
    digest: "Digest | None" = None,
    max_window: int = DEFAULT_ZSTD_WINDOW,
) -> DecompressedReader:
    """Open a plain or compressed file for reading in blocks; see DecompressedReader."""
    return DecompressedReader(path, display=display, chunk=chunk, digest=digest, max_window=max_window)


class Digest(Protocol):
    """A hash object."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add the next bytes."""


class _DecodedStream(Protocol):
    """A file's decompressed bytes in order.

    `read` and `readinto` return fewer bytes than requested only at the end of the data.
    """

    def read(self, size: int, /) -> bytes: ...
    def readinto(self, buffer: memoryview, /) -> int: ...


class _PlainStream:
    """The bytes of a file that is not compressed."""

    def __init__(self, reader: DecompressedReader) -> None:
        self._reader = reader

    def read(self, size: int) -> bytes:
        return self._reader._read(size)

    def readinto(self, buffer: memoryview) -> int:
        filled = 0
        while count := self._reader._file.readinto(buffer[filled:]):
            filled += count
        self._reader._account(buffer[:filled])
        return filled


class _ConcatenatedStreams:
    """A decoder of consecutive gzip members, bzip2 streams or xz streams. Zero bytes between them are permitted."""

    def __init__(
        self,
        reader: DecompressedReader,
        new_decoder: Callable[[], "_StreamDecoder"],
        damage_errors: tuple[type[Exception], ...],
    ) -> None:
        self._reader = reader
        self._new_decoder = new_decoder
        self._damage_errors = damage_errors
        self._decoder: _StreamDecoder | None = None
        self._finished_streams = 0
        self._data = b""  # read from the file, not yet passed to a decoder
        self._start = 0  # offset in the file of the decoder's last input

    def read(self, size: int) -> bytes:
        pieces: list[bytes] = []
        while size and (piece := self._decode_piece(size)):
            pieces.append(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readinto(self, buffer: memoryview) -> int:
        filled = 0
        while filled < len(buffer) and (piece := self._decode_piece(len(buffer) - filled)):
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
        return filled

    def _decode_piece(self, size: int) -> bytes:
        """Return at most `size` decoded bytes, and no bytes at the end of the file."""
        reader = self._reader
        while True:
            needs_input = self._decoder is None or self._decoder.needs_input
            if needs_input and not self._data:
                self._data = reader._read(_FEED_BYTES)
                if not self._data:
                    if self._decoder is not None or not self._finished_streams:
                        raise reader._truncation_error()
                    return b""
            data, self._data = self._data, b""
            if self._decoder is None:
                if self._finished_streams:
                    data = data.lstrip(b"\0")
                    if not data:
                        continue
                if not data.startswith(_MAGIC[reader.codec or ""][: len(data)]):
                    raise reader._foreign_data_error(reader.compressed_read - len(data))
                self._decoder = self._new_decoder()
            if data:
                self._start = reader.compressed_read - len(data)
            try:
                piece = self._decoder.decompress(data, size)
            except self._damage_errors as error:
                raise reader._damage_error(self._start, str(error)) from error
            if self._decoder.eof:
                self._data, self._decoder = self._decoder.unused_data, None
                self._finished_streams += 1
            if piece:
                return piece


class _ZstdStream:
    """A decoder of zstd frames."""

    def __init__(self, reader: DecompressedReader) -> None:
        import zstandard

        self._reader = reader
        self._source = _ZstdFrameScanner(reader)
        self._zstd_error = zstandard.ZstdError
        self._stream = zstandard.ZstdDecompressor(max_window_size=reader._max_window).stream_reader(
            cast(IO[bytes], self._source), read_size=_FEED_BYTES, read_across_frames=True
        )

    def read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except self._zstd_error as error:
            raise self._explain(error) from error

    def readinto(self, buffer: memoryview) -> int:
        try:
            return self._stream.readinto(buffer)
        except self._zstd_error as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> InputError:
        self._source.check_end()
        return self._reader._damage_error(self._reader.compressed_read, str(error))


class _StreamDecoder(Protocol):
    """The interface of a decoder for one stream: of bz2, of lzma and of `_GzipMember`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _GzipMember:
    """A decoder of one gzip member, which checks the CRC and the length."""

    def __init__(self) -> None:
        import zlib

        self._stream = zlib.decompressobj(wbits=31)  # 15 for the window, 16 for gzip's header and trailer

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def needs_input(self) -> bool:
        return not self._stream.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + data, max_length)


class _ZstdFrameScanner:
    """The file object that the zstd decoder reads: it scans the headers of frames and blocks in the bytes.

    The decoder does not detect a truncated frame: it waits for more input and ends without an error. The scan detects
    a frame that is still open at the end of the file. Frame format: RFC 8878, section 3.1.

    `backports.zstd` would not require the scan, because its decoder reports an open frame. But it takes 1.35 times the
    CPU time on frames of 1 MB, 1.7 times on one large frame, and 2.4 times on frames of 1 KB.
    """

    def __init__(self, reader: DecompressedReader) -> None:
        self._reader = reader
        self._offset = 0  # of the next byte to scan
        self._field = b""  # bytes of the field that the scan needs, as far as they were read
        self._in_frame = False
        self._at_block = False
        self._scan = self._scan_frames()
        self._needed = next(self._scan)

    def read(self, size: int) -> bytes:
        """Read and scan the file's next bytes, and return them."""
        data = self._reader._read(size)
        if not data:
            if self._in_frame or not self._offset:
                raise self._reader._truncation_error()
            self.check_end()
        position = 0
        while position < len(data):
            if self._at_block and not self._field:
                position = self._skip_blocks(data, position)
                if position == len(data):
                    break
            step = min(abs(self._needed) - len(self._field), len(data) - position)
            if self._needed > 0:
                self._field += data[position : position + step]
                complete = len(self._field) == self._needed
            else:
                self._needed += step
                complete = self._needed == 0
            position += step
            self._offset += step
            if complete:
                field, self._field = self._field, b""
                self._needed = self._scan.send(field)
        return data

    def _skip_blocks(self, data: bytes, position: int) -> int:
        """Skip the blocks that `data` contains completely, except a frame's last block; return the new position.

        `_scan_frames` handles all other blocks.
        """
        begin, end = position, len(data)
        while position + 3 < end:
            header = data[position] | data[position + 1] << 8 | data[position + 2] << 16
            size = header >> 3
            if header & 1 or size > _ZSTD_BLOCK:
                break
            block_end = position + 3 + (1 if header & 6 == _ZSTD_RLE << 1 else size)
            if block_end > end:
                break
            position = block_end
        self._offset += position - begin
        return position

    def check_end(self) -> None:
        """Raise InputError when the bytes after the last frame are too few for the start of another frame."""
        if self._field and not self._in_frame:
            raise self._reader._foreign_data_error(self._offset - len(self._field))

    def _scan_frames(self) -> Generator[int, bytes, None]:
        """Yield the size of the next field; the caller sends the field.

        For a negative size, the caller skips this number of bytes and sends an empty field.
        """
        while True:
            self._in_frame = False
            magic = _uint((yield 4))
            begin = self._offset - 4
            self._in_frame = True
            if magic & ~0xF == _ZSTD_SKIPPABLE:
                if size := _uint((yield 4)):
                    yield -size
                continue
            if magic != _ZSTD_MAGIC:
                raise self._reader._foreign_data_error(begin)
            # Descriptor: size of the dictionary id (2 bits), checksum (1), reserved (2), single segment (1),
            # size of the content size (2). Next: window (absent from a single segment), dictionary, content size.
            descriptor = _uint((yield 1))
            single = descriptor >> 5 & 1
            scale = 0 if single else _uint((yield 1))
            dictionary = (0, 1, 2, 4)[descriptor & 3]
            if dictionary and (number := _uint((yield dictionary))):
                raise InputError(
                    f"{self._reader.display}: the zstd frame at byte {begin:,} needs dictionary {number}, and "
                    "tokenmill does not support dictionaries. Replace the file with a copy that is compressed without "
                    "a dictionary."
                )
            content = (single, 2, 4, 8)[descriptor >> 6]
            window = _uint((yield content)) if content else 0
            if not single:
                window = (8 + (scale & 7)) << (7 + (scale >> 3))
            if window > self._reader._max_window:
                raise self._reader._window_error(begin, window)
            last = 0
            while not last:
                # Block header: last block (1 bit), type (2 bits), size (21 bits).
                self._at_block = True
                block = _uint((yield 3))
                self._at_block = False
                last, kind, size = block & 1, block >> 1 & 3, block >> 3
                if size > _ZSTD_BLOCK:
                    raise self._reader._damage_error(self._offset - 3, "impossible block size")
                if size := 1 if kind == _ZSTD_RLE else size:
                    yield -size
            if descriptor & 4:
                yield -4


def _uint(field: bytes) -> int:
    return int.from_bytes(field, "little")
