"""Decompress what corpora come in, block by block, refusing what is damaged.

First step of reading a file: extract writes these blocks to disk, `corpus.readers` splits them into
records. Memory is bounded by the block and the codec's window, never by the file or by what a hostile
file claims to expand to. Nothing damaged passes as a short file: the usual stream readers end quietly
on a truncated zstd frame and ignore what follows the last bzip2 or gzip stream.
"""

import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self, cast

from tokenmill.corpus import unexpected_content
from tokenmill.corpus.block_kinds import ZSTD_WINDOW, ZSTD_WINDOW_MOST
from tokenmill.errors import InputError
from tokenmill.suffixes import strip_compression

_FEED = 128 << 10  # compressed bytes given to a decoder at a time: each time may wait for another thread of Python
_XZ_MEMORY = 512 << 20
_MAGIC = {"gz": b"\x1f\x8b", "bz2": b"BZh", "xz": b"\xfd7zXZ\0"}
_BZ2_BLOCK = b"1AY&SY"
"""What follows the magic and the block size of a bzip2 file that is not empty; the magic itself is text."""

_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_SKIPPABLE = 0x184D2A50  # the low four bits are free
_ZSTD_BLOCK = 128 << 10  # no block regenerates more
_ZSTD_RLE = 1  # block type: one byte, repeated


def codec_of_content(head: bytes) -> str | None:
    """Name the codec that a file's first bytes show; None where they are of none."""
    magic = _uint(head[:4])
    if magic == _ZSTD_MAGIC or magic & ~0xF == _ZSTD_SKIPPABLE:
        return "zst"
    if head.startswith(_MAGIC["bz2"]):
        return "bz2" if head[4:10] == _BZ2_BLOCK else None
    return next((codec for codec, magic in _MAGIC.items() if head.startswith(magic)), None)


_RWF_DONTCACHE = 0x80
"""Flag of preadv2(2) since Linux 6.14, where the file system has it; Python does not name it yet."""


class _PassingFile:
    """A file read from its beginning to its end, which does not fill the page cache with what is read once.

    What was in the cache before stays there. New pages cost more than the reading where a virtual machine's host takes
    those away that are not in use (tests/bench/README.md), and a corpus would drive out everything else.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._at = 0
        self._passing = sys.platform == "linux"
        self._buffer = bytearray()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def head(self, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, 0)

    def read(self, size: int) -> bytes:
        if not self._passing:
            return self._file.read(size)
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        with memoryview(self._buffer)[:size] as room:
            return bytes(room[: self.readinto(room)])

    def readinto(self, buffer: bytearray | memoryview) -> int:
        if self._passing:
            try:
                got = os.preadv(self._file.fileno(), [buffer], self._at, _RWF_DONTCACHE)
            except OSError:  # of a kernel, a file system or a sandbox without it; any other comes again
                self._passing = False
                if self._at:
                    self._file.seek(self._at)
            else:
                self._at += got
                return got
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        self._buffer = bytearray()  # the garbage collector is to find little: see DecompressedReader.close


class DecompressedReader:
    """Hand out one file's decompressed bytes, as blocks of at most `chunk` bytes or into the caller's buffers.

    Blocks and buffers are full until the data end, however small the frames are that they come from. The
    codec follows the file's suffix or, where that is of none, its first bytes. `compressed_read` counts the
    file's bytes behind what is handed out so far. A file of 0 bytes has no blocks, whatever its suffix.

    Raises InputError, naming the file and the offset in it, where the data are damaged, cut short or
    followed by something else.

    `digest`, a hash object, is fed the file's own bytes: all of them, once the end was reached. `window` is the largest
    window of a zstd frame that is taken.
    """

    def __init__(
        self,
        path: Path,
        *,
        display: str | None = None,
        chunk: int = 1 << 20,
        digest: "Digest | None" = None,
        window: int = ZSTD_WINDOW,
    ) -> None:
        self.display = display or str(path)
        self.compressed_read = 0
        self._chunk = chunk
        self._digest = digest
        self._window = window
        self._file = _PassingFile(path)
        self.codec = strip_compression(path.name)[1] or codec_of_content(self._file.head(10))
        self._stream = self._decode()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        block = b"" if self._file.closed else self._stream.read(self._chunk)
        if not block:
            self.close()
            raise StopIteration
        return block

    def readinto(self, buffer: memoryview) -> int:
        """Decompress the next bytes into a buffer, and return how many; fewer than it holds only at the end, then 0."""
        return self._stream.readinto(buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; no block follows."""
        self._file.close()
        # The two know each other: a decoder takes too much memory to wait for the garbage collector.
        vars(self).pop("_stream", None)

    def _decode(self) -> "_Stream":
        match self.codec:
            case None:
                return _Plain(self)
            case "zst":
                return _Zstd(self)
            case "gz":
                import zlib

                return _Streams(self, _GzipMember, (zlib.error,))
            case "bz2":
                import bz2

                return _Streams(self, bz2.BZ2Decompressor, (OSError, ValueError))
            case _:
                import lzma

                return _Streams(
                    self, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY), (lzma.LZMAError,)
                )

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._taken(data)
        return data

    def _taken(self, data: bytes | memoryview) -> None:
        self.compressed_read += len(data)
        if self._digest is not None:
            self._digest.update(data)

    def _damaged(self, offset: int, why: str) -> InputError:
        return InputError(f"{self.display}: damaged {self.codec} data near byte {offset:,}: {why}. {REMEDY}")

    def _truncated(self) -> InputError:
        return InputError(
            f"{self.display}: the {self.codec} data are cut short: the file ends at byte {self._file.size():,} in the "
            f"middle of a frame. {REMEDY}"
        )

    def _foreign(self, offset: int) -> InputError:
        if offset == 0:
            unexpected_content.refuse(self._file.head(unexpected_content.HEAD), self.display)
            return InputError(f"{self.display}: not {self.codec} data, although its name says so. {REMEDY}")
        return InputError(
            f"{self.display}: something other than {self.codec} data follows at byte {offset:,}. {REMEDY}"
        )

    def _wide(self, offset: int, window: int) -> InputError:
        size = f"{-(-window >> 20):,} MiB"
        if window > ZSTD_WINDOW_MOST:
            how = "Compress the file again without --long (zstd -d --long=31 -c OLD | zstd -o NEW)"
        else:
            how = (
                f"Allow it with --zstd-window {-(-window >> 20)}MiB (in a chart: --set dataset.zstdWindow="
                f"{-(-window >> 20)}MiB); each file that is being read then takes up to so much memory"
            )
        return InputError(
            f"{self.display}: the zstd frame at byte {offset:,} needs a window of {size}, more than the "
            f"{self._window >> 20:,} MiB that are taken. {how}."
        )


REMEDY = "Put a whole copy in its place; if it was downloaded, delete it and run tokenmill download again."


def open_decompressed(
    path: Path,
    *,
    display: str | None = None,
    chunk: int = 1 << 20,
    digest: "Digest | None" = None,
    window: int = ZSTD_WINDOW,
) -> DecompressedReader:
    """Open a plain or compressed file for reading in blocks; see DecompressedReader."""
    return DecompressedReader(path, display=display, chunk=chunk, digest=digest, window=window)


class Digest(Protocol):
    """A hash object."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take the next bytes."""


class _Stream(Protocol):
    """A file's decompressed bytes in order; `read` and `readinto` fall short of what is asked only at the end."""

    def read(self, size: int, /) -> bytes: ...
    def readinto(self, buffer: memoryview, /) -> int: ...


class _Plain:
    """A file that is not compressed."""

    def __init__(self, reader: DecompressedReader) -> None:
        self._reader = reader

    def read(self, size: int) -> bytes:
        return self._reader._read(size)

    def readinto(self, buffer: memoryview) -> int:
        done = 0
        while got := self._reader._file.readinto(buffer[done:]):
            done += got
        self._reader._taken(buffer[:done])
        return done


class _Streams:
    """Decode gzip members or bzip2 or xz streams one after the other, zero bytes between them allowed."""

    def __init__(
        self, reader: DecompressedReader, new: Callable[[], "_Decoder"], damages: tuple[type[Exception], ...]
    ) -> None:
        self._reader = reader
        self._new = new
        self._damages = damages
        self._decoder: _Decoder | None = None
        self._streams = 0  # ended
        self._data = b""  # read and not yet given to a decoder
        self._start = 0  # where in the file the decoder's last data begin

    def read(self, size: int) -> bytes:
        pieces: list[bytes] = []
        while size and (piece := self._piece(size)):
            pieces.append(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readinto(self, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer) and (piece := self._piece(len(buffer) - done)):
            buffer[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def _piece(self, size: int) -> bytes:
        """Decode at most so many bytes; none at the end of the file."""
        reader = self._reader
        while True:
            wanting = self._decoder is None or self._decoder.needs_input
            if wanting and not self._data:
                self._data = reader._read(_FEED)
                if not self._data:
                    if self._decoder is not None:
                        raise reader._truncated()
                    return b""
            data, self._data = self._data, b""
            if self._decoder is None:
                if self._streams:
                    data = data.lstrip(b"\0")
                    if not data:
                        continue
                if not data.startswith(_MAGIC[reader.codec or ""][: len(data)]):
                    raise reader._foreign(reader.compressed_read - len(data))
                self._decoder = self._new()
            if data:
                self._start = reader.compressed_read - len(data)
            try:
                piece = self._decoder.decompress(data, size)
            except self._damages as error:
                raise reader._damaged(self._start, str(error)) from error
            if self._decoder.eof:
                self._data, self._decoder = self._decoder.unused_data, None
                self._streams += 1
            if piece:
                return piece


class _Zstd:
    """Decode zstd frames."""

    def __init__(self, reader: DecompressedReader) -> None:
        import zstandard

        self._reader = reader
        self._source = _ZstdFrames(reader)
        self._error = zstandard.ZstdError
        self._stream = zstandard.ZstdDecompressor(max_window_size=reader._window).stream_reader(
            cast(IO[bytes], self._source), read_size=_FEED, read_across_frames=True
        )

    def read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except self._error as error:
            raise self._explained(error) from error

    def readinto(self, buffer: memoryview) -> int:
        try:
            return self._stream.readinto(buffer)
        except self._error as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> InputError:
        self._source.check_end()
        return self._reader._damaged(self._reader.compressed_read, str(error))


class _Decoder(Protocol):
    """What bz2 and lzma offer for one stream, and `_GzipMember` with them."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _GzipMember:
    """Decode one gzip member, checking its CRC and length."""

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


class _ZstdFrames:
    """Hand a file's bytes to the zstd decoder, walking the frames and blocks in them.

    The decoder takes a truncated frame for one that waits for more and ends quietly; the walk knows at the
    end of the file whether a frame is open. Frame format: RFC 8878, section 3.1.

    `backports.zstd` would need no walk, since its decoder says whether a frame is open, but takes 1.35 times the CPU on
    frames of 1 MB, 1.7 times on one large frame, and 2.4 times on frames of 1 KB.
    """

    def __init__(self, reader: DecompressedReader) -> None:
        self._reader = reader
        self._offset = 0  # of the next byte to be walked
        self._field = b""  # as much as has been read of the field that the walk waits for
        self._inside = False  # a frame
        self._blocks = False  # at the beginning of a block
        self._walk = self._frames()
        self._want = next(self._walk)

    def read(self, size: int) -> bytes:
        """Give the file's next bytes once they are walked."""
        data = self._reader._read(size)
        if not data:
            if self._inside:
                raise self._reader._truncated()
            self.check_end()
        at = 0
        while at < len(data):
            if self._blocks and not self._field:
                at = self._pass_blocks(data, at)
                if at == len(data):
                    break
            step = min(abs(self._want) - len(self._field), len(data) - at)
            if self._want > 0:
                self._field += data[at : at + step]
                complete = len(self._field) == self._want
            else:
                self._want += step
                complete = self._want == 0
            at += step
            self._offset += step
            if complete:
                field, self._field = self._field, b""
                self._want = self._walk.send(field)
        return data

    def _pass_blocks(self, data: bytes, at: int) -> int:
        """Pass over blocks that lie whole in `data` and are not a frame's last; others are for the walk."""
        begin, end = at, len(data)
        while at + 3 < end:
            header = data[at] | data[at + 1] << 8 | data[at + 2] << 16
            size = header >> 3
            if header & 1 or size > _ZSTD_BLOCK:
                break
            behind = at + 3 + (1 if header & 6 == _ZSTD_RLE << 1 else size)
            if behind > end:
                break
            at = behind
        self._offset += at - begin
        return at

    def check_end(self) -> None:
        """Refuse bytes behind the last frame that are too few to begin another."""
        if self._field and not self._inside:
            raise self._reader._foreign(self._offset - len(self._field))

    def _frames(self) -> Generator[int, bytes, None]:
        """Yield how many bytes are needed next, to be sent; a negative number of bytes is passed over."""
        while True:
            self._inside = False
            magic = _uint((yield 4))
            begin = self._offset - 4
            self._inside = True
            if magic & ~0xF == _ZSTD_SKIPPABLE:
                if size := _uint((yield 4)):
                    yield -size
                continue
            if magic != _ZSTD_MAGIC:
                raise self._reader._foreign(begin)
            # Descriptor: dictionary id's size (2 bits), checksum (1), reserved (2), single segment (1),
            # content size's size (2). Then window (absent from a single segment), dictionary, content size.
            descriptor = _uint((yield 1))
            single = descriptor >> 5 & 1
            scale = 0 if single else _uint((yield 1))
            dictionary = (0, 1, 2, 4)[descriptor & 3]
            if dictionary and (number := _uint((yield dictionary))):
                raise InputError(
                    f"{self._reader.display}: the zstd frame at byte {begin:,} needs dictionary {number}. "
                    "Compress the file again without a dictionary."
                )
            content = (single, 2, 4, 8)[descriptor >> 6]
            window = _uint((yield content)) if content else 0
            if not single:
                window = (8 + (scale & 7)) << (7 + (scale >> 3))
            if window > self._reader._window:
                raise self._reader._wide(begin, window)
            last = 0
            while not last:
                # Block header: last block (1 bit), type (2 bits), size (21 bits).
                self._blocks = True
                block = _uint((yield 3))
                self._blocks = False
                last, kind, size = block & 1, block >> 1 & 3, block >> 3
                if size > _ZSTD_BLOCK:
                    raise self._reader._damaged(self._offset - 3, "impossible block size")
                if size := 1 if kind == _ZSTD_RLE else size:
                    yield -size
            if descriptor & 4:
                yield -4


def _uint(field: bytes) -> int:
    return int.from_bytes(field, "little")
