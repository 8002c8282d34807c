"""transform after SIGKILL, and with other numbers of workers and processes: the same bytes, and no file left over."""

import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from support.corpus import REPOSITORY
from support.hub import Hub
from support.runs import Forge, assert_kept, assert_same_tree, kill_at, receipts, tree, wait_for_group_end
from support.sweep import KILLS, SEED

TRANSFORM = ["--transform", "sft(input=question,output=answer)", "--on-bad-record", "quarantine"]
SHARDS = 14
"""More than the files, so that the larger ones are divided, and one unit makes several shards."""


def rows(name: str, count: int) -> list[dict[str, Any]]:
    """Return records of which some lack the answer, so that they are dropped."""
    dice = random.Random(name)
    return [
        {"question": f"{name} {n} " + "x" * dice.randrange(200), **({"answer": "é"} if dice.random() < 0.7 else {})}
        for n in range(count)
    ]


def lines(name: str, count: int) -> bytes:
    """Return records as lines, with some bad and blank ones."""
    text = "".join(
        json.dumps(row) + "\n" + ("{bad\n" if n % 50 == 7 else "\n" if n % 40 == 9 else "")
        for n, row in enumerate(rows(name, count))
    )
    return text.encode()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files of each form, of different sizes."""
    source = tmp_path_factory.mktemp("mixed")
    (source / "a.jsonl").write_bytes(lines("a", 2000))
    (source / "b.jsonl.zst").write_bytes(zstandard.compress(lines("b", 900)))
    pq.write_table(pa.Table.from_pylist(rows("c", 500)), source / "c.parquet", row_group_size=100)
    (source / "d.jsonl").write_bytes(lines("d", 10))
    return source


@pytest.fixture(scope="module", params=["none", "zstd"])
def command(request: pytest.FixtureRequest, mixed: Path) -> Callable[[Path], list[Any]]:
    """Return a function that makes the command for an output."""
    options = [*TRANSFORM, "--shards", SHARDS, "--compression", request.param]
    return lambda output: ["transform", mixed, output, *options]


@pytest.fixture(scope="module")
def expected(
    command: Callable[[Path], list[Any]], forge: Forge, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """Return the tree of a run that is not killed."""
    output = tmp_path_factory.mktemp("expected") / "out"
    forge.complete([*command(output), "--processes", 1])
    return tree(output)


@pytest.mark.parametrize("workers", [1, 3, 7])
@pytest.mark.parametrize("processes", [1, 2])
def test_workers_and_processes_change_no_byte(
    command: Callable[[Path], list[Any]],
    expected: dict[str, bytes],
    forge: Forge,
    tmp_path: Path,
    workers: int,
    processes: int,
) -> None:
    share = ["--workers", workers, "--processes", processes]
    runs = [forge.start([*command(tmp_path / "out"), *share, "--worker-index", index]) for index in range(workers)]
    for run in runs:
        assert run.wait() == 0, run.output
    assert_same_tree(tmp_path / "out", expected)


def test_killed_runs_resume(
    command: Callable[[Path], list[Any]], expected: dict[str, bytes], forge: Forge, tmp_path: Path
) -> None:
    dice, output, kills = random.Random(SEED), tmp_path / "out", 0
    while kills < KILLS:
        shutil.rmtree(output, ignore_errors=True)
        for _ in range(dice.randint(2, 8)):
            before = receipts(output, "transform")
            processes = dice.choice((1, 1, 2))
            trigger = kill_at(output, count=dice.randint(1, dice.choice((25, 100, 250))))
            run = forge.run([*command(output), "--processes", processes], trigger)
            assert run.exit in (0, -signal.SIGKILL), run.output
            assert processes == 1 or wait_for_group_end(run.pid), "children outlive their parent"
            assert_kept(before, receipts(output, "transform"))
            kills += run.exit != 0
        before = receipts(output, "transform")
        forge.complete([*command(output), "--processes", dice.choice((1, 2))])
        assert_kept(before, receipts(output, "transform"))
        assert_same_tree(output, expected, f"after {kills} kills")


def test_divided_files_have_all_records_once(expected: dict[str, bytes], mixed: Path) -> None:
    """Compare with the rows themselves: the shards of a file have its rows in turn."""
    written = {
        name: zstandard.ZstdDecompressor().decompressobj().decompress(data) if name.endswith(".zst") else data
        for name, data in expected.items()
        if name.startswith("shard_")
    }
    assert len(written) == SHARDS
    actual = sorted(json.loads(line)["input"] for data in written.values() for line in data.splitlines())
    wanted = [row for name, count in (("a", 2000), ("b", 900), ("c", 500), ("d", 10)) for row in rows(name, count)]
    assert actual == sorted(row["question"] for row in wanted if "answer" in row)


def test_a_killed_run_on_a_source_leaves_no_scratch(forge: Forge, hub: Hub, corpus: Path, tmp_path: Path) -> None:
    options = ["--transform", "select(text)", "--shards", 20, "--processes", 1]
    forge.complete(["transform", corpus, tmp_path / "expected", *options])
    scratch, output = tmp_path / "scratch", tmp_path / "out"
    command = ["transform", f"hf://datasets/{REPOSITORY}", output, *options, "--scratch", scratch]
    command += ["--endpoint", hub.endpoint]
    for count in (40, 150, 300):
        forge.run(command, kill_at(output, count=count))
    done = receipts(output, "transform")
    forge.complete(command)
    assert_kept(done, receipts(output, "transform"))
    assert {path.name: path.read_bytes() for path in output.glob("shard_*")} == {
        path.name: path.read_bytes() for path in (tmp_path / "expected").glob("shard_*")
    }
    assert not any(scratch.iterdir())
