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

SECRET = b"tokenmill test hub"  # links survive a restart; nothing here is worth guarding


class Door(ThreadingHTTPServer):
    """Listen on one port, and know its connections so that all of them can be ended."""

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
        """Bind without looking up the host's name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own."""
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
        """Stop listening, break every connection and wait for its thread."""
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
    """Serve repositories as the Hugging Face Hub does, between start() and stop() or as a context.

    `port` and `cdn_port` 0 take free ports, which are kept over stop() and start(). `public_host` is
    the name clients use where it is not `host`. With `token`, everything but the CDN wants it.
    `rate_limit` (requests, seconds) answers 429 to further resolve requests in a fixed window. Signed
    links hold for `link_seconds`. With `xet`, LFS files are in Xet storage too. `on_request` is called
    with every request before it is answered.
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
        self._doors: list[Door] = []
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
        """Listen on both ports; raise OSError where one is taken."""
        self._stopping.clear()
        self._doors.append(Door(self, self.port, cdn=False))
        try:
            self._doors.append(Door(self, self.cdn_port, cdn=True))
        except OSError:
            self.stop()
            raise
        self.port, self.cdn_port = (door.port for door in self._doors)

    def stop(self) -> None:
        """Stop listening and end every connection; when it returns no thread is left."""
        self._stopping.set()
        while self._doors:
            self._doors.pop().stop()

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT is to be."""
        return f"http://{self.public_host}:{self.port}"

    @property
    def cdn_endpoint(self) -> str:
        """Where LFS files are; a port of its own, so another origin."""
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
        """Commit the files to a branch, which they replace, and return the commit's name.

        `lfs` is every file (True), none (False), the named ones, or by default those of 1 MiB or more
        and those with a suffix of compressed or binary data. Older commits stay.
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
        """Do the same as add_dataset for a model, which is where tokenizers are."""
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
        """Move a branch to a commit of the same names with other contents."""
        names = repo.commits[repo.branches[branch]].files
        self._add(repo.type, repo.id, dict.fromkeys(names, b"moved\n"), branch=branch, lfs=None, gated=repo.gated)

    def find(self, repo_type: RepoType, repo_id: str) -> Repository | None:
        """Return a repository."""
        return self._repositories.get((repo_type, repo_id))

    def record(self, request: Request) -> None:
        """Note a request that has arrived."""
        self.requests.append(request)
        if self.on_request:
            self.on_request(request)

    def admit(self) -> tuple[int, float] | None:
        """Count a resolve request: how many were left in this window, and the seconds to its end."""
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

    def signed(self, file: File, link: str) -> bool:
        """Say whether a link to the file is signed and has not expired."""
        arguments = parse_qs(link.partition("?")[2])
        expires = arguments.get("Expires", [""])[0]
        given = arguments.get("Signature", [""])[0]
        return (
            hmac.compare_digest(given.encode(), signature(link_key(file), expires).encode())
            and float(expires) > time.time()
        )

    def sleep(self, seconds: float) -> None:
        """Wait; raise ConnectionAbortedError where the Hub is stopped meanwhile."""
        if self._stopping.wait(seconds):
            raise ConnectionAbortedError


def link_key(file: File) -> str:
    """Return the name an LFS file has on the CDN: of its path too, so that faults find it by path."""
    return hashlib.sha256(f"{file.sha256} {file.path}".encode("utf-8", "surrogatepass")).hexdigest()


def signature(key: str, expires: str) -> str:
    """Return what proves that a link was made here."""
    return hmac.new(SECRET, f"{key} {expires}".encode(), "sha256").hexdigest()
