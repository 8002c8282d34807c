"""Read ranges of objects through the process that fetches them for this machine (`fetcher`), which this module starts.

<scratch>/tokenmill-buckets-<user>/fetch-<environment>         its socket
<scratch>/tokenmill-buckets-<user>/fetch-<environment>.lock    a lock of processes that start it
"""

import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill import __version__
from tokenmill.core.buckets.address import BucketUnavailable
from tokenmill.core.buckets.client import (
    BucketError,
    BucketRefused,
    CredentialsExpired,
    InvalidKey,
    ObjectChanged,
    ObjectMissing,
)
from tokenmill.core.buckets.fetcher import (
    Answer,
    Positions,
    RangeRequest,
    RemoteObject,
    receive,
    receive_content,
    send_message,
    short_path,
)
from tokenmill.core.buckets.range_cache import SIZE_VARIABLE, find_cache_size
from tokenmill.core.machine import this_process
from tokenmill.errors import RequestError

_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_", "CLOUDSDK_", "GCE_", "STORAGE_EMULATOR_HOST", "SSL_CERT_", "REQUESTS_CA_")
_EXACT_VARIABLES = ("HOME", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", SIZE_VARIABLE)
_ATTEMPTS = 5
"""How often a process starts the fetcher again when it was killed."""
_CLASSES: tuple[type[BucketError], ...] = (ObjectMissing, BucketRefused, InvalidKey, CredentialsExpired, ObjectChanged)
_ERRORS = {error.__name__: error for error in _CLASSES} | {
    error.__name__: BucketRefused for error in (BucketUnavailable, RequestError)
}
_connections = threading.local()


def read_ranges(root: Path, name: RemoteObject, starts: Positions, stops: Positions) -> npt.NDArray[np.uint8]:
    """Return the bytes of ranges of an object, one after the other; the socket is in `root`.

    Raises:
        BucketError: the object cannot be read; the classes are those of `client`.
    """
    request = RangeRequest(name, starts.tobytes(), stops.tobytes(), wait=True)
    for _ in range(_ATTEMPTS):
        with _forgetting_broken(root):
            connection = _find_connection(root)
            send_message(connection, request)
            answer = msgspec.msgpack.decode(receive_content(connection), type=Answer)
            if answer.error:
                raise _ERRORS.get(answer.error, BucketError)(answer.message)
            if answer.bytes != (stops - starts).sum():
                raise BucketError(f"the store sent {answer.bytes:,} bytes of {(stops - starts).sum():,}")
            return np.frombuffer(receive(connection, answer.bytes), np.uint8)
    raise BucketError("the process that reads buckets ended several times; look for its end in the system's log")


def read_ahead(root: Path, name: RemoteObject, starts: Positions, stops: Positions) -> None:
    """Begin to fetch ranges that this process reads soon, in their order."""
    with _forgetting_broken(root):
        send_message(_find_connection(root), RangeRequest(name, starts.tobytes(), stops.tobytes(), wait=False))


def _list_connections() -> dict[Path, socket.socket]:
    """Return the connections of this thread; a fork shares those of its parent, and makes its own."""
    state = vars(_connections)
    if state.get("process") != this_process():
        state.update(process=this_process(), open={})
    connections: dict[Path, socket.socket] = state["open"]
    return connections


def _find_connection(root: Path) -> socket.socket:
    connections = _list_connections()
    if root not in connections:
        connections[root] = _open_connection(root)
    return connections[root]


@contextmanager
def _forgetting_broken(root: Path) -> Iterator[None]:
    """Close the connection after an error inside a message; suppress that of a process that ended."""
    try:
        yield
    except BucketError:
        raise
    except BaseException as error:
        connection = _list_connections().pop(root, None)
        if connection is not None:
            connection.close()
        if not isinstance(error, EOFError | ConnectionError):
            raise


def _open_connection(root: Path) -> socket.socket:
    path = root / f"fetch-{_hash_environment()}"
    with suppress(OSError):
        return _try_to_connect(path)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(OSError):  # another process has started it
                return _try_to_connect(path)
            _start(path)
        return _try_to_connect(path)
    except FileNotFoundError as error:  # it has ended since
        raise ConnectionResetError(str(error)) from error
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise
        raise BucketError(f"the process that reads buckets cannot be reached: {error}") from error


def _try_to_connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        with short_path(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def _start(path: Path) -> None:
    """Start the process, and wait until it accepts connections (RequestError: the size of the cache is invalid)."""
    find_cache_size(path.parent)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "tokenmill.core.buckets.fetcher", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # a launcher that ends its ranks must not end what other programs use
        text=True,
    ) as process:
        assert process.stdout is not None  # noqa: S101 - stdout is a pipe
        lines = []
        for line in process.stdout:
            if line == "ready\n":
                return
            lines.append(line.strip())
    reason = next(filter(None, reversed(lines)), f"exit status {process.returncode}")
    raise BucketError(f"the process that reads buckets did not start: {reason}")


def _hash_environment() -> str:
    """Return a hash of the variables that choose credentials and endpoints, which processes must share."""
    chosen = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.upper().startswith(_VARIABLES) or name.upper() in _EXACT_VARIABLES
    )
    return hashlib.sha256(repr((__version__, chosen)).encode()).hexdigest()[:12]
