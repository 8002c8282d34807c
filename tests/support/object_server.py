"""A server of the objects of a directory, as S3 shows them, with a latency; it counts what it sends.

It answers thousands of requests in a second, which moto does not, so that it shows the speed of a client.
"""

import asyncio
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import xxhash

_DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


class Sent(NamedTuple):
    """The requests for ranges of `.bin` objects, and the bytes of their answers."""

    requests: int
    bytes: int


class ObjectServer:
    """An S3 server of the bucket `data`, in another process."""

    def __init__(self, address: str, control: Connection) -> None:
        self.address, self._control = address, control

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of its clients."""
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        return keys | {"AWS_ENDPOINT_URL": self.address}

    def take_counts(self) -> Sent:
        """Return what was sent since the last call."""
        self._control.send(None)
        return Sent(*self._control.recv())


@contextmanager
def serve_objects(root: Path, latency: float = 0.0) -> Iterator[ObjectServer]:
    """Serve the files of a directory."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(root, latency, there), daemon=True)
    process.start()
    try:
        yield ObjectServer(f"http://127.0.0.1:{here.recv()}", here)
    finally:
        process.kill()
        process.join()


def _serve(root: Path, latency: float, control: Connection) -> None:
    asyncio.run(_Answers(root, latency, control).run())


class _Answers:
    def __init__(self, root: Path, latency: float, control: Connection) -> None:
        self._files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
        self._contents: dict[str, tuple[bytes, str]] = {}
        self._latency, self._control = latency, control
        self._sent = [0, 0]

    async def run(self) -> None:
        server = await asyncio.start_server(self._answer_all, "127.0.0.1", 0, backlog=1024)
        self._control.send(server.sockets[0].getsockname()[1])
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._count)
        await server.serve_forever()

    def _count(self) -> None:
        try:
            self._control.recv()
        except EOFError:
            sys.exit()
        self._control.send(self._sent)
        self._sent = [0, 0]

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await asyncio.sleep(self._latency)
                writer.write(self._answer(head))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, head: str) -> bytes:
        line, *headers = head.split("\r\n")
        method, target, _ = line.split(" ")
        url = urlsplit(target)
        _, _, key = unquote(url.path).strip("/").partition("/")
        if not key:
            return _respond("200 OK", self._list(parse_qs(url.query, keep_blank_values=True)))
        if key not in self._files:
            return _respond("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>")
        data, tag = self._read(key)
        ranges = [text.split("=")[1] for text in headers if text.lower().startswith("range:")]
        status, more, part = "200 OK", "", data
        if ranges and method == "GET":
            start, _, stop = ranges[0].partition("-")
            part = data[int(start) : int(stop) + 1 if stop else None]
            status, more = (
                "206 Partial Content",
                f"Content-Range: bytes {start}-{int(start) + len(part) - 1}/{len(data)}\r\n",
            )
            if key.endswith(".bin"):
                self._sent[0] += 1
                self._sent[1] += len(part)
        return _respond(status, part, f'{more}ETag: "{tag}"\r\nLast-Modified: {_DATE}\r\n', head=method == "HEAD")

    def _read(self, key: str) -> tuple[bytes, str]:
        if key not in self._contents:
            data = self._files[key].read_bytes()
            self._contents[key] = data, xxhash.xxh3_128_hexdigest(data)
        return self._contents[key]

    def _list(self, query: dict[str, list[str]]) -> bytes:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        prefixes, entries = set[str](), []
        for key in sorted(self._files):
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            data, tag = self._read(key)
            entries.append(
                f"<Contents><Key>{key}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
                f"<ETag>&quot;{tag}&quot;</ETag><Size>{len(data)}</Size></Contents>"
            )
        common = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in sorted(prefixes))
        return (
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(entries)}{common}</ListBucketResult>".encode()
        )


def _respond(status: str, body: bytes, headers: str = "", *, head: bool = False) -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + (b"" if head else body)
