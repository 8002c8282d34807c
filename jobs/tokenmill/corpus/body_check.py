"""Judge what a server gave in place of a file where no hash does: by its first bytes, and by its end.

Without a hash a login page would be stored as data, and without a length a transfer that is cut would pass for whole.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenmill.suffixes import COMPRESSIONS, LINE_SUFFIXES, is_data_file, strip_compression

HEAD = 4096
"""Bytes from the beginning of a file that are looked at."""
IN_ITS_PLACE = "it may be the page of a login or of an error: check the address, and the credentials that it needs"
"""What to do about an impostor."""
_TAIL = 16 << 20
_LFS = b"version https://git-lfs.github.com/spec/"


def impostor(head: bytes, name: str) -> str | None:
    """Return what a file is instead of what its name says, None when its first bytes may be right."""
    if not head or not (is_data_file(name) or strip_compression(name)[1]):
        return None
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(_LFS):
        return "a Git LFS pointer"
    if text.startswith(b"<"):
        html = text[:HEAD].lower()
        return "an HTML page" if b"<html" in html or b"<!doctype html" in html else "an XML document"
    kind = name.lower().rpartition(".")[2]
    if kind in (*COMPRESSIONS, "parquet") and text.startswith((b'{"', b"{\n", b"{ ")):
        return f"JSON and no {kind} data"
    return "gz data that were compressed once more" if kind == "gz" and _is_twice_gz(head) else None


def _is_twice_gz(head: bytes) -> bool:
    try:
        return next(decoded("gz", [head[:_FEED]]), b"").startswith(b"\x1f\x8b\x08")
    except DecodeError:
        return False


def unfinished(path: Path, name: str) -> str | None:
    """Return why a file whose length nobody said cannot be whole, None where its format does not tell."""
    size = path.stat().st_size
    if not size:
        return "nothing came, and the server does not say how much there is"
    if codec := strip_compression(name)[1]:
        try:
            with path.open("rb") as file:
                for _ in decoded(codec, iter(lambda: file.read(1 << 20), b"")):
                    pass
        except DecodeError as error:
            return str(error)
        return None
    with path.open("rb") as file:
        file.seek(max(0, size - _TAIL))
        tail = file.read()
    if name.lower().endswith(".parquet"):
        footer = int.from_bytes(tail[-8:-4], "little")
        return None if tail.endswith(b"PAR1") and 0 < footer <= size - 12 else "its Parquet footer is missing"
    if not name.lower().endswith(LINE_SUFFIXES) or tail.endswith(b"\n"):
        return None
    last = tail.rpartition(b"\n")[2]
    return None if len(last) == _TAIL or _is_json(last) or tail.rstrip()[-1:] in (b"]", b"}") else _CUT


_CUT = "its last line is cut short"


def _is_json(line: bytes) -> bool:
    import orjson

    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


class DecodeError(Exception):
    """Compressed data that are cut short or damaged."""


def decoded(codec: str, blocks: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Yield what compressed blocks decompress to, in pieces of some MB at most; raises Undecodable.

    `codec` is a suffix of COMPRESSIONS, or deflate. What ends in the middle of a stream is cut short.
    """
    decoder: Any = None
    errors: tuple[type[Exception], ...] = (zlib.error, lzma.LZMAError, OSError, ValueError, *_zstd_errors(codec))
    for block in blocks:
        for start in range(0, len(block), _FEED):
            data = bytes(block[start : start + _FEED])
            while data := data if decoder else data.lstrip(b"\0"):
                try:
                    decoder = decoder or _DECODERS[codec](data)
                    piece = decoder.decompress(data)
                except errors as error:
                    raise DecodeError(f"its {codec} data are damaged ({error})") from error
                if piece:
                    yield piece
                if not decoder.eof:
                    break
                data, decoder = decoder.unused_data, None
    if decoder:
        raise DecodeError(f"its {codec} data are cut short")


_FEED = 1 << 10
"""Compressed bytes that are decompressed at a time: of a bomb they give no more than some MB."""


def _zstd(_: bytes) -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=128 << 20).decompressobj()


def _zstd_errors(codec: str) -> tuple[type[Exception], ...]:
    if codec != "zst":
        return ()
    import zstandard

    return (zstandard.ZstdError,)


def _deflate(data: bytes) -> Any:
    """Servers send it with zlib's header, as they should, or without."""
    wrapped = data[0] & 15 == zlib.DEFLATED and int.from_bytes(data[:2], "big") % 31 == 0
    return zlib.decompressobj(wbits=15 if wrapped else -15)


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "gz": lambda _: zlib.decompressobj(wbits=31),
    "zst": _zstd,
    "bz2": lambda _: bz2.BZ2Decompressor(),
    "xz": lambda _: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=512 << 20),
    "deflate": _deflate,
}
