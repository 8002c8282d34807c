"""The process that reads ranges of objects for all processes of a user on a machine.

One process, because the threads of a client of buckets do not survive a fork, as in the workers of torch's DataLoader,
because ranks that read the same samples fetch them once, and because one cache has one size. `ranges` has the other
end: it starts this process, which ends when no process has been connected for IDLE_SECONDS.

A message is its length, 8 bytes, and a request or an answer in MessagePack; the bytes of a range follow their answer.
"""

import fcntl
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.buckets.address import BucketAddress
from tokenmill.core.buckets.client import BucketClient, BucketRefused, CredentialsExpired
from tokenmill.core.buckets.range_cache import RangeCache, find_cache_size
from tokenmill.core.machine import ignore_stop_signals, raise_file_limit
from tokenmill.core.redaction import redact

BLOCK_BYTES = 1 << 20
"""Bytes that are fetched together if all objects fit into the cache."""
GAP_BYTES = 64
"""Bytes between two ranges that are fetched with them in one request."""
GROUP_BYTES = 4 << 20
"""Largest size of such a request."""
URGENT_READERS, AHEAD_READERS = 64, 256
"""Requests at the same time for ranges that a process waits for, and for those that it needs later."""
IDLE_SECONDS = 10.0
MAX_FILES = 65_536
LENGTH = struct.Struct("<Q")

Positions = npt.NDArray[np.int64]


class RemoteObject(msgspec.Struct, frozen=True, array_like=True):
    """A version of an object in a bucket, such as s3://BUCKET."""

    bucket: str
    key: str
    version: str
    size: int


class RangeRequest(msgspec.Struct, frozen=True, array_like=True):
    """Ranges of an object: the first and the last positions, as int64; `wait` asks for their bytes."""

    object: RemoteObject
    starts: bytes
    stops: bytes
    wait: bool


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The number of bytes that follow, or the class and the message of an error."""

    bytes: int = 0
    error: str = ""
    message: str = ""


Range = tuple[RemoteObject, int, int]


class _Part(NamedTuple):
    """Bytes of a range, counted from its start."""

    range: Range
    start: int
    stop: int


def send_message(connection: socket.socket, message: msgspec.Struct, data: bytes = b"") -> None:
    """Send a message, and the bytes that follow it."""
    content = msgspec.msgpack.encode(message)
    connection.sendall(b"".join((LENGTH.pack(len(content)), content, data)))


def receive(connection: socket.socket, count: int) -> bytearray:
    """Return the next bytes of a connection (EOFError if it ends before)."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        received = connection.recv_into(view[done:])
        if not received:
            raise EOFError
        done += received
    return data


def receive_content(connection: socket.socket) -> bytearray:
    """Return the content of the next message."""
    return receive(connection, LENGTH.unpack(receive(connection, LENGTH.size))[0])


@dataclass
class _Fetch:
    """A request to a store for ranges that are next to each other, and what waits for them."""

    futures: dict[Range, Future[bytes]]
    is_urgent: bool
    task: Future[None] | None = None


class Fetcher:
    """Ranges of objects, from the cache or from their buckets."""

    def __init__(self, cache: RangeCache) -> None:
        self._cache, self._lock = cache, threading.Lock()
        self._pending: dict[Range, _Fetch] = {}
        self._clients: dict[str, BucketClient] = {}
        self._opening = threading.Lock()
        self._objects, self._object_bytes = set[RemoteObject](), 0
        self._urgent = ThreadPoolExecutor(URGENT_READERS)
        self._ahead = ThreadPoolExecutor(AHEAD_READERS)

    def read(self, name: RemoteObject, starts: Positions, stops: Positions) -> bytes:
        """Return the bytes of ranges, one after the other."""
        ranges = list(zip(starts.tolist(), stops.tolist(), strict=True))
        if not self._fits_in_cache(name):
            return b"".join(self._wait([_Part((name, start, stop), 0, stop - start) for start, stop in ranges]))
        return b"".join(
            self._wait(
                [
                    _Part(block, max(start - block[1], 0), min(stop, block[2]) - block[1])
                    for start, stop in ranges
                    for block in _list_blocks(name, start, stop)
                ]
            )
        )

    def read_ahead(self, name: RemoteObject, starts: Positions, stops: Positions, processes: int = 1) -> None:
        """Begin to fetch ranges in their order; ranges that touch each other are fetched together.

        Those above a share of the cache are left out: each of `processes` may ask for as many.
        """
        count = int((stops - starts).cumsum().searchsorted(self._cache.size // (2 * processes), "right"))
        starts, stops = starts[:count], stops[:count]
        if not count:
            return
        if self._fits_in_cache(name):
            blocks = dict.fromkeys(
                block
                for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
                for block in _list_blocks(name, start, stop)
            )
            groups = [[block] for block in blocks]
        else:
            groups = _group(name, starts, stops)
        with self._lock:
            for group in groups:
                missing = [part for part in group if part not in self._pending and part not in self._cache]
                if missing:
                    self._submit(missing, self._ahead)

    def _fits_in_cache(self, name: RemoteObject) -> bool:
        """Return whether all objects that were read fit into the cache, so that no byte is fetched twice."""
        with self._lock:
            if name not in self._objects:
                self._objects.add(name)
                self._object_bytes += name.size
            return self._object_bytes <= self._cache.size * 0.9

    def _wait(self, parts: "Sequence[_Part]") -> list[bytes]:
        with self._lock:
            contents = [self._cache.get(*part) or self._request(part.range) for part in parts]
        return [
            content if isinstance(content, bytes) else content.result()[part.start : part.stop]
            for part, content in zip(parts, contents, strict=True)
        ]

    def _request(self, part: Range) -> Future[bytes]:
        """Return the bytes of a range, whose request goes before those of ranges for later; the caller has the lock."""
        fetch = self._pending.get(part)
        if fetch is None:
            fetch = self._submit([part], self._urgent)
        elif not fetch.is_urgent and fetch.task is not None and fetch.task.cancel():
            fetch.task, fetch.is_urgent = self._urgent.submit(self._fetch, fetch), True
        return fetch.futures[part]

    def _submit(self, ranges: Sequence[Range], executor: ThreadPoolExecutor) -> "_Fetch":
        """Request ranges that are next to each other; the caller has the lock."""
        fetch = _Fetch({part: Future[bytes]() for part in ranges}, is_urgent=executor is self._urgent)
        self._pending.update(dict.fromkeys(ranges, fetch))
        fetch.task = executor.submit(self._fetch, fetch)
        return fetch

    def _fetch(self, fetch: "_Fetch") -> None:
        name, first, _ = next(iter(fetch.futures))
        try:
            data = self._read(name, first, max(part[2] for part in fetch.futures))
        except BaseException as error:  # every process that waits gets it
            with self._lock:
                for part in fetch.futures:
                    self._pending.pop(part, None)
            for future in fetch.futures.values():
                future.set_exception(error)
            return
        for part, future in fetch.futures.items():
            content = data[part[1] - first : part[2] - first]
            with self._lock:
                self._pending.pop(part, None)
                self._cache.put(part, content)
            future.set_result(content)

    def _read(self, name: RemoteObject, start: int, stop: int) -> bytes:
        """Return a range of an object; with a new client if the credentials of the first one are not accepted."""
        client = self._open(name.bucket)
        try:
            return client.read(name.key, start, stop, name.version).data
        except (CredentialsExpired, BucketRefused):
            return self._open(name.bucket, client).read(name.key, start, stop, name.version).data

    def _open(self, bucket: str, refused: BucketClient | None = None) -> BucketClient:
        """Return the client of a bucket, another one than `refused`."""
        with self._opening:
            if self._clients.get(bucket) is refused:
                self._clients[bucket] = BucketClient(BucketAddress(bucket))
            return self._clients[bucket]


def _list_blocks(name: RemoteObject, start: int, stop: int) -> list[Range]:
    """Return the blocks that have the bytes of a range."""
    begins = range(start - start % BLOCK_BYTES, stop, BLOCK_BYTES)
    return [(name, begin, min(begin + BLOCK_BYTES, name.size)) for begin in begins]


def _group(name: RemoteObject, starts: Positions, stops: Positions) -> list[list[Range]]:
    """Return ranges in groups that are fetched together, in the order in which a process needs them."""
    order = starts.argsort(kind="stable")
    first, last = starts[order], stops[order]
    groups: list[list[Range]] = []
    ranks: list[int] = []
    for rank, start, stop in zip(order.tolist(), first.tolist(), last.tolist(), strict=True):
        group = groups[-1] if groups else []
        if group and group[-1][1:] == (start, stop):
            continue
        if group and group[-1][2] <= start <= group[-1][2] + GAP_BYTES and stop - group[0][1] <= GROUP_BYTES:
            group.append((name, start, stop))
            ranks[-1] = min(ranks[-1], rank)
        else:
            groups.append([(name, start, stop)])
            ranks.append(rank)
    return [groups[place] for place in np.argsort(ranks, kind="stable").tolist()]


class _Server:
    """Answers the requests of connections, and ends when there has been none for a while."""

    def __init__(self, fetcher: Fetcher, path: Path, lock: int) -> None:
        self._fetcher, self._path, self._lock = fetcher, path, lock
        self._connections, self._last = 0, time.monotonic()
        self._state = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)

    def listen(self) -> None:
        """Make the socket."""
        self._path.unlink(missing_ok=True)
        with short_path(self._path) as path:
            self._listener.bind(path)
        self._listener.listen(1024)
        self._listener.settimeout(1.0)

    def serve(self) -> None:
        """Accept connections until there is none for IDLE_SECONDS; a process that starts another one has the lock."""
        while not self._is_idle() or not self._end():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # too many open files
                time.sleep(0.1)
                continue
            connection.settimeout(None)
            with self._state:
                self._connections += 1
            threading.Thread(target=self._answer_all, args=(connection,), daemon=True).start()

    def _is_idle(self) -> bool:
        with self._state:
            return not self._connections and time.monotonic() - self._last > IDLE_SECONDS

    def _end(self) -> bool:
        """Remove the socket, unless another process makes one at this moment."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self._path.unlink(missing_ok=True)
        return True

    def _answer_all(self, connection: socket.socket) -> None:
        try:
            with connection:
                while True:
                    request = msgspec.msgpack.decode(receive_content(connection), type=RangeRequest)
                    self._answer(connection, request)
        except (EOFError, OSError, msgspec.MsgspecError):
            pass  # the process ended
        finally:
            with self._state:
                self._connections -= 1
                self._last = time.monotonic()

    def _answer(self, connection: socket.socket, request: RangeRequest) -> None:
        starts, stops = np.frombuffer(request.starts, np.int64), np.frombuffer(request.stops, np.int64)
        if not request.wait:
            self._fetcher.read_ahead(request.object, starts, stops, max(1, self._connections))
            return
        try:
            data = self._fetcher.read(request.object, starts, stops)
        except Exception as error:  # the process that asks raises it
            send_message(connection, Answer(error=type(error).__name__, message=redact(str(error))))
        else:
            send_message(connection, Answer(bytes=len(data)), data)


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a path of a socket that has less than the 108 bytes that the system allows."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    handle = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{path.name}"
    finally:
        os.close(handle)


def main() -> None:
    """Serve the socket that the first argument names; write a line when it accepts connections."""
    path = Path(sys.argv[1])
    if os.fork():  # the process that starts this one waits only for its first line
        os._exit(0)
    ignore_stop_signals()
    raise_file_limit(MAX_FILES)
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    server = _Server(Fetcher(RangeCache(path.parent, find_cache_size(path.parent))), path, lock)
    server.listen()
    print("ready", flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    server.serve()
    os._exit(0)  # threads that read ahead need not end first


if __name__ == "__main__":
    main()
