"""The test Hub with the real huggingface_hub and requests: protocol, names, faults, stop."""

import gzip
import hashlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import requests

from support.hub import Fault, FaultPlan, Hub
from tokenmill.errors import RequestError

# huggingface_hub reads these variables at its import.
os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

TESTS = Path(__file__).parents[1]
REPO = "org/corpus"
PLAIN = b"a plain file\n" * 100
PACKED = bytes(range(256)) * 64
FILES = {"README.md": PLAIN, "train/a.jsonl.zst": PACKED, "train/b.jsonl": b"{}\n"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        server.add_dataset(REPO, FILES)
        yield server


@pytest.fixture
def api(hub: Hub) -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=hub.endpoint, token=False)


def url(hub: Hub, path: str, revision: str = "main") -> str:
    return f"{hub.endpoint}/datasets/{REPO}/resolve/{quote(revision, safe='')}/{quote(path, safe='')}"


def get(address: str, **headers: str) -> requests.Response:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.get(address, headers={"Accept-Encoding": "identity"} | headers, timeout=20)


# -- protocol, through huggingface_hub


def test_information_has_the_commit_of_a_branch_or_commit(hub: Hub, api: Any) -> None:
    old = api.repo_info(REPO, repo_type="dataset").sha
    new = hub.add_dataset(REPO, FILES | {"c": b"c"})
    hub.add_dataset(REPO, FILES, branch="refs/convert/parquet")
    assert api.repo_info(REPO, repo_type="dataset", revision="main").sha == new != old
    assert api.repo_info(REPO, repo_type="dataset", revision=old).sha == old
    assert api.repo_info(REPO, repo_type="dataset", revision="refs/convert/parquet").sha == old
    info = api.repo_info(REPO, repo_type="dataset", files_metadata=True)
    assert {f.rfilename: f.size for f in info.siblings} == {
        **{p: len(c) for p, c in FILES.items()},
        "c": 1,
    }


def test_the_content_names_a_commit() -> None:
    first, second = Hub(), Hub()
    assert first.add_dataset(REPO, FILES) == second.add_dataset(REPO, dict(reversed(FILES.items())))
    assert first.add_dataset(REPO, FILES | {"x": b""}) != first.add_dataset(REPO, FILES | {"x": b"1"})


def test_listing_in_pages_has_sizes_and_hashes(hub: Hub, api: Any) -> None:
    many = {f"train/{i:03}.jsonl.zst": b"%d" % i for i in range(25)} | {"README.md": PLAIN}
    sha = hub.add_dataset(REPO, many)
    hub.page_size = 4
    listed = list(api.list_repo_tree(REPO, repo_type="dataset", revision=sha, recursive=True, expand=True))
    files = {entry.path: entry for entry in listed if hasattr(entry, "blob_id")}
    assert {path: entry.size for path, entry in files.items()} == {p: len(c) for p, c in many.items()}
    assert [entry.path for entry in listed if not hasattr(entry, "blob_id")] == ["train"]
    packed, plain = files["train/007.jsonl.zst"], files["README.md"]
    assert packed.lfs.sha256 == hashlib.sha256(b"7").hexdigest()
    assert plain.lfs is None
    assert plain.blob_id == hashlib.sha1(b"blob %d\0" % len(PLAIN) + PLAIN).hexdigest()
    assert sum(r.kind == "tree" for r in hub.requests) == 7
    top = api.list_repo_tree(REPO, repo_type="dataset")
    assert [entry.path for entry in top] == ["README.md", "train"]
    assert len(list(api.list_repo_tree(REPO, "train", repo_type="dataset"))) == 25
    paths = ["README.md", "train", "absent"]
    assert {e.path for e in api.get_paths_info(REPO, paths, repo_type="dataset")} == {"README.md", "train"}


def test_a_pointer_has_the_blob_id_of_git() -> None:
    # echo -n hello | git lfs clean | git hash-object --stdin
    hub = Hub()
    hub.add_dataset(REPO, {"x": b"hello"}, lfs={"x"})
    pointer = (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{hashlib.sha256(b'hello').hexdigest()}\nsize 5\n"
    ).encode()
    repository = hub.find("dataset", REPO)
    assert repository is not None
    entry = repository.commits[repository.branches["main"]].entries[0]
    assert entry["oid"] == hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()
    assert entry["lfs"]["pointerSize"] == len(pointer)


@pytest.mark.parametrize("name", ["tiny", "org/tiny"])
def test_a_model_downloads_fully_or_by_file(name: str, hub: Hub, api: Any, tmp_path: Path) -> None:
    source = tmp_path / "weights.bin"
    source.write_bytes(PACKED)
    files: dict[str, bytes | Path] = {"tokenizer.json": b"{}", "empty.txt": b"", "model.bin": source, "sub/x.txt": b"x"}
    sha = hub.add_model(name, files)
    single = api.hf_hub_download(name, "tokenizer.json", cache_dir=tmp_path / "one")
    assert Path(single).read_bytes() == b"{}"
    assert sha in single
    snapshot = Path(api.snapshot_download(name, cache_dir=tmp_path / "all"))
    content = {p.relative_to(snapshot).as_posix(): p.read_bytes() for p in snapshot.rglob("*") if p.is_file()}
    assert content == {**files, "model.bin": PACKED}


def test_errors_match_the_hub(hub: Hub, api: Any, tmp_path: Path) -> None:
    from huggingface_hub import errors

    with pytest.raises(errors.RepositoryNotFoundError):
        api.repo_info("org/absent", repo_type="dataset")
    with pytest.raises(errors.RevisionNotFoundError):
        api.repo_info(REPO, repo_type="dataset", revision="absent")
    with pytest.raises(errors.RevisionNotFoundError):
        list(api.list_repo_tree(REPO, repo_type="dataset", revision="absent"))
    with pytest.raises(errors.EntryNotFoundError):
        api.hf_hub_download(REPO, "absent", repo_type="dataset", cache_dir=tmp_path)
    hub.add_dataset("org/gated", FILES, gated=True)
    assert api.repo_info("org/gated", repo_type="dataset").gated == "manual"
    with pytest.raises(errors.GatedRepoError):
        api.hf_hub_download("org/gated", "README.md", repo_type="dataset", cache_dir=tmp_path)


def test_the_hub_requires_a_token_and_the_cdn_gets_none(hub: Hub, api: Any, tmp_path: Path) -> None:
    from huggingface_hub import HfApi, errors

    hub.token = "hf_secret"
    with pytest.raises(errors.RepositoryNotFoundError):
        api.repo_info(REPO, repo_type="dataset")
    assert get(url(hub, "README.md")).status_code == 401
    assert get(url(hub, "README.md"), Authorization="Bearer wrong").status_code == 401
    owner = HfApi(endpoint=hub.endpoint, token="hf_secret")
    path = owner.hf_hub_download(REPO, "train/a.jsonl.zst", repo_type="dataset", cache_dir=tmp_path)
    assert Path(path).read_bytes() == PACKED
    assert get(url(hub, "train/a.jsonl.zst"), Authorization="Bearer hf_secret").content == PACKED
    cdn_requests = [r for r in hub.requests if r.kind == "cdn"]
    assert cdn_requests
    assert not any("Authorization" in r.headers for r in cdn_requests)


# -- protocol, on the wire


def test_a_small_file_is_served_by_the_hub_itself(hub: Hub) -> None:
    response = requests.head(url(hub, "README.md"), timeout=20)
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["Content-Length"] == str(len(PLAIN))
    assert response.headers["ETag"].strip('"') == hashlib.sha1(b"blob 1300\0" + PLAIN).hexdigest()
    assert get(url(hub, "README.md")).content == PLAIN
    assert [(r.kind, r.file, r.status, r.bytes_sent) for r in hub.requests] == [
        ("resolve", "README.md", 200, 0),
        ("resolve", "README.md", 200, len(PLAIN)),
    ]


def test_a_large_file_is_a_signed_link_to_another_origin(hub: Hub) -> None:
    sha = hub.add_dataset(REPO, FILES)
    response = requests.head(url(hub, "train/a.jsonl.zst", sha), timeout=20)
    assert response.status_code == 302
    assert response.headers["X-Repo-Commit"] == sha
    assert response.headers["X-Linked-Size"] == str(len(PACKED))
    assert response.headers["X-Linked-ETag"].strip('"') == hashlib.sha256(PACKED).hexdigest()
    link = response.headers["Location"]
    assert urlsplit(link).netloc != urlsplit(hub.endpoint).netloc
    assert get(link).content == PACKED
    assert get(link[:-1] + "~").status_code == 403
    assert get(link.partition("?")[0]).status_code == 403
    hub.link_seconds = -1
    expired = get(url(hub, "train/a.jsonl.zst"))
    assert (expired.status_code, len(expired.history)) == (403, 1)


def test_files_in_lfs_are_selectable(hub: Hub) -> None:
    for lfs, large in ((None, {"b.zst"}), (True, {"a", "b.zst"}), (False, set()), ({"a"}, {"a"})):
        hub.add_dataset(REPO, {"a": b"1", "b.zst": b"2"}, lfs=lfs)
        codes = {n: requests.head(url(hub, n), timeout=20).status_code for n in ("a", "b.zst")}
        assert {name for name, code in codes.items() if code == 302} == large


@pytest.mark.parametrize("name", ["README.md", "train/a.jsonl.zst"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_ranges(name: str, on_disk: bool, hub: Hub, tmp_path: Path) -> None:
    data = FILES[name]
    (tmp_path / "file").write_bytes(data)
    hub.add_dataset(REPO, {name: tmp_path / "file" if on_disk else data})
    size, address = len(data), url(hub, name)
    for requested, start, stop in (("0-", 0, size), ("7-11", 7, 12), ("9-99999999", 9, size), ("-5", size - 5, size)):
        response = get(address, Range=f"bytes={requested}")
        assert (response.status_code, response.content) == (206, data[start:stop])
        assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{size}"
    beyond = get(address, Range=f"bytes={size}-")
    assert (beyond.status_code, beyond.headers["Content-Range"]) == (416, f"bytes */{size}")
    etag = get(address).headers["ETag"]
    assert get(address, Range="bytes=1-", If_Range=etag).status_code == 206
    for ignored in ({"Range": "bytes=1-", "If_Range": '"other"'}, {"Range": "lines=1-"}, {"Range": "bytes=5-2"}):
        assert (get(address, **ignored).status_code, get(address, **ignored).content) == (200, data)


NAMES = [
    "a b.txt",
    "what?.txt",
    "frag#ment",
    "100%25.txt",
    "naïve/日本語🙂.zst",
    "\u202egpj.exe",
    "line\nbreak\r\x00\x7f\x1b.txt",
    "../../x",
    "../../x.zst",
    "/etc/passwd",
    "a//b",
    "a\\b",
    "Case.txt",
    "case.txt",
    "CASE.TXT",
    "main/resolve/main/x",
    "x" * 300,
    "é" * 300 + ".gz",
    "\udc80.txt",
    ".",
    "CON",
]


def test_any_name_is_listed_and_served(hub: Hub, api: Any) -> None:
    files = {name: f"{number}".encode() for number, name in enumerate(NAMES)}
    sha = hub.add_dataset(REPO, files)
    listed = api.list_repo_tree(REPO, repo_type="dataset", revision=sha, recursive=True)
    assert {entry.path for entry in listed if hasattr(entry, "blob_id")} == set(NAMES)
    base = f"{hub.endpoint}/datasets/{REPO}/resolve/{sha}/"
    for name, content in files.items():
        if name == ".":  # a client that follows RFC 3986 cannot request it
            continue
        response = get(base + quote(name.encode("utf-8", "surrogatepass"), safe=""))
        assert (response.status_code, response.content) == (200, content), name
    assert get(base + "%FF").status_code == 400
    assert get(base + quote("../../../../../etc/hostname", safe="")).status_code == 404


@pytest.mark.parametrize("revision", ["refs/pr/1", "odd name #1"])
def test_any_revision_is_served(revision: str, hub: Hub) -> None:
    hub.add_dataset(REPO, {"d/f": b"other"}, branch=revision)
    assert get(url(hub, "d/f", revision)).content == b"other"
    assert get(f"{hub.endpoint}/datasets/{REPO}/resolve/{quote(revision)}/d/f").content == b"other"
    assert get(f"{hub.endpoint}/api/datasets/{REPO}/tree/{quote(revision)}/d").json()[0]["path"] == "d/f"


def test_old_commits_stay_when_a_branch_moves(hub: Hub) -> None:
    old = hub.add_dataset(REPO, FILES)

    def push(request: Any) -> None:
        if request.kind == "api":
            hub.add_dataset(REPO, {"README.md": b"pushed"})

    hub.on_request = push
    assert get(f"{hub.endpoint}/api/datasets/{REPO}").json()["sha"] != old
    assert get(url(hub, "README.md")).content == b"pushed"
    assert get(url(hub, "README.md", old)).content == PLAIN


def test_connections_stay_open(hub: Hub) -> None:
    with requests.Session() as session:
        for _ in range(5):
            assert session.get(url(hub, "README.md"), timeout=20).content == PLAIN
            assert session.get(url(hub, "absent"), timeout=20).status_code == 404
        assert sum(t.name == f"testhub-{urlsplit(hub.endpoint).port}-connection" for t in threading.enumerate()) == 1


def test_the_rate_limit_sends_the_wait(hub: Hub) -> None:
    from huggingface_hub.utils._http import parse_ratelimit_headers

    hub.rate_limit = (2, 0.5)
    codes = [get(url(hub, "README.md")).status_code for _ in range(2)]
    refused = get(url(hub, "README.md"))
    assert [*codes, refused.status_code] == [200, 200, 429]
    limit = parse_ratelimit_headers(refused.headers)
    assert limit is not None
    assert (limit.remaining, limit.reset_in_seconds, limit.limit) == (0, 1, 2)
    assert hub.requests[-1].retry_after == 1
    time.sleep(limit.reset_in_seconds)
    assert get(url(hub, "README.md")).status_code == 200


# -- faults


@pytest.mark.parametrize("name", ["README.md", "train/a.jsonl.zst"])
def test_refusals(name: str, hub: Hub) -> None:
    hub.faults.add(
        Fault("429", retry="ratelimit", seconds=7),
        Fault("429", retry="seconds", seconds=2.5),
        Fault("429", retry="date", seconds=30),
        Fault("429"),
        *(Fault(code) for code in ("500", "502", "503", "401", "403", "404")),
        Fault("503", retry="seconds", seconds=1),
    )
    responses = [get(url(hub, name)) for _ in range(12)]
    assert [r.status_code for r in responses] == [429] * 4 + [500, 502, 503, 401, 403, 404, 503, 200]
    assert responses[0].headers["RateLimit"] == '"resolvers";r=0;t=7'
    assert "RateLimit-Policy" in responses[0].headers
    assert responses[1].headers["Retry-After"] == "3"
    wait = parsedate_to_datetime(responses[2].headers["Retry-After"]).timestamp() - time.time()
    assert 20 < wait <= 31
    assert not {"RateLimit", "Retry-After"} & responses[3].headers.keys()
    assert responses[9].headers["X-Error-Code"] == "EntryNotFound"
    assert responses[10].headers["Retry-After"] == "1"
    assert responses[11].content == FILES[name]
    waits = [r.retry_after for r in hub.requests if r.fault]
    assert waits[:2] == [7, 3]
    assert waits[3:] == [None] * 7 + [1]
    assert [r.fault for r in hub.requests][:3] == ["429"] * 3


def test_an_expired_link_of_the_cdn(hub: Hub) -> None:
    hub.faults.add(Fault("403", where="cdn"))
    first, second = get(url(hub, "train/a.jsonl.zst")), get(url(hub, "train/a.jsonl.zst"))
    assert (first.status_code, second.status_code) == (403, 200)
    assert urlsplit(first.url).port == hub.cdn_port


def test_faults_of_listing_and_information(hub: Hub) -> None:
    hub.faults.add(Fault("503", where="info"), Fault("500", where="tree"), Fault("cut", where="tree", at=1))
    info, tree = f"{hub.endpoint}/api/datasets/{REPO}", f"{hub.endpoint}/api/datasets/{REPO}/tree/main"
    assert [get(info).status_code for _ in range(2)] == [503, 200]
    assert get(tree).status_code == 500
    with pytest.raises(requests.RequestException):
        get(tree)
    assert len(get(tree).json()) == 2
    assert get(url(hub, "README.md")).status_code == 200


def read(address: str, **headers: str) -> tuple[bytes, bool]:
    """Return the received bytes, and whether the transfer ended with an error."""
    received = b""
    try:
        with requests.get(address, headers=headers, stream=True, timeout=20) as response:
            for part in response.raw.stream(100):
                received += part
    except (requests.RequestException, OSError):
        return received, True
    except Exception as error:
        assert type(error).__module__.startswith("urllib3"), error
        return received, True
    return received, False


@pytest.mark.parametrize("name", ["README.md", "train/a.jsonl.zst"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_damaged_bodies(name: str, on_disk: bool, hub: Hub, tmp_path: Path) -> None:
    data, address = FILES[name], url(hub, name)
    (tmp_path / "file").write_bytes(data)
    hub.add_dataset(REPO, {name: tmp_path / "file" if on_disk else data})

    def under(kind: str, **options: Any) -> tuple[bytes, bool]:
        hub.faults.clear()
        hub.faults.add(Fault(kind, **options))
        damaged = read(address)
        assert read(address) == (data, False)
        return damaged

    assert under("cut", at=100) == (data[:100], True)
    received, failed = under("reset", at=100)
    assert failed
    assert data.startswith(received)
    assert under("drop") == (b"", True)
    assert under("short", at=100) == (data[:100], False)
    assert under("short", at=100, declared="none") == (data[:100], False)
    assert under("stall", at=100, seconds=0.01) == (data, False)
    assert under("stall", at=100, seconds=0.01, then="close") == (data[:100], True)
    assert under("slow", rate=len(data) * 50) == (data, False)
    assert under("cut", at=10**9) == (data[:-1], True)
    assert under("cut") == (data[: len(data) // 2], True)
    for position in (0, 100, len(data) - 1):
        received, failed = under("flip", at=position)
        assert not failed
        assert [i for i in range(len(data)) if received[i] != data[i]] == [position]
        assert len(received) == len(data)


def test_a_fault_counts_bytes_of_the_range_that_is_sent(hub: Hub) -> None:
    hub.faults.add(Fault("cut", at=10))
    assert read(url(hub, "README.md"), Range="bytes=50-")[0] == PLAIN[50:60]


@pytest.mark.parametrize("name", ["README.md", "train/a.jsonl.zst"])
def test_a_range_may_be_ignored(name: str, hub: Hub) -> None:
    hub.faults.add(Fault("ignore_range"))
    assert get(url(hub, name)).status_code == 200
    response = get(url(hub, name), Range="bytes=5-")
    assert (response.status_code, response.content) == (200, FILES[name])
    assert get(url(hub, name), Range="bytes=5-").status_code == 206


def test_gzip_is_sent_on_request(hub: Hub) -> None:
    hub.faults.add(Fault("gzip", times=None))
    assert get(url(hub, "README.md")).headers["Content-Length"] == str(len(PLAIN))
    response = get(url(hub, "README.md"), Accept_Encoding="gzip")
    assert "Content-Length" not in response.headers
    assert response.content == PLAIN
    assert gzip.decompress(read(url(hub, "README.md"), Accept_Encoding="gzip")[0]) == PLAIN


def test_a_fault_counts_paths_separately(hub: Hub) -> None:
    hub.add_dataset(REPO, {"a": b"a", "b": b"b", "c.txt": b"c"})
    hub.faults.add(Fault("500", path="[ab]", after=1, times=2), Fault("404", path="*.txt", times=None))
    codes = {n: [get(url(hub, n)).status_code for _ in range(4)] for n in ("a", "b", "c.txt")}
    assert codes == {"a": [200, 500, 500, 200], "b": [200, 500, 500, 200], "c.txt": [404] * 4}


def test_a_branch_moves_between_information_and_download(hub: Hub) -> None:
    hub.faults.add(Fault("move_branch"))
    old = get(f"{hub.endpoint}/api/datasets/{REPO}/revision/main").json()["sha"]
    new = get(f"{hub.endpoint}/api/datasets/{REPO}/revision/main").json()["sha"]
    assert old != new
    assert get(url(hub, "train/a.jsonl.zst")).content != PACKED
    assert get(url(hub, "train/a.jsonl.zst", old)).content == PACKED


def test_a_plan_from_json(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    file.write_text(json.dumps([{"kind": "cut", "path": "*.zst", "at": 9}]))
    assert FaultPlan.from_json(file).take("cdn", "a.zst", {"cut"}) == Fault("cut", path="*.zst", at=9)
    for wrong in ("", "{}", "[1]", '[{"kind": "200"}]', '[{"kind": "cut", "where": "x"}]', '[{"knd": 1}]'):
        file.write_text(wrong)
        with pytest.raises(RequestError, match=r"faults\.json"):
            FaultPlan.from_json(file)


# -- start and stop


def test_stop_ends_every_connection_and_start_takes_the_same_ports(hub: Hub) -> None:
    hub.faults.add(Fault("stall", at=5, seconds=3600), Fault("slow", path="train/*", rate=0.1))
    session = requests.Session()
    idle = session.get(f"{hub.endpoint}/api/datasets/{REPO}", timeout=20)
    stalled = session.get(url(hub, "README.md"), stream=True, timeout=20)
    with requests.get(url(hub, "train/b.jsonl"), stream=True, timeout=20) as slow:
        ports = [urlsplit(endpoint).port for endpoint in (hub.endpoint, hub.cdn_endpoint)]
        own_threads = [
            t for t in threading.enumerate() if t.name.startswith(tuple(f"testhub-{port}" for port in ports))
        ]
        assert len(own_threads) > 2
        hub.stop()
        assert not [thread for thread in own_threads if thread.is_alive()]
        for response in (stalled, slow):
            with pytest.raises(requests.RequestException):
                _ = response.content
    with pytest.raises(requests.ConnectionError):
        get(idle.url)
    hub.faults.clear()
    hub.start()
    assert get(idle.url).json() == idle.json()
    session.close()


def test_a_client_may_disconnect(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    hub.add_dataset(REPO, {"big.zst": bytes(1 << 24)})
    with requests.get(url(hub, "big.zst"), stream=True, timeout=20) as response:
        response.raw.read(10)
    hub.stop()
    assert capfd.readouterr() == ("", "")


def test_the_command_serves_a_directory_until_sigterm(tmp_path: Path) -> None:
    for name, data in (("datasets/org/corpus/d/a.zst", PACKED), ("models/org/tiny/tokenizer.json", b"{}")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "faults.json").write_text('[{"kind": "500"}]')
    command = [sys.executable, "-m", "support.hub", str(tmp_path)]
    options = ["--token", "t", "--faults", str(tmp_path / "faults.json"), "--public-host", "localhost"]
    with subprocess.Popen([*command, *options], cwd=TESTS, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        name, _, endpoint = process.stdout.readline().strip().partition("=")
        assert (name, endpoint.rpartition(":")[0]) == ("HF_ENDPOINT", "http://localhost")
        headers = {"Authorization": "Bearer t"}
        address = f"{endpoint}/datasets/org/corpus/resolve/main/d/a.zst"
        assert get(address, **headers).status_code == 500
        assert get(address, **headers).content == PACKED
        assert get(f"{endpoint}/org/tiny/resolve/main/tokenizer.json").status_code == 500
        assert get(f"{endpoint}/org/tiny/resolve/main/tokenizer.json").status_code == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    empty = tmp_path / "empty"
    empty.mkdir()
    failed = subprocess.run([*command[:-1], str(empty)], cwd=TESTS, capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert "nothing to serve" in failed.stderr


def test_a_reset_is_a_reset_and_a_cut_is_not(hub: Hub) -> None:
    hub.faults.add(Fault("reset", at=10), Fault("cut", at=10))
    for error in (ConnectionResetError, http.client.IncompleteRead):
        connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=20)
        connection.request("GET", urlsplit(url(hub, "README.md")).path)
        with pytest.raises(error):
            connection.getresponse().read()
        connection.close()
