"""Buckets as sources."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from support.buckets import KEY, Store
from support.commandline import data_of, finish, start, tokenmill

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "tests/conformance/tokenizers/tiny"


def lines(name: str, count: int = 100) -> bytes:
    """Return records that differ for every name; names of equal length give records of equal length."""
    return (json.dumps({"text": f"of {name}"}) + "\n").encode() * count


FILES = {
    name: lines(name)
    for name in ("train/a.jsonl", "train/b.jsonl", "test/t.jsonl", "README.md", "na me+%20\u00fc.jsonl")
}


def test_bucket_downloads_all_or_selected_files(store: Store, tmp_path: Path) -> None:
    store.fill(FILES)
    store.put("corpus/train/", b"")  # the folder marker that cloud consoles create
    store.put("corpus2/x.jsonl", b"{}\n")
    source = f"{store.uri}/corpus"
    for output, expected, options in (
        ("train", ["train/a.jsonl", "train/b.jsonl"], []),
        ("test", ["test/t.jsonl"], ["--split", "test"]),
        ("all", sorted(FILES), ["--split", "any", "--include", "*"]),
        ("named", ["README.md"], ["--include", "*.md"]),
    ):
        ended = store.run("download", source, tmp_path / output, "--layout", "tree", *options)
        assert ended.code == 0, ended.err
        downloaded = data_of(tmp_path / output)
        assert sorted(downloaded.values()) == sorted(FILES[name] for name in expected)
        assert {name for name in downloaded if name.isascii() and " " not in name} >= {
            n for n in expected if "%" not in n
        }
    single = store.run("download", f"{source}/train/a.jsonl", tmp_path / "one")
    assert single.code == 0 and data_of(tmp_path / "one") == {"a.jsonl": FILES["train/a.jsonl"]}
    assert tokenmill("verify", tmp_path / "all").code == 0
    assert store.run("download", source, tmp_path / "train", "--layout", "tree", "--json").result["units_done_now"] == 0


def download_half(store: Store, output: Path) -> list[str]:
    """Run one of two workers; return the keys of the objects that remain for the other worker."""
    files = {f"{number}.jsonl": lines(f"number {number}") for number in range(6)}
    store.fill(files)
    ended = store.run("download", f"{store.uri}/corpus", output, "--workers", 2, "--worker-index", 1)
    assert ended.code == 0, ended.err
    remaining = sorted(files.keys() - data_of(output).keys())
    assert len(remaining) == 3
    return [f"corpus/{name}" for name in remaining]


def test_replaced_object_of_the_same_size_is_refused(store: Store, tmp_path: Path) -> None:
    for key in download_half(store, tmp_path / "out"):
        store.put(key, lines("another!"))
    ended = store.run("download", f"{store.uri}/corpus", tmp_path / "out", "--workers", 2)
    assert ended.code == 2 and "changed since it was planned" in ended.err, ended.err
    assert len(data_of(tmp_path / "out")) == 3
    assert lines("another!") not in data_of(tmp_path / "out").values()


def test_object_deleted_after_the_listing_is_named(store: Store, tmp_path: Path) -> None:
    deleted, *_ = download_half(store, tmp_path / "out")
    store.delete(deleted)
    ended = store.run("download", f"{store.uri}/corpus", tmp_path / "out", "--workers", 2)
    assert ended.code == 2 and "the object was deleted from the bucket" in ended.err, ended.err
    assert Path(deleted).name in ended.err and "HF_TOKEN" not in ended.err
    assert len(data_of(tmp_path / "out")) == 5


def test_killed_download_resumes(store: Store, tmp_path: Path) -> None:
    content = lines("something large", 800_000)
    store.fill({"big.jsonl": content})
    command = ("download", f"{store.uri}/corpus", tmp_path / "out")
    process = start(*command, **store.environment)
    deadline = time.monotonic() + 60
    while not [path for path in (tmp_path / "out").glob(".tokenmill/download/attempts/*/data") if path.stat().st_size]:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    ended = store.run(*command)
    assert ended.code == 0, ended.err
    assert data_of(tmp_path / "out") == {"big.jsonl": content}


def test_missing_or_forbidden_objects_are_refused(store: Store, tmp_path: Path) -> None:
    store.fill(FILES)
    for source in (f"{store.uri}/nothing", f"{store.uri}nothing/corpus", f"{store.uri}nothing"):
        ended = store.run("download", source, tmp_path / "out")
        assert ended.code == 2 and f"there are no files at {source}" in ended.err, ended.err
    wrong = {word: value.replace("AccountKey=Eby8", "AccountKey=Eby9") for word, value in store.environment.items()}
    if store.uri.startswith("s3"):  # moto accepts any credentials, but requires some
        wrong = {"AWS_ENDPOINT_URL": store.environment["AWS_ENDPOINT_URL"], "AWS_EC2_METADATA_DISABLED": "true"}
    ended = tokenmill("download", f"{store.uri}/corpus", tmp_path / "out", **wrong)
    assert ended.code == 2 and "credentials" in ended.err.partition(";")[2], ended.err
    assert "not-to-be-printed" not in ended.err and KEY not in ended.err


def test_profiles_and_public_buckets(s3_store: Store, tmp_path: Path) -> None:
    """A profile of the AWS tools has the keys, the region and the endpoint; a public bucket needs no keys."""
    s3_store.fill(FILES)
    source = f"{s3_store.uri}/corpus/README.md"
    address = s3_store.environment["AWS_ENDPOINT_URL"]
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = key\naws_secret_access_key = not-to-be-printed\n")
    (tmp_path / "config").write_text(f"[profile lab]\nregion = us-east-1\nendpoint_url = {address}\n")
    files = {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    ended = tokenmill("download", source, tmp_path / "profile", **files, AWS_PROFILE="lab")
    assert ended.code == 0, ended.err
    ended = tokenmill("download", source, tmp_path / "none", **files, AWS_PROFILE="other")
    assert ended.code == 2 and "other" in ended.err and "check the credentials" in ended.err, ended.err
    import boto3

    client = boto3.client(
        "s3", endpoint_url=address, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s"
    )
    client.put_bucket_acl(Bucket=s3_store.uri.rpartition("/")[2], ACL="public-read")
    client.put_object_acl(Bucket=s3_store.uri.rpartition("/")[2], Key="corpus/README.md", ACL="public-read")
    public = {"AWS_SKIP_SIGNATURE": "true", "AWS_ENDPOINT_URL": address}
    ended = tokenmill("download", source, tmp_path / "public", **public)
    assert ended.code == 0, ended.err


def test_preprocess_reads_a_bucket_like_a_directory(store: Store, tmp_path: Path) -> None:
    files = {f"{number}.jsonl": lines(f"number {number}") for number in range(3)}
    store.fill(files)
    local = tmp_path / "local"
    local.mkdir()
    for name, data in files.items():
        (local / name).write_bytes(data)
    outputs = {}
    for output, source in (("from-disk", str(local)), ("from-bucket", f"{store.uri}/corpus")):
        ended = store.run(
            "preprocess", source, tmp_path / output, "--tokenizer", TOKENIZER, "--processes", 1, "--encoder", "hf"
        )
        assert ended.code == 0, ended.err
        outputs[output] = {path.name: path.read_bytes() for path in (tmp_path / output).glob("*_document.*")}
    assert len(outputs["from-bucket"]) == 6 and outputs["from-bucket"] == outputs["from-disk"]
