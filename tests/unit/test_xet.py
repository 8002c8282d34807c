"""Downloads from Xet storage with the Hub's client, and the fallback to the CDN."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.commandline import CommandResult, data_of, finish, start, tokenmill
from support.hub import Fault, Hub
from tokenmill.errors import Stopped
from tokenmill.sources.factory import open_source
from tokenmill.sources.fetch import fetch_to
from tokenmill.sources.retry import RetryPolicy

pytestmark = pytest.mark.slow

pytest.importorskip("hf_xet")

URI = "hf://datasets/org/c"
BIG = os.urandom(3_300_001)
FILES = {"big.jsonl.zst": BIG, **{f"{n}.jsonl.zst": BIG[n : n + 70_000] for n in range(6)}, "plain.jsonl": b"{}\n"}
FAILED = "Xet storage failed"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(xet=True) as server:
        server.add_dataset("org/c", FILES)
        yield server


def download(hub: Hub, output: Path, *more: Any, **environment: str) -> CommandResult:
    return tokenmill("download", URI, output, "--stall-seconds", 2, *more, hub=hub, **environment)


def kinds(hub: Hub) -> dict[str, int]:
    requested = [request.kind for request in hub.requests]
    return {kind: requested.count(kind) for kind in set(requested)}


def test_a_download_from_xet_uses_one_token_and_no_quota(hub: Hub, tmp_path: Path) -> None:
    result = download(hub, tmp_path / "out")
    assert result.code == 0, result.err
    assert data_of(tmp_path / "out") == FILES and FAILED not in result.err
    assert [request.file for request in hub.requests if request.kind in ("resolve", "cdn")] == ["plain.jsonl"]
    assert sum("xet-read-token" in request.path for request in hub.requests) == 1
    assert not any("telemetry" in request.path for request in hub.requests)


def test_the_hubs_variable_disables_xet(hub: Hub, tmp_path: Path) -> None:
    assert download(hub, tmp_path / "out", HF_HUB_DISABLE_XET="1").code == 0
    assert data_of(tmp_path / "out") == FILES and "xet" not in kinds(hub)


def test_a_private_repository(tmp_path: Path) -> None:
    with Hub(xet=True, token="hf_secret", link_seconds=3) as private:  # the short lifetime requires new tokens
        private.add_dataset("org/c", FILES)
        result = download(private, tmp_path / "out", HF_TOKEN="hf_secret")
        assert result.code == 0, result.err
        assert data_of(tmp_path / "out") == FILES and FAILED not in result.err
        for request in private.requests:
            secret = "hf_secret" in (request.headers["Authorization"] or "")
            assert secret == (request.path.startswith(("/api", "/datasets")))


@pytest.mark.parametrize(
    "fault",
    [
        Fault("404", where="xet", path="", times=None),
        Fault("503", where="xet", times=None, path="big*"),
        Fault("404", where="xet", times=None, path="?.jsonl.zst"),
        Fault("cut", where="xet", times=None, after=1, path="big*"),
        Fault("drop", where="xet", times=None, path="big*"),
        Fault("stall", where="xet", times=None, after=2, path="big*", seconds=60),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.path}",
)
def test_an_error_of_xet_is_reported_once_and_the_cdn_used(hub: Hub, tmp_path: Path, fault: Fault) -> None:
    hub.faults.add(fault)
    result = download(hub, tmp_path / "out")
    assert result.code == 0, result.err
    assert data_of(tmp_path / "out") == FILES
    assert result.err.count(FAILED) == 1
    assert kinds(hub)["cdn"]


def test_wrong_bytes_from_xet_are_replaced_from_the_cdn(hub: Hub, tmp_path: Path) -> None:
    hub.faults.add(Fault("flip", where="xet", times=None, after=1, at=50_000, path="big*"))
    result = download(hub, tmp_path / "out")
    assert result.code == 0, result.err
    assert data_of(tmp_path / "out") == FILES
    assert [request.file for request in hub.requests if request.kind == "cdn"] == ["big.jsonl.zst"]


class Fetch:
    """A source, and the listed file that the tests fetch."""

    def __init__(self, hub: Hub, **more: Any) -> None:
        self.warned: list[str] = []
        self.source = open_source(URI, stall_seconds=60, endpoint=hub.endpoint, warn=self.warned.append)
        listing = self.source.list(None, RetryPolicy(time.monotonic() + 10))
        self.revision, (self.file,) = listing.revision, [f for f in listing.files if f.path == "big.jsonl.zst"]

    def to(self, path: Path, on_progress: Any = lambda _: None) -> bytes:
        deadline = time.monotonic() + 30
        fetch_to(self.source, self.file, self.revision, path, deadline=deadline, on_progress=on_progress)
        return path.read_bytes()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("home")
def test_xet_resumes_from_any_byte(hub: Hub, tmp_path: Path) -> None:
    fetch = Fetch(hub)
    for kept in (1, 65_536, 1_234_567, len(BIG) - 1):
        (tmp_path / "a").write_bytes(BIG[:kept])
        assert fetch.to(tmp_path / "a") == BIG
    spans = [request.headers["Range"] for request in hub.requests if "reconstructions" in request.path]
    assert len(spans) >= 4 and spans[-1].startswith(f"bytes={len(BIG) - 1}-")
    assert "cdn" not in kinds(hub) and not fetch.warned


@pytest.mark.usefixtures("home")
def test_a_wait_for_silent_storage_can_be_stopped(hub: Hub, tmp_path: Path) -> None:
    hub.faults.add(Fault("stall", where="xet", times=None, path="big*", seconds=60))

    def stop(count: int) -> None:
        if not count:
            raise Stopped("enough")

    with pytest.raises(Stopped):
        Fetch(hub).to(tmp_path / "a", stop)
    assert BIG.startswith((tmp_path / "a").read_bytes())


@pytest.mark.usefixtures("home")
def test_without_the_client_the_cdn_is_used_silently(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hf_xet", None)
    fetch = Fetch(hub)
    assert fetch.to(tmp_path / "a") == BIG
    assert "xet" not in kinds(hub) and not fetch.warned


def test_a_killed_or_stopped_download_resumes(hub: Hub, tmp_path: Path) -> None:
    hub.faults.add(Fault("stall", where="xet", after=3, times=None, path="big*", seconds=300))
    for number in (signal.SIGTERM, signal.SIGKILL):
        hub.requests.clear()
        process = start("download", URI, tmp_path / "out", hub=hub)
        while not any(request.fault for request in hub.requests):
            assert process.poll() is None, "the download ended before the storage stalled"
            time.sleep(0.02)
        process.send_signal(number)
        assert finish(process).code == (143 if number == signal.SIGTERM else -number)
    hub.faults.clear()
    result = download(hub, tmp_path / "out")
    assert result.code == 0, result.err
    assert data_of(tmp_path / "out") == FILES and FAILED not in result.err
