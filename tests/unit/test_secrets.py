"""A credential is used, and then is nowhere: not on a terminal, in a log, in a record, or in a child's environment."""

import base64
import importlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from support.commandline import CommandResult, data_of, run_many, tokenmill
from support.corpus import TOKENIZER
from support.hub import Fault, Hub
from tokenmill.corpus.factory import open_source
from tokenmill.corpus.retry import RetryPolicy
from tokenmill.corpus.uri import redact_addresses, redact_secrets
from tokenmill.errors import RequestError
from tokenmill.tokens.gate import child_environment

pytestmark = pytest.mark.slow

TOKEN = "hf_PlantedToken0123456789abcdef"
WRONG = "hf_AnotherToken0123456789abcdef"
PASSWORD = "hunter2"
URI = "hf://datasets/org/corpus"
LINES = b"".join(json.dumps({"text": f"line {number}"}).encode() + b"\n" for number in range(50))


def traces(directory: Path, *secrets: str) -> list[str]:
    """Return the files that hold a secret, in their name or content, as it is or in base64."""
    forms = [form for secret in secrets for form in (secret.encode(), base64.b64encode(secret.encode()))]
    return [
        str(path)
        for path in directory.rglob("*")
        if any(form in str(path).encode() or (path.is_file() and form in path.read_bytes()) for form in forms)
    ]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(token=TOKEN) as made:
        made.add_dataset("org/corpus", {f"{number}.jsonl": LINES for number in range(4)}, lfs=["1.jsonl", "2.jsonl"])
        made.add_dataset("org/gated", {"a.jsonl": LINES}, gated=True)
        made.add_model("org/model", {path.name: path for path in TOKENIZER.iterdir()})
        yield made


def test_the_hubs_token_is_nowhere_but_in_its_requests(hub: Hub, tmp_path: Path) -> None:
    """Through every command that asks the Hub, when it goes well and when it does not."""
    hub.faults.add(
        Fault("401", path="0.jsonl", where="resolve"),
        Fault("403", path="1.jsonl", where="cdn"),
        Fault("drop", path="2.jsonl", where="cdn"),
    )
    out, said = tmp_path / "out", []

    def run(code: int, *arguments: Any, **variables: str) -> CommandResult:
        ended = tokenmill(*arguments, hub=hub, **({"HF_TOKEN": TOKEN} | variables))
        assert ended.code == code, ended.err
        said.append(ended.out + ended.err)
        return ended

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
    assert sent == {f"Bearer {TOKEN}", f"Bearer {WRONG}", None}, "the requests had it"
    assert {request.headers["Authorization"] for request in hub.requests if request.kind == "cdn"} == {None}
    assert TOKEN not in "".join(said) and WRONG not in "".join(said)
    assert data_of(out) and traces(tmp_path, TOKEN, WRONG) == []


def test_a_bug_has_a_traceback_and_no_token(hub: Hub, tmp_path: Path) -> None:
    """Wherever it is raised: a traceback shows lines of code, never what variables hold."""
    bug = "import tokenmill.corpus.{0} as m\ndef broken(*given, **more): raise RuntimeError('a bug')\nm.{1} = broken\n"
    for place in (("hub_api", "_parse_file"), ("transfer", "HttpBody.read"), ("fetch", "_FileFetch.run")):
        output = tmp_path / place[1]
        (ended,), _ = run_many(
            [["download", URI, str(output)]], bug.format(*place), HF_TOKEN=TOKEN, HF_ENDPOINT=hub.endpoint
        )
        assert ended.code not in (0, 2) and "a bug" in ended.err, ended.err
        assert TOKEN not in ended.out + ended.err
    assert traces(tmp_path, TOKEN) == []


class Doorkeeper(BaseHTTPRequestHandler):
    """One file for whoever has the password."""

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
        """Say nothing."""


@pytest.fixture(scope="module")
def door() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Doorkeeper)
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
def test_a_password_in_an_address_is_used_and_not_told(
    address: str, code: int, message: str, door: str, tmp_path: Path
) -> None:
    ended = tokenmill("download", address.format(PASSWORD, door), tmp_path / "out")
    assert ended.code == code, ended.err
    assert message.format(PASSWORD, door) in ended.out + ended.err
    assert PASSWORD not in ended.out + ended.err
    assert traces(tmp_path, PASSWORD) == []
    if code == 0:
        assert data_of(tmp_path / "out") == {"a.jsonl": LINES}
        plan = json.loads((tmp_path / "out/.tokenmill/download/plan.json").read_bytes())
        assert plan["source"]["uri"] == f"http://{door}/a.jsonl"


def test_a_mirrors_password_is_not_told(tmp_path: Path) -> None:
    for endpoint in (f"me:{PASSWORD}@mirror", f"ftp://me:{PASSWORD}@mirror"):
        ended = tokenmill("download", URI, tmp_path / "out", HF_ENDPOINT=endpoint)
        assert (ended.code, PASSWORD in ended.err) == (2, False)
        assert "invalid Hub endpoint 'mirror'" in ended.err
    assert traces(tmp_path, PASSWORD) == []


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("https://me:p@ss@host:8443/a@b:c/x", "https://host:8443/a@b:c/x"),
        ("https://[::1]:8443/x?y#z", "https://[::1]:8443/x"),
        ("hf://datasets/org/name@v1/a:b@c", "hf://datasets/org/name@v1/a:b@c"),
        ("s3://key:se/cr:et@bucket/x", "s3://bucket/x"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("/data/a:b@c", "/data/a:b@c"),
    ],
)
def test_an_address_is_told_without_what_may_be_a_secret(uri: str, said: str) -> None:
    assert redact_secrets(uri) == said


def test_what_other_libraries_say_is_told_without_addresses() -> None:
    said = f"error for url (https://cas/x?X-Amz-Signature={PASSWORD}), with url: /x?sig={PASSWORD} (Caused by socks5://a:{PASSWORD}@p)"
    assert redact_addresses(said) == "error for url (<url>), with url: <url> (Caused by <url>)"


class Store(fsspec.AbstractFileSystem):
    """A bucket's client whose every answer is a refusal that quotes the signed address."""

    protocol = "s3"

    def find(self, path: str, *_: Any, **__: Any) -> Any:
        raise PermissionError(f"Forbidden: GET https://{path}?sig={PASSWORD}")


def test_a_bucket_that_refuses_says_so_without_what_it_was_asked_with(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = importlib.import_module("fsspec.registry")
    monkeypatch.setitem(registered._registry, "s3", Store)
    source = open_source(f"s3://bucket/x?sig={PASSWORD}", stall_seconds=1)
    with pytest.raises(RequestError) as refused:
        source.list(None, RetryPolicy(time.monotonic()))
    assert str(refused.value) == (
        "cannot list s3://bucket/x: PermissionError: Forbidden: GET <url>; check the address and the credentials"
    )
    with pytest.raises(RequestError, match="--revision: s3://bucket/x has no revisions"):
        source.list("main", RetryPolicy(time.monotonic()))


def test_who_handles_a_tokenizer_is_handed_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries that tokenise are others' code."""
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
    given = child_environment()
    assert not given.keys() & set(secrets)
    assert [given[name] for name in kept] == [f"value of {name}" for name in kept]
