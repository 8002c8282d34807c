"""Checks of packed rows that are stricter than Megatron-Bridge's, and of damaged shards."""

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tokenmill.engine.contract import FileEntry
from tokenmill.packs.check import RowLimits, check_output, find_problems
from tokenmill.packs.contract import PackBasis
from tokenmill.packs.writers.parquet import COLUMNS

CASES = json.loads((Path(__file__).parents[1] / "conformance/sft/packed_rows.json").read_text())
LIMITS = RowLimits(pack_size=8, fill="stored", vocabulary=100)


def kinds(row: Any, limits: RowLimits = LIMITS) -> list[str]:
    ids, mask, starts = row
    return [kind for kind, _ in find_problems(ids, mask, starts, limits)]


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
        (([1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 1, 0], [0, 3]), []),
    ],
)
def test_each_problem_of_a_row(row: Any, expected: list[str]) -> None:
    assert kinds(row) == expected


def test_the_size_counts_what_fills_a_row() -> None:
    row = ([1] * 10, [1, 0] * 5, [0, 2, 4, 6, 8])
    assert kinds(row) == ["size"]
    assert kinds(row, LIMITS._replace(fill="trained")) == []


def test_sequences_have_their_padding() -> None:
    row = ([1] * 7, [1, 1, 0, 1, 1, 0, 0], [0, 3])
    assert kinds(row) == []
    assert kinds(row, LIMITS._replace(multiple=2)) == ["padding"]
    assert kinds(([1] * 8, [1, 1, 0, 1, 1, 0, 0, 0], [0, 3]), LIMITS._replace(multiple=2)) == []


def test_rows_that_the_reference_accepts_by_mistake() -> None:
    """Each of the reference's bad rows is refused, also those that its own check accepts."""
    limits = RowLimits(16, "stored", 1000)
    accepted = [row for *row, answer in CASES["bad_rows"] if answer == "ok" and not kinds(row, limits)]
    assert accepted == [[[1, 2, 3], [0, 1, 0], [0]]]
    assert all(kinds(row, limits) for *row, answer in CASES["bad_rows"] if answer != "ok")


def test_rows_that_the_reference_packed_train_only_inside_sequences() -> None:
    """Only sequences of one token, or without loss tokens, make rows that train nothing."""
    for case in CASES["cases"]:
        for packed in case["packed"].values():
            problems = {
                kind for row in packed["rows"] for kind in kinds(row, RowLimits(case["pack_size"], "stored", 5000))
            }
            assert problems <= ({"untrained"} if case["name"] in ("overlong", "zero_mask") else set()), case["name"]


BASIS = PackBasis(inputs="0" * 32, format="parquet", pack_size=8, fill="stored", multiple=1, pad=0, vocabulary=100)
ROW = {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 0], "seq_start_id": [0], "source": ["a.jsonl"], "row": [7]}
TYPES = {name: pa.list_(pa.type_for_alias(kind)) for name, kind in COLUMNS.items()}


def write(path: Path, rows: list[dict[str, Any]], **types: Any) -> None:
    """Write rows as pack does; `types` has other types of columns, or None for a column that is left out."""
    kinds = {name: kind for name, kind in {**TYPES, **types}.items() if kind is not None}
    arrays = [pa.array([row.get(name) for row in rows], kind) for name, kind in kinds.items()]
    pq.write_table(pa.table(arrays, names=list(kinds)), path, row_group_size=2, compression="zstd")


def check(path: Path, rows: int, basis: PackBasis = BASIS) -> list[str]:
    entry = FileEntry(path.name, path.stat().st_size, "0" * 32, role="shard", records=rows)
    return check_output(path, entry, basis)


def test_problems_of_a_shard_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "shard.parquet"
    bad = {**ROW, "loss_mask": [0, 0, 0]}
    write(path, [ROW] * 5)
    assert check(path, 5) == []
    write(path, [ROW, ROW, bad, bad, {**ROW, "row": [1, 2]}])
    problems = check(path, 4)
    assert len(problems) == 3
    assert problems[0].startswith(
        f"{path}: row 2: it trains no token: its loss_mask has only zeros (and 1 more row); run"
    )
    assert problems[1].startswith(f"{path}: row 4: it has 1 sources and 2 records for 1 sequences; run")
    assert "it has 5 rows, but its receipt has 4; run" in problems[2]


def test_the_totals_of_the_receipt_are_compared(tmp_path: Path) -> None:
    """Another valid shard with as many rows has other numbers of sequences or tokens."""
    path = tmp_path / "shard.parquet"
    write(path, [ROW, ROW])
    entry = FileEntry(path.name, 1, "0" * 32, role="shard", records=2, sequences=2, tokens=6)
    assert check_output(path, entry, BASIS) == []
    (problem,) = check_output(path, msgspec.structs.replace(entry, sequences=3), BASIS)
    assert "it has 2 sequences, but its receipt has 3; run" in problem
    (problem,) = check_output(path, msgspec.structs.replace(entry, tokens=7), BASIS)
    assert "it has 6 ids, but its receipt has 7; run" in problem


@pytest.mark.parametrize(
    ("rows", "types", "message"),
    [
        ([ROW], {"loss_mask": None}, "it lacks the column loss_mask"),
        ([{**ROW, "weight": 1}], {"weight": pa.int32()}, "it has the unknown column 'weight'"),
        ([{**ROW, "input_ids": 1}], {"input_ids": pa.int32()}, "input_ids is int32, not list<int32>"),
        ([ROW], {"input_ids": pa.list_(pa.int64())}, "input_ids is list<element: int64>, not list<int32>"),
        ([ROW], {"seq_start_id": pa.list_(pa.float64())}, "seq_start_id is list<element: double>, not list<int32>"),
        ([ROW], {"source": pa.list_(pa.binary())}, "source is list<element: binary>, not list<string>"),
        ([ROW, {**ROW, "input_ids": None}], {}, "row group 0: input_ids has nulls"),
        ([{**ROW, "loss_mask": [1, None, 0]}], {}, "row group 0: loss_mask has nulls"),
        ([ROW, ROW, ROW, {**ROW, "source": [None]}], {}, "row group 1: source has nulls"),
    ],
)
def test_a_file_with_other_columns(tmp_path: Path, rows: Any, types: Any, message: str) -> None:
    path = tmp_path / "shard.parquet"
    write(path, rows, **types)
    (problem,) = check(path, len(rows))
    assert f"{path}: row {0 if len(rows) < 4 else 2}: it cannot be read as parquet ({message}); run the same" in problem


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it does not end with the footer of a Parquet file"),
        (b"PAR1 no", "it does not end with the footer of a Parquet file"),
        (b"PAR1" + bytes(20) + b"\xff\xff\xff\x7fPAR1", "it does not end with the footer of a Parquet file"),
        (b"PAR1" + bytes(2 << 20) + (2 << 20).to_bytes(4, "little") + b"PAR1", "its footer has 2,097,152 bytes, but"),
        (b"PAR1" + bytes(20) + (20).to_bytes(4, "little") + b"PAR1", "its metadata is damaged: field 4 is not a list"),
        (b"PAR1" + b"\x49\xfc" * 30 + (60).to_bytes(4, "little") + b"PAR1", "its metadata "),
        (b"PAR1" + b"\x19" * 60 + (60).to_bytes(4, "little") + b"PAR1", "its metadata is nested too deeply"),
    ],
    ids=["empty", "text", "outside", "large", "zeros", "list", "deep"],
)
def test_a_file_that_is_not_parquet(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "shard.parquet"
    path.write_bytes(data)
    (problem,) = check(path, 1)
    assert f"{path}: row 0: it cannot be read as parquet ({message}" in problem


@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize("rows", [1, 20_000])
def test_pages_that_declare_many_values_are_not_decoded(tmp_path: Path, dictionary: bool, rows: int) -> None:
    """A file of some kilobytes declares ten million ids; a thousand times more would not fit into memory."""
    path = tmp_path / "shard.parquet"
    ids = pa.ListArray.from_arrays(
        pa.array(np.linspace(0, 10_000_000, rows + 1).astype("i4")), pa.array(np.ones(10_000_000, "i4"))
    )
    columns = [ids, *(pa.array([ROW[name]] * rows, kind) for name, kind in list(TYPES.items())[1:])]
    table = pa.table(columns, names=list(TYPES))
    pq.write_table(table, path, row_group_size=10_000_000, compression="zstd", use_dictionary=dictionary)
    assert path.stat().st_size < 200_000
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    (problem,) = check(path, rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if rows == 1:
        assert "row group 0, column input_ids.list.element: it declares 10,000,00" in problem
        assert "more than 1 rows of a pack can have" in problem
    else:
        assert "row group 0 has 20,000 rows, but the maximum is 8,192" in problem
    assert pa.total_allocated_bytes() == before and peak < 1 << 20


@pytest.mark.parametrize("seed", range(3))
def test_damaged_bytes_end_no_process(tmp_path: Path, seed: int) -> None:
    """pyarrow ends the process for some damaged footers, so the footer is checked before."""
    path, dice = tmp_path / "shard.parquet", random.Random(seed)
    write(path, [ROW] * 9)
    good = path.read_bytes()
    for _ in range(300):
        data = bytearray(good)
        for _ in range(dice.choice((1, 1, 3))):
            data[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(data)
        assert all(problem.startswith(f"{path}: ") for problem in check(path, 9))


LINES = PackBasis(inputs="0" * 32, format="jsonl", pack_size=8, fill="stored", multiple=1, pad=0, vocabulary=100)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"input_ids": []}', "Object missing required field `loss_mask`"),
        ({**ROW, "input_ids": ["1", 2, 3]}, "Expected `int`, got `str` - at `$.input_ids[0]`"),
        ({**ROW, "input_ids": [1.5, 2, 3]}, "Expected `int`, got `float` - at `$.input_ids[0]`"),
        ({**ROW, "input_ids": [None, 2, 3]}, "Expected `int`, got `null` - at `$.input_ids[0]`"),
        ({**ROW, "input_ids": 5}, "Expected `array`, got `int` - at `$.input_ids`"),
        ({**ROW, "loss_mask": [True, True, False]}, "Expected `int`, got `bool` - at `$.loss_mask[0]`"),
        ({**ROW, "input_ids": [1 << 70, 2, 3]}, "at `$.input_ids[0]`"),
        ({**ROW, "weight": 1}, "Object contains unknown field `weight`"),
        (b'"' + b"a" * ((1 << 20) + 8 * 4096), "the line has more than 1,081,344 bytes"),
        (b"[" * 100_000, "Expected `object`, got `array`"),
    ],
)
def test_json_lines(tmp_path: Path, line: Any, message: str) -> None:
    path = tmp_path / "shard.jsonl"
    good = json.dumps(ROW).encode() + b"\n"
    path.write_bytes(good)
    assert check(path, 1, LINES) == []
    path.write_bytes(good + (line if isinstance(line, bytes) else json.dumps(line).encode()))
    (problem,) = check(path, 2, LINES)
    assert f"{path}: row 1: it cannot be read as jsonl (" in problem and message in problem


def test_the_paths_of_a_blend(tmp_path: Path) -> None:
    path, shard = tmp_path / "blend.json", tmp_path / "shard.parquet"
    entry = FileEntry("blend.json", 1, "0" * 32, role="blend")
    path.write_text(json.dumps({"train": ["2", str(shard)], "valid": None, "test": None}))
    (problem,) = check_output(path, entry, BASIS)
    assert f"it names 1 files that do not exist, such as {shard}, because the output was moved" in problem
    shard.write_bytes(b"")
    assert check_output(path, entry, BASIS) == []
    for content in ("[]", "[" * 100_000, '{"train": [1, 2]}', '{"train": 3}'):
        path.write_text(content)
        (problem,) = check_output(path, entry, BASIS)
        assert "it is not a blend" in problem


def test_a_file_that_a_trainer_would_read_with_the_shards(tmp_path: Path) -> None:
    path, shard = tmp_path / "blend.json", tmp_path / "shard.parquet"
    entry = FileEntry("blend.json", 1, "0" * 32, role="blend")
    path.write_text(json.dumps({"train": ["2", str(shard)], "valid": None, "test": None}))
    for name in ("shard.parquet", "metadata.json", "shard.jsonl"):
        (tmp_path / name).write_bytes(b"")
    assert check_output(path, entry, BASIS) == []
    (tmp_path / "old.pq").write_bytes(b"")
    (problem,) = check_output(path, entry, BASIS)
    assert problem.startswith(f"{tmp_path / 'old.pq'}: the pack did not make this file, but a trainer that reads the")
