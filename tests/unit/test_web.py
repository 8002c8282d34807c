"""Downloads of a URL from servers that compress, send another page, name the file, or stop early."""

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
from tokenmill.sources.web import disposition_name

pytestmark = pytest.mark.slow

LINES = b"".join(b'{"text": "line %d of a corpus"}\n' % number for number in range(20_000))
HTML = b"\n<!DOCTYPE html><html><body>Please log in</body></html>"
ZST, GZ, BZ2, XZ = zstandard.compress(LINES), gzip.compress(LINES), bz2.compress(LINES), lzma.compress(LINES)
PACKED = {"gzip": GZ, "x-gzip": GZ, "zstd": ZST, "deflate": zlib.compress(LINES), "br": b"\x1b\x03\x01"}


class Response(NamedTuple):
    """A response: with its length if `sized`, and truncated after `cut` bytes."""

    body: bytes
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed
    status: int = 200
    sized: bool = True
    chunked: bool = False
    cut: int | None = None


Script = Callable[[BaseHTTPRequestHandler, int], Response]


class Server(ThreadingHTTPServer):
    """A server whose `script` creates the response from the request and the number of requests."""

    script: Script
    requests: int = 0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        server.requests += 1
        response: Response = server.script(self, server.requests)
        self.send_response(response.status)
        for name, value in response.headers.items():
            self.send_header(name, value)
        if response.chunked:
            self.protocol_version = "HTTP/1.1"
            self.send_header("Transfer-Encoding", "chunked")
        elif response.sized:
            self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        body = response.body[: response.cut]
        if response.chunked:
            for start in range(0, len(body), 5000):
                piece = body[start : start + 5000]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n" if response.cut is None else b"")
        else:
            self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as http_server:
        threading.Thread(target=http_server.serve_forever, args=(0.02,), daemon=True).start()
        yield http_server
        http_server.shutdown()


def always(*response: Any, **more: Any) -> Script:
    return lambda request, number: Response(*response, **more)


def download(server: Server, name: str, output: Path, script: Script, *more: Any) -> CommandResult:
    server.script, server.requests = script, 0
    return tokenmill("download", f"http://127.0.0.1:{server.server_port}/{name}", output, *more)


# -- Content-Encoding


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "zstd", "deflate"])
@pytest.mark.parametrize("sized", [True, False])
def test_a_compressed_response_is_stored_decompressed(coding: str, sized: bool, server: Server, tmp_path: Path) -> None:
    response = always(PACKED[coding], {"Content-Encoding": coding}, sized=sized)
    result = download(server, "b.jsonl", tmp_path / "out", response)
    assert result.code == 0, result.err
    assert data_of(tmp_path / "out") == {"b.jsonl": LINES}


def test_two_codings_one_over_the_other(server: Server, tmp_path: Path) -> None:
    headers = {"Content-Encoding": "gzip, zstd"}
    assert download(server, "b.jsonl", tmp_path / "out", always(zstandard.compress(GZ), headers)).code == 0
    assert data_of(tmp_path / "out") == {"b.jsonl": LINES}


@pytest.mark.parametrize(
    ("name", "body", "coding"), [("b.jsonl.gz", GZ, "gzip"), ("b.jsonl.zst", ZST, "zstd"), ("b.jsonl", LINES, "utf-8")]
)
def test_a_coding_of_the_name_or_without_meaning_is_ignored(
    name: str, body: bytes, coding: str, server: Server, tmp_path: Path
) -> None:
    assert download(server, name, tmp_path / "out", always(body, {"Content-Encoding": coding})).code == 0
    assert data_of(tmp_path / "out") == {name: body}


def test_a_truncated_coded_response_is_retried(server: Server, tmp_path: Path) -> None:
    headers = {"Content-Encoding": "gzip"}
    result = download(
        server,
        "b.jsonl",
        tmp_path / "out",
        lambda request, number: Response(GZ, headers, sized=number % 2 == 0, cut=None if number > 3 else 9000),
    )
    assert result.code == 0, result.err
    assert data_of(tmp_path / "out") == {"b.jsonl": LINES}


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, br", "nonsense"])
def test_an_unsupported_coding_is_refused_at_once(coding: str, server: Server, tmp_path: Path) -> None:
    result = download(server, "b.jsonl", tmp_path / "out", always(PACKED["br"], {"Content-Encoding": coding}))
    assert result.code == 2 and "which tokenmill did not request and cannot decode" in result.err
    assert data_of(tmp_path / "out") == {} and server.requests == 1


# -- another page


@pytest.mark.parametrize(
    ("name", "body", "content"),
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
def test_a_page_in_place_of_data_is_refused(
    name: str, body: bytes, content: str, server: Server, tmp_path: Path
) -> None:
    result = download(server, name, tmp_path / "out", always(body, {"Content-Type": "text/html"}))
    assert result.code == 2 and f"the server sent wrong content: {content}" in result.err
    assert not (tmp_path / "out/.tokenmill/download/plan.json").exists()


def test_a_login_page_after_the_plan_is_refused(server: Server, tmp_path: Path) -> None:
    result = download(
        server,
        "b.jsonl",
        tmp_path / "out",
        lambda request, number: Response(LINES if number == 1 else HTML, sized=False),
    )
    assert result.code == 2 and "the server sent wrong content: an HTML page, 5 times in a row" in result.err
    assert data_of(tmp_path / "out") == {}


def test_text_similar_to_a_page_is_data(server: Server, tmp_path: Path) -> None:
    for name, body in (("page.html", HTML), ("b.jsonl", b'{"text": "<html>"}\n'), ("notes.txt", b"<p>")):
        assert download(server, name, tmp_path / name, always(body, {"Content-Type": "text/html"})).code == 0
        assert data_of(tmp_path / name) == {name: body}


def test_wrong_content_in_a_stream(server: Server, tmp_path: Path) -> None:
    def script(request: BaseHTTPRequestHandler, number: int) -> Response:
        return Response(HTML) if "login" in request.path else Response(GZ, {"Content-Encoding": "gzip"})

    server.script = script
    source = f"http://127.0.0.1:{server.server_port}"
    results, _ = run_many(
        [
            ["preprocess", f"{source}/login.jsonl", str(tmp_path / "a"), "--tokenizer", "x"],
            ["preprocess", f"{source}/b.jsonl", str(tmp_path / "b"), "--tokenizer", "x"],
        ]
    )
    assert [result.code for result in results] == [2, 2]
    assert "the server sent wrong content: an HTML page" in results[0].err
    assert "does not report the size of b.jsonl; use tokenmill download" in results[1].err


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
def test_a_server_names_an_unnamed_file(path: str, header: str, stored: str, server: Server, tmp_path: Path) -> None:
    result = download(server, path, tmp_path / "out", always(LINES, {"Content-Disposition": header}))
    assert result.code == 0, result.err
    assert data_of(tmp_path / "out") == {stored: LINES}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_an_address_without_a_name(server: Server, tmp_path: Path) -> None:
    for header in ('attachment; filename=".."', "attachment; filename*=UTF-8''%00"):
        result = download(server, "files/", tmp_path / "out", always(LINES, {"Content-Disposition": header}))
        assert result.code == 2 and "does not name a file, and neither does its server" in result.err


# -- ends


def parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.table({"text": [f"line {number}" for number in range(5000)]}), sink)
    return bytes(sink.getvalue())


BODIES = {
    "b.jsonl": LINES[:-1],
    "b.jsonl.zst": ZST,
    "b.jsonl.gz": GZ,
    "b.jsonl.bz2": BZ2,
    "b.jsonl.xz": XZ,
    "b.parquet": parquet(),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_truncated_response_without_length_is_detected(name: str, server: Server, tmp_path: Path) -> None:
    body = BODIES[name]
    for cut in (len(body) // 2, len(body) - 1):
        result = download(
            server,
            name,
            tmp_path / str(cut),
            lambda request, number, cut=cut: Response(body, sized=False, cut=None if number > 3 else cut),  # type: ignore[misc]
        )
        assert result.code == 0, result.err
        assert data_of(tmp_path / str(cut)) == {name: body} and server.requests == 4
    result = download(server, name, tmp_path / "never", always(body, sized=False, cut=len(body) // 2))
    assert (result.code == 1 and "truncated" in result.err) or "footer is missing" in result.err
    assert data_of(tmp_path / "never") == {}


def test_unfinished_chunks_and_an_empty_response(server: Server, tmp_path: Path) -> None:
    result = download(
        server,
        "b.jsonl",
        tmp_path / "chunks",
        lambda request, number: Response(LINES, chunked=True, cut=10_000 if number == 2 else None),
    )
    assert result.code == 0 and data_of(tmp_path / "chunks") == {"b.jsonl": LINES}
    result = download(server, "b.jsonl", tmp_path / "nothing", always(b"", sized=False))
    assert result.code == 1 and "the response is empty, and the server does not report a length" in result.err
    assert download(server, "b.jsonl", tmp_path / "empty", always(b"")).code == 0


# -- redirects


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://127.0.0.1/b.jsonl", "data:text/plain,x", "http://[::1", "http://h:0x1/"],
)
def test_a_redirect_to_an_invalid_url_is_refused(location: str, server: Server, tmp_path: Path) -> None:
    result = download(server, "b.jsonl", tmp_path / "out", always(b"", {"Location": location}, 302))
    assert result.code == 2 and "but tokenmill follows only http:// and https://" in result.err
    assert server.requests == 1
