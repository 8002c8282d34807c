"""Fetch one file of a source to a local path: through faults, with resume, and never with wrong bytes."""

import hashlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.commandline import data_of
from support.hub import Fault, Hub
from tokenmill.engine.contract import RemoteFile
from tokenmill.errors import RequestError, Stopped, TransientError
from tokenmill.sources.factory import open_source
from tokenmill.sources.fetch import ConnectionPool, fetch_to
from tokenmill.sources.retry import RetryPolicy
from tokenmill.sources.transfer import RateLimitGate

CONTENT = bytes(range(251)) * 8000
URI = "hf://datasets/org/c"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.sources.retry.BACKOFF_SECONDS", (0.01, 0.05))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        server.add_dataset("org/c", {"a.zst": CONTENT, "b.jsonl": CONTENT[:5000]})
        yield server


class Fetched:
    """A source, its listed files, and the progress that its fetches reported."""

    def __init__(self, hub: Hub, uri: str = URI) -> None:
        self.source = open_source(uri, stall_seconds=0.5, endpoint=hub.endpoint)
        listing = self.source.list(None, RetryPolicy(time.monotonic() + 10))
        self.revision = listing.revision
        self.files = {file.path: file for file in listing.files}
        self.reported: list[int] = []

    def to(self, path: Path, name: str = "a.zst", seconds: float = 20, **more: Any) -> bytes:
        file = self.files[name]
        deadline = time.monotonic() + seconds
        more.setdefault("on_progress", self.reported.append)
        fetch_to(self.source, file, self.revision, path, deadline=deadline, **more)
        return path.read_bytes()


def test_a_file_arrives_through_faults(hub: Hub, tmp_path: Path) -> None:
    fetched = Fetched(hub)
    hub.faults.add(Fault("cut"), Fault("503"), Fault("flip", where="cdn", after=2), Fault("reset"))
    assert fetched.to(tmp_path / "a") == CONTENT
    assert fetched.to(tmp_path / "b", "b.jsonl") == CONTENT[:5000]
    assert sum(fetched.reported) == len(CONTENT) + 5000


@pytest.mark.parametrize("left", [CONTENT[:700_000], b"wrong" * 1000, CONTENT + b"more", CONTENT, b""])
def test_partial_file_is_resumed_or_discarded(hub: Hub, tmp_path: Path, left: bytes) -> None:
    fetched = Fetched(hub)
    (tmp_path / "a").write_bytes(left)
    hub.requests.clear()
    assert fetched.to(tmp_path / "a") == CONTENT
    assert sum(fetched.reported) == len(CONTENT)
    ranges = [request.headers["Range"] for request in hub.requests if request.kind == "cdn"]
    if left == CONTENT:
        assert not ranges
    elif left == CONTENT[:700_000]:
        assert ranges == ["bytes=700000-"]


def test_partial_file_without_a_hash_is_discarded(hub: Hub, tmp_path: Path) -> None:
    fetched = Fetched(hub, f"{hub.endpoint}/datasets/org/c/resolve/main/a.zst")
    (tmp_path / "a").write_bytes(b"x" * 1000)
    assert fetched.to(tmp_path / "a") == CONTENT


def test_corrupt_file_is_not_kept(hub: Hub, tmp_path: Path) -> None:
    fetched = Fetched(hub)
    hub.faults.add(Fault("flip", where="cdn", times=None))
    with pytest.raises(TransientError, match=r"sha256 is .* after 3 complete downloads"):
        fetched.to(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b""


def test_permanent_refusal_and_deadline(hub: Hub, tmp_path: Path) -> None:
    fetched = Fetched(hub)
    hub.faults.add(Fault("403", where="cdn", times=None), Fault("503", path="b.jsonl", times=None))
    with pytest.raises(RequestError, match="HF_TOKEN"):
        fetched.to(tmp_path / "a")
    with pytest.raises(TransientError, match="deadline"):
        fetched.to(tmp_path / "b", "b.jsonl", seconds=0.5)


def test_progress_callback_can_stop_and_bytes_are_kept(hub: Hub, tmp_path: Path) -> None:
    fetched = Fetched(hub)

    def stop(count: int) -> None:
        if count > 0:
            raise Stopped("enough")

    with pytest.raises(Stopped):
        fetched.to(tmp_path / "a", on_progress=stop)
    received = (tmp_path / "a").read_bytes()
    assert 0 < len(received) < len(CONTENT) and CONTENT.startswith(received)
    assert fetched.to(tmp_path / "a") == CONTENT


@pytest.mark.parametrize(
    "file",
    [
        RemoteFile("a", 1, sha256=hashlib.sha256(b"a").hexdigest()),
        RemoteFile("b", 0, git_sha1="0" * 40),
        RemoteFile("c", None, version='"etag"'),
        RemoteFile("d", None),
    ],
)
def test_plan_keeps_all_fields_of_a_file(file: RemoteFile) -> None:
    assert RemoteFile.from_json(file.to_json()) == file
    assert None not in [value for key, value in file.to_json().items() if key != "bytes"]


# -- large files, in parts

BIG = os.urandom(1_900_000)
SMALLER = (
    "import tokenmill.sources.fetch as f, tokenmill.sources.retry as r; "
    "f.PART_BYTES = 1 << 16; f.MIN_DIVIDED_BYTES = 1 << 18; "
    "r.BACKOFF_SECONDS = (0.01, 0.05)"
)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Hub:
    """Lower the limits, so that a small file counts as large."""
    monkeypatch.setattr("tokenmill.sources.fetch.PART_BYTES", 1 << 16)
    monkeypatch.setattr("tokenmill.sources.fetch.MIN_DIVIDED_BYTES", 1 << 18)
    hub.add_dataset("org/c", {"big.zst": BIG, "small.zst": BIG[:100_000]})
    return hub


def requested_ranges(hub: Hub) -> list[str | None]:
    return [request.headers["Range"] for request in hub.requests if request.kind == "cdn"]


def test_large_file_uses_spare_connections_and_is_located_once(parts: Hub, tmp_path: Path) -> None:
    fetched = Fetched(parts)
    assert fetched.to(tmp_path / "a", "big.zst", pool=ConnectionPool(4)) == BIG
    assert sum(fetched.reported) == len(BIG)
    assert sorted(requested_ranges(parts)) == sorted(
        f"bytes={n}-{min(n + 65535, len(BIG) - 1)}" for n in range(0, len(BIG), 1 << 16)
    )
    assert [request.kind for request in parts.requests].count("resolve") == 1
    clients = {request.client for request in parts.requests if request.kind == "cdn"}
    assert 2 <= len(clients) <= 5  # four threads at a time, and the first one


def test_no_part_is_requested_twice(parts: Hub, tmp_path: Path) -> None:
    written = [0]

    def on_progress(count: int) -> None:
        written[0] += count
        if written[0] == 4 << 16:  # the four threads request up to six parts ahead, and wait
            wait_for(lambda: len(requested_ranges(parts)) >= 10)

    Fetched(parts).to(tmp_path / "a", "big.zst", pool=ConnectionPool(4), on_progress=on_progress)
    assert len(requested_ranges(parts)) == len(set(requested_ranges(parts)))


def test_without_spare_connections_one_is_reused(parts: Hub, tmp_path: Path) -> None:
    pool = ConnectionPool(2)
    pool.acquire(lambda: None)
    assert Fetched(parts).to(tmp_path / "a", "big.zst", pool=pool) == BIG
    assert len({request.client for request in parts.requests if request.kind == "cdn"}) == 1
    parts.requests.clear()
    assert Fetched(parts).to(tmp_path / "b", "small.zst", pool=ConnectionPool(4)) == BIG[:100_000]
    assert Fetched(parts).to(tmp_path / "c", "big.zst") == BIG
    assert requested_ranges(parts) == [None, None]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("cut", where="cdn", after=3, times=4),
        Fault("cut", where="cdn", after=3, times=4, at=0),
        Fault("short", where="cdn", after=3, times=3),
        Fault("short", where="cdn", after=3, times=3, declared="none"),
        Fault("reset", where="cdn", after=2, times=5),
        Fault("drop", where="cdn", after=2, times=5),
        Fault("stall", where="cdn", after=4, seconds=20),
        Fault("flip", where="cdn", after=6),
        Fault("429", where="cdn", after=3, retry="seconds"),
        Fault("503", where="cdn", after=1, times=3),
        Fault("403", where="cdn", after=5, times=4),
        Fault("ignore_range", where="cdn"),
        Fault("ignore_range", where="cdn", after=5),
        Fault("ignore_range", where="cdn", after=5, times=3),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.after}-{fault.at}-{fault.declared}",
)
def test_a_large_file_arrives_through_faults(
    parts: Hub, tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed_at: list[float] = []

    def close_for(gate: RateLimitGate, seconds: float) -> None:
        original(gate, seconds)
        closed_at.append(time.monotonic())

    original = RateLimitGate.close_for
    monkeypatch.setattr(RateLimitGate, "close_for", close_for)
    fetched = Fetched(parts)
    parts.faults.add(fault)
    assert fetched.to(tmp_path / "a", "big.zst", pool=ConnectionPool(4)) == BIG
    assert sum(fetched.reported) == len(BIG)
    assert any(request.fault for request in parts.requests)
    limited = [request for request in parts.requests if request.retry_after]
    assert len(closed_at) == len(limited)
    for request, since in zip(limited, closed_at, strict=True):
        opens = request.time + (request.retry_after or 0) - 0.02
        early = [later for later in parts.requests if since < later.time < opens and later.kind == "cdn"]
        assert len(early) <= 4  # requests in flight when the client received the response


def test_expired_links_are_renewed(tmp_path: Path, parts: Hub) -> None:
    fetched = Fetched(parts)
    for number in range(3, 60, 4):
        parts.faults.add(Fault("403", where="cdn", path="big.zst", after=number))
    assert fetched.to(tmp_path / "a", "big.zst", pool=ConnectionPool(2)) == BIG
    assert [request.fault for request in parts.requests].count("403") > 5


def test_stop_during_parts_keeps_a_resumable_file(parts: Hub, tmp_path: Path) -> None:
    fetched = Fetched(parts)
    parts.faults.add(Fault("stall", where="cdn", after=6, seconds=60))

    def stop(count: int) -> None:
        if not count and any(request.fault for request in parts.requests):  # waiting for the stalled part
            raise Stopped("enough")

    fetched.source = open_source(URI, stall_seconds=60, endpoint=parts.endpoint)
    with pytest.raises(Stopped):
        fetched.to(tmp_path / "a", "big.zst", pool=ConnectionPool(4), on_progress=stop)
    left = (tmp_path / "a").read_bytes()
    assert BIG.startswith(left)
    assert fetched.to(tmp_path / "a", "big.zst", pool=ConnectionPool(4)) == BIG


def test_file_that_changes_during_the_fetch_is_refused(parts: Hub, tmp_path: Path) -> None:
    def change(request: Any) -> None:
        if sum(request.kind == "resolve" for request in parts.requests) == 6:
            parts.add_dataset("org/c", {"big.jsonl": BIG[::-1]}, lfs=False)

    parts.add_dataset("org/c", {"big.jsonl": BIG}, lfs=False)
    parts.on_request = change
    fetched = Fetched(parts, f"{parts.endpoint}/datasets/org/c/resolve/main/big.jsonl")
    with pytest.raises(RequestError, match="changed since it was planned"):
        fetched.to(tmp_path / "a", "big.jsonl", pool=ConnectionPool(3))


class WithoutRanges(http.server.BaseHTTPRequestHandler):
    """A server without support for ranges."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(BIG)))
        self.end_headers()
        self.wfile.write(BIG)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def test_a_large_file_of_a_server_without_ranges(parts: Hub, tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WithoutRanges) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        fetched = Fetched(parts, f"http://127.0.0.1:{server.server_port}/big.zst")
        assert fetched.to(tmp_path / "a", "big.zst", pool=ConnectionPool(4)) == BIG
        server.shutdown()


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while not (result := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
    return result


def test_killed_fetch_resumes_after_the_contiguous_bytes(hub: Hub, tmp_path: Path) -> None:
    hub.add_dataset("org/c", {"big.jsonl.zst": BIG})
    hub.faults.add(Fault("stall", where="cdn", after=7, seconds=60))
    command = [sys.executable, "-c", SMALLER + "; from tokenmill.cli import main; main()", "download", URI]
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)}
    process = subprocess.Popen([*command, str(tmp_path / "out")], env=environment, stderr=subprocess.PIPE)
    stalled = wait_for(lambda: next((request for request in hub.requests if request.fault), None))
    start = int(stalled.headers["Range"].removeprefix("bytes=").partition("-")[0])
    beyond = {f"bytes={start + n * 65536}-" for n in (1, 2)}
    wait_for(lambda: all(any((span or "").startswith(part) for span in requested_ranges(hub)) for part in beyond))
    left = wait_for(lambda: list((tmp_path / "out").rglob("data")))[0]
    wait_for(lambda: left.stat().st_size >= start)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = left.read_bytes()
    assert len(kept) < start + 65536 and BIG.startswith(kept)

    hub.requests.clear()
    done = subprocess.run(
        [*command, str(tmp_path / "out")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert data_of(tmp_path / "out") == {"big.jsonl.zst": BIG}
    assert min(int((span or "bytes=0-")[6:].partition("-")[0]) for span in requested_ranges(hub)) == len(kept)


def test_connections_outlive_files_and_redirects(hub: Hub, tmp_path: Path) -> None:
    names = [f"{number}.jsonl.zst" for number in range(40)]
    hub.add_dataset("org/c", {name: name.encode() * 100 for name in names})
    fetched = Fetched(hub)
    for name in names:
        fetched.to(tmp_path / name, name)
    assert len({request.client for request in hub.requests}) == 2  # the Hub's and the CDN's
