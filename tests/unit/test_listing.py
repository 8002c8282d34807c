"""Wrong listings: no plan uses an invalid one; the same command recovers from an error that appears later."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from support.commandline import CommandResult, data_of, tokenmill
from support.corpus import TOKENIZER
from support.hub import Hub

pytestmark = pytest.mark.slow

FILES = {f"{name}.jsonl": b'{"text": "%s"}\n' % name.encode() * 50 for name in "abc"}
URI = "hf://datasets/org/c"

Corrupt = Callable[[Any], Any]


class Front(ThreadingHTTPServer):
    """A proxy of a Hub that corrupts the next `left` listings, and does not change the files."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub
        self.corrupt: Corrupt = lambda page: page
        self.left = 0
        self.requests = 0
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        front: Any = self.server
        headers = {name: value for name, value in self.headers.items() if name in ("Range", "Authorization")}
        with urlopen(Request(front.hub.endpoint + self.path, headers=headers)) as response:
            data, status, response_headers = response.read(), response.status, dict(response.headers)
        if "/tree/" in self.path:
            front.requests += 1
            if front.left:
                front.left -= 1
                page = front.corrupt(json.loads(data))
                data = page if isinstance(page, bytes) else json.dumps(page).encode()
        self.send_response(status)
        for name in ("ETag", "Content-Range", "X-Repo-Commit"):
            if name in response_headers:
                self.send_header(name, response_headers[name])
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def front() -> Iterator[Front]:
    with Hub() as hub:
        hub.add_dataset("org/c", FILES, lfs=["b.jsonl"])
        with Front(hub) as proxy:
            yield proxy
            proxy.shutdown()


def download(front: Front, output: Path, corrupt: Corrupt, times: int, *more: Any) -> CommandResult:
    front.corrupt, front.left, front.requests = corrupt, times, 0
    return tokenmill("download", URI, output, "--deadline", 40, *more, HF_ENDPOINT=front.endpoint)


def change_second(**changes: Any) -> Corrupt:
    return lambda page: [page[0], page[1] | changes, *page[2:]]


INVALID: dict[str, Corrupt] = {
    "a negative size": change_second(size=-5),
    "a size that is text": change_second(size="700"),
    "a size that is true": change_second(size=True),
    "a size beyond all disks": change_second(size=1 << 70),
    "two sizes": change_second(lfs={"oid": "0" * 64, "size": 3, "pointerSize": 5}),
    "no path": lambda page: [{key: value for key, value in page[0].items() if key != "path"}, *page[1:]],
    "a path that is a number": change_second(path=5),
    "a path twice": lambda page: [*page, page[0] | {"size": 3}],
    "a hash of other digits": change_second(lfs=None, oid="x" * 40),
    "a hash that is cut": change_second(lfs={"oid": "0" * 63}),
    "an entry that is none": lambda page: [*page, None],
    "a page that is cut": lambda page: json.dumps(page).encode()[:-40],
    "a page that is no list": lambda page: {"error": "try later"},
}


@pytest.mark.parametrize("kind", INVALID)
def test_invalid_listing_is_requested_again(kind: str, front: Front, tmp_path: Path) -> None:
    ended = download(front, tmp_path / "out", INVALID[kind], 1)
    assert ended.code == 0, ended.err
    assert "retrying in" in ended.err and front.requests == 2
    assert data_of(tmp_path / "out") == FILES


def test_listing_that_stays_invalid_makes_no_plan(front: Front, tmp_path: Path) -> None:
    ended = download(front, tmp_path / "out", INVALID["a negative size"], 99)
    assert ended.code == 1 and ("is still invalid" in ended.err or "deadline" in ended.err)
    assert not (tmp_path / "out/.tokenmill/download/plan.json").exists()
    assert download(front, tmp_path / "out", change_second(), 0).code == 0
    assert data_of(tmp_path / "out") == FILES


WRONG: dict[str, Corrupt] = {
    "a size too small": lambda page: [page[0] | {"size": 10}, *page[1:]],
    "a size too large": lambda page: [page[0] | {"size": 70_000}, *page[1:]],
    "another hash": lambda page: [page[0] | {"oid": "0" * 40}, *page[1:]],
    "a file that is not there": lambda page: [*page, page[0] | {"path": "d.jsonl"}],
    "another name": lambda page: [page[0] | {"path": "d.jsonl"}, *page[1:]],
    "a hash of another in LFS": change_second(lfs={"oid": "0" * 64}),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_plan_of_a_wrong_listing_is_replaced_by_the_same_command(kind: str, front: Front, tmp_path: Path) -> None:
    """The same run makes the new plan, because the second listing is correct."""
    # A missing file is retried until the deadline.
    ended = download(front, tmp_path / "now", WRONG[kind], 1, "--deadline", 10)
    assert ended.code == 0, ended.err
    assert "making a new plan" in ended.err
    assert data_of(tmp_path / "now") == FILES


def test_a_plan_of_a_listing_that_stayed_wrong_is_replaced_later(front: Front, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = download(front, out, WRONG["a size too large"], 99)
    assert ended.code == 1 and "70000 were listed" in ended.err
    kept = (out / ".tokenmill/download/receipts/b.jsonl.json").stat().st_mtime_ns
    ended = download(front, out, change_second(), 0)
    assert ended.code == 0, ended.err
    assert data_of(out) == FILES
    assert kept != 0 and tokenmill("verify", out).code == 0


def test_stream_gets_a_new_plan(front: Front, tmp_path: Path) -> None:
    def run(output: Path) -> CommandResult:
        arguments = ["--tokenizer", TOKENIZER, "--processes", 1, "--deadline", 40]
        return tokenmill("preprocess", URI, output, *arguments, HF_ENDPOINT=front.endpoint)

    front.corrupt, front.left = WRONG["another hash"], 1
    ended = run(tmp_path / "out")
    assert ended.code == 0, ended.err
    assert "making a new plan" in ended.err
    front.left = 0
    assert run(tmp_path / "right").code == 0
    assert data_of(tmp_path / "out") == data_of(tmp_path / "right")


def test_corrupt_file_is_refused_with_a_correct_listing(front: Front, tmp_path: Path) -> None:
    """The download requests the listing again, and does not make a new plan."""
    from support.hub import Fault

    front.hub.faults.add(Fault("flip", path="a.jsonl", times=None))
    ended = download(front, tmp_path / "out", change_second(), 0)
    assert ended.code == 1 and "sends wrong bytes" in ended.err and "making a new plan" not in ended.err
    assert sorted(data_of(tmp_path / "out")) == ["b.jsonl", "c.jsonl"] and front.requests == 2
