"""The local directories that stand for buckets."""

import os
from pathlib import Path

import pytest

from tokenmill.core.buckets.mirror import find_address, parse_location, show_addresses
from tokenmill.errors import RequestError


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a scratch directory whose name has a blank."""
    directory = tmp_path / "my scratch"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    return directory


@pytest.mark.parametrize(
    ("address", "bucket", "prefix", "account"),
    [
        ("s3://bucket/a/b", "bucket", "a/b", ""),
        ("S3://bucket/a b/", "bucket", "a b", ""),
        ("gs://bucket", "bucket", "", ""),
        ("abfs://container@account.dfs.core.windows.net/x", "container", "x", "account"),
    ],
)
def test_a_path_stands_for_an_address(address: str, bucket: str, prefix: str, account: str, scratch: Path) -> None:
    path = parse_location(address)
    found = find_address(path)
    assert path.is_relative_to(scratch) and found is not None
    assert (found.bucket, found.prefix, found.account) == (bucket, prefix, account)
    below = find_address(path / "out" / ".tokenmill")
    assert below is not None and below.prefix == f"{prefix}/out/.tokenmill".lstrip("/")
    assert find_address(scratch) is None and parse_location(str(scratch)) == scratch


def test_messages_have_the_address(scratch: Path) -> None:
    path = parse_location("s3://bucket/out")
    assert show_addresses(f"{path}/a.bin: missing, see {path}") == "s3://bucket/out/a.bin: missing, see s3://bucket/out"
    assert show_addresses(f"'{path}/.copies.m-1.2-ab.tmp/a.bin'") == "'s3://bucket/out/a.bin'"
    assert show_addresses(f"{path}/.local.{'0' * 32}/a.bin") == "s3://bucket/out/a.bin"
    assert show_addresses(str(scratch)) == str(scratch)
    inner = parse_location("s3://bucket/tokenmill-buckets-0/s3/x")
    assert show_addresses(str(inner)) == "s3://bucket/tokenmill-buckets-0/s3/x"


def test_the_root_of_another_user_is_refused(scratch: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (scratch / f"tokenmill-buckets-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match="is not a directory of this user; set TMPDIR"):
        parse_location("s3://bucket/out")
    for text in (
        *("https://host/x", "s3:/bucket", "ftp://x", "s3://", "s3://bucket/a/../../b", "s3://bucket/a\nb"),
        *("s3://key:secretsecret@bucket/x", "gs://me@bucket/x"),
    ):
        with pytest.raises(RequestError):
            parse_location(text)
