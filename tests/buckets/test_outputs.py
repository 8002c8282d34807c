"""Buckets as outputs: the bytes of a directory, also after kills, faults and with several workers."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.buckets import CLOSED, CUT, LOST, Fault, Proxy, Store
from support.chat import builtin_source, conversations, make_tokenizer
from support.commandline import CommandResult, finish, start, tokenmill
from support.disk import Disk
from tokenmill.core.buckets.address import BucketAddress
from tokenmill.core.buckets.client import BucketClient
from tokenmill.tokenize.stream import HEAD_BYTES, HEADS

pytestmark = pytest.mark.slow

TOKENIZER = Path(__file__).parents[2] / "tests/conformance/tokenizers/tiny"
FILES = 6
FAULTS = [
    Fault(500, "InternalError"),
    Fault(503, "SlowDown"),
    Fault(400, "ExpiredToken"),
    CLOSED,
    LOST,
    CUT,
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of files with some thousand records each."""
    directory = tmp_path_factory.mktemp("corpus")
    for number in range(FILES):
        words = random.Random(number).choices(["one", "two", "three", "four", "number", "word"], k=40_000)
        texts = (" ".join(words[begin : begin + 10]) for begin in range(0, len(words), 10))
        (directory / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return directory


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of `preprocess` in a directory."""
    output = tmp_path_factory.mktemp("expected") / "out"
    ended = tokenmill(*preprocess(corpus, output))
    assert ended.code == 0, ended.err
    return read_directory(output)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return the environment of a command on a machine with its own scratch directory."""
    (tmp_path / "scratch").mkdir()
    yield {"TMPDIR": str(tmp_path / "scratch")}
    names = [path.name for path in (tmp_path / "scratch").rglob("*")]
    assert not [name for name in names if name.startswith((".copies.", "out-")) or name.endswith((".bin", ".idx"))]


def preprocess(source: Any, output: Any) -> list[Any]:
    return ["preprocess", source, output, "--tokenizer", TOKENIZER, "--encoder", "hf", "--processes", 2]


def read_directory(output: Path) -> dict[str, bytes]:
    return {path.relative_to(output).as_posix(): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def assert_same(store: Store, prefix: str, expected: dict[str, bytes]) -> None:
    """Check that a bucket has the objects of a directory; the receipts have other times."""
    objects = store.read_all(prefix)
    assert objects.keys() == expected.keys()
    different = [name for name in objects if objects[name] != expected[name] and "/receipts/" not in name]
    assert not different
    assert not store.uploads()


def kill(*processes: Any) -> None:
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        finish(process)


STAGES = {
    "download": ["--layout", "tree"],
    "extract": [],
    "concatenate": ["--target-files", 2],
    "transform": ["--transform", "sft(input=text, output=text)", "--shards", 2],
    "preprocess": ["--tokenizer", TOKENIZER, "--encoder", "hf"],
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_writes_the_same_into_a_bucket(
    stage: str, store: Store, corpus: Path, tmp_path: Path, scratch: dict[str, str]
) -> None:
    output = tmp_path / "out"
    assert tokenmill(stage, corpus, output, *STAGES[stage]).code == 0
    ended = store.run(stage, corpus, f"{store.uri}/out", *STAGES[stage], **scratch)
    assert ended.code == 0, ended.err
    assert f"{store.uri}/out" in ended.out + ended.err and scratch["TMPDIR"] not in ended.out + ended.err
    assert_same(store, "out", read_directory(output))
    ended = store.run(stage, corpus, f"{store.uri}/out", *STAGES[stage], "--json", **scratch)
    assert ended.code == 0 and '"units_done_now": 0' in ended.out.replace('":0', '": 0'), ended.out
    ended = store.run("verify", f"{store.uri}/out", **scratch)
    assert ended.code == 0 and "no problems" in ended.out, ended.out + ended.err


def test_the_default_output_is_below_the_input(store: Store, corpus: Path, scratch: dict[str, str]) -> None:
    ended = store.run("download", corpus, f"{store.uri}/corpus", "--layout", "tree", **scratch)
    assert ended.code == 0, ended.err
    for stage, folder, options in (
        ("extract", "extracted", []),
        ("concatenate", "concatenated", ["--target-files", 2]),
        ("preprocess", "preprocessed", STAGES["preprocess"]),
    ):
        ended = store.run(stage, f"{store.uri}/corpus", *options, **scratch)
        assert ended.code == 0 and f"{store.uri}/corpus/{folder}" in ended.err + ended.out, ended.err
        assert store.read_all(f"corpus/{folder}/.tokenmill/{stage}")


def test_conversations_and_their_rows_in_a_bucket(
    long_store: Store, corpus: Path, tmp_path: Path, scratch: dict[str, str]
) -> None:
    (tmp_path / "chats").mkdir()
    rows = [json.dumps(row) + "\n" for row in conversations(51, 200)]
    (tmp_path / "chats/a.jsonl").write_text("".join(rows))
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    commands = {
        "chat": (tmp_path / "chats", ["--tokenizer", tokenizer, "--encoder", "hf", "--chat-template", "chatml"]),
        "pack": (tmp_path / "chat", ["--pack-size", 1024]),
    }
    for stage, (source, options) in commands.items():
        ended = tokenmill(stage, source, tmp_path / stage, *options)
        assert ended.code == 0, ended.err
        ended = long_store.run(stage, source, f"{long_store.uri}/{stage}", *options, **scratch)
        assert ended.code == 0, ended.err
        objects, files = long_store.read_all(stage), read_directory(tmp_path / stage)
        assert objects.keys() == files.keys()
        place = str(tmp_path / stage)
        assert {name for name in objects if objects[name] != files[name] and "/receipts/" not in name} == (
            {"blend.json", ".tokenmill/pack/manifest.json"} if stage == "pack" else set()
        )
        if stage == "pack":  # the only file with the place of the output
            assert objects["blend.json"].decode() == files["blend.json"].decode().replace(
                place, f"{long_store.uri}/pack"
            )
        ended = long_store.run("verify", f"{long_store.uri}/{stage}", **scratch)
        assert ended.code == 0 and "no problems" in ended.out, ended.out + ended.err
    # from bucket to bucket; copies of the pairs stay in the scratch directory
    (tmp_path / "other").mkdir()
    other = {"TMPDIR": str(tmp_path / "other")}
    ended = long_store.run("pack", f"{long_store.uri}/chat", f"{long_store.uri}/packed", "--pack-size", 1024, **other)
    assert ended.code == 0, ended.err
    shards = {name: data for name, data in long_store.read_all("packed").items() if name.endswith(".parquet")}
    assert shards == {path.name: path.read_bytes() for path in (tmp_path / "pack").glob("*.parquet")}
    for command in (["inspect", "--row", 0], ["report"], ["check-data", "--seq-length", 1024]):
        ended = long_store.run(command[0], f"{long_store.uri}/packed", *command[1:], **other)
        assert ended.code == 0 and str(tmp_path) not in ended.out + ended.err, ended.out + ended.err
    ended = long_store.run("report", f"{long_store.uri}/chat", **other)
    assert ended.code == 0 and "Complete." in ended.out, ended.out + ended.err


def test_fine_tuning_data_in_a_bucket(s3_store: Store, tmp_path: Path) -> None:
    for name, count in (("a", 80), ("b", 40)):
        (tmp_path / name).mkdir()
        rows = [json.dumps(row) + "\n" for row in conversations(count, count)]
        (tmp_path / name / "chats.jsonl").write_text("".join(rows))
    blend = [{"name": name, "path": str(tmp_path / name), "weight": 1} for name in "ab"]
    (tmp_path / "blend.json").write_text(json.dumps({"datasets": blend}))
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    options = ["--tokenizer", tokenizer, "--encoder", "hf", "--chat-template", "chatml", "--pack-size", 1024]
    for number, source in enumerate((tmp_path / "a", tmp_path / "blend.json")):
        assert tokenmill("sft", source, tmp_path / f"out{number}", *options).code == 0
        ended = s3_store.run("sft", source, f"{s3_store.uri}/out{number}", *options, TMPDIR=str(tmp_path))
        assert ended.code == 0 and f"in {s3_store.uri}/out{number}/packed" in ended.out, ended.err + ended.out
        objects, files = s3_store.read_all(f"out{number}"), read_directory(tmp_path / f"out{number}")
        data = {name for name in files if not name.startswith(".tokenmill") and "/.tokenmill/" not in name}
        assert data <= objects.keys()
        different = {name for name in data if files[name] != objects[name]}
        assert different == {"packed/blend.json"}


def test_a_pipeline_in_a_bucket_is_the_pipeline_on_a_disk(
    long_store: Store, corpus: Path, tmp_path: Path, scratch: dict[str, str]
) -> None:
    options = ["--tokenizer", TOKENIZER, "--encoder", "hf", "--extract", "--concatenate", 2]
    assert tokenmill("run", corpus, tmp_path / "out", *options).code == 0
    ended = long_store.run("run", corpus, f"{long_store.uri}/out", *options, **scratch)
    assert ended.code == 0, ended.err
    assert_same(long_store, "out", read_directory(tmp_path / "out"))
    status = long_store.run("status", f"{long_store.uri}/out", **scratch)
    assert status.code == 0 and status.out.count("complete") == 4, status.out
    documents = [
        run("inspect", place, "--document", 7).out
        for run, place in ((tokenmill, tmp_path / "out"), (long_store.run, f"{long_store.uri}/out"))
    ]
    assert documents[0].partition("\n")[2] == documents[1].partition("\n")[2]


def test_killed_workers_leave_nothing_and_lose_nothing(
    long_store: Store, corpus: Path, expected: dict[str, bytes], scratch: dict[str, str]
) -> None:
    command = preprocess(corpus, f"{long_store.uri}/out")
    chance = random.Random(int(os.environ.get("TOKENMILL_SEED", "51")))
    for _ in range(6):
        process = start(*command, **long_store.environment, **scratch)
        end = time.monotonic() + chance.uniform(0.5, 5)
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        if process.poll() is None:
            kill(process)
    ended = long_store.run(*command, **scratch)
    assert ended.code == 0, ended.err
    assert_same(long_store, "out", expected)


def test_two_workers_on_two_machines_and_a_command_that_runs_twice(
    long_store: Store, corpus: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    command = preprocess(corpus, f"{long_store.uri}/out")
    processes = []
    for number, options in enumerate(
        (["--workers", 2, "--worker-index", 0], ["--workers", 2, "--worker-index", 1], [])
    ):
        (tmp_path / str(number)).mkdir()
        processes.append(start(*command, *options, **long_store.environment, TMPDIR=str(tmp_path / str(number))))
    ends = [finish(process) for process in processes]
    assert [end.code for end in ends] == [0, 0, 0], [end.err for end in ends]
    assert_same(long_store, "out", expected)


def test_an_upload_that_ends_after_another_plan_changes_nothing(
    s3_store: Store, corpus: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """A worker on another machine uploads a file of the old plan after the new plan is finished."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    proxy, uploading, released = Proxy(s3_store.address), threading.Event(), threading.Event()

    def choose(method: str, path: str) -> Fault | None:
        if method == "PUT" and path.partition("?")[0].endswith(".bin"):
            uploading.set()
            released.wait(60)
        return None

    proxy.choose = choose
    command = preprocess(corpus, f"{s3_store.uri}/out")
    with proxy.run() as address:
        late = start(
            *command, "--no-append-eod", **s3_store.through(address).environment, TMPDIR=str(tmp_path / "first")
        )
        assert uploading.wait(60)
        ended = s3_store.run(*command, "--replace", TMPDIR=str(tmp_path / "second"))
        assert ended.code == 0, ended.err
        released.set()
        end = finish(late)
        assert end.code != 0 and "another run replaced" in end.err, end.err
    ended = s3_store.run(*command, TMPDIR=str(tmp_path / "second"))
    assert ended.code == 0, ended.err
    objects = s3_store.read_all("out")
    assert not [name for name in objects if "/attempts/" in name] and not s3_store.uploads()
    assert {name: objects.get(name) for name in expected if "_document." in name} == {
        name: data for name, data in expected.items() if "_document." in name
    }


def test_an_upload_of_a_replaced_plan_does_not_remove_the_same_bytes(
    s3_store: Store, corpus: Path, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    proxy, uploading, released = Proxy(s3_store.address), threading.Event(), threading.Event()

    def choose(method: str, path: str) -> Fault | None:
        if method == "PUT" and path.endswith("out/1.jsonl"):
            uploading.set()
            released.wait(60)
        return None

    proxy.choose = choose
    command = ["download", corpus, f"{s3_store.uri}/out"]
    with proxy.run() as address:
        late = start(*command, **s3_store.through(address).environment, TMPDIR=str(tmp_path / "first"))
        assert uploading.wait(60)
        replacing = [*command, "--exclude", "5.jsonl", "--replace"]
        ended = s3_store.run(*replacing, TMPDIR=str(tmp_path / "second"))
        assert ended.code == 0, ended.err
        released.set()
        assert finish(late).code != 0
    ended = s3_store.run("verify", f"{s3_store.uri}/out", TMPDIR=str(tmp_path / "second"))
    assert ended.code == 0, ended.out


@pytest.mark.parametrize("versioned", [False, True])
def test_a_killed_planner_does_not_block_the_next(
    versioned: bool, s3_store: Store, corpus: Path, expected: dict[str, bytes], scratch: dict[str, str]
) -> None:
    if versioned:
        s3_store.keep_versions()
    proxy, planning = Proxy(s3_store.address), threading.Event()

    def choose(method: str, path: str) -> Fault | None:
        if planning.is_set():  # the killed process leaves its requests
            return CLOSED
        if method == "PUT" and path.endswith("/plan.json"):
            planning.set()
            return CLOSED
        return None

    proxy.choose = choose
    command = preprocess(corpus, f"{s3_store.uri}/out")
    with proxy.run() as address:
        process = start(*command, **s3_store.through(address).environment, **scratch)
        assert planning.wait(60)
        kill(process)
    assert "planning.json" in "".join(s3_store.read_all("out"))
    ended = s3_store.run(*command, **scratch)
    assert ended.code == 0, ended.err
    objects = s3_store.read_all("out")
    assert objects.keys() == expected.keys()


def test_another_tokenizer_of_the_same_size_is_not_read_from_an_old_copy(
    s3_store: Store, tmp_path: Path, scratch: dict[str, str]
) -> None:
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations(51, 20)))
    outputs = {}
    for name in ("AAA", "BBB"):
        template = builtin_source("chatml").replace("<|im_start|>", f"<|im_start|>{name}")
        tokenizer = make_tokenizer(tmp_path / name, template=template)
        options = ["--tokenizer", tokenizer, "--encoder", "hf", "--processes", 1]
        ended = s3_store.run("chat", tmp_path / "chats", f"{s3_store.uri}/out", *options, "--replace", **scratch)
        assert ended.code == 0, ended.err
        assert tokenmill("chat", tmp_path / "chats", tmp_path / f"out{name}", *options).code == 0
        outputs[name] = s3_store.read_all("out")["a_chat_document.bin"]
        assert outputs[name] == (tmp_path / f"out{name}/a_chat_document.bin").read_bytes()
    assert outputs["AAA"] != outputs["BBB"]


def test_commands_that_need_a_directory_refuse_an_address(corpus: Path) -> None:
    for command in (
        ["download", corpus, "s3://bucket/out", "--on", "slurm", "--dry-run"],
        ["adopt", "s3://bucket/chat", "out"],
    ):
        ended = tokenmill(*command)
        assert ended.code == 2 and "is an address, but only a path works here" in ended.err, ended.err


def test_faults_of_the_server_lose_nothing(
    s3_store: Store, corpus: Path, expected: dict[str, bytes], scratch: dict[str, str]
) -> None:
    proxy, chance = Proxy(s3_store.address), random.Random(int(os.environ.get("TOKENMILL_SEED", "51")))
    proxy.choose = lambda method, path: chance.choice(FAULTS) if chance.random() < 0.1 else None
    with proxy.run() as address:
        behind = s3_store.through(address)
        for _ in range(20):
            ended = behind.run(*preprocess(corpus, f"{s3_store.uri}/out"), **scratch)
            assert ended.code in (0, 1), ended.err
            if ended.code == 0:
                break
        assert ended.code == 0 and proxy.faults > 5, (proxy.faults, ended.err)
    assert_same(s3_store, "out", expected)


@pytest.mark.parametrize(
    ("method", "fault", "code", "message"),
    [
        ("PUT", Fault(403, "AccessDenied"), 2, "read, write, list and delete"),
        ("GET", Fault(403, "AccessDenied"), 2, "read, write, list and delete"),
        ("DELETE", Fault(403, "AccessDenied"), 2, "read, write, list and delete"),
        ("PUT", Fault(403, "RequestTimeTooSkewed"), 2, "set the clock"),
        ("PUT", Fault(400, "ExpiredToken"), 1, "renew the credentials"),
    ],
)
def test_a_refusal_has_a_remedy(
    method: str,
    fault: Fault,
    code: int,
    message: str,
    s3_store: Store,
    corpus: Path,
    scratch: dict[str, str],
) -> None:
    proxy = Proxy(s3_store.address)
    proxy.choose = lambda requested, path: (
        fault if requested == method or (method == "DELETE" and "?delete" in path) else None
    )
    with proxy.run() as address:
        ended = s3_store.through(address).run(*preprocess(corpus, f"{s3_store.uri}/out"), **scratch)
    assert ended.code == code and message in ended.err, ended.err


def test_a_store_that_refuses_to_describe_an_empty_object(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_store.put("empty", b"")
    proxy = Proxy(s3_store.address)
    proxy.choose = lambda method, path: Fault(403) if method == "HEAD" else None
    with proxy.run() as address:
        for name, value in s3_store.through(address).environment.items():
            monkeypatch.setenv(name, value)
        client = BucketClient(BucketAddress(s3_store.uri))
        entry = client.find("empty")
        assert entry is not None and entry.size == 0
        assert client.find("nothing") is None


def test_wrong_buckets_and_the_objects_of_others_are_refused(
    store: Store, corpus: Path, scratch: dict[str, str]
) -> None:
    ended = store.run(*preprocess(corpus, f"{store.uri}nothing/out"), **scratch)
    assert ended.code == 2 and f"there is no bucket {store.uri}nothing" in ended.err, ended.err
    store.put("out/3_text_document.bin", b"of somebody else")
    ended = store.run(*preprocess(corpus, f"{store.uri}/out"), **scratch)
    assert ended.code == 2 and f"{store.uri}/out/3_text_document.bin exists" in ended.err, ended.err


def test_changed_objects_are_found_and_made_again(
    long_store: Store, corpus: Path, expected: dict[str, bytes], scratch: dict[str, str]
) -> None:
    command = preprocess(corpus, f"{long_store.uri}/out")
    assert long_store.run(*command, **scratch).code == 0
    content = expected["2_text_document.bin"]
    long_store.put("out/2_text_document.bin", content[:-2] + b"xx")
    long_store.delete("out/4_text_document.idx")
    ended: CommandResult = long_store.run("verify", f"{long_store.uri}/out", **scratch)
    assert ended.code == 2 and ended.out.count("problem: ") >= 2, ended.out
    assert f"{long_store.uri}/out/2_text_document.bin" in ended.out and ".copies." not in ended.out
    ended = long_store.run(*command, "--json", **scratch)  # the versions in the receipts tell
    assert ended.code == 0, ended.err
    assert_same(long_store, "out", expected)
    assert long_store.run("verify", f"{long_store.uri}/out", **scratch).code == 0


def test_each_byte_moves_once(s3_store: Store, scratch: dict[str, str]) -> None:
    """Planning reads the beginnings of two files; all else is read and written once."""
    record = (json.dumps({"text": "one two three four " * 20}) + "\n").encode()
    size = 3 * 20_000 * len(record)
    for number in range(3):
        s3_store.put(f"corpus/{number}.jsonl", record * 20_000)
    proxy = Proxy(s3_store.address)
    with proxy.run() as address:
        ended = s3_store.through(address).run(*preprocess(f"{s3_store.uri}/corpus", f"{s3_store.uri}/out"), **scratch)
    assert ended.code == 0, ended.err
    written = sum(len(data) for name, data in s3_store.read_all("out").items() if name.endswith((".bin", ".idx")))
    records = 2 << 20  # bytes of the tokenizer and the records, which do not grow with the corpus
    assert proxy.bytes_received <= 1.02 * size + HEADS * HEAD_BYTES + records
    assert proxy.bytes_sent <= 1.02 * written + records


def test_the_requests_of_a_unit_do_not_grow_with_their_number(
    s3_store: Store, tmp_path: Path, scratch: dict[str, str]
) -> None:
    (tmp_path / "small").mkdir()
    requests = {}
    for units in (10, 60):
        for number in range(units):
            (tmp_path / f"small/{number}.jsonl").write_text("{}\n")
        proxy = Proxy(s3_store.address)
        with proxy.run() as address:
            place = f"{s3_store.uri}/out{units}"
            ended = s3_store.through(address).run("download", tmp_path / "small", place, **scratch)
            assert ended.code == 0, ended.err
            requests[units] = proxy.requests
            ended = s3_store.through(address).run("download", tmp_path / "small", place, **scratch)
            assert ended.code == 0 and proxy.requests - requests[units] < 2 * units + 40
    assert (requests[60] - requests[10]) / 50 <= 20


def test_a_scratch_directory_that_is_too_small_is_refused_early(s3_store: Store, corpus: Path, tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk")
    try:
        disk.fill(leave=100_000)
        ended = s3_store.run("download", corpus, f"{s3_store.uri}/out", TMPDIR=str(disk.path))
    finally:
        disk.unmount()
    assert ended.code == 2 and "set TMPDIR (or --scratch) to a larger directory" in ended.err, ended.err


def test_unfinished_uploads_are_listed_and_aborted(
    s3_store: Store, corpus: Path, scratch: dict[str, str], tmp_path: Path
) -> None:
    """A killed process leaves the parts of the upload of a large file."""
    (tmp_path / "large").mkdir()
    (tmp_path / "large/a.jsonl").write_bytes(b'{"text": "' + b"x" * (60 << 20) + b'"}\n')
    proxy, parts = Proxy(s3_store.address), []

    def choose(method: str, path: str) -> Fault | None:
        if method == "PUT" and "partNumber" in path:
            parts.append(path)
        return None

    proxy.choose = choose
    command = ["download", tmp_path / "large", f"{s3_store.uri}/out"]
    with proxy.run() as address:
        process = start(*command, **s3_store.through(address).environment, **scratch)
        while not parts:
            assert process.poll() is None
            time.sleep(0.001)
        kill(process)
    assert s3_store.uploads() == ["out/a.jsonl"]
    status = s3_store.run("status", f"{s3_store.uri}/out", **scratch)
    assert status.code == 0 and "1 unfinished uploads" in status.err, status.err
    ended = s3_store.run(*command, **scratch)
    assert ended.code == 0, ended.err
    status = s3_store.run("status", f"{s3_store.uri}/out", "--abort-uploads", 0, **scratch)
    assert status.code == 0 and "unfinished" not in status.err and not s3_store.uploads(), status.err
    assert s3_store.read_all("out")["a.jsonl"] == (tmp_path / "large/a.jsonl").read_bytes()
    ended = s3_store.run("status", f"{s3_store.uri}/out", "--abort-uploads", "nan", **scratch)
    assert ended.code == 2 and "it must be a number of hours" in ended.err, ended.err
    ended = tokenmill("status", tmp_path, "--abort-uploads", 0)
    assert ended.code == 2 and "is not in a bucket" in ended.err
