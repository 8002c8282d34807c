"""Checks of packed rows that are stricter than Megatron-Bridge's, and of damaged shards."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tokenmill.flow.contract import FileEntry
from tokenmill.packing.check import RowLimits, check_output, find_problems
from tokenmill.packing.contract import PackBasis

CASES = json.loads((Path(__file__).parents[1] / "conformance/sft/packed_rows.json").read_text())
LIMITS = RowLimits(pack_size=8, fill="stored", vocabulary=100)


def kinds(row: Any, limits: RowLimits = LIMITS) -> list[str]:
    return [kind for kind, _ in find_problems(*row, limits)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (([1, 2, 3], [1, 1, 0], [0]), []),
        (([1, 2, 3, 4], [0, 0, 1, 0], [0, 2]), []),
        (([], [], []), ["empty"]),
        (([1, 2, 3], [0, 1], [0]), ["mask length"]),
        (([1, 2, 3], [0, 1, 0], []), ["first"]),
        (([1, 2, 3], [0, 1, 0], [1]), ["first"]),
        (([1, 2, 3], [0, 1, 0], [0, 3]), ["starts"]),
        (([1, 2, 3, 4], [1, 0, 0, 0], [0, 2, 2]), ["starts"]),
        (([1, 2, 3, 4], [1, 0, 0, 0], [0, 2, 1]), ["starts"]),
        (([1] * 9, [1] * 8 + [0], [0]), ["size"]),
        (([1, -5], [1, 0], [0]), ["ids"]),
        (([1, 100], [1, 0], [0]), ["ids"]),
        (([1, 2, 3], [1, 2, 0], [0]), ["values"]),
        (([1, 2, 3], [1, -1, 0], [0]), ["values"]),
        (([1, 2, 3], [0, 0, 0], [0]), ["untrained"]),
        (([1, 2, 3], [0, 0, 1], [0]), ["last"]),
        (([1, 2, 3, 4], [0, 1, 1, 0], [0, 2]), ["last"]),
        (([1, 101], [0, 0], [0]), ["ids", "untrained"]),
    ],
)
def test_each_problem_of_a_row(row: Any, expected: list[str]) -> None:
    assert kinds(row) == expected


def test_the_size_counts_what_fills_a_row() -> None:
    row = ([1] * 10, [1, 0] * 5, [0, 2, 4, 6, 8])
    assert kinds(row) == ["size"]
    assert kinds(row, LIMITS._replace(fill="trained")) == []


def test_rows_that_the_reference_accepts_by_mistake() -> None:
    """Each of the reference's bad rows is refused, also those that its own check accepts."""
    limits = RowLimits(16, "stored", 1000)
    accepted = [row for *row, answer in CASES["bad_rows"] if answer == "ok" and not kinds(row, limits)]
    assert accepted == [[[1, 2, 3], [0, 1, 0], [0]]]
    assert all(kinds(row, limits) for *row, answer in CASES["bad_rows"] if answer != "ok")


def test_rows_that_the_reference_packed_train_only_inside_sequences() -> None:
    """Only sequences of one token, or without trained tokens, make rows that train nothing."""
    for case in CASES["cases"]:
        for packed in case["packed"].values():
            problems = {
                kind for row in packed["rows"] for kind in kinds(row, RowLimits(case["pack_size"], "stored", 5000))
            }
            assert problems <= ({"untrained"} if case["name"] in ("overlong", "zero_mask") else set()), case["name"]


BASIS = PackBasis(inputs="0" * 32, format="parquet", pack_size=8, fill="stored", multiple=1, pad=0, vocabulary=100)
ROW = {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 0], "seq_start_id": [0]}


def check(path: Path, table: "pa.Table | bytes", rows: int, basis: PackBasis = BASIS) -> list[str]:
    if isinstance(table, bytes):
        path.write_bytes(table)
    else:
        pq.write_table(table, path, row_group_size=2)
    entry = FileEntry(path.name, path.stat().st_size, "0" * 32, role="shard", records=rows)
    return check_output(path, entry, basis)


def test_problems_of_a_shard_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "shard.parquet"
    bad = {**ROW, "loss_mask": [0, 0, 0]}
    assert check(path, pa.Table.from_pylist([ROW] * 5), 5) == []
    problems = check(path, pa.Table.from_pylist([ROW, ROW, bad, bad, ROW]), 4)
    assert len(problems) == 2
    assert problems[0].startswith(
        f"{path}: row 2: it trains no token: its loss_mask has only zeros (and 1 more rows); run"
    )
    assert "it has 5 rows, but its receipt has 4; run" in problems[1]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"PAR1 no", "it is not a shard of the format parquet"),
        (pa.table({"input_ids": [[1]]}), "it lacks the column loss_mask"),
        (pa.table({"input_ids": [1], "loss_mask": [1], "seq_start_id": [0]}), "input_ids is int64, not a list"),
        (pa.Table.from_pylist([{**ROW, "input_ids": None}, ROW]), "input_ids has nulls"),
        (pa.Table.from_pylist([{**ROW, "loss_mask": [1, None, 0]}]), "loss_mask has nulls"),
        (
            pa.Table.from_pylist([{**ROW, "seq_start_id": [0.0]}]),
            "seq_start_id has nulls, or values that are not integers",
        ),
    ],
)
def test_a_file_of_another_kind(tmp_path: Path, table: Any, message: str) -> None:
    (problem,) = check(tmp_path / "shard.parquet", table, 1)
    assert message in problem and "run the same tokenmill pack again" in problem


def test_json_lines(tmp_path: Path) -> None:
    basis = PackBasis(
        **{name: getattr(BASIS, name) for name in BASIS.__struct_fields__ if name != "format"}, format="jsonl"
    )
    path = tmp_path / "shard.jsonl"
    assert check(path, json.dumps(ROW).encode() + b"\n", 1, basis) == []
    for line in (b"{", b"[]\n", b'{"input_ids": []}\n'):
        (problem,) = check(path, line, 1, basis)
        assert "it is not a shard of the format jsonl" in problem
    (problem,) = check(path, json.dumps({**ROW, "input_ids": ["a", 2, 3]}).encode(), 1, basis)
    assert "it is not a shard of the format jsonl" in problem


def test_the_paths_of_a_blend(tmp_path: Path) -> None:
    path, shard = tmp_path / "blend.json", tmp_path / "shard.parquet"
    entry = FileEntry("blend.json", 1, "0" * 32, role="blend")
    path.write_text(json.dumps({"train": ["2", str(shard)], "valid": None, "test": None}))
    (problem,) = check_output(path, entry, BASIS)
    assert f"it names 1 files that do not exist, such as {shard}, because the output was moved" in problem
    shard.write_bytes(b"")
    assert check_output(path, entry, BASIS) == []
    path.write_text("[]")
    (problem,) = check_output(path, entry, BASIS)
    assert "it is not a blend" in problem
