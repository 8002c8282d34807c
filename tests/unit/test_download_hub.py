"""tokenmill download from the test Hub, in a separate process: faults, kills, tokens, moves and hostile names."""

import contextlib
import hashlib
import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import stages
from support.commandline import CommandResult, data_of, finish, start, tokenmill
from support.hub import Fault, Hub
from tokenmill.engine.progress import Reporter
from tokenmill.engine.selection import Selection
from tokenmill.engine.stage import StageRun
from tokenmill.engine.worker import Summary
from tokenmill.errors import InputError, RequestError, TransientError
from tokenmill.sources.factory import open_source
from tokenmill.sources.uri import normalize_source

pytestmark = pytest.mark.slow

URI = "hf://datasets/org/corpus"
CONNECTIONS = 8
# The faults that a download of a file may meet; a fault with `cdn` affects only files in LFS.
FAULTS = [
    Fault("429", retry="ratelimit"),
    Fault("429", retry="seconds"),
    Fault("429", retry="date"),
    Fault("429"),
    Fault("500"),
    Fault("502"),
    Fault("503"),
    Fault("503", retry="seconds"),
    Fault("503", where="cdn"),
    Fault("drop"),
    Fault("drop", where="cdn"),
    Fault("cut"),
    Fault("cut", at=0),
    Fault("reset"),
    Fault("short"),
    Fault("short", declared="none"),
    Fault("flip", where="cdn"),
    Fault("flip", where="resolve"),
    Fault("stall", seconds=20),
    Fault("stall", seconds=0.1, then="close"),
    Fault("slow", rate=200_000),
    Fault("401"),
    Fault("403", where="cdn"),
    Fault("404"),
    Fault("gzip"),
]


def text(name: str, size: int) -> bytes:
    """Return lines of JSON that differ for every name."""
    line = json.dumps({"text": hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()}).encode() + b"\n"
    return line * (1 + size // len(line))


def corpus(names: list[str], size: int = 20_000) -> dict[str, bytes]:
    """Return a file for every name; the suffix decides whether the Hub stores a file in LFS."""
    return {name: text(name, size) for name in names}


def download(hub: Hub, output: Path, *more: Any, **options: Any) -> CommandResult:
    return tokenmill(
        "download", URI, output, "--connections", CONNECTIONS, "--stall-seconds", 0.5, *more, hub=hub, **options
    )


def fetch(hub: Hub, output: Path, uri: str = URI, *, run: StageRun | None = None, **selection: Any) -> Summary:
    """Download in this process, for tests that do not check how a process ends."""
    location = {"revision": selection.pop("revision", None), "endpoint": hub.endpoint}
    options = {"connections": CONNECTIONS, "deadline": 30, "stall_seconds": 0.5}
    return stages.download(uri, output, run or StageRun(Reporter()), Selection(**selection), **location, **options)


def receipts(output: Path) -> set[str]:
    return {path.name.removesuffix(".json") for path in (output / ".tokenmill/download/receipts").glob("*.json")}


def assert_retry_after_is_kept(hub: Hub, connections: int) -> None:
    """Check that no file is requested again before its Retry-After; after a 429, this holds for every file."""
    for number, request in enumerate(hub.requests):
        if request.retry_after is None:
            continue
        opens = request.time + request.retry_after - 0.02
        early = [later for later in hub.requests[number + 1 :] if later.time < opens and later.kind == request.kind]
        assert not [later.path for later in early if later.file == request.file]
        if request.status == 429:  # requests in flight at the time of the response, at most one per connection
            assert len([later for later in early if later.time > request.responded]) <= connections


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path_factory.getbasetemp() / "no-token"))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        yield server


def test_every_fault_alone(hub: Hub, tmp_path: Path) -> None:
    names = {
        f"{number:02d}{'-lfs.jsonl.zst' if lfs else '.jsonl'}": fault
        for number, fault in enumerate(FAULTS)
        for lfs in (0, 1)
    }
    files = corpus(list(names)) | {"ranges.jsonl": text("ranges", 20_000)}
    hub.add_dataset("org/corpus", files)
    for name, fault in names.items():
        hub.faults.add(Fault(**fault.__dict__ | {"path": name}))
    hub.faults.add(Fault("cut", path="ranges.jsonl"), Fault("ignore_range", path="ranges.jsonl"))
    hub.faults.add(Fault("503", where="info"), Fault("429", where="tree", retry="seconds"))
    ended = download(hub, tmp_path / "out", "--json", "--connections", 64)
    assert ended.code == 0, ended.err
    assert data_of(tmp_path / "out") == files
    assert ended.result["complete"] and ended.result["units_done_now"] == len(files)
    assert_retry_after_is_kept(hub, 64)
    struck = {(request.file, request.fault) for request in hub.requests}
    expected = {
        (name, fault.kind)
        for name, fault in names.items()
        if fault.kind != "gzip" and fault.where != ("resolve" if name.endswith(".zst") else "cdn")
    }
    assert expected | {("ranges.jsonl", "ignore_range"), ("", "503"), ("", "429")} <= struck


def test_broken_listing_is_requested_again(tmp_path: Path) -> None:
    files = corpus([f"{number}.jsonl" for number in range(7)], 100)
    with contextlib.ExitStack() as stack:
        started = []
        for kind in ("drop", "cut", "short"):
            hub = stack.enter_context(Hub(page_size=3))
            hub.add_dataset("org/corpus", files)
            hub.faults.add(Fault(kind, where="tree", seconds=0.2, then="close", after=1))
            started.append((kind, start("download", URI, tmp_path / kind, hub=hub)))
        for kind, process in started:
            ended = finish(process)
            assert ended.code == 0, (kind, ended.err)
            assert data_of(tmp_path / kind) == files


def test_200_files_with_all_faults_while_status_is_correct(hub: Hub, tmp_path: Path) -> None:
    names = [f"{number:03d}.jsonl{'.zst' * (number % 2)}" for number in range(200)]
    # Workers start with the largest file.
    files = {name: text(name, 60_000 - 250 * number) for number, name in enumerate(names)}
    hub.add_dataset("org/corpus", files)
    hub.page_size = 50
    for number, name in enumerate(names):
        for step in range(3):
            fault = FAULTS[(number * 3 + step) % len(FAULTS)]
            # A stall costs its full timeout and a 429 stops all connections: only the first files have them.
            if fault.kind in ("429", "stall") and number >= 30:
                fault = Fault("cut", at=1000 * step)
            hub.faults.add(Fault(**fault.__dict__ | {"path": name}))
    output = tmp_path / "out"
    process = start(
        "download", URI, output, "--connections", 32, "--stall-seconds", 0.5, "--json", hub=hub
    )  # fmt: skip
    seen = []
    while process.poll() is None:
        before = receipts(output)
        report = tokenmill("status", output, "--json")
        after = receipts(output)
        if report.code == 2:
            assert not before and "no stage" in report.err
            continue
        state = report.result
        if state["state"] == "stopped while planning":  # the directory exists, but the planning lease is not yet taken
            assert all(earlier["state"] == state["state"] for earlier in seen)
        elif state["state"] != "planning":
            assert len(before) <= state["units_done"] <= len(after)
            assert state["units"] == 200
            assert state["bytes_done"] <= state["bytes"] == sum(map(len, files.values()))
            assert state["state"] == "complete" if state["units_done"] == 200 else state["state"] != "complete"
        seen.append(state)
        time.sleep(0.5)
    ended = finish(process)
    assert ended.code == 0, ended.err
    assert data_of(output) == files
    assert_retry_after_is_kept(hub, 32)
    final = tokenmill("status", output, "--json").result
    assert (final["state"], final["units_done"], final["at_work"], final["failures"]) == ("complete", 200, [], [])
    assert any(state["state"] == "running" and state["at_work"] for state in seen)
    struck = Counter(request.fault for request in hub.requests if request.fault)
    assert set(struck) >= {fault.kind for fault in FAULTS} - {"gzip"}
    manifest = json.loads((output / ".tokenmill/download/manifest.json").read_bytes())
    assert manifest["counts"] == {"in": 200, "out": 200, "rejected": 0, "bytes": sum(map(len, files.values()))}


def test_all_connections_share_a_rate_limit(tmp_path: Path) -> None:
    with Hub(rate_limit=(6, 1.0)) as hub:
        hub.add_dataset("org/corpus", files := corpus([f"{number}.jsonl" for number in range(10)], 100))
        ended = download(hub, tmp_path / "out")
        assert ended.code == 0, ended.err
        assert data_of(tmp_path / "out") == files
        assert_retry_after_is_kept(hub, CONNECTIONS)


def test_corrupt_file_refusal_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that stays corrupt fails without a receipt; the others are complete, and no file contains the token."""
    token = "hf_thisIsASecret0123456789"
    with Hub(token=token, link_seconds=2) as hub:
        files = corpus([f"{number}.jsonl.zst" for number in range(5)])
        hub.add_dataset("org/corpus", files)
        hub.faults.add(Fault("flip", path="3.jsonl.zst", where="cdn", times=None))
        hub.faults.add(Fault("cut", path="1.jsonl.zst", where="cdn"), Fault("403", path="2.jsonl.zst", where="cdn"))
        ended = download(hub, tmp_path / "out", "--json", HF_TOKEN=token)
        assert ended.code not in (0, 2)
        assert "3.jsonl.zst" in ended.err and "sha256" in ended.err
        assert receipts(tmp_path / "out") == files.keys() - {"3.jsonl.zst"}
        assert data_of(tmp_path / "out") == {name: files[name] for name in files if name != "3.jsonl.zst"}
        assert not (tmp_path / "out/.tokenmill/download/manifest.json").exists()
        status = tokenmill("status", tmp_path / "out", "--json").result
        assert (status["state"], status["units_done"]) == ("failed", 4)
        assert "3.jsonl.zst" in status["failures"][0]["message"]
        requests = [request for request in hub.requests if request.file == "3.jsonl.zst" and request.kind == "cdn"]
        assert len(requests) == 3 and not any(request.headers["Range"] for request in requests)

        # The next run starts without the wrong bytes, and with all of its retries.
        hub.requests.clear()
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(TransientError, match="sha256"):
            fetch(hub, tmp_path / "out")
        requests = [request for request in hub.requests if request.file == "3.jsonl.zst" and request.kind == "cdn"]
        assert len(requests) == 3 and not any(request.headers["Range"] for request in requests)

        hub.faults.clear()
        assert fetch(hub, tmp_path / "out").done_now == 1
        assert data_of(tmp_path / "out") == files
        for request in hub.requests:
            expected = None if request.kind == "cdn" else f"Bearer {token}"
            assert request.headers["Authorization"] == expected
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or token.encode() not in path.read_bytes()
    assert token not in ended.err + ended.out


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
    return result


@pytest.mark.parametrize("name", ["big.jsonl.zst", "big.jsonl"])
def test_killed_download_resumes(hub: Hub, tmp_path: Path, name: str) -> None:
    content = text("big", 8 << 20)
    hub.add_dataset("org/corpus", {name: content}, lfs={name} if name.endswith("zst") else False)
    half = len(content) // 2
    hub.faults.add(Fault("stall", path=name, where="cdn" if name.endswith("zst") else "resolve", at=half, seconds=60))
    process = start("download", URI, tmp_path / "out", hub=hub)
    work = tmp_path / "out/.tokenmill/download/attempts"
    wait_for(lambda: [path for path in work.glob("*/data") if path.stat().st_size >= half - (1 << 20)])
    process.send_signal(signal.SIGKILL)
    assert finish(process).code == -signal.SIGKILL
    kept = next(work.glob("*/data")).stat().st_size
    assert kept > 0 and data_of(tmp_path / "out") == {}
    assert tokenmill("status", tmp_path / "out", "--json").result["state"] == "stopped"

    hub.requests.clear()
    ended = download(hub, tmp_path / "out", "--json")
    assert ended.code == 0, ended.err
    assert data_of(tmp_path / "out") == {name: content}
    assert {request.headers["Range"] for request in hub.requests if request.kind in ("resolve", "cdn")} == {
        f"bytes={kept}-"
    }
    assert not work.exists()


def test_sigterm_while_waiting_ends_with_143(hub: Hub, tmp_path: Path) -> None:
    files = corpus([f"{number}.jsonl" for number in range(4)], 100)
    hub.add_dataset("org/corpus", files)
    hub.faults.add(Fault("503", path="2.jsonl", retry="seconds", seconds=300))
    process = start("download", URI, tmp_path / "out", "--connections", 2, hub=hub)
    wait_for(lambda: len(receipts(tmp_path / "out")) == 3)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.code == 143 and "run the same command again" in ended.err
    again = download(hub, tmp_path / "out", "--json")
    assert again.code == 0 and again.result["units_done_now"] == 1
    assert data_of(tmp_path / "out") == files


def test_sigterm_while_listing_ends_with_143(hub: Hub, tmp_path: Path) -> None:
    hub.add_dataset("org/corpus", corpus(["a.jsonl"]))
    hub.faults.add(Fault("429", where="info", retry="seconds", seconds=300, times=None))
    process = start("download", URI, tmp_path / "out", hub=hub)
    wait_for(lambda: any(request.fault for request in hub.requests))
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 143


def test_deadline_ends_retries_with_exit_1(hub: Hub, tmp_path: Path) -> None:
    files = corpus([f"{number}.jsonl" for number in range(4)], 100)
    hub.add_dataset("org/corpus", files)
    # One transient failure makes the exit code 1, even if another file is refused.
    hub.faults.add(Fault("503", path="1.jsonl", times=None), Fault("404", path="2.jsonl", times=None))
    ended = download(hub, tmp_path / "out", "--deadline", 2)
    assert ended.code == 1
    assert "1.jsonl" in ended.err and "2.jsonl" in ended.err and "deadline" in ended.err
    hub.faults.clear()
    fetch(hub, tmp_path / "out")
    assert data_of(tmp_path / "out") == files


def test_deadline_applies_to_the_listing(hub: Hub, tmp_path: Path) -> None:
    hub.add_dataset("org/corpus", corpus(["a.jsonl"]))
    hub.faults.add(Fault("503", where="info", times=None))
    ended = download(hub, tmp_path / "out", "--deadline", 2)
    assert ended.code == 1 and "org/corpus" in ended.err


def test_permanent_refusal_is_exit_2_with_a_remedy(hub: Hub, tmp_path: Path) -> None:
    names = ["401.jsonl", "403.jsonl.zst", "404.jsonl", "fine.jsonl"]
    hub.add_dataset("org/corpus", files := corpus(names, 100))
    for name in names[:3]:
        hub.faults.add(Fault(name[:3], path=name, times=None, where="cdn" if name.endswith("zst") else "resolve"))
    ended = download(hub, tmp_path / "out")
    assert ended.code == 2
    assert "HF_TOKEN" in ended.err and "still exists in this revision" in ended.err
    assert data_of(tmp_path / "out") == {"fine.jsonl": files["fine.jsonl"]}
    state = tokenmill("status", tmp_path / "out", "--json").result
    assert state["state"] == "failed"
    assert {failure["unit"] for failure in state["failures"]} == set(names[:3])


def test_unlistable_dataset_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.sources.retry.BACKOFF_SECONDS", (0.01, 0.02))
    with Hub() as hub, Hub(token="right") as private:
        hub.add_dataset("org/corpus", corpus(["a.jsonl"]))
        hub.add_dataset("org/gated", corpus(["a.jsonl"]), gated=True)
        private.add_dataset("org/corpus", corpus(["a.jsonl"]))
        for server, uri, remedy in (
            (hub, "hf://datasets/org/nothing", "HF_TOKEN"),
            (hub, URI + "@nothing", "revision"),
            (hub, URI + "/nothing", "folder"),
            (hub, "hf://datasets/org/gated", "HF_TOKEN"),
            (private, URI, "HF_TOKEN"),
        ):
            with pytest.raises(RequestError, match=remedy):
                fetch(server, tmp_path / uri.replace("/", "_"), uri)
        monkeypatch.setenv("HF_TOKEN", "wrong")
        with pytest.raises(RequestError, match="refused the dataset org/corpus"):
            fetch(private, tmp_path / "out")
        monkeypatch.setenv("HF_TOKEN", "\u201cright\u201d")
        with pytest.raises(RequestError, match="correct HF_TOKEN"):
            fetch(private, tmp_path / "out")
    monkeypatch.setenv("HF_ENDPOINT", "huggingface.co")
    with pytest.raises(RequestError, match="set --endpoint"):
        open_source(URI, stall_seconds=1)
    assert data_of(tmp_path) == {}


@pytest.mark.parametrize(
    ("typed", "more", "branch", "folder"),
    [
        ("hf://datasets/org/corpus", [], "main", ""),
        ("datasets/org/corpus", [], "main", ""),
        ("datasets/org/corpus@refs/convert/parquet", [], "refs/convert/parquet", ""),
        ("https://huggingface.co/datasets/org/corpus", [], "main", ""),
        ("https://huggingface.co/datasets/org/corpus/", [], "main", ""),
        ("https://hf.co/datasets/org/corpus/tree/main/en?row=1#x", [], "main", "en"),
        ("https://huggingface.co/datasets/org/corpus/tree/refs%2Fconvert%2Fparquet", [], "refs/convert/parquet", ""),
        ("https://huggingface.co/datasets/org/corpus/tree/refs/convert/parquet/en", [], "refs/convert/parquet", "en"),
        ("hf://datasets/org/corpus@refs/convert/parquet/en", [], "refs/convert/parquet", "en"),
        ("hf://datasets/org/corpus@refs%2Fconvert%2Fparquet", [], "refs/convert/parquet", ""),
        ("hf://datasets/org/corpus@~parquet", [], "refs/convert/parquet", ""),
        ("hf://datasets/org/corpus", ["--revision", "refs/convert/parquet"], "refs/convert/parquet", ""),
        ("hf://datasets/org/corpus@refs/pr/7", [], "refs/pr/7", ""),
    ],
)
def test_every_form_of_dataset_uri_works(tmp_path: Path, typed: str, more: list[str], branch: str, folder: str) -> None:
    files = {name: corpus([f"{name} of {branch}"])[f"{name} of {branch}"] for name in ("a.jsonl", "en/b.jsonl")}
    with Hub() as hub:
        hub.add_dataset("org/corpus", {"decoy.jsonl": b'{"text": "x"}\n'})
        commit = hub.add_dataset("org/corpus", files, branch=branch)
        ended = tokenmill("download", typed, tmp_path / "out", *more, hub=hub)
    assert ended.code == 0, ended.err
    expected = {name.rpartition("/")[2]: data for name, data in files.items() if name.startswith(folder)}
    assert data_of(tmp_path / "out") == expected
    plan = json.loads((tmp_path / "out/.tokenmill/download/plan.json").read_bytes())
    assert plan["source"] == {"uri": "hf://datasets/org/corpus", "revision": commit}


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("hf://org/corpus", "for a dataset org/corpus: hf://datasets/org/corpus"),
        ("hf://org/corpus@refs/convert/parquet", ": hf://datasets/org/corpus@refs/convert/parquet"),
        ("org/corpus", "for a dataset on the Hub, use hf://datasets/org/corpus"),
        ("hf://datasets/org", "write hf://datasets/ORG/NAME"),
    ],
)
def test_dataset_name_is_refused_with_its_uri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = tokenmill("download", typed, tmp_path / "out")
    assert ended.code == 2 and message in ended.err, ended.err


@pytest.mark.parametrize("repository", ["org/corpus", "blob/corpus"])
def test_page_of_a_file_means_the_file(repository: str) -> None:
    page = f"https://huggingface.co/datasets/{repository}/blob/main/en/blob/a.jsonl"
    assert normalize_source(page) == f"https://huggingface.co/datasets/{repository}/resolve/main/en/blob/a.jsonl"


def test_a_path_that_looks_like_a_dataset_stays_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("datasets/org/corpus", "org/corpus"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.jsonl").write_text('{"text": "here"}\n')
        ended = tokenmill("download", name, tmp_path / f"out-{name[:3]}")
        assert ended.code == 0, ended.err
        assert list(data_of(tmp_path / f"out-{name[:3]}")) == ["a.jsonl"]


def test_moved_branch_does_not_change_a_plan(hub: Hub, tmp_path: Path) -> None:
    files = corpus([f"{number}.jsonl" for number in range(6)])
    commit = hub.add_dataset("org/corpus", files)
    hub.faults.add(Fault("move_branch"))
    output = tmp_path / "out"
    first = fetch(hub, output, run=StageRun(Reporter(), 0, 2))
    assert first.completion.manifest is None and 0 < first.completion.done < 6
    hub.requests.clear()
    second = fetch(hub, output, run=StageRun(Reporter(), 1, 2))
    assert {request.kind for request in hub.requests} == {"resolve"}
    assert data_of(output) == files
    assert second.completion.manifest is not None
    assert second.completion.manifest.content["source"] == {"uri": URI, "revision": commit}
    # The same request still means the same data; a request that names the commit is another one.
    assert fetch(hub, output).done_now == 0
    with pytest.raises(RequestError, match=f'revision: null -> "{commit}"'):
        fetch(hub, output, revision=commit)
    assert fetch(hub, output, revision=commit, run=StageRun(Reporter(), replace=True)).done_now == 0
    assert data_of(output) == files


def test_a_larger_sample_keeps_the_smaller_one(hub: Hub, tmp_path: Path) -> None:
    hub.add_dataset("org/corpus", corpus([f"train/{number}.jsonl" for number in range(12)] + ["test/0.jsonl"], 100))
    replace = StageRun(Reporter(), replace=True)
    fetch(hub, tmp_path / "out", sample=3)
    before = data_of(tmp_path / "out")
    assert len(before) == 3
    assert fetch(hub, tmp_path / "out", sample=6, run=replace).done_now == 3
    assert len(data_of(tmp_path / "out")) == 6 and before.items() <= data_of(tmp_path / "out").items()
    assert fetch(hub, tmp_path / "out", sample=3, run=replace).done_now == 0
    assert data_of(tmp_path / "out") == before


HOSTILE = [
    "control\x01\n\r\t\x1b[2J\x7f.jsonl",
    "case.jsonl",
    "CASE.jsonl",
    "Case.jsonl",
    "compos\u00e9.jsonl",
    "compose\u0301.jsonl",
    "long" * 75 + ".jsonl",
    "long" * 74 + "lonG.jsonl",
    "\u8a9e" * 100 + ".jsonl",
    " leading and trailing .jsonl",
    ".hidden.jsonl",
    "-rf.jsonl",
    "a%2Fb.jsonl",
    "a?b#c&d=e+f.jsonl",
    ".tokenmill/download/plan.json",
    "deep/er/case.jsonl",
    "$(touch pwned).jsonl",
    "nul.jsonl",
]


@pytest.mark.parametrize("layout", ["flat", "tree"])
def test_hostile_names_arrive_with_the_right_bytes(hub: Hub, tmp_path: Path, layout: str) -> None:
    hub.add_dataset("org/corpus", files := corpus(HOSTILE, 100))
    fetch(hub, tmp_path / "out", layout=layout)
    downloaded = data_of(tmp_path / "out")
    assert Counter(downloaded.values()) == Counter(files.values())
    assert all(name.isascii() and name.isprintable() for name in downloaded)
    manifest = json.loads((tmp_path / "out/.tokenmill/download/manifest.json").read_bytes())
    for entry in manifest["files"]:
        assert downloaded[entry["path"]] == files[entry["parts"][0]["source"]]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_name_that_leads_outside_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    hub.add_dataset("org/corpus", corpus(["fine.jsonl", "../../outside.jsonl"], 100))
    with pytest.raises(InputError, match="is not trusted"):
        fetch(hub, tmp_path / "deep" / "out")
    assert data_of(tmp_path / "deep") == {} and not any(r.kind in ("resolve", "cdn") for r in hub.requests)


def test_non_unicode_name_downloads_or_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.add_dataset("org/corpus", files := corpus(["lone\ud800surrogate.jsonl"], 100))
    ended = download(hub, tmp_path / "out")
    assert ended.code in (0, 2), ended.err
    assert "Traceback" not in ended.err
    assert list(data_of(tmp_path / "out").values()) == (list(files.values()) if ended.code == 0 else [])


def test_file_that_is_also_a_folder_downloads_or_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.add_dataset("org/corpus", {"a.jsonl": text("a", 200), "a.jsonl/b.jsonl": text("b", 100)})
    with contextlib.suppress(RequestError):
        for worker in (0, 1):  # the first worker downloads the larger file
            fetch(hub, tmp_path / "out", layout="tree", run=StageRun(Reporter(), worker, 2))
        assert len(data_of(tmp_path / "out")) == 2


def test_name_cannot_write_lines_to_the_log(hub: Hub, tmp_path: Path) -> None:
    hub.add_dataset("org/hostile", corpus(["a\x1b[31m\nall done.jsonl"]))
    hub.faults.add(*[Fault("404", path="a\x1b[31m\nall done.jsonl")] * 9)
    ended = tokenmill("download", "hf://datasets/org/hostile", tmp_path / "out", hub=hub)
    assert ended.code == 2, ended.err
    assert "\x1b" not in ended.err and "\nall done" not in ended.err
