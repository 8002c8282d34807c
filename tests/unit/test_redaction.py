"""Redaction: no terminal, log, event or record contains a credential that another program quotes."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from support.commandline import run_many
from tokenmill.core import redaction
from tokenmill.core.redaction import contains_sent_credential, redact, register_address_secrets, register_secrets

TOKEN = "hf_PlantedToken/0123456789+abcdef"
PASSWORD = "hunter2"

FORMS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "for an address": lambda secret: quote(secret, safe=""),
}


@pytest.fixture(autouse=True)
def no_registered_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_secrets", "_sent"):
        monkeypatch.setattr(redaction, name, set())
    monkeypatch.setattr(redaction, "_scanned", False)


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_redacted_in_each_form(form: str) -> None:
    register_secrets(f"Bearer {TOKEN}")
    quoted = FORMS[form](TOKEN)
    assert redact(f"403 <{quoted}> is not allowed") == "403 <<redacted>> is not allowed"
    assert contains_sent_credential(quoted)


def test_a_login_is_redacted_in_each_part() -> None:
    login = f"me:{PASSWORD}"
    header = f"Basic {base64.b64encode(login.encode()).decode()}"
    register_secrets(header)
    assert redact(f"{header}, {login}, {PASSWORD}") == "Basic <redacted>, <redacted>, <redacted>"


def test_ordinary_text_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORT_TOKEN", "data")
    monkeypatch.setenv("NUMBER_KEY", "8080")
    monkeypatch.setenv("HF_TOKEN_PATH", "/data/corpus/token")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "DefaultEndpointsProtocol=https;AccountName=corpora")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    register_address_secrets("https://host/a.jsonl?download=true&name=wikipedia-2024-01.jsonl")
    register_secrets("Bearer hf_PlantedToken0123456789abcdef")
    for text in (
        "no data files in /data/corpus/token; wanted names ending in .jsonl (port 8080)",
        "https://corpora.blob.core.windows.net wikipedia-2024-01.jsonl through http://proxy.example:3128",
        "hf_Planted; hf_PlantedTok",
    ):
        assert redact(text) == text
        assert not contains_sent_credential(text)


@pytest.mark.parametrize(
    ("name", "value", "secrets"),
    [
        ("AWS_SECRET_ACCESS_KEY", "wJalr/XUtnFEMI+K7MDENG", ["wJalr/XUtnFEMI+K7MDENG"]),
        ("AZURE_STORAGE_CONNECTION_STRING", "AccountName=a;AccountKey=Zm9vYmFyYmF6==;X=y", ["Zm9vYmFyYmF6=="]),
        ("AZURE_STORAGE_SAS_TOKEN", "?sv=2024-01-01&sig=AbC%2BdEf123%3D", ["AbC+dEf123=", "AbC%2BdEf123%3D"]),
        ("HTTPS_PROXY", "http://me:proxy%40pass1@proxy:3128", ["proxy@pass1", "proxy%40pass1"]),
        ("FSSPEC_S3", '{"key": "AKIA0123456789", "secret": "sesame-0123"}', ["AKIA0123456789", "sesame-0123"]),
        ("WANDB_API_KEY", "0123456789abcdef0123", ["0123456789abcdef0123"]),
        ("DATABASE_URL", "postgres://me:sesame99@db/x", ["sesame99"]),
    ],
)
def test_environment_secrets_are_redacted(
    name: str, value: str, secrets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    for secret in secrets:
        assert redact(f"denied ({secret})") == "denied (<redacted>)"


def test_secrets_of_credential_files_are_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    account = {
        "type": "service_account",
        "project_id": "my-project-name",
        "private_key": "-----BEGIN X-----\nMIIEvQIBADANBg\n",
    }
    (tmp_path / "gcp.json").write_text(json.dumps(account))
    (tmp_path / "aws").write_text("[default]\nregion = eu-central-1\naws_secret_access_key = sesame/0123456789\n")
    (tmp_path / "token").write_text("projected-token-0123\n")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "gcp.json"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws"))
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(tmp_path / "token"))
    text = f"{tmp_path}/gcp.json my-project-name eu-central-1: MIIEvQIBADANBg sesame/0123456789 projected-token-0123"
    assert redact(text) == f"{tmp_path}/gcp.json my-project-name eu-central-1: <redacted> <redacted> <redacted>"


class Echo(BaseHTTPRequestHandler):
    """A server that refuses requests, and quotes the credential in the form that the path's first part selects."""

    def do_GET(self) -> None:
        form = list(FORMS)[int(self.path.split("/")[1])]
        scheme, _, sent = (self.headers["Authorization"] or "").partition(" ")
        secret = base64.b64decode(sent).decode().partition(":")[2] if scheme == "Basic" else sent
        secret = secret or self.path.partition("sig=")[2].partition("&")[0]
        quoted = FORMS[form](secret)
        self.send_response(403, None if "header" in self.path else quoted)
        self.send_header("X-Error-Message" if "header" in self.path else "X-Other", quoted)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_a_credential_that_a_server_quotes_is_redacted(echo: str, tmp_path: Path) -> None:
    """Check the Hub's token, the password of a URL and a signature, in headers and in the reason phrase."""
    commands = []
    for number in range(len(FORMS)):
        out = str(tmp_path / "out" / str(number))
        commands.append(
            ["download", f"http://me:{quote(TOKEN, safe='')}@{echo}/{number}/header/a.jsonl", out, "--json"]
        )
        commands.append(["download", f"http://{echo}/{number}/a.jsonl?sig={quote(TOKEN, safe='')}", out])
        commands.append(["download", "hf://datasets/org/c", out, "--endpoint", f"http://{echo}/{number}/header"])
    commands.append(
        ["preprocess", f"http://me:{PASSWORD}@{echo}/0/a.jsonl", str(tmp_path / "out/s"), "--tokenizer", "x"]
    )
    results, _ = run_many(commands, HF_TOKEN=TOKEN)
    assert all(result.code == 2 and "403" in result.err for result in results)
    assert sum("<redacted>" in result.err for result in results) > len(FORMS)
    written = "".join(result.out + result.err for result in results)
    failures = list((tmp_path / "out").rglob("failures/*.json"))
    assert len(failures) > len(FORMS) / 2
    written += "".join(path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file())
    for form in FORMS.values():
        assert form(TOKEN) not in written
    assert f" {PASSWORD}" not in written


class Planter(Echo):
    """A Hub that plants the token in recorded fields: a commit, a name, a hash."""

    def do_GET(self) -> None:
        token = (self.headers["Authorization"] or "").partition(" ")[2]
        planted = self.path.split("/")[1]
        file = {"type": "file", "path": "a.jsonl", "size": 3, "oid": "0" * 40}
        content: Any = {"sha": token if planted == "sha" else "0" * 40}
        if "/tree/" in self.path:
            content = [file | ({"path": f"{token}.jsonl"} if planted == "path" else {"oid": token})]
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_a_response_with_the_token_is_not_recorded(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Planter) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        places = ("sha", "path", "oid")
        results, _ = run_many(
            [
                [
                    "download",
                    "hf://datasets/o/c",
                    str(tmp_path / place),
                    "--endpoint",
                    f"http://127.0.0.1:{server.server_port}/{place}",
                ]
                for place in places
            ],
            HF_TOKEN=TOKEN,
        )
        server.shutdown()
    for result in results:
        assert result.code == 2 and "contains the access token of the request" in result.err
        assert TOKEN not in result.err
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("processes", [1, 2])
def test_a_traceback_of_a_bug_has_no_key(processes: int, tmp_path: Path) -> None:
    """Check also a child process, and a library that writes to standard error."""
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / "in" / f"{name}.jsonl.gz").write_bytes(b"")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, tokenmill.stages.extract as m\n"
        "def broken(*_):\n"
        "    print('library:', os.environ['AWS_SECRET_ACCESS_KEY'], file=sys.stderr, flush=True)\n"
        "    raise RuntimeError('bug: ' + os.environ['AWS_SECRET_ACCESS_KEY'])\n"
        "m.Extract.do = broken\n"
    )
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "tokenmill",
            "extract",
            tmp_path / "in",
            tmp_path / "out",
            "--processes",
            str(processes),
        ],
        env=os.environ
        | {"AWS_SECRET_ACCESS_KEY": TOKEN, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode not in (0, 2)
    assert "RuntimeError: bug: <redacted>" in process.stderr and "library: <redacted>" in process.stderr
    assert TOKEN not in process.stderr + process.stdout
