"""Metrics of this process in Prometheus' text format: served on a port, written to a file, pushed to a Pushgateway.

A `MetricsExporter` has the metrics of one command. The numbers come from collectors: `engine.metrics` for the data
stages, `train.runtime.metrics` for a run. They read counters that exist anyway, and compute nothing until a scrape.

    served on a port   for pods, which Prometheus scrapes
    written to a file  every 15 s and at the end, for the textfile collector of node_exporter
    pushed             at the end, for a Job that ends between two scrapes
"""

import os
import re
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import unquote

from tokenmill import __version__
from tokenmill.errors import RequestError

if TYPE_CHECKING:
    from prometheus_client import Metric

WRITE_SECONDS = 15.0
"""Interval of the writes to the file; that of Prometheus' scrapes by default is a minute or less."""
PUSH_SECONDS = 5.0
"""Time for a push: the name of the host, the connection, the request and the response."""

_FILE_START = b"# HELP "
_OWN_LABELS = frozenset(
    ("fault", "framework", "gpus", "kind", "model", "node", "nodes", "plan", "reason", "release", "stage", "state")
) | {"version", "worker", "workers"}
"""Labels of the metrics themselves, which the labels of a group would replace."""

_PUSH_URL = re.compile(
    r"(?P<url>https?://[^\s@?#]+?)(?:/metrics/job/(?P<job>[^\s@?#/]+)(?P<labels>(?:/[a-zA-Z_]\w*/[^\s@?#/]+)*))?/?"
)
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]*)\]|([A-Za-z0-9.-]*)):([0-9]{1,5})")


class Collector(Protocol):
    """The source of some metrics."""

    def collect(self) -> "Iterable[Metric]":
        """Return the metrics at this moment."""


class ListenAddress(NamedTuple):
    """An address to serve metrics on; an empty host is every interface."""

    host: str
    port: int


class PushTarget(NamedTuple):
    """A Pushgateway, and the labels by which it groups the metrics."""

    url: str
    job: str = ""
    """The label job; that of the command if empty."""
    labels: tuple[tuple[str, str], ...] = ()


class MetricsTarget(NamedTuple):
    """The destinations of a command's metrics, all of them optional."""

    listen: ListenAddress | None = None
    file: Path | None = None
    push: PushTarget | None = None


def parse_listen_address(text: str) -> ListenAddress:
    """Parse [HOST]:PORT, such as :9464 or 127.0.0.1:9464.

    Raises:
        ValueError: the text is not such an address.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise ValueError(f"{text!r} is not an address; write it as :9464 or 127.0.0.1:9464")
    return ListenAddress(match[1] or match[2] or "", int(match[3]))


def parse_push_url(text: str) -> PushTarget:
    """Parse the URL of a Pushgateway: the base, or with a group, such as http://HOST:9091/metrics/job/NAME/LABEL/VALUE.

    It contains no password, because other processes can read arguments.

    Raises:
        ValueError: the text is not such a URL.
    """
    match = _PUSH_URL.fullmatch(text)
    if match is None or (match["job"] is None and "/metrics/" in text):
        raise ValueError(
            "not the URL of a Pushgateway; write it as http://HOST:9091 or "
            "http://HOST:9091/metrics/job/NAME/LABEL/VALUE, without a user or password"
        )
    parts = [unquote(part) for part in (match["labels"] or "").split("/")[1:]]
    if used := sorted(_OWN_LABELS & set(parts[::2])):
        raise ValueError(f"the metrics have the label {used[0]} themselves; remove it from the URL")
    return PushTarget(match["url"], unquote(match["job"] or ""), tuple(zip(parts[::2], parts[1::2], strict=True)))


def _check_file(path: Path) -> None:
    """Check that a path is free, or a file with metrics: a rename would replace a device, a link, or a user's data."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_file():
        raise RequestError(f"{path} is not a regular file; specify another one with --metrics-file")
    with path.open("rb") as file:
        start = file.read(len(_FILE_START))
    if start not in (b"", _FILE_START):
        raise RequestError(f"{path} exists and contains no metrics; specify another file with --metrics-file")


class MetricsExporter:
    """Gives the metrics of collectors to Prometheus while the context is open, and for the last time at its end."""

    def __init__(
        self,
        target: MetricsTarget,
        job: str,
        collectors: Iterable[Collector],
        warn: Callable[[str], None],
        *,
        required: bool = True,
    ) -> None:
        """Name the destinations, the job label of a push, and the collectors.

        `warn` gets failures after the start, and also those at the start if the metrics are not `required`.
        """
        self._target, self._job, self._warn, self._required = target, job, warn, required
        self._collectors = list(collectors)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._close_server: Callable[[], None] = lambda: None

    def __enter__(self) -> "MetricsExporter":
        """Start to serve and to write.

        Raises:
            RequestError: the port cannot be opened, or the file cannot be written.
        """
        if not any(self._target):
            return self
        from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        Gauge(
            "tokenmill_build_info", "Version of tokenmill; the value is always 1.", ["version"], registry=self._registry
        ).labels(__version__).set(1)
        for collector in self._collectors:
            self._registry.register(collector)
        try:
            self._start()
        except Exception as error:
            self._close_server()
            if self._required:
                raise
            self._warn(str(error))
        return self

    def _start(self) -> None:
        if self._target.listen:
            self._serve(self._target.listen)
        if self._target.file:
            try:
                _check_file(self._target.file)
                self._write(self._target.file)
            except OSError as error:
                raise RequestError(
                    f"cannot write metrics to {self._target.file}: {error.strerror}; specify a file in an existing "
                    "directory with --metrics-file"
                ) from None
            self._thread = threading.Thread(target=self._write_at_intervals, args=(self._target.file,), daemon=True)
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write and push the last values, and stop."""
        if not any(self._target):
            return
        self._ended.set()
        if self._thread:
            self._thread.join()
        self.publish()
        self._close_server()

    def publish(self) -> None:
        """Write and push the metrics now."""
        if self._thread:
            self._try("write metrics", lambda: self._write(self._target.file))
        if push := self._target.push:
            self._try("push metrics", lambda: self._push(push))

    def _serve(self, address: ListenAddress) -> None:
        from prometheus_client import start_http_server

        host = address.host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")  # noqa: S104 - a pod's address
        try:
            server, thread = start_http_server(address.port, host, self._registry)
        except (OSError, UnicodeError) as error:  # UnicodeError: a host that no name can have, such as a..b
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise RequestError(
                f"cannot serve metrics on {host} port {address.port}: {reason}; choose another "
                "address with --metrics-listen"
            ) from None

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._close_server = close

    def _write_at_intervals(self, path: Path) -> None:
        while not self._ended.wait(WRITE_SECONDS):
            self._try("write metrics", lambda: self._write(path))

    def _write(self, path: Path | None) -> None:
        from prometheus_client import write_to_textfile

        write_to_textfile(str(path), self._registry)  # a temporary file, then a rename

    def _push(self, push: PushTarget) -> None:
        from prometheus_client import push_to_gateway

        group = {"instance": socket.gethostname(), **dict(push.labels)}
        failures: list[Exception] = []

        def send() -> None:
            try:
                push_to_gateway(push.url, push.job or self._job, self._registry, group, timeout=PUSH_SECONDS)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=send, daemon=True)  # the timeout above applies to each read of the response
        thread.start()
        thread.join(PUSH_SECONDS)
        if thread.is_alive():
            raise TimeoutError(f"the Pushgateway did not respond within {PUSH_SECONDS:.0f} s")
        if failures:
            raise failures[0]

    def _try(self, action: str, call: Callable[[], None]) -> None:
        """Call a function, and only warn if it fails: metrics never change the result of a command."""
        try:
            call()
        except Exception as error:
            self._warn(f"could not {action}: {error}")
