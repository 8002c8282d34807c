"""One file of a source to a local path: through faults, from where it stopped, and right or not at all."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenmill.corpus.fetch import fetch_to
from tokenmill.corpus.source import Patience, RemoteFile, open_source
from tokenmill.errors import RequestError, Stopped, TransientError
from tokenmill.testhub import Fault, Hub

CONTENT = bytes(range(251)) * 8000
URI = "hf://datasets/org/c"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.corpus.fetch.BACKOFF_SECONDS", (0.01, 0.05))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as made:
        made.add_dataset("org/c", {"a.zst": CONTENT, "b.jsonl": CONTENT[:5000]})
        yield made


class Fetched:
    """A source, what it lists, and what was reported while it was fetched."""

    def __init__(self, hub: Hub, uri: str = URI) -> None:
        self.source = open_source(uri, stall_seconds=0.5, endpoint=hub.endpoint)
        listing = self.source.list(None, Patience(time.monotonic() + 10))
        self.revision = listing.revision
        self.files = {file.path: file for file in listing.files}
        self.reported: list[int] = []

    def to(self, path: Path, name: str = "a.zst", seconds: float = 20, **more: Any) -> bytes:
        file = self.files[name]
        until = time.monotonic() + seconds
        more.setdefault("checkpoint", self.reported.append)
        fetch_to(self.source, file, self.revision, path, give_up_at=until, **more)
        return path.read_bytes()


def test_a_file_arrives_through_faults(hub: Hub, tmp_path: Path) -> None:
    fetched = Fetched(hub)
    hub.faults.add(Fault("cut"), Fault("503"), Fault("flip", where="cdn", after=2), Fault("reset"))
    assert fetched.to(tmp_path / "a") == CONTENT
    assert fetched.to(tmp_path / "b", "b.jsonl") == CONTENT[:5000]
    assert sum(fetched.reported) == len(CONTENT) + 5000


@pytest.mark.parametrize("left", [CONTENT[:700_000], b"wrong" * 1000, CONTENT + b"more", CONTENT, b""])
def test_what_a_dead_attempt_left_is_gone_on_from_or_thrown_away(hub: Hub, tmp_path: Path, left: bytes) -> None:
    fetched = Fetched(hub)
    (tmp_path / "a").write_bytes(left)
    hub.requests.clear()
    assert fetched.to(tmp_path / "a") == CONTENT
    assert sum(fetched.reported) == len(CONTENT)
    asked = [request.headers["Range"] for request in hub.requests if request.kind == "cdn"]
    if left == CONTENT:
        assert not asked
    elif left == CONTENT[:700_000]:
        assert asked == ["bytes=700000-"]


def test_without_a_hash_nothing_of_an_earlier_attempt_is_trusted(hub: Hub, tmp_path: Path) -> None:
    fetched = Fetched(hub, f"{hub.endpoint}/datasets/org/c/resolve/main/a.zst")
    (tmp_path / "a").write_bytes(b"x" * 1000)
    assert fetched.to(tmp_path / "a") == CONTENT


def test_a_file_that_stays_wrong_leaves_nothing_to_go_on_from(hub: Hub, tmp_path: Path) -> None:
    fetched = Fetched(hub)
    hub.faults.add(Fault("flip", where="cdn", times=None))
    with pytest.raises(TransientError, match=r"sha256 is .* after 3 whole downloads"):
        fetched.to(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b""


def test_refused_for_good_and_out_of_time(hub: Hub, tmp_path: Path) -> None:
    fetched = Fetched(hub)
    hub.faults.add(Fault("403", where="cdn", times=None), Fault("503", path="b.jsonl", times=None))
    with pytest.raises(RequestError, match="HF_TOKEN"):
        fetched.to(tmp_path / "a")
    with pytest.raises(TransientError, match="deadline"):
        fetched.to(tmp_path / "b", "b.jsonl", seconds=0.5)


def test_who_is_told_of_progress_can_stop_it_and_what_came_is_kept(hub: Hub, tmp_path: Path) -> None:
    fetched = Fetched(hub)

    def stop(count: int) -> None:
        if count > 0:
            raise Stopped("enough")

    with pytest.raises(Stopped):
        fetched.to(tmp_path / "a", checkpoint=stop)
    came = (tmp_path / "a").read_bytes()
    assert 0 < len(came) < len(CONTENT) and CONTENT.startswith(came)
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
def test_a_plan_says_of_a_file_all_that_is_known(file: RemoteFile) -> None:
    assert RemoteFile.of_spec(file.spec()) == file
    assert None not in [value for key, value in file.spec().items() if key != "bytes"]
