"""The test Hub's two ports: the Hub itself, and the CDN that it redirects LFS files to."""

import contextlib
import hashlib
import hmac
import socket
import socketserver
import time
from collections.abc import Callable, Collection, Mapping
from http.server import ThreadingHTTPServer
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs

from .faults import FaultPlan
from .protocol import Handler, Request
from .repository import Commit, Content, File, Repository, RepoType

SECRET = b"tokenmill test hub"  # constant, so that links survive a restart; it protects nothing


class Listener(ThreadingHTTPServer):
    """A listening port and its connections, which stop() closes."""

    request_queue_size = 128

    def __init__(self, hub: "Hub", port: int, *, cdn: bool) -> None:
        self.hub = hub
        self.cdn = cdn
        self._lock = Lock()
        self._connections: dict[Thread, socket.socket] = {}
        super().__init__((hub.host, port), Handler)
        self.port = int(self.server_address[1])
        self._accepting = Thread(target=self.serve_forever, args=(0.02,), daemon=True, name=f"testhub-{self.port}")
        self._accepting.start()

    def server_bind(self) -> None:
        """Bind without a lookup of the host's name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a separate thread."""
        name = f"testhub-{self.port}-connection"
        thread = Thread(target=self._serve, args=(request, client_address), daemon=True, name=name)
        with self._lock:
            self._connections[thread] = request
        thread.start()

    def _serve(self, request: Any, client_address: Any) -> None:
        self.process_request_thread(request, client_address)
        with self._lock:
            self._connections = {t: c for t, c in self._connections.items() if c is not request}

    def stop(self) -> None:
        """Stop listening, close every connection and wait for its thread."""
        self.shutdown()
        self.server_close()
        self._accepting.join()
        with self._lock:
            connections = dict(self._connections)
        for thread, connection in connections.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()


class Hub:
    """A server of repositories that behaves like the Hugging Face Hub, from start() to stop() or as a context manager.

    `port` and `cdn_port` 0 select free ports, which stop() and start() keep. `public_host` is the name that
    clients use if it is not `host`. All requests but those to the CDN require the `token`, if there is one.
    `rate_limit` (requests, seconds) causes 429 for further resolve requests in a fixed window. Signed
    links are valid for `link_seconds`. With `xet`, LFS files are also in Xet storage. The Hub calls `on_request`
    with every request before the response.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        cdn_port: int = 0,
        token: str | None = None,
        page_size: int = 1000,
        public_host: str | None = None,
        link_seconds: float = 3600,
        rate_limit: tuple[int, float] | None = None,
        xet: bool = False,
        on_request: Callable[[Request], None] | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.cdn_port = cdn_port
        self.token = token
        self.page_size = page_size
        self.public_host = public_host or ("127.0.0.1" if host in ("", "0.0.0.0") else host)
        self.link_seconds = link_seconds
        self.rate_limit = rate_limit
        self.xet = xet
        self.on_request = on_request
        self.faults = FaultPlan()
        self.requests: list[Request] = []
        self.links: dict[str, File] = {}
        self.xet_files: dict[str, File] = {}
        self._repositories: dict[tuple[str, str], Repository] = {}
        self._listeners: list[Listener] = []
        self._lock = Lock()
        self._stopping = Event()
        self._window_end = 0.0
        self._window_used = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Listen on both ports; raise OSError if a port is in use."""
        self._stopping.clear()
        self._listeners.append(Listener(self, self.port, cdn=False))
        try:
            self._listeners.append(Listener(self, self.cdn_port, cdn=True))
        except OSError:
            self.stop()
            raise
        self.port, self.cdn_port = (listener.port for listener in self._listeners)

    def stop(self) -> None:
        """Stop listening, close every connection and wait for all threads."""
        self._stopping.set()
        while self._listeners:
            self._listeners.pop().stop()

    @property
    def endpoint(self) -> str:
        """Return the value for HF_ENDPOINT."""
        return f"http://{self.public_host}:{self.port}"

    @property
    def cdn_endpoint(self) -> str:
        """Return the address of LFS files: another port, and therefore another origin."""
        return f"http://{self.public_host}:{self.cdn_port}"

    def add_dataset(
        self,
        repo_id: str,
        files: Mapping[str, Content],
        *,
        branch: str = "main",
        lfs: bool | Collection[str] | None = None,
        gated: bool = False,
    ) -> str:
        """Replace the files of a branch by a commit, and return the commit's name.

        `lfs` selects the files in LFS: all files (True), no files (False), the named files, or by default files of
        1 MiB or more and files with a suffix of compressed or binary data. Older commits stay.
        """
        return self._add("dataset", repo_id, files, branch=branch, lfs=lfs, gated=gated).sha

    def add_model(
        self,
        repo_id: str,
        files: Mapping[str, Content],
        *,
        branch: str = "main",
        lfs: bool | Collection[str] | None = None,
        gated: bool = False,
    ) -> str:
        """Add a model, as add_dataset adds a dataset; a tokenizer is part of a model."""
        return self._add("model", repo_id, files, branch=branch, lfs=lfs, gated=gated).sha

    def _add(
        self,
        repo_type: RepoType,
        repo_id: str,
        files: Mapping[str, Content],
        *,
        branch: str,
        lfs: bool | Collection[str] | None,
        gated: bool,
    ) -> Commit:
        with self._lock:
            repo = self._repositories.setdefault((repo_type, repo_id), Repository(repo_type, repo_id))
            repo.gated = gated
            commit = repo.commit(files, branch, lfs)
            self.links |= {link_key(file): file for file in commit.files.values() if file.sha256}
            self.xet_files |= {file.xet: file for file in commit.files.values() if file.sha256}
        return commit

    def move(self, repo: Repository, branch: str) -> None:
        """Move a branch to a commit with the same names and other contents."""
        names = repo.commits[repo.branches[branch]].files
        self._add(repo.type, repo.id, dict.fromkeys(names, b"moved\n"), branch=branch, lfs=None, gated=repo.gated)

    def find(self, repo_type: RepoType, repo_id: str) -> Repository | None:
        """Return a repository."""
        return self._repositories.get((repo_type, repo_id))

    def record(self, request: Request) -> None:
        """Store a request, and call the hook."""
        self.requests.append(request)
        if self.on_request:
            self.on_request(request)

    def admit(self) -> tuple[int, float] | None:
        """Count a resolve request; return how many were left in this window, and the seconds to its end."""
        if self.rate_limit is None:
            return None
        limit, seconds = self.rate_limit
        with self._lock:
            now = time.monotonic()
            if now >= self._window_end:
                self._window_end, self._window_used = now + seconds, 0
            left = max(0, limit - self._window_used)
            self._window_used += 1
            return left, self._window_end - now

    def link(self, file: File) -> str:
        """Return a signed link to an LFS file on the CDN."""
        key, expires = link_key(file), f"{time.time() + self.link_seconds:.3f}"
        return f"{self.cdn_endpoint}/lfs/{key}?Expires={expires}&Signature={signature(key, expires)}"

    def is_signed(self, file: File, link: str) -> bool:
        """Return whether a link to the file has a valid signature and has not expired."""
        arguments = parse_qs(link.partition("?")[2])
        expires = arguments.get("Expires", [""])[0]
        received = arguments.get("Signature", [""])[0]
        return (
            hmac.compare_digest(received.encode(), signature(link_key(file), expires).encode())
            and float(expires) > time.time()
        )

    def sleep(self, seconds: float) -> None:
        """Wait; raise ConnectionAbortedError if the Hub stops during the wait."""
        if self._stopping.wait(seconds):
            raise ConnectionAbortedError


def link_key(file: File) -> str:
    """Return the name of an LFS file on the CDN; it includes the path, because faults match the path."""
    return hashlib.sha256(f"{file.sha256} {file.path}".encode("utf-8", "surrogatepass")).hexdigest()


def signature(key: str, expires: str) -> str:
    """Return the signature of a link."""
    return hmac.new(SECRET, f"{key} {expires}".encode(), "sha256").hexdigest()
