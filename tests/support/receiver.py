"""A receiver of announcements: an HTTP or HTTPS server that records requests, with faults."""

import json
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Request:
    """A request that the receiver got."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        """Return the content as JSON."""
        return json.loads(self.content)


@dataclass
class Receiver:
    """The state of a receiver: `answer` returns the status and headers of a response."""

    port: int = 0
    scheme: str = "http"
    answer: Callable[[Request], tuple[int, dict[str, str]]] = lambda request: (200, {})
    content: bytes = b"ok"
    pause: float = 0.0
    """Seconds before a response."""
    requests: list[Request] = field(default_factory=list)
    received: threading.Event = field(default_factory=threading.Event)
    """Set at the first request, before its response."""

    @property
    def url(self) -> str:
        """Return an address with a path that is a secret, as that of Slack."""
        return f"{self.scheme}://127.0.0.1:{self.port}/services/T0PLANTED/B0PLANTED/plantedsecret0123456789"

    @property
    def messages(self) -> list[Any]:
        """Return the content of all requests that had a POST."""
        return [request.json for request in self.requests if request.method == "POST"]

    def wait(self, count: int, seconds: float = 30) -> None:
        """Wait until there are this many requests."""
        deadline = time.monotonic() + seconds
        while len(self.requests) < count:
            assert time.monotonic() < deadline, self.requests
            time.sleep(0.02)


def statuses(*codes: int, headers: dict[str, str] | None = None) -> Callable[[Request], tuple[int, dict[str, str]]]:
    """Return an answer with these codes, one for each request, and the last one for all others."""
    left = list(codes)
    return lambda request: (left.pop(0) if len(left) > 1 else left[0], headers or {})


@contextmanager
def receiving(receiver: Receiver | None = None, certificate: Path | None = None) -> Iterator[Receiver]:
    """Serve a receiver; `certificate` is a PEM file with a key and a certificate."""
    receiver = receiver or Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(self.command, self.path, dict(self.headers.items()), content)
            receiver.requests.append(request)
            receiver.received.set()
            time.sleep(receiver.pause)
            code, headers = receiver.answer(request)
            try:
                self.send_response(code)
                for name, value in {"Content-Length": str(len(receiver.content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(receiver.content)
            except OSError:
                self.close_connection = True

        do_POST = do_GET = _handle

        def log_message(self, format: str, *args: Any) -> None:
            """Write no log."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore clients that close a connection."""

    with Server(("127.0.0.1", receiver.port), Handler) as server:
        receiver.port = server.server_port
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
            receiver.scheme = "https"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield receiver
        finally:
            server.shutdown()


def make_certificate(path: Path, host: str = "127.0.0.1") -> Path:
    """Write a self-signed certificate with its key to a file."""
    kind = "IP" if host.replace(".", "").isdigit() else "DNS"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=receiver", "-addext", f"subjectAltName={kind}:{host}"),
            *("-keyout", str(path), "-out", f"{path}.crt"),
        ],
        check=True,
        capture_output=True,
    )
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path
