"""download: the choice of files, and its sources other than the Hub: a URL and a directory."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import stages
from support.commandline import data_of, tokenmill
from support.hub import Fault, Hub
from tokenmill.engine.contract import RemoteFile
from tokenmill.engine.progress import Reporter
from tokenmill.engine.selection import Selection
from tokenmill.engine.stage import StageRun
from tokenmill.errors import InputError, RequestError, TransientError
from tokenmill.sources.factory import open_source
from tokenmill.sources.listing import select
from tokenmill.sources.source import Listing
from tokenmill.stages.download import Download

SLIMPAJAMA = [
    "README.md",
    *(f"train/chunk{c}/example_train_{n}.jsonl.zst" for c in (1, 2) for n in range(20)),
    *(f"validation/chunk1/example_holdout_{n}.jsonl.zst" for n in range(5)),
    *(f"test/chunk1/example_holdout_{n}.jsonl.zst" for n in range(5)),
]


def fetch(uri: Any, output: Path, **selection: Any) -> None:
    """Download in this process, for tests that do not check how a process ends."""
    options = {"connections": 4, "deadline": 20, "stall_seconds": 1}
    stages.download(uri, output, StageRun(Reporter()), Selection(**selection), **options)


def listing(*paths: str) -> Listing:
    return Listing("hf://datasets/org/c", "0" * 40, [RemoteFile(path, 1) for path in paths])


def chosen(paths: list[str], **selection: Any) -> list[str]:
    return [file.path for file in select(listing(*paths), Selection(**selection, every_pattern=True))[0]]


# -- choice of files


def test_default_selects_the_data_files_of_train() -> None:
    files, notes = select(listing(*SLIMPAJAMA), Selection())
    assert [file.path for file in files] == sorted(path for path in SLIMPAJAMA if path.startswith("train/"))
    assert any("left out 1 files that are not data files" in note for note in notes)
    assert any("reading only split train" in note for note in notes)


def test_format_selects_possible_names() -> None:
    paths = ["README.md", "train/wiki_00", "train/b.jsonl.gz", "train/c.txt", "train/d.parquet", "test/wiki_01"]

    def taken(format_name: str, **selection: Any) -> list[str]:
        return [file.path for file in select(listing(*paths), Selection(**selection), format_name)[0]]

    assert taken("jsonl") == ["train/b.jsonl.gz", "train/c.txt", "train/wiki_00"]
    assert taken("txt") == ["train/c.txt", "train/wiki_00"]
    assert taken("parquet") == ["train/d.parquet", "train/wiki_00"]
    assert taken("txt", split="test") == ["test/wiki_01"]
    assert taken("txt", include=["train/*"], exclude=["*.gz", "*.parquet", "*wiki*"]) == ["train/c.txt"]
    saved = ["train/data-00000-of-00001.arrow", "train/state.json", "train/dataset_info.json", "dataset_dict.json"]
    assert chosen(saved) == saved[:1]


def test_splits_never_mix_by_default() -> None:
    for split in ("validation", "test"):
        assert all(path.startswith(split) for path in chosen(SLIMPAJAMA, split=split))
    assert len(chosen(SLIMPAJAMA, split="any")) == len(SLIMPAJAMA) - 1
    with pytest.raises(RequestError, match=r"more than one split: .*--split NAME"):
        chosen(SLIMPAJAMA, include=["*chunk1*"])
    assert len(chosen(SLIMPAJAMA, include=["*chunk1*"], split="train")) == 20
    with pytest.raises(RequestError, match="--split dev: no selected file is of this split"):
        chosen(SLIMPAJAMA, split="dev")
    with pytest.raises(RequestError, match="more than one split"):
        chosen(["a.jsonl", "test/a.jsonl"])
    names = ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test-00000-of-00001.parquet"]
    assert chosen(names) == names[:2]
    assert chosen(["only/a.jsonl", "other/b.jsonl"]) == ["only/a.jsonl", "other/b.jsonl"]


def test_patterns_choose_and_exclude() -> None:
    paths = ["a/1.jsonl", "a/2.jsonl", "b/1.jsonl", "README.md", "LICENSE"]
    assert chosen(paths, include=["a/*"]) == ["a/1.jsonl", "a/2.jsonl"]
    assert chosen(paths, include=["a/*", "b/*"], exclude=["*/1.*"]) == ["a/2.jsonl"]
    assert chosen(paths, exclude=["b/*"]) == ["a/1.jsonl", "a/2.jsonl"]
    assert chosen(paths, include=["*.md"]) == ["README.md"]
    assert chosen(paths, include=["*"]) == sorted(paths)
    with pytest.raises(
        RequestError, match=r"no file of hf://datasets/org/c matches --include .*; the 5 files are .*check --include"
    ):
        chosen(paths, include=["*.parquet"])
    with pytest.raises(RequestError, match="no file"):
        chosen(["README.md"])
    with pytest.raises(RequestError, match=r"no file of .* matches --include c/\*; correct"):
        chosen(paths, include=["a/*", "c/*"])


@settings(max_examples=40)
@given(
    st.sets(st.from_regex(r"[a-z]{1,3}/[a-z0-9]{1,4}\.jsonl", fullmatch=True), min_size=1, max_size=30),
    st.integers(1, 40),
    st.randoms(),
)
def test_sample_is_reproducible_and_grows(paths: set[str], count: int, random: Any) -> None:
    paths = {path for path in paths if path.split("/")[0] not in ("dev", "val")}
    mixed = sorted(paths)
    random.shuffle(mixed)
    if not mixed:
        return
    sample = chosen(mixed, sample=count)
    assert sample == chosen(sorted(mixed), sample=count) == sorted(sample)
    assert len(sample) == min(count, len(mixed))
    assert set(sample) <= set(chosen(mixed, sample=count + 1))


def test_sample_is_taken_from_included_files() -> None:
    sample = chosen(SLIMPAJAMA, include=["train/chunk2/*"], sample=5)
    assert len(sample) == 5 and all(path.startswith("train/chunk2/") for path in sample)
    files, notes = select(listing("a.jsonl"), Selection(sample=5))
    assert len(files) == 1 and any("reading all files" in note for note in notes)


@pytest.mark.parametrize(
    "path",
    [
        "../../x",
        "/etc/passwd",
        "a/../../b",
        "a/..",
        "./a",
        "a//b",
        "a/",
        "",
        ".",
        "..",
        "a\\..\\..\\b",
        "C:\\x",
        "a\0b",
    ],
)
def test_listing_with_an_outside_path_is_refused(path: str) -> None:
    with pytest.raises(InputError, match="nothing was downloaded"):
        select(listing("good.jsonl", path), Selection(include=["good.jsonl"]))


# -- sources


@pytest.mark.parametrize(
    "uri",
    ["ftp://host/x", "hf://org/name", "hf://datasets/name", "hf://spaces/org/name", "nonsense://", "https://host/", ""],
)
def test_invalid_uri_is_refused(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(RequestError):
        fetch(uri, tmp_path / "out")


@pytest.mark.parametrize(
    "uri",
    [
        "https://user:hunter2@host/x.jsonl",
        "HTTPS://user:hunter2@host/x.jsonl",
        "https://user:p@hunter2@host/x.jsonl?sig=hunter2",
        "https://host/x.jsonl#hunter2",
        "s3://key:hunter2@bucket/x",
        "az://container/x?sig=hunter2",
        "ftp://user:hunter2@host/x",
        "hf://user:hunter2@datasets/org/name",
    ],
)
def test_secret_of_a_uri_is_not_recorded_or_printed(tmp_path: Path, uri: str) -> None:
    request = Download(uri=uri, output=tmp_path / "out").prepare(StageRun(Reporter()))
    assert "hunter2" not in json.dumps(request.content)
    if uri.startswith(("ftp", "hf")):
        with pytest.raises(RequestError) as refused:
            open_source(uri, stall_seconds=1)
        assert "hunter2" not in str(refused.value)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(RequestError, match=r"pip install .\.\[s3\]"):
        open_source("s3://bucket/prefix", stall_seconds=1)


def test_a_bucket_without_a_name_or_an_account_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for uri in ("s3://", "s3:///x", "S3://"):
        with pytest.raises(RequestError, match="does not name a bucket; write s3://BUCKET/PREFIX"):
            open_source(uri, stall_seconds=1)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    for text, problem in (("", "AZURE_STORAGE_ACCOUNT_NAME"), ("nonsense", "malformed")):
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
        with pytest.raises(RequestError, match=f"cannot open az://bucket: .*{problem}.*; check the credentials"):
            open_source("az://bucket/c", stall_seconds=1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name in ("a.jsonl", "sub/a.jsonl", "sub/b.jsonl", "README.md"):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) + "\n")
    return tmp_path / "source"


def test_a_directory_flat_and_as_a_tree(source: Path, tmp_path: Path) -> None:
    fetch(f"file://{source}", tmp_path / "flat")
    flat = {name.replace("/", "__"): data for name, data in data_of(source).items() if name != "README.md"}
    assert data_of(tmp_path / "flat") == flat
    fetch(source, tmp_path / "tree", layout="tree", include=["*"])
    assert data_of(tmp_path / "tree") == data_of(source)


def test_single_file_and_missing_directory(source: Path, tmp_path: Path) -> None:
    fetch(source / "sub/b.jsonl", tmp_path / "one")
    assert data_of(tmp_path / "one") == {"b.jsonl": (source / "sub/b.jsonl").read_bytes()}
    with pytest.raises(RequestError, match="there are no files at"):
        fetch(tmp_path / "nowhere", tmp_path / "out")


def test_tokenmill_output_is_copied_without_its_records(source: Path, tmp_path: Path) -> None:
    fetch(source, tmp_path / "one")
    fetch(tmp_path / "one", tmp_path / "two", layout="tree")
    assert data_of(tmp_path / "two") == data_of(tmp_path / "one")


def test_links_are_followed_and_the_output_is_not_read(source: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more/c.jsonl").write_text('{"text": "c"}\n')
    (source / "linked").symlink_to(tmp_path / "more")
    expected = {"a.jsonl", "sub/a.jsonl", "sub/b.jsonl", "linked/c.jsonl"}
    fetch(source, source / "out", layout="tree", sample=2)
    fetch(source, tmp_path / "out", layout="tree")
    assert set(data_of(tmp_path / "out")) == expected


# -- a URL, with the test Hub as a plain web server


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        server.add_dataset("org/c", {"a b.jsonl": b'{"text": "x"}\n' * 5000, "c.jsonl.zst": b"z" * 3000})
        yield server


def address(hub: Hub, name: str = "a%20b.jsonl") -> str:
    return f"{hub.endpoint}/datasets/org/c/resolve/main/{name}"


def test_url_download_survives_faults(hub: Hub, tmp_path: Path) -> None:
    hub.faults.add(
        Fault("cut", path="a b.jsonl", after=1), Fault("503", path="a b.jsonl", after=1, retry="seconds", seconds=1)
    )
    ended = tokenmill("download", address(hub) + "?signature=s3cret", tmp_path / "out")
    assert ended.code == 0, ended.err
    assert data_of(tmp_path / "out") == {"a%20b.jsonl": b'{"text": "x"}\n' * 5000}
    assert not any(b"s3cret" in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    # The Hub redirects a file in LFS to another origin.
    assert tokenmill("download", address(hub, "c.jsonl.zst"), tmp_path / "other").code == 0


def test_busy_url_is_retried(hub: Hub, tmp_path: Path) -> None:
    hub.faults.add(Fault("503", retry="seconds", seconds=1), Fault("429", retry="seconds", seconds=1))
    fetch(address(hub), tmp_path / "out")
    assert len(data_of(tmp_path / "out")) == 1
    for request, after in zip(hub.requests, hub.requests[1:], strict=False):
        assert after.time - request.time >= (request.retry_after or 0)


def test_unreachable_url_fails_before_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.sources.retry.BACKOFF_SECONDS", (0.01, 0.02))
    with pytest.raises(TransientError, match="check the address"):
        fetch("http://localhost:1/x.jsonl", tmp_path / "out")


def test_missing_url_is_refused(hub: Hub, tmp_path: Path) -> None:
    netloc = hub.endpoint.removeprefix("http://")
    ended = tokenmill("download", f"http://user:s3cret@{netloc}/x.jsonl", tmp_path / "out")
    assert ended.code == 2 and "404" in ended.err
    assert "s3cret" not in ended.err


class Plain(http.server.BaseHTTPRequestHandler):
    """A server with neither ETag nor ranges, as python -m http.server is."""

    content = b""
    requests = 0

    def do_GET(self) -> None:
        type(self).requests += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.mark.parametrize("changed", [b"x" * 5000, b"x" * 50])
def test_file_of_changed_size_is_not_retried_forever(changed: bytes, tmp_path: Path) -> None:
    Plain.content, Plain.requests = b"{}\n" * 1000, 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Plain) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}/log.jsonl"
        fetch(uri, tmp_path / "out")
        (tmp_path / "out" / "log.jsonl").unlink()
        Plain.content, Plain.requests = changed, 0
        ended = tokenmill("download", uri, tmp_path / "out", "--deadline", 3, real_backoff=True)
        server.shutdown()
    assert ended.code in (1, 2) and "log.jsonl" in ended.err
    assert data_of(tmp_path / "out") == {}
    assert Plain.requests <= 12
