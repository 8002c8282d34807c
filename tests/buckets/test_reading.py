"""Datasets in buckets: the samples of a directory, in few bytes, also after kills and faults."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.buckets import CLOSED, CUT, Fault, Proxy, Store
from support.chat import builtin_source, conversations, lines, make_tokenizer
from support.commandline import tokenmill
from support.mill import Mill
from support.object_server import serve_objects
from support.pairs import write_ids
from tokenmill import data
from tokenmill.errors import RequestError, TransientError

pytestmark = pytest.mark.slow

FAULTS = [Fault(500, "InternalError"), Fault(503, "SlowDown"), CLOSED, CUT]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an output of preprocess with two pairs."""
    return Mill(tmp_path_factory.mktemp("mill")).make("dataset", {"a": 400, "b": 300})


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a scratch directory; all processes that fetch for this test end with it."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield directory
    for process in find_fetchers(directory):
        os.kill(process, signal.SIGKILL)


def find_fetchers(directory: Path) -> list[int]:
    """Return the processes that fetch ranges for programs with this scratch directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if "tokenmill.core.buckets.fetcher" in words and any(word.startswith(f"{directory}/") for word in words):
                found.append(int(entry.name))
    return found


def copy_to(store: Store, directory: Path, prefix: str) -> str:
    """Copy a directory into a bucket, and return its address."""
    for path in directory.rglob("*"):
        if path.is_file():
            store.put(f"{prefix}/{path.relative_to(directory).as_posix()}", path.read_bytes())
    return f"{store.uri}/{prefix}"


@contextmanager
def using(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    yield


def read_all(samples: Any, step: int = 7) -> list[np.ndarray[Any, Any]]:
    batches = [samples.batch(range(first, min(first + step, len(samples)))) for first in range(0, len(samples), step)]
    return [np.concatenate([batch.tokens.ravel(), batch.labels.ravel()]) for batch in batches]


def assert_equal(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_samples_are_those_of_a_directory(
    store: Store, dataset: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = copy_to(store, dataset, "data")
    with using(store, monkeypatch):
        for name, place in (("there", uri), ("here", str(dataset))):
            blend = f'{{"train": ["0.3", "{place}/a_text_document", "0.7", "{place}"]}}'
            (tmp_path / f"{name}.json").write_text(blend)
        for there, here, more in (
            (uri, str(dataset), {}),
            (uri, str(dataset), {"samples": 500, "split": "90,5,5", "part": "valid"}),
            (f"{uri}/a_text_document.bin", str(dataset / "a_text_document"), {"documents": "varlen"}),
            (
                [(1.0, uri), (2.0, f"{uri}/b_text_document")],
                [(1.0, dataset), (2.0, dataset / "b_text_document")],
                {"samples": 300},
            ),
            ([(0.5, uri), (0.5, dataset)], [(0.5, dataset), (0.5, dataset)], {"samples": 300}),
            (tmp_path / "there.json", tmp_path / "here.json", {"samples": 200}),
        ):
            remote = data.open(there, seq_length=32, **more)  # type: ignore[arg-type]
            local = data.open(here, seq_length=32, **more)  # type: ignore[arg-type]
            assert remote.fingerprint() == local.fingerprint(), (there, remote.identity, local.identity)
            assert_equal(read_all(remote), read_all(local))
            assert remote.digest() == local.digest()
            assert remote.origin(3)[0].file == local.origin(3)[0].file
        assert str(scratch) not in str(remote.identity)


def test_phases_read_datasets_in_buckets(
    s3_store: Store, dataset: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = copy_to(s3_store, dataset, "data")
    plan = """
phases:
  - samples: 40
    blend: [{path: DATA/a_text_document, weight: 1}, {path: DATA/b_text_document, weight: 3}]
  - samples: 60
    blend: [{path: DATA, weight: 1}]
"""
    with using(s3_store, monkeypatch):
        digests = []
        for name, place in (("here", str(dataset)), ("there", uri)):
            (tmp_path / f"{name}.yaml").write_text(plan.replace("DATA", place))
            for _ in range(2):  # writes the views, and opens them again
                samples = data.open(phases=tmp_path / f"{name}.yaml", seq_length=32)
                digests.append(samples.digest())
                assert samples.origin(50)[0].file in ("a.jsonl", "b.jsonl")
        assert len(set(digests)) == 1


def test_packed_rows_are_those_of_a_directory(
    s3_store: Store, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.jsonl").write_bytes(lines(conversations(1, 60)))
    template = tmp_path / "chatml.jinja"
    template.write_text(builtin_source("chatml"))
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    for command in (
        ["chat", tmp_path / "corpus", tmp_path / "chat", "--tokenizer", tokenizer, "--chat-template", template],
        ["pack", tmp_path / "chat", tmp_path / "pack", "--pack-size", 1024],
    ):
        ended = tokenmill(*command)
        assert ended.code == 0, ended.err
    uri = copy_to(s3_store, tmp_path / "pack", "pack")
    with using(s3_store, monkeypatch):
        remote = data.open(uri, seq_length=1024)
        local = data.open(tmp_path / "pack", seq_length=1024)
        assert remote.fingerprint() == local.fingerprint() and remote.digest() == local.digest()


def test_workers_of_a_dataloader_read_after_a_fork(
    s3_store: Store, dataset: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from tokenmill.loaders.torch import Loader, MapDataset, StreamDataset
    from tokenmill.samples.order import Order

    uri = copy_to(s3_store, dataset, "data")
    with using(s3_store, monkeypatch):
        remote, local = (data.open(source, seq_length=32) for source in (uri, dataset))
        expected = [batch["tokens"] for batch in Loader(local, 4, rank=1, world=2)]
        actual = [batch["tokens"] for batch in Loader(remote, 4, rank=1, world=2)]
        assert all(map(torch.equal, actual, expected)) and len(actual) == len(expected)
        for method in ("fork", "spawn"):
            order = Order(len(remote), 4, rank=1, world=2)
            workers = torch.utils.data.DataLoader(
                StreamDataset(remote, order), batch_size=None, num_workers=2, multiprocessing_context=method
            )
            actual = [batch["tokens"] for batch in workers]
            assert all(map(torch.equal, actual, expected)) and len(actual) >= len(expected)
        workers = torch.utils.data.DataLoader(MapDataset(remote), batch_size=8, num_workers=2)
        batches = [batch["tokens"].numpy() for batch in workers]
        np.testing.assert_array_equal(np.concatenate(batches), local.batch(range(len(local))).tokens)


def test_processes_after_a_fork_read_samples(
    s3_store: Store, dataset: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = copy_to(s3_store, dataset, "data")
    with using(s3_store, monkeypatch):
        samples = data.open(uri, seq_length=32)
        first = samples.digest(0, 50)
        digests = multiprocessing.get_context("fork").Queue()
        process = multiprocessing.get_context("fork").Process(
            target=lambda: digests.put(samples.digest(0, 50)), daemon=True
        )
        process.start()
        assert digests.get(timeout=60) == first == samples.digest(0, 50)
        process.join()


def test_a_process_after_a_fork_opens_no_bucket(
    s3_store: Store, dataset: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = copy_to(s3_store, dataset, "data")
    context = multiprocessing.get_context("fork")
    with using(s3_store, monkeypatch):
        data.open(uri, seq_length=32)
        errors = context.Queue()
        process = context.Process(target=send_error, args=(f"{s3_store.uri}/data", errors), daemon=True)
        process.start()
        assert "open the data before the fork, or start worker processes with the method spawn" in errors.get(
            timeout=60
        )
        process.join()


def send_error(uri: str, errors: Any) -> None:
    try:
        data.open(uri, seq_length=16)
    except RequestError as error:
        errors.put(str(error))


def test_a_fork_while_threads_read(
    s3_store: Store, dataset: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = copy_to(s3_store, dataset, "data")
    context = multiprocessing.get_context("fork")
    with using(s3_store, monkeypatch):
        samples, stop = data.open(uri, seq_length=32), threading.Event()
        expected = samples.digest(0, 20)

        def read() -> None:
            number = 0
            while not stop.is_set():
                samples.batch([number % len(samples)])
                number += 1

        with ThreadPoolExecutor(2) as threads:
            for _ in range(2):
                threads.submit(read)
            try:
                for _ in range(5):
                    digests = context.Queue()
                    process = context.Process(target=lambda q=digests: q.put(samples.digest(0, 20)), daemon=True)
                    process.start()
                    assert digests.get(timeout=60) == expected
                    process.join()
            finally:
                stop.set()


def test_random_samples_ask_for_no_others(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "objects").mkdir()
    write_ids(tmp_path / "objects/corpus", np.arange(600_000) % 60000, np.full(2000, 300), "uint16")
    monkeypatch.setenv("TOKENMILL_BUCKET_CACHE_BYTES", "1000000")
    with serve_objects(tmp_path / "objects") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        samples = data.open(f"s3://{tmp_path.name}/corpus", seq_length=64)
        server.take_counts()
        for number in np.random.default_rng(1).integers(0, len(samples), 300).tolist():
            samples.batch([number])
        assert server.take_counts().bytes <= 1.2 * 300 * 65 * 2


def test_renewed_credentials_are_used(
    s3_store: Store, dataset: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that reads keeps running, and takes the keys that are in the file then."""
    uri = copy_to(s3_store, dataset, "data")
    proxy = Proxy(s3_store.address)
    environment = {name: value for name, value in s3_store.environment.items() if "KEY" not in name}
    keys = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    keys.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = old-secret-key\n")
    with proxy.run() as address, using(s3_store._replace(environment=environment).through(address), monkeypatch):
        samples = data.open(uri, seq_length=32)
        samples.batch([0])
        proxy.accept = lambda authorization: "Credential=new/" in authorization
        keys.write_text("[default]\naws_access_key_id = new\naws_secret_access_key = new-secret-key\n")
        assert samples.digest(0, 50) == data.open(dataset, seq_length=32).digest(0, 50)


def test_modules_of_the_working_directory_are_not_imported(
    s3_store: Store, dataset: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = copy_to(s3_store, dataset, "data")
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    with using(s3_store, monkeypatch):
        data.open(uri, seq_length=32).batch([0])


def test_an_invalid_size_of_the_cache_is_refused(
    s3_store: Store, dataset: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = copy_to(s3_store, dataset, "data")
    monkeypatch.setenv("TOKENMILL_BUCKET_CACHE_BYTES", "10GB")
    with using(s3_store, monkeypatch), pytest.raises(RequestError, match="it must be a number of bytes"):
        data.open(uri, seq_length=32).batch([0])


def test_a_long_path_of_the_socket(
    s3_store: Store, dataset: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = scratch / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(deep))
    uri = copy_to(s3_store, dataset, "data")
    with using(s3_store, monkeypatch):
        samples = data.open(uri, seq_length=32)
        assert samples.digest(0, 50) == data.open(dataset, seq_length=32).digest(0, 50)


def test_commands_know_addresses_with_an_equals_sign_and_pairs_without_a_record(
    s3_store: Store, dataset: Path, tmp_path: Path
) -> None:
    for prefix in ("v", "v=2"):
        copy_to(s3_store, dataset, prefix)
    for suffix in ("bin", "idx"):
        s3_store.put(f"foreign/x.{suffix}", (dataset / f"a_text_document.{suffix}").read_bytes())
    ended = s3_store.run(
        "blend", tmp_path / "blend.txt", f"{s3_store.uri}/v=2", "--split", "80,10,10", TMPDIR=str(tmp_path)
    )
    assert ended.code == 0 and f" {s3_store.uri}/v=2/a_text_document" in (tmp_path / "blend.txt").read_text(), ended.err
    ended = s3_store.run("verify", f"{s3_store.uri}/foreign/x", TMPDIR=str(tmp_path))
    assert ended.code == 0 and "no problems" in ended.out, ended.err


def test_a_killed_fetcher_is_started_again(
    s3_store: Store, dataset: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = copy_to(s3_store, dataset, "data")
    expected = read_all(data.open(dataset, seq_length=16), 3)
    with using(s3_store, monkeypatch):
        samples = data.open(uri, seq_length=16)
        dice, actual = random.Random(1), []
        for first in range(0, len(samples), 3):
            if dice.random() < 0.02:
                for process in find_fetchers(scratch):
                    os.kill(process, signal.SIGKILL)
            batch = samples.batch(range(first, min(first + 3, len(samples))))
            actual.append(np.concatenate([batch.tokens.ravel(), batch.labels.ravel()]))
        assert_equal(actual, expected)
        assert len(find_fetchers(scratch)) == 1


def test_faults_of_the_store_change_no_sample(
    store: Store, dataset: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, dice = copy_to(store, dataset, "data"), random.Random(3)
    proxy = Proxy(store.address)
    monkeypatch.setenv("TOKENMILL_BUCKET_CACHE_BYTES", "20000")  # no block fits
    with proxy.run() as address, using(store.through(address), monkeypatch):
        proxy.choose = lambda method, path: dice.choice(FAULTS) if dice.random() < 0.1 else None
        samples = data.open(uri, seq_length=64, samples=200)
        assert samples.digest(0, 200) == data.open(dataset, seq_length=64, samples=200).digest(0, 200)
        assert proxy.faults > 10


def test_bytes_of_a_shuffled_corpus_that_fits_in_no_cache(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.random.default_rng(0).integers(20, 1500, 4000)
    (tmp_path / "objects").mkdir()
    write_ids(tmp_path / "objects/corpus", np.arange(lengths.sum()) % 60000, lengths, "uint16")
    monkeypatch.setenv("TOKENMILL_BUCKET_CACHE_BYTES", "3000000")
    with serve_objects(tmp_path / "objects") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        samples = data.open(f"s3://{tmp_path.name}/corpus", seq_length=1024)
        server.take_counts()
        digest = samples.digest()
        sent, trained = server.take_counts(), len(samples) * 1024 * 2
        assert digest == data.open(tmp_path / "objects/corpus", seq_length=1024).digest()
        assert sent.bytes <= 1.01 * trained
        monkeypatch.setenv("TOKENMILL_BUCKET_CACHE_BYTES", "30000000")  # the corpus fits: each byte once
        with ThreadPoolExecutor(1) as thread:  # another connection, of another environment
            samples = data.open(f"s3://{tmp_path.name}/corpus", seq_length=1024, samples=2 * len(samples))
            server.take_counts()
            local = data.open(tmp_path / "objects/corpus", seq_length=1024, samples=2 * len(samples) // 2)
            assert thread.submit(samples.digest, 0, 4000).result() == local.digest(0, 4000)
        size = (tmp_path / "objects/corpus.bin").stat().st_size
        assert server.take_counts().bytes <= size


def test_ranks_of_a_machine_fetch_the_same_samples_once(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.full(2000, 300)
    (tmp_path / "objects").mkdir()
    write_ids(tmp_path / "objects/corpus", np.arange(lengths.sum()) % 60000, lengths, "uint16")
    monkeypatch.setenv("TOKENMILL_BUCKET_CACHE_BYTES", "1100000")
    with serve_objects(tmp_path / "objects") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        context = multiprocessing.get_context("spawn")
        digests, barrier = context.Queue(), context.Barrier(5)
        ranks = [
            context.Process(target=send_digest, args=(f"s3://{tmp_path.name}/corpus", digests, barrier), daemon=True)
            for _ in range(4)
        ]
        for rank in ranks:
            rank.start()
        barrier.wait(60)  # all have opened the pair
        server.take_counts()
        samples = data.open(tmp_path / "objects/corpus", seq_length=256)
        for _ in range(0, len(samples), 64):
            barrier.wait(60)
        assert {digests.get(timeout=120) for _ in ranks} == {samples.digest()}
        assert server.take_counts().bytes < 1.05 * len(samples) * 257 * 2


def send_digest(uri: str, digests: Any, barrier: Any) -> None:
    """Read all samples at the speed of the other ranks."""
    samples, digest = data.open(uri, seq_length=256), data.SampleDigest()
    barrier.wait(60)
    for first in range(0, len(samples), 64):
        barrier.wait(60)
        batch = samples.batch(range(first, min(first + 64, len(samples))))
        digest.add(batch.tokens, batch.masked_labels())
    digests.put(digest.hexdigest())


def test_errors_name_the_object_and_the_remedy(
    s3_store: Store, dataset: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = copy_to(s3_store, dataset, "data")
    with using(s3_store, monkeypatch):
        with pytest.raises(RequestError, match=f"there is no bucket {s3_store.uri}-x"):
            data.open(f"{s3_store.uri}-x/data", seq_length=16)
        with pytest.raises(RequestError, match=r"there is no .*s3://.*/nothing"):
            data.open(f"{s3_store.uri}/nothing", seq_length=16)
        with pytest.raises(RequestError, match="is an address"):
            data.open("ftp://server/data", seq_length=16)
        samples = data.open(uri, seq_length=16)
        samples.batch([0])
        for name in ("a", "b"):
            s3_store.put(
                f"data/{name}_text_document.bin", b"\1" * (dataset / f"{name}_text_document.bin").stat().st_size
            )
        for process in find_fetchers(scratch):
            os.kill(process, signal.SIGKILL)  # with its cache
        with pytest.raises(TransientError, match=f"{uri}/._text_document.bin changed while it was read"):
            read_all(samples)
        for name in ("a", "b"):
            s3_store.delete(f"data/{name}_text_document.bin")
        with pytest.raises(TransientError, match=f"{uri}/._text_document.bin was deleted while it was read"):
            read_all(samples)
        with pytest.raises(RequestError, match=r"missing or have another size now: a_text_document\.bin"):
            data.open(f"{uri}/a_text_document", seq_length=16)


def test_the_fetcher_ends_with_its_last_reader(
    s3_store: Store, dataset: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = copy_to(s3_store, dataset, "data")
    program = f"import tokenmill.data; tokenmill.data.open({uri!r}, seq_length=16).batch([0])"
    with using(s3_store, monkeypatch):
        subprocess.run([sys.executable, "-c", program], check=True)
    (process,) = find_fetchers(scratch)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not find_fetchers(scratch)
    assert not [path for path in scratch.rglob("fetch-*") if path.suffix != ".lock"]
