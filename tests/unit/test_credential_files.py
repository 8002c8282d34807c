"""Environment variables that name a file with certificates, a key or a token which cannot be used."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commandline import tokenmill
from support.receiver import make_certificate

pytestmark = pytest.mark.slow
S3 = "s3://bucket/corpus"
HTTPS = "https://127.0.0.1:1/a.jsonl"
HUB = "hf://datasets/org/name"


def write(content: str) -> Callable[[Path], object]:
    """Return a step that writes the file."""
    return lambda path: path.write_text(content)


@pytest.mark.parametrize(
    ("variable", "source"),
    [
        ("REQUESTS_CA_BUNDLE", HTTPS),
        ("CURL_CA_BUNDLE", HTTPS),
        ("SSL_CERT_FILE", HTTPS),
        ("REQUESTS_CA_BUNDLE", HUB),
        ("REQUESTS_CA_BUNDLE", S3),
        ("AWS_CA_BUNDLE", S3),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", S3),
        ("AZURE_FEDERATED_TOKEN_FILE", "az://container/corpus"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, variable: str, source: str) -> None:
    steps: dict[str, Callable[[Path], object]] = {"missing": lambda path: None, "empty": write(""), "pipe": os.mkfifo}
    if "CA_BUNDLE" in variable or variable == "SSL_CERT_FILE":
        steps["other"] = write("no certificate")
    for name, make in steps.items():
        make(tmp_path / name)
        environment = {variable: str(tmp_path / name), "HF_ENDPOINT": "https://127.0.0.1:1"}
        ended = tokenmill("download", source, tmp_path / "out", **environment)
        assert ended.code == 2, (name, ended.err)
        assert f"{variable} names '{tmp_path / name}'" in ended.err and "correct or unset the variable" in ended.err
        assert "Traceback" not in ended.err


def test_a_token_in_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    ended = tokenmill("download", HUB, tmp_path / "out", HF_TOKEN_PATH=str(tmp_path / "token"), HF_TOKEN="")
    assert ended.code == 2 and f"HF_TOKEN_PATH names '{tmp_path / 'token'}'" in ended.err


def test_variables_that_the_source_does_not_use_are_ignored(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "a"}\n')
    local = tokenmill("download", tmp_path / "in", tmp_path / "out", REQUESTS_CA_BUNDLE=absent, SSL_CERT_FILE=absent)
    assert local.code == 0, local.err
    certificates = make_certificate(tmp_path / "ca.pem").with_name("ca.pem.crt")
    for variables in (
        {"REQUESTS_CA_BUNDLE": str(certificates), "AWS_CA_BUNDLE": absent, "GOOGLE_APPLICATION_CREDENTIALS": absent},
        {"REQUESTS_CA_BUNDLE": str(tmp_path), "HF_TOKEN_PATH": absent, "HF_TOKEN": ""},
    ):
        ended = tokenmill("download", HTTPS, tmp_path / "web", "--deadline", "0", **variables)
        assert ended.code != 0 and "refused" in ended.err.lower() and "unset the variable" not in ended.err
    plain = tokenmill(
        "download", "http://127.0.0.1:1/a", tmp_path / "web", "--deadline", "0", REQUESTS_CA_BUNDLE=absent
    )
    assert "unset the variable" not in plain.err
