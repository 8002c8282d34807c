"""One file at an address, from servers that compress, send another page, name the file elsewhere, or break off."""

import bz2
import gzip
import lzma
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from support.commandline import CommandResult, data_of, run_many, tokenmill
from tokenmill.corpus.web import disposition_name

pytestmark = pytest.mark.slow

LINES = b"".join(b'{"text": "line %d of a corpus"}\n' % number for number in range(20_000))
HTML = b"\n<!DOCTYPE html><html><body>Please log in</body></html>"
ZST, GZ, BZ2, XZ = zstandard.compress(LINES), gzip.compress(LINES), bz2.compress(LINES), lzma.compress(LINES)
PACKED = {"gzip": GZ, "x-gzip": GZ, "zstd": ZST, "deflate": zlib.compress(LINES), "br": b"\x1b\x03\x01"}


class Answer(NamedTuple):
    """What a server sends: the length as it is unless it says none, and breaks off after `cut` bytes."""

    body: bytes
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed
    status: int = 200
    sized: bool = True
    chunked: bool = False
    cut: int | None = None


Script = Callable[[BaseHTTPRequestHandler, int], Answer]


class Server(ThreadingHTTPServer):
    """Answers each request as `script` says, given how many there were for its path."""

    script: Script
    asked: int = 0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        server.asked += 1
        answer: Answer = server.script(self, server.asked)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.chunked:
            self.protocol_version = "HTTP/1.1"
            self.send_header("Transfer-Encoding", "chunked")
        elif answer.sized:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        body = answer.body[: answer.cut]
        if answer.chunked:
            for start in range(0, len(body), 5000):
                piece = body[start : start + 5000]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n" if answer.cut is None else b"")
        else:
            self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        yield made
        made.shutdown()


def always(*answer: Any, **more: Any) -> Script:
    return lambda request, number: Answer(*answer, **more)


def download(server: Server, name: str, output: Path, script: Script, *more: Any) -> CommandResult:
    server.script, server.asked = script, 0
    return tokenmill("download", f"http://127.0.0.1:{server.server_port}/{name}", output, *more)


# -- Content-Encoding


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "zstd", "deflate"])
@pytest.mark.parametrize("sized", [True, False])
def test_what_a_server_compresses_is_stored_as_its_name_says(
    coding: str, sized: bool, server: Server, tmp_path: Path
) -> None:
    answer = always(PACKED[coding], {"Content-Encoding": coding}, sized=sized)
    ended = download(server, "b.jsonl", tmp_path / "out", answer)
    assert ended.code == 0, ended.err
    assert data_of(tmp_path / "out") == {"b.jsonl": LINES}


def test_two_codings_one_over_the_other(server: Server, tmp_path: Path) -> None:
    headers = {"Content-Encoding": "gzip, zstd"}
    assert download(server, "b.jsonl", tmp_path / "out", always(zstandard.compress(GZ), headers)).code == 0
    assert data_of(tmp_path / "out") == {"b.jsonl": LINES}


@pytest.mark.parametrize(
    ("name", "body", "coding"), [("b.jsonl.gz", GZ, "gzip"), ("b.jsonl.zst", ZST, "zstd"), ("b.jsonl", LINES, "utf-8")]
)
def test_a_coding_that_the_name_promises_or_that_is_none_changes_nothing(
    name: str, body: bytes, coding: str, server: Server, tmp_path: Path
) -> None:
    assert download(server, name, tmp_path / "out", always(body, {"Content-Encoding": coding})).code == 0
    assert data_of(tmp_path / "out") == {name: body}


def test_a_coded_answer_that_breaks_off_begins_again(server: Server, tmp_path: Path) -> None:
    headers = {"Content-Encoding": "gzip"}
    ended = download(
        server,
        "b.jsonl",
        tmp_path / "out",
        lambda request, number: Answer(GZ, headers, sized=number % 2 == 0, cut=None if number > 3 else 9000),
    )
    assert ended.code == 0, ended.err
    assert data_of(tmp_path / "out") == {"b.jsonl": LINES}


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, br", "nonsense"])
def test_a_coding_that_cannot_be_undone_is_refused_at_once(coding: str, server: Server, tmp_path: Path) -> None:
    ended = download(server, "b.jsonl", tmp_path / "out", always(PACKED["br"], {"Content-Encoding": coding}))
    assert ended.code == 2 and "which tokenmill did not request and cannot decode" in ended.err
    assert data_of(tmp_path / "out") == {} and server.asked == 1


# -- another page


@pytest.mark.parametrize(
    ("name", "body", "what"),
    [
        ("b.jsonl", HTML, "an HTML page"),
        ("b.jsonl.zst", HTML, "an HTML page"),
        ("b.parquet", b"\xef\xbb\xbf<html lang=en>...", "an HTML page"),
        ("b.jsonl", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "an XML document"),
        ("b.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "a Git LFS pointer"),
        ("b.jsonl.gz", b'{"error": "unauthorized"}', "JSON instead of gz data"),
        ("b.jsonl.gz", gzip.compress(GZ), "gz data that was compressed twice"),
        ("b.parquet", b'{"error": "not found"}', "JSON instead of parquet data"),
    ],
)
def test_a_page_in_place_of_data_is_refused(name: str, body: bytes, what: str, server: Server, tmp_path: Path) -> None:
    ended = download(server, name, tmp_path / "out", always(body, {"Content-Type": "text/html"}))
    assert ended.code == 2 and f"the server sent wrong content: {what}" in ended.err
    assert not (tmp_path / "out/.tokenmill/download/plan.json").exists()


def test_a_login_that_ends_after_the_plan_is_no_data(server: Server, tmp_path: Path) -> None:
    ended = download(
        server, "b.jsonl", tmp_path / "out", lambda request, number: Answer(LINES if number == 1 else HTML, sized=False)
    )
    assert ended.code == 2 and "the server sent wrong content: an HTML page, 5 times in a row" in ended.err
    assert data_of(tmp_path / "out") == {}


def test_text_that_only_looks_alike_is_data(server: Server, tmp_path: Path) -> None:
    for name, body in (("page.html", HTML), ("b.jsonl", b'{"text": "<html>"}\n'), ("notes.txt", b"<p>")):
        assert download(server, name, tmp_path / name, always(body, {"Content-Type": "text/html"})).code == 0
        assert data_of(tmp_path / name) == {name: body}


def test_the_same_kinds_in_a_stream(server: Server, tmp_path: Path) -> None:
    def script(request: BaseHTTPRequestHandler, number: int) -> Answer:
        return Answer(HTML) if "login" in request.path else Answer(GZ, {"Content-Encoding": "gzip"})

    server.script = script
    source = f"http://127.0.0.1:{server.server_port}"
    ended, _ = run_many(
        [
            ["preprocess", f"{source}/login.jsonl", str(tmp_path / "a"), "--tokenizer", "x"],
            ["preprocess", f"{source}/b.jsonl", str(tmp_path / "b"), "--tokenizer", "x"],
        ]
    )
    assert [each.code for each in ended] == [2, 2]
    assert "the server sent wrong content: an HTML page" in ended[0].err
    assert "does not report the size of b.jsonl; use tokenmill download" in ended[1].err


# -- names


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ('attachment; filename="b.jsonl"', "b.jsonl"),
        ("attachment; filename=b.jsonl.zst; size=5", "b.jsonl.zst"),
        ("attachment; filename=\"x\"; filename*=UTF-8''%C3%A9%20b.jsonl", "\u00e9 b.jsonl"),
        ('inline; filename="../../etc/passwd"', "passwd"),
        ('inline; filename="C:\\\\data\\\\b.jsonl"', "b.jsonl"),
        ("attachment; filename*=UTF-8''..%2F..%2Fb.jsonl", "b.jsonl"),
        ('attachment; filename="a\\"b.jsonl"', 'a"b.jsonl'),
        ('attachment; filename=".."', ""),
        ("attachment; filename*=UTF-8''a%00b%0a.jsonl", ""),
        ("attachment; filename*=nonsense''%C3%A9.jsonl", ""),
        ("inline", ""),
    ],
)
def test_the_name_of_a_content_disposition(header: str, name: str) -> None:
    assert disposition_name(header) == name


@pytest.mark.parametrize(
    ("path", "header", "stored"),
    [
        ("get?id=5", 'attachment; filename="b.jsonl"', "b.jsonl"),
        ("files/", 'attachment; filename="../../b.jsonl"', "b.jsonl"),
        ("?id=5", "attachment; filename*=UTF-8''c%20d.jsonl", "c%20d.jsonl"),
        ("a.jsonl", 'attachment; filename="b.jsonl"', "a.jsonl"),
        ("get", "inline", "get"),
    ],
)
def test_a_server_names_what_its_address_does_not(
    path: str, header: str, stored: str, server: Server, tmp_path: Path
) -> None:
    ended = download(server, path, tmp_path / "out", always(LINES, {"Content-Disposition": header}))
    assert ended.code == 0, ended.err
    assert data_of(tmp_path / "out") == {stored: LINES}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_an_address_that_nobody_names(server: Server, tmp_path: Path) -> None:
    for header in ('attachment; filename=".."', "attachment; filename*=UTF-8''%00"):
        ended = download(server, "files/", tmp_path / "out", always(LINES, {"Content-Disposition": header}))
        assert ended.code == 2 and "does not name a file, and neither does its server" in ended.err


# -- ends


def parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.table({"text": [f"line {number}" for number in range(5000)]}), sink)
    return bytes(sink.getvalue())


WHOLE = {
    "b.jsonl": LINES[:-1],
    "b.jsonl.zst": ZST,
    "b.jsonl.gz": GZ,
    "b.jsonl.bz2": BZ2,
    "b.jsonl.xz": XZ,
    "b.parquet": parquet(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_answer_without_length_that_is_cut_is_not_taken_for_whole(name: str, server: Server, tmp_path: Path) -> None:
    body = WHOLE[name]
    for cut in (len(body) // 2, len(body) - 1):
        ended = download(
            server,
            name,
            tmp_path / str(cut),
            lambda request, number, cut=cut: Answer(body, sized=False, cut=None if number > 3 else cut),  # type: ignore[misc]
        )
        assert ended.code == 0, ended.err
        assert data_of(tmp_path / str(cut)) == {name: body} and server.asked == 4
    ended = download(server, name, tmp_path / "never", always(body, sized=False, cut=len(body) // 2))
    assert (ended.code == 1 and "truncated" in ended.err) or "footer is missing" in ended.err
    assert data_of(tmp_path / "never") == {}


def test_chunks_without_an_end_and_an_answer_of_nothing(server: Server, tmp_path: Path) -> None:
    ended = download(
        server,
        "b.jsonl",
        tmp_path / "chunks",
        lambda request, number: Answer(LINES, chunked=True, cut=10_000 if number == 2 else None),
    )
    assert ended.code == 0 and data_of(tmp_path / "chunks") == {"b.jsonl": LINES}
    ended = download(server, "b.jsonl", tmp_path / "nothing", always(b"", sized=False))
    assert ended.code == 1 and "the response is empty, and the server does not report a length" in ended.err
    assert download(server, "b.jsonl", tmp_path / "empty", always(b"")).code == 0


# -- redirects


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://127.0.0.1/b.jsonl", "data:text/plain,x", "http://[::1", "http://h:0x1/"],
)
def test_a_redirect_to_what_is_no_server_is_refused_at_once(location: str, server: Server, tmp_path: Path) -> None:
    ended = download(server, "b.jsonl", tmp_path / "out", always(b"", {"Location": location}, 302))
    assert ended.code == 2 and "but tokenmill follows only http:// and https://" in ended.err
    assert server.asked == 1
