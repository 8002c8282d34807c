"""The store of orders: a large order is computed once on a machine, and every failure leads to the same samples."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tokenmill.data
from support.pairs import write_ids

SEQUENCES = 60_000
SAMPLES = 300
"""Samples that are compared."""

CHILD = """
import sys
builds = []
sys.addaudithook(lambda event, args: builds.append(event) if event == "os.mkdir" and ".new-" in str(args[0]) else None)
import tokenmill.data
samples = tokenmill.data.open(sys.argv[1], seq_length=64, index_cache=sys.argv[2])
print("opened", flush=True)
print(samples.digest(0, int(sys.argv[3])), len(builds))
"""
"""Prints the digest of the first samples, and how many orders were computed in new files."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a pair whose order is stored."""
    random = np.random.default_rng(1)
    lengths = random.integers(0, 9, SEQUENCES)
    ids = random.integers(1, 1000, int(lengths.sum()))
    return write_ids(tmp_path_factory.mktemp("pair") / "pair", ids, lengths)


@pytest.fixture(scope="module")
def expected(pair: Path) -> str:
    """Return the digest of the first samples, with an order in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMILL_CACHE_DIR", "")
        return tokenmill.data.open(pair, seq_length=64).digest(0, SAMPLES)


def read(pair: Path, store: Path) -> str:
    return tokenmill.data.open(pair, seq_length=64, index_cache=store).digest(0, SAMPLES)


def start(pair: Path, store: Path) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", CHILD, str(pair), str(store), str(SAMPLES)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def finish(child: subprocess.Popen[str]) -> tuple[str, int]:
    """Return the digest and the number of orders that the process computed."""
    try:
        output, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 0
    digest, builds = output.splitlines()[-1].split()
    return digest, int(builds)


def entries(store: Path) -> list[Path]:
    return [path for path in (store / "orders").iterdir() if path.is_dir()]


def test_processes_at_once_compute_an_order_once_and_later_ones_read_it(
    pair: Path, expected: str, tmp_path: Path
) -> None:
    assert read(pair, tmp_path) == expected
    (entry,) = entries(tmp_path)
    stored = {path.name: path.read_bytes() for path in entry.iterdir()}
    shutil.rmtree(entry)
    with Path(f"{entry}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        children = [start(pair, tmp_path) for _ in range(2)]
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "opened\n"
        time.sleep(0.1)
        assert all(child.poll() is None for child in children)
    results = [finish(child) for child in children]
    assert [digest for digest, _ in results] == [expected] * 2
    assert sorted(builds for _, builds in results) == [0, 1]
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == stored
    assert read(pair, tmp_path) == expected
    assert finish(start(pair, tmp_path)) == (expected, 0)


def change_description(entry: Path, **fields: object) -> None:
    path = entry / "order.json"
    content = json.loads(path.read_bytes())
    content["ends"] |= fields
    path.write_text(json.dumps(content))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a file is missing": lambda entry: (entry / "samples").unlink(),
    "a file is shorter": lambda entry: os.truncate(entry / "ends", 8 * (SEQUENCES - 1)),
    "a file is empty": lambda entry: os.truncate(entry / "sequences", 0),
    "a file has zeros": lambda entry: (entry / "sequences").write_bytes(bytes(4 * SEQUENCES)),
    "no description": lambda entry: (entry / "order.json").unlink(),
    "an incomplete description": lambda entry: os.truncate(entry / "order.json", 20),
    "another dtype": lambda entry: change_description(entry, dtype="<f8"),
    "a dtype of objects": lambda entry: change_description(entry, dtype="|O"),
    "an unknown dtype": lambda entry: change_description(entry, dtype="x"),
    "a negative length": lambda entry: change_description(entry, length=-1),
    "a description that is nested too deeply": lambda entry: (entry / "order.json").write_text('{"a":' * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_computed_again(pair: Path, expected: str, tmp_path: Path, damage: str) -> None:
    read(pair, tmp_path)
    (entry,) = entries(tmp_path)
    stored = {path.name: path.read_bytes() for path in entry.iterdir()}
    DAMAGES[damage](entry)
    assert read(pair, tmp_path) == expected
    assert entries(tmp_path) == [entry]
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == stored


@pytest.mark.parametrize("name", ["order.json", "ends", "lock"])
def test_a_pipe_in_the_store_is_not_waited_for(pair: Path, expected: str, tmp_path: Path, name: str) -> None:
    read(pair, tmp_path)
    (entry,) = entries(tmp_path)
    if name == "lock":
        shutil.rmtree(entry)
    path = Path(f"{entry}.lock") if name == "lock" else entry / name
    path.unlink()
    os.mkfifo(path)
    assert finish(start(pair, tmp_path))[0] == expected


def test_a_lock_that_is_a_link_creates_no_file_elsewhere(pair: Path, expected: str, tmp_path: Path) -> None:
    store, victim = tmp_path / "store", tmp_path / "victim"
    read(pair, store)
    (entry,) = entries(store)
    shutil.rmtree(entry)
    Path(f"{entry}.lock").unlink()
    Path(f"{entry}.lock").symlink_to(victim)
    assert read(pair, store) == expected
    assert not victim.exists()


def test_other_requests_have_other_orders(pair: Path, tmp_path: Path) -> None:
    for options in ({}, {"seed": 1}, {"split": "9,1,0"}, {"samples": 8_000}, {"seq_length": 65}):
        settings = {"seq_length": 64, "index_cache": tmp_path} | options
        tokenmill.data.open(pair, **settings)[0]  # type: ignore[arg-type]
    assert len(entries(tmp_path)) == 5


def test_a_small_order_is_not_stored(pair: Path, tmp_path: Path) -> None:
    tokenmill.data.open(pair, seq_length=64, split="1,1,0", part="validation", index_cache=tmp_path)[0]
    assert not list(tmp_path.iterdir())


def test_a_directory_that_others_may_write_to_is_not_used(pair: Path, expected: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert read(pair, tmp_path) == expected
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system with room for the first array of the order, but not for the second."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() != 0 or mount("-t", "tmpfs", "-o", "size=500k,mode=0700", "tokenmill-test", path):
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def mount(*arguments: str | Path) -> int:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode


def test_without_space_the_order_is_computed_in_memory(pair: Path, expected: str, small_disk: Path) -> None:
    assert read(pair, small_disk) == expected
    assert entries(small_disk) == []


def test_on_a_read_only_disk_the_order_is_computed_in_memory(pair: Path, expected: str, small_disk: Path) -> None:
    mount("-o", "remount,ro", small_disk)
    assert read(pair, small_disk) == expected
    mount("-o", "remount,rw,size=4m", small_disk)
    read(pair, small_disk)
    mount("-o", "remount,ro", small_disk)
    assert read(pair, small_disk) == expected
    assert len(entries(small_disk)) == 1
