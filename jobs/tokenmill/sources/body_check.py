"""Content checks for downloads that have no hash: the first bytes of a file and its end.

`sources.web` and `sources.fetch` call them. Without these checks, a login page would be stored as data, and a
truncated transfer without a length would count as complete.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenmill.records.suffixes import COMPRESSIONS, LINE_SUFFIXES, is_data_file, strip_compression

HEAD_BYTES = 4096
"""Bytes at the beginning of a file that `find_wrong_content` inspects."""
WRONG_CONTENT_REMEDY = "it may be a login page or an error page; check the address and the credentials for it"
"""The remedy in messages about wrong content."""
_TAIL_BYTES = 16 << 20
_LFS_SIGNATURE = b"version https://git-lfs.github.com/spec/"


def find_wrong_content(head: bytes, name: str) -> str | None:
    """Return what a file contains instead of the format of its name; None when its first bytes are plausible."""
    if not head or not (is_data_file(name) or strip_compression(name)[1]):
        return None
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(_LFS_SIGNATURE):
        return "a Git LFS pointer"
    if text.startswith(b"<"):
        html = text[:HEAD_BYTES].lower()
        return "an HTML page" if b"<html" in html or b"<!doctype html" in html else "an XML document"
    suffix = name.lower().rpartition(".")[2]
    if suffix in (*COMPRESSIONS, "parquet") and text.startswith((b'{"', b"{\n", b"{ ")):
        return f"JSON instead of {suffix} data"
    return "gz data that was compressed twice" if suffix == "gz" and _is_gz_twice(head) else None


def _is_gz_twice(head: bytes) -> bool:
    try:
        return next(decode_blocks("gz", [head[:_FEED_BYTES]]), b"").startswith(b"\x1f\x8b\x08")
    except DecodeError:
        return False


def find_truncation(path: Path, name: str) -> str | None:
    """Return why a file of unknown length is incomplete; None when its format does not show that."""
    size = path.stat().st_size
    if not size:
        return "the response is empty, and the server does not report a length"
    if codec := strip_compression(name)[1]:
        try:
            with path.open("rb") as file:
                for _ in decode_blocks(codec, iter(lambda: file.read(1 << 20), b"")):
                    pass
        except DecodeError as error:
            return str(error)
        return None
    with path.open("rb") as file:
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read()
    if name.lower().endswith(".parquet"):
        footer = int.from_bytes(tail[-8:-4], "little")
        return None if tail.endswith(b"PAR1") and 0 < footer <= size - 12 else "its Parquet footer is missing"
    if not name.lower().endswith(LINE_SUFFIXES) or tail.endswith(b"\n"):
        return None
    line = tail.rpartition(b"\n")[2]
    return None if len(line) == _TAIL_BYTES or _is_json(line) or tail.rstrip()[-1:] in (b"]", b"}") else _LINE_TRUNCATED


_LINE_TRUNCATED = "its last line is truncated"


def _is_json(line: bytes) -> bool:
    import orjson

    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


class DecodeError(Exception):
    """Compressed data that is truncated or damaged."""


def decode_blocks(codec: str, blocks: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Yield the decompressed data of compressed blocks, in pieces of at most some MB.

    `codec` is a suffix of COMPRESSIONS, or "deflate". Raises DecodeError when the data is damaged, or when it ends
    inside a compressed stream.
    """
    decoder: Any = None
    errors: tuple[type[Exception], ...] = (zlib.error, lzma.LZMAError, OSError, ValueError, *_zstd_errors(codec))
    for block in blocks:
        for start in range(0, len(block), _FEED_BYTES):
            data = bytes(block[start : start + _FEED_BYTES])
            while data := data if decoder else data.lstrip(b"\0"):
                try:
                    decoder = decoder or _DECODERS[codec](data)
                    piece = decoder.decompress(data)
                except errors as error:
                    raise DecodeError(f"its {codec} data is damaged ({error})") from error
                if piece:
                    yield piece
                if not decoder.eof:
                    break
                data, decoder = decoder.unused_data, None
    if decoder:
        raise DecodeError(f"its {codec} data is truncated")


_FEED_BYTES = 1 << 10
"""Compressed bytes that are decompressed at a time: 1 KiB of a decompression bomb expands to at most some MB."""


def _zstd(_: bytes) -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=128 << 20).decompressobj()


def _zstd_errors(codec: str) -> tuple[type[Exception], ...]:
    if codec != "zst":
        return ()
    import zstandard

    return (zstandard.ZstdError,)


def _deflate(data: bytes) -> Any:
    """Return a decoder for deflate data with a zlib header, as the standard requires, or without one."""
    wrapped = data[0] & 15 == zlib.DEFLATED and int.from_bytes(data[:2], "big") % 31 == 0
    return zlib.decompressobj(wbits=15 if wrapped else -15)


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "gz": lambda _: zlib.decompressobj(wbits=31),
    "zst": _zstd,
    "bz2": lambda _: bz2.BZ2Decompressor(),
    "xz": lambda _: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=512 << 20),
    "deflate": _deflate,
}
