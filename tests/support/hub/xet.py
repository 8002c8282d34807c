"""Xet storage, as far as hf_xet needs it to download: the parts of a file and their addresses.

    GET  /api/datasets/ID/xet-read-token/REV   (Hub) headers with the address of the storage and a token
    GET  (CDN) /v2/reconstructions/FILE        the terms of a file or of a range of it, and the addresses of xorbs
    GET  (CDN) /xorb/FILE/N                    a xorb, or a range of it

A xorb is a sequence of chunks. A chunk is a header (version 0, u24 stored length, u8 compression 0, u24 length) and
its bytes. A term is a range of chunks. Source: openapi/cas.openapi.yaml and xorb_chunk_format.rs of
github.com/huggingface/xet-core.
A real server splits files by their content and shares chunks between files; that makes no difference to a download.
"""

from typing import Any

from .repository import Content, File, digest

CHUNK = 1 << 16
HEADER = 8
XORB = 16
"""Chunks in a xorb; a real xorb contains up to 64 MiB."""
TOKEN = "xet-read-token"


def xorb_id(file: File, number: int) -> str:
    """Return the hash that names a xorb."""
    return digest("sha256", f"{file.xet} {number}".encode())


def xorb(file: File, number: int) -> File:
    """Return a xorb in the form of a file."""
    begin = number * XORB * CHUNK
    data = bytearray()
    for start in range(begin, min(begin + XORB * CHUNK, file.size), CHUNK):
        chunk = _read(file.content, start, min(start + CHUNK, file.size))
        length = len(chunk).to_bytes(3, "little")
        data += b"\0" + length + b"\0" + length + chunk
    return File(file.path, bytes(data), len(data), xorb_id(file, number))


def reconstruction(file: File, start: int, stop: int, address: str) -> dict[str, Any]:
    """Describe the parts of bytes `start` to `stop` of a file, with the xorbs under `address`."""
    first, last = start // CHUNK, (stop - 1) // CHUNK
    terms, xorbs = [], {}
    for number in range(first // XORB, last // XORB + 1):
        begin = max(first - number * XORB, 0)
        end = min(last - number * XORB, XORB - 1) + 1
        offset = (number * XORB + begin) * CHUNK
        length = min((number * XORB + end) * CHUNK, file.size) - offset
        chunks = {"start": begin, "end": end}
        position = begin * (CHUNK + HEADER)
        span = {"start": position, "end": position + length + (end - begin) * HEADER - 1}
        terms.append({"hash": xorb_id(file, number), "unpacked_length": length, "range": chunks})
        url = f"{address}/{file.xet}/{number}"
        xorbs[xorb_id(file, number)] = [{"url": url, "ranges": [{"chunks": chunks, "bytes": span}]}]
    return {"offset_into_first_range": start - first * CHUNK, "terms": terms, "xorbs": xorbs}


def _read(content: Content, start: int, stop: int) -> bytes:
    if isinstance(content, bytes):
        return content[start:stop]
    with content.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)
