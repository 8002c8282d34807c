"""The status of a stage that changes while status reads it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.engine.attempt import new_attempt_directory, planning_lease
from tokenmill.engine.contract import Files, InputFile, Receipt
from tokenmill.engine.record import Plan, StageRecord, Unit
from tokenmill.engine.status import list_statuses
from tokenmill.stages.registry import EXTRACT, KINDS

UNITS = [Unit(name, 1, Files([InputFile(name, "1")]), [name]) for name in ("a", "b")]
PLAN = Plan("extract", {}, UNITS, {}, require="out")


@pytest.fixture
def record(tmp_path: Path) -> StageRecord:
    stage_record = StageRecord(tmp_path, EXTRACT)
    stage_record.directory.mkdir(parents=True)
    return stage_record


def test_plan_written_during_the_check_counts_as_planning(record: StageRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    read_plan = StageRecord.read_plan

    def plan_follows(self: StageRecord) -> Plan | None:
        plan = read_plan(self)
        record.plan_path.write_bytes(PLAN.to_bytes())
        planning_lease(record).path.unlink(missing_ok=True)
        return plan

    planning_lease(record).acquire()
    monkeypatch.setattr(StageRecord, "read_plan", plan_follows)
    assert list_statuses(record.output, KINDS)[0].state == "planning"


def test_unit_that_ends_during_the_check_is_running(record: StageRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    read_receipts = StageRecord.receipts

    def attempt_ends(self: StageRecord, plan: Plan) -> Iterator[tuple[Unit, Receipt | None]]:
        yield from read_receipts(self, plan)
        record.tree.remove_tree(attempt)

    record.plan_path.write_bytes(PLAN.to_bytes())
    attempt = new_attempt_directory(record, "a", PLAN.id)
    monkeypatch.setattr(StageRecord, "receipts", attempt_ends)
    state = list_statuses(record.output, KINDS)[0]
    assert (state.state, state.at_work) == ("running", ["a"])
