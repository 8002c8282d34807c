"""Use of credentials: no terminal, log, record or environment of a child contains a credential afterwards."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.commandline import CommandResult, data_of, run_many, tokenmill
from support.corpus import TOKENIZER
from support.hub import Fault, Hub
from tokenmill.errors import RequestError, TransientError
from tokenmill.sources.factory import open_source
from tokenmill.sources.retry import RetryPolicy
from tokenmill.sources.uri import redact_addresses, redact_secrets
from tokenmill.tokenize.gate import child_environment

pytestmark = pytest.mark.slow

TOKEN = "hf_PlantedToken0123456789abcdef"
WRONG = "hf_AnotherToken0123456789abcdef"
PASSWORD = "hunter2"
URI = "hf://datasets/org/corpus"
LINES = b"".join(json.dumps({"text": f"line {number}"}).encode() + b"\n" for number in range(50))


def files_with(directory: Path, *secrets: str) -> list[str]:
    """Return the files with a secret in their name or content, in plain text or base64."""
    forms = [form for secret in secrets for form in (secret.encode(), base64.b64encode(secret.encode()))]
    return [
        str(path)
        for path in directory.rglob("*")
        if any(form in str(path).encode() or (path.is_file() and form in path.read_bytes()) for form in forms)
    ]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(token=TOKEN) as server:
        server.add_dataset("org/corpus", {f"{number}.jsonl": LINES for number in range(4)}, lfs=["1.jsonl", "2.jsonl"])
        server.add_dataset("org/gated", {"a.jsonl": LINES}, gated=True)
        server.add_model("org/model", {path.name: path for path in TOKENIZER.iterdir()})
        yield server


def test_only_requests_contain_the_hubs_token(hub: Hub, tmp_path: Path) -> None:
    """Check every command that uses the Hub, with and without errors."""
    hub.faults.add(
        Fault("401", path="0.jsonl", where="resolve"),
        Fault("403", path="1.jsonl", where="cdn"),
        Fault("drop", path="2.jsonl", where="cdn"),
    )
    out, outputs = tmp_path / "out", []

    def run(code: int, *arguments: Any, **variables: str) -> CommandResult:
        result = tokenmill(*arguments, hub=hub, **({"HF_TOKEN": TOKEN} | variables))
        assert result.code == code, result.err
        outputs.append(result.out + result.err)
        return result

    run(0, "download", URI, out, "--json")
    run(0, "preprocess", out, "--tokenizer", "org/model")
    run(0, "preprocess", URI, tmp_path / "streamed", "--tokenizer", "org/model", "--processes", 1, "--json")
    run(0, "verify", out)
    run(0, "status", out, "--json")
    run(0, "inspect", out, "--document", 3)
    run(2, "download", "hf://datasets/org/gated", tmp_path / "gated", "--json")
    run(2, "download", URI, tmp_path / "wrong", HF_TOKEN=WRONG)
    run(2, "preprocess", out, tmp_path / "pairs", "--tokenizer", "org/nothing", HF_TOKEN=WRONG)
    run(2, "download", URI, tmp_path / "quoted", HF_TOKEN=f"'{TOKEN}\u2019")
    hub.faults.add(Fault("401", path="3.jsonl", where="resolve", times=None))
    run(2, "download", URI, tmp_path / "refused", "--json")
    run(0, "status", tmp_path / "refused")

    sent = {request.headers["Authorization"] for request in hub.requests}
    assert sent == {f"Bearer {TOKEN}", f"Bearer {WRONG}", None}, "the requests must contain the token"
    assert {request.headers["Authorization"] for request in hub.requests if request.kind == "cdn"} == {None}
    assert TOKEN not in "".join(outputs) and WRONG not in "".join(outputs)
    assert data_of(out) and files_with(tmp_path, TOKEN, WRONG) == []


def test_a_traceback_of_a_bug_has_no_token(hub: Hub, tmp_path: Path) -> None:
    """A traceback from any place shows lines of code, never the values of variables."""
    bug = "import tokenmill.sources.{0} as m\ndef broken(*given, **more): raise RuntimeError('a bug')\nm.{1} = broken\n"
    for place in (("hub_api", "_parse_file"), ("transfer", "HttpBody.read"), ("fetch", "_FileFetch.run")):
        output = tmp_path / place[1]
        (result,), _ = run_many(
            [["download", URI, str(output)]], bug.format(*place), HF_TOKEN=TOKEN, HF_ENDPOINT=hub.endpoint
        )
        assert result.code not in (0, 2) and "a bug" in result.err, result.err
        assert TOKEN not in result.out + result.err
    assert files_with(tmp_path, TOKEN) == []


class PasswordServer(BaseHTTPRequestHandler):
    """A server of one file, which requires a password."""

    def do_GET(self) -> None:
        allowed = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
        if self.headers["Authorization"] != f"Basic {allowed}" and "sig=" + PASSWORD not in self.path:
            self.send_error(401)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(LINES)))
        self.end_headers()
        self.wfile.write(LINES)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def password_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), PasswordServer)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("address", "code", "message"),
    [
        ("http://me:{0}@{1}/a.jsonl", 0, "complete, 1 file,"),
        ("http://{1}/a.jsonl?sig={0}", 0, "complete, 1 file,"),
        ("http://you:{0}@{1}/a.jsonl", 2, "http://{1}/a.jsonl: {1} returned 401"),
        ("http://me:ab/{0}@{1}/a.jsonl", 2, "cannot find the host and port in 'http://{1}/a.jsonl'"),
        ("http://me:{0}#1@{1}/a.jsonl", 2, "cannot find the host and port in 'http://{1}/a.jsonl'"),
        ("http://me:{0}?1@{1}/a.jsonl", 2, "cannot find the host and port in 'http://{1}/a.jsonl'"),
        ("http://me:{0}", 2, "cannot find the host and port in 'http://me'"),
        ("http://me:{0}@{1}/", 2, "http://{1}/ does not name a file"),
        ("s3://key:{0}@bucket/a", 2, "the address of 's3://bucket/a' contains a password; remove the password"),
        ("s3://key:12/{0}@bucket/a", 2, "the address of 's3://bucket/a' contains a password; remove the password"),
    ],
)
def test_a_password_in_an_address_is_used_not_printed(
    address: str, code: int, message: str, password_server: str, tmp_path: Path
) -> None:
    result = tokenmill("download", address.format(PASSWORD, password_server), tmp_path / "out")
    assert result.code == code, result.err
    assert message.format(PASSWORD, password_server) in result.out + result.err
    assert PASSWORD not in result.out + result.err
    assert files_with(tmp_path, PASSWORD) == []
    if code == 0:
        assert data_of(tmp_path / "out") == {"a.jsonl": LINES}
        plan = json.loads((tmp_path / "out/.tokenmill/download/plan.json").read_bytes())
        assert plan["source"]["uri"] == f"http://{password_server}/a.jsonl"


def test_a_mirrors_password_is_hidden(tmp_path: Path) -> None:
    for endpoint in (f"me:{PASSWORD}@mirror", f"ftp://me:{PASSWORD}@mirror"):
        result = tokenmill("download", URI, tmp_path / "out", HF_ENDPOINT=endpoint)
        assert (result.code, PASSWORD in result.err) == (2, False)
        assert "invalid Hub endpoint 'mirror'" in result.err
    assert files_with(tmp_path, PASSWORD) == []


@pytest.mark.parametrize(
    ("uri", "printed"),
    [
        ("https://me:p@ss@host:8443/a@b:c/x", "https://host:8443/a@b:c/x"),
        ("https://[::1]:8443/x?y#z", "https://[::1]:8443/x"),
        ("hf://datasets/org/name@v1/a:b@c", "hf://datasets/org/name@v1/a:b@c"),
        ("s3://key:se/cr:et@bucket/x", "s3://bucket/x"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("/data/a:b@c", "/data/a:b@c"),
    ],
)
def test_secrets_are_removed_from_an_address(uri: str, printed: str) -> None:
    assert redact_secrets(uri) == printed


def test_urls_in_errors_of_libraries_are_replaced() -> None:
    message = f"error for url (https://cas/x?X-Amz-Signature={PASSWORD}), with url: /x?sig={PASSWORD} (Caused by socks5://a:{PASSWORD}@p)"
    assert redact_addresses(message) == "error for url (<url>), with url: <url> (Caused by <url>)"


def test_an_error_of_a_bucket_hides_the_signed_url(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    source = open_source(f"s3://bucket/x?sig={PASSWORD}", stall_seconds=1)
    with pytest.raises(TransientError) as failed:
        source.list(None, RetryPolicy(time.monotonic()))
    assert str(failed.value).startswith("cannot list s3://bucket/x: ") and PASSWORD not in str(failed.value)
    assert "127.0.0.1" not in str(failed.value) and "check the address and the credentials" in str(failed.value)
    with pytest.raises(RequestError, match="--revision: s3://bucket/x has no revisions"):
        source.list("main", RetryPolicy(time.monotonic()))


def test_tokenizer_children_have_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer libraries are code of other projects."""
    secrets = ("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    secrets += (
        "AWS_SESSION_TOKEN",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_CLIENT_SECRET",
    )
    secrets += ("AZURE_STORAGE_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "HTTPS_PROXY", "https_proxy", "WANDB_API_KEY")
    kept = ("PATH", "LD_LIBRARY_PATH", "TOKENMILL_RUN", "TOKENIZERS_PARALLELISM", "FASTOKENS_BPE_THREADS", "AWS_REGION")
    for name in (*secrets, *kept):
        monkeypatch.setenv(name, f"value of {name}")
    environment = child_environment()
    assert not environment.keys() & set(secrets)
    assert [environment[name] for name in kept] == [f"value of {name}" for name in kept]
