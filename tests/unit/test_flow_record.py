"""Plans, receipts and manifests: equal ids, valid receipts, and damaged records."""

import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.core.files.hashing import hash_file
from tokenmill.core.files.paths import safe_name
from tokenmill.engine.contract import EmptyPair, Files, InputFile, Origin, Receipt, Record, StageKind, Upstream
from tokenmill.engine.lineage import source_parts
from tokenmill.engine.record import Plan, StageRecord, Unit, complete, make_manifest
from tokenmill.errors import RequestError

TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
VALUES = st.none() | st.integers(-(2**53), 2**53) | TEXT
SPECS = st.dictionaries(st.text(max_size=12), VALUES, max_size=4)
NAMES = st.builds(safe_name, TEXT)


class UnitSpec(Record, frozen=True):
    """The specification of a unit in these tests."""

    number: int | None = None
    text: str = ""


KIND = StageKind("extract", UnitSpec)
UNIT_SPECS = st.builds(UnitSpec, st.none() | st.integers(-(2**53), 2**53), TEXT)
UNITS = st.lists(
    st.builds(Unit, id=NAMES, weight=st.integers(0, 2**50), spec=UNIT_SPECS, outputs=st.lists(NAMES, max_size=3)),
    max_size=5,
)
PLANS = st.builds(
    Plan,
    stage=st.sampled_from(["download", "extract"]),
    request=SPECS,
    units=UNITS,
    basis=SPECS,
    details=SPECS,
    source=st.builds(Origin, st.text(max_size=12), st.none() | st.text(max_size=12)),
    upstream=st.builds(Upstream, st.none() | st.text(max_size=12), listing=st.text(max_size=12)),
    require=st.none() | st.just("out"),
)
PLAN = Plan(
    "extract", {"input": "x"}, [Unit("a", 3, UnitSpec(1), ["a"]), Unit("b", 5, UnitSpec(2), ["b"])], {}, require="out"
)


def finish(record: StageRecord, plan: Plan, unit: Unit, content: bytes = b"{}\n", **changed: Any) -> Path:
    """Write a unit's output and receipt as an attempt does."""
    output = record.output / unit.outputs[0]
    output.write_bytes(content)
    entry = {"path": unit.outputs[0], "bytes": len(content), "xxh3_128": hash_file(output), "parts": []}
    receipt = {
        "plan": plan.id,
        "unit": unit.id,
        "counts": {"in": 1, "out": 1, "rejected": 0},
        "outputs": [entry],
        "inputs": [],
        "empty": [],
        "weight": unit.weight,
        "started": "2026-01-01T00:00:00.000+00:00",
        "finished": "2026-01-01T00:00:01.000+00:00",
        "host": "here",
    } | changed
    path = record.receipt_path(unit.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(receipt))
    return path


@pytest.fixture
def record(tmp_path: Path) -> StageRecord:
    stage_record = StageRecord(tmp_path, KIND)
    stage_record.directory.mkdir(parents=True)
    stage_record.plan_path.write_bytes(PLAN.to_bytes())
    return stage_record


@given(PLANS)
@settings(max_examples=50)
def test_a_plan_on_disk_is_the_plan_that_was_written(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    record = StageRecord(tmp_path_factory.getbasetemp() / "plans", KIND)
    record.directory.mkdir(parents=True, exist_ok=True)
    record.plan_path.write_bytes(plan.to_bytes())
    assert record.read_plan() == plan
    assert record.plan_id() == plan.id
    again = record.read_plan()
    assert again is not None and replace(again).id == plan.id


@given(PLANS, PLANS)
@settings(max_examples=50)
def test_plans_have_the_same_id_only_if_they_are_equal(first: Plan, second: Plan) -> None:
    contents = [json.loads(plan.to_bytes()) | {"id": None} for plan in (first, second)]
    assert (first.id == second.id) == (contents[0] == contents[1])


def test_everything_in_a_plan_is_in_its_id() -> None:
    others = [
        replace(PLAN, stage="concatenate"),
        replace(PLAN, request={}),
        replace(PLAN, basis={"eod": 1}),
        replace(PLAN, details={"notes": []}),
        replace(PLAN, source=Origin(revision="0")),
        replace(PLAN, upstream=Upstream(manifest="0")),
        replace(PLAN, require=None),
        replace(PLAN, units=PLAN.units[:1]),
        replace(PLAN, units=PLAN.units[::-1]),
    ]
    assert len({plan.id for plan in [PLAN, *others]}) == len(others) + 1


def test_unit_key_depends_only_on_what_decides_its_bytes() -> None:
    unit = PLAN.units[0]
    key = PLAN.unit_key(unit)
    assert (
        replace(PLAN, request={}, details={"x": 1}, units=[]).unit_key(
            Unit("renamed", 99, unit.spec(UnitSpec), unit.outputs)
        )
        == key
    )
    assert replace(PLAN, basis={"eod": 1}).unit_key(unit) != key
    assert replace(PLAN, stage="concatenate").unit_key(unit) != key
    assert PLAN.unit_key(Unit(unit.id, unit.weight, unit.spec(UnitSpec), ["other"])) != key
    assert PLAN.unit_key(Unit(unit.id, unit.weight, UnitSpec(3), unit.outputs)) != key


def test_other_plan_format_is_refused_and_truncated_plan_is_none(record: StageRecord) -> None:
    data = PLAN.to_bytes()
    for size in (0, 1, 20, len(data) // 2, len(data) - 3):
        record.plan_path.write_bytes(data[:size])
        assert record.read_plan() is None
    record.plan_path.write_text(json.dumps(json.loads(data) | {"format": 99}))
    with pytest.raises(RequestError, match=r"format 99, but this version of tokenmill writes 1.*use the version"):
        record.read_plan()


def test_receipt_is_valid_only_with_its_plan_and_files(record: StageRecord) -> None:
    unit = PLAN.units[0]
    assert record.read_receipt(PLAN, unit) is None
    path = finish(record, PLAN, unit)
    output = record.output / "a"
    assert record.read_receipt(PLAN, unit) is not None
    assert record.read_receipt(replace(PLAN, request={}), unit) is None

    output.write_bytes(b"[]\n")  # the same size
    assert record.read_receipt(PLAN, unit) is not None
    assert record.read_receipt(PLAN, unit, verify_hashes=True) is None
    output.write_bytes(b"{")
    assert record.read_receipt(PLAN, unit) is None
    output.unlink()
    assert record.read_receipt(PLAN, unit) is None

    content = finish(record, PLAN, unit).read_bytes()
    for size in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        assert record.read_receipt(PLAN, unit) is None


@pytest.mark.parametrize(
    ("was", "becomes"), [(b'"weight": 3', b'"weight": 4'), (b'"outputs": ["a"]', b'"outputs": ["b"]')]
)
def test_modified_plan_is_refused(record: StageRecord, was: bytes, becomes: bytes) -> None:
    assert was in PLAN.to_bytes()
    record.plan_path.write_bytes(PLAN.to_bytes().replace(was, becomes))
    with pytest.raises(RequestError, match="its content does not match its id"):
        record.read_plan()


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "b"])
def test_receipt_with_a_foreign_file_is_none(record: StageRecord, path: str) -> None:
    unit = PLAN.units[0]
    finish(record, PLAN, unit, outputs=[{"path": path, "bytes": 1, "xxh3_128": "0"}])
    assert record.read_receipt(PLAN, unit) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"outputs": None},
        {"outputs": [{"path": "a"}]},
        {"counts": {}},
        {"counts": {"in": 2, "out": 1}},
        {"weight": None},
        {"empty": None},
    ],
)
def test_incomplete_receipt_is_none(record: StageRecord, wrong: dict[str, Any]) -> None:
    finish(record, PLAN, PLAN.units[0], **wrong)
    assert record.read_receipt(PLAN, PLAN.units[0]) is None


def test_unit_id_that_leads_outside_is_refused(record: StageRecord) -> None:
    with pytest.raises(RequestError, match="damaged"):
        record.read_receipt(PLAN, Unit("../../../x", 1, Record(), ["a"]))


def test_manifest_is_written_with_the_last_receipt(record: StageRecord) -> None:
    finish(record, PLAN, PLAN.units[1])
    halfway = complete(record, PLAN)
    assert (halfway.manifest, halfway.missing, halfway.done) == (None, [PLAN.units[0]], 1)
    assert not record.manifest_path.exists()
    finish(record, PLAN, PLAN.units[0])
    read_only = complete(record, PLAN, write=False)
    assert read_only.manifest is not None and not record.manifest_path.exists()
    final = complete(record, PLAN)
    assert final.manifest is not None
    assert json.loads(record.manifest_path.read_bytes())["hash"] == final.manifest.hash == read_only.manifest.hash
    assert [entry.path for entry in final.manifest.files] == ["a", "b"]


def test_only_names_are_read_while_a_receipt_is_missing(record: StageRecord) -> None:
    """Up to a thousand workers end before the last one, and each checks whether it is the last."""
    path = record.receipt_path(PLAN.units[0].id)
    path.mkdir(parents=True)  # a read of this directory fails
    halfway = complete(record, PLAN)
    assert (halfway.missing, halfway.done) == ([PLAN.units[1]], 1)
    path.rmdir()
    finish(record, PLAN, PLAN.units[1])
    path.write_bytes(b"{")  # an invalid receipt is detected once every receipt exists
    assert complete(record, PLAN).missing == [PLAN.units[0]]


def test_manifest_hash_ignores_times_hosts_and_directories(record: StageRecord, tmp_path: Path) -> None:
    elsewhere = StageRecord(tmp_path / "elsewhere", KIND)
    elsewhere.output.mkdir()
    for unit in PLAN.units:
        finish(record, PLAN, unit)
        finish(elsewhere, PLAN, unit, host="there", started="2027-01-01T00:00:00Z", finished="2027-01-02T00:00:00Z")
    first, second = complete(record, PLAN).manifest, complete(elsewhere, PLAN).manifest
    assert first is not None and second is not None and first.hash == second.hash
    finish(elsewhere, PLAN, PLAN.units[0], content=b"[]\n")
    third = complete(elsewhere, PLAN).manifest
    assert third is not None and third.hash != first.hash


@pytest.mark.slow
def test_a_plan_of_many_units_and_its_manifest_take_little_memory(record: StageRecord) -> None:
    """59,166 shards are one plan, and every process of a run has the plan in memory."""
    count = 2000
    units = [
        Unit(name, 1, Files([InputFile(name, "1@2", parts=source_parts(name))]), [name])
        for name in (f"{n:05d}" for n in range(count))
    ]
    plan = replace(PLAN, units=units)
    for unit in units:
        finish(record, plan, unit)
    record.plan_path.write_bytes(plan.to_bytes())
    manifest = complete(record, plan).manifest
    measure = f"""
import tracemalloc
from pathlib import Path
from tokenmill.engine.record import StageRecord, complete
from tokenmill.stages.registry import EXTRACT
record = StageRecord(Path({str(record.output)!r}), EXTRACT)
complete(record, record.read_plan())  # the first call loads the imports
tracemalloc.start()
plan = record.read_plan()
again = complete(record, plan).manifest
stored = record.stored_manifest(plan.id)
_, peak = tracemalloc.get_traced_memory()
print(plan.id, again.hash, stored.hash, peak)
"""
    output = subprocess.run([sys.executable, "-c", measure], capture_output=True, text=True, check=True).stdout.split()
    assert manifest and output[:3] == [plan.id, manifest.hash, manifest.hash]
    assert int(output[3]) < 2000 * count


def test_counts_are_summed_over_units() -> None:
    empty, now = EmptyPair("text", "x", 3), datetime.now(UTC)
    receipts = [Receipt(PLAN.id, str(n), {"in": n, "out": n, "blank": 1}, [], [], [empty], n, now, now) for n in (2, 5)]
    manifest = make_manifest(PLAN, receipts)
    assert manifest.counts == {"in": 7, "out": 7, "blank": 2}
    assert manifest.empty == [empty] * 2


def test_a_dataset_without_records_gets_no_manifest(record: StageRecord) -> None:
    for unit in PLAN.units:
        finish(record, PLAN, unit, counts={"in": 0, "out": 0, "rejected": 0})
    with pytest.raises(RequestError, match="made no records"):
        complete(record, PLAN)
    assert not record.manifest_path.exists()
