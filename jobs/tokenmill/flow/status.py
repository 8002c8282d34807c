"""How far every stage below a directory is, from its records alone: nothing needs to be running to ask."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.errors import RequestError
from tokenmill.files.lease import HEARTBEAT_SECONDS, Liveness
from tokenmill.flow.attempt import LeftoverAttempt, is_planning, leftovers
from tokenmill.flow.contract import Failure, Kind, Receipt
from tokenmill.flow.lineage import records_of
from tokenmill.flow.record import StageRecord, complete

RATE_SECONDS = 300.0
"""The rate is that of the units finished in the last so many seconds of work."""


@dataclass(frozen=True)
class StageStatus:
    """One stage's state: complete, running, failed (units failed and nobody works), stopped or planning."""

    stage: str
    output: Path
    state: str
    units: int
    units_done: int
    bytes: int
    bytes_done: int
    bytes_per_second: float | None
    seconds_left: float | None
    at_work: list[str]
    failures: list[Failure]
    counts: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the status as JSON."""
        failures = [failure.to_json() for failure in self.failures]
        return {**self.__dict__, "output": str(self.output), "failures": failures}


def statuses(path: Path, kinds: Sequence[Kind], stage: str | None = None) -> list[StageStatus]:
    """Return the status of each stage of `kinds` begun in `path` or below, or of `stage`; none is a RequestError."""
    found = [_status(record) for record in records_of(path, kinds, stage)]
    if not found:
        raise RequestError(f"no stage of tokenmill was begun in {path} or below it; give an output directory")
    return found


def _status(record: StageRecord) -> StageStatus:
    # Read who works before what is done: in the other order, one that ends in between is missed, and a stage that
    # goes on is called stopped.
    planning = is_planning(record)
    plan = record.read_plan()
    if plan is None:
        failures = record.failures()
        state = "planning" if planning else "failed while planning" if failures else "stopped while planning"
        return StageStatus(record.stage, record.output, state, 0, 0, 0, 0, None, None, [], failures, {})
    at_work = [
        unit
        for unit, found in leftovers(record).items()
        if any(left.liveness is Liveness.ALIVE or _recent(left) for left in found)
    ]
    receipts, counts = list[Receipt](), dict[str, int]()
    bytes_done = 0
    for unit, receipt in record.receipts(plan):
        if receipt is None:
            continue
        receipts.append(receipt)
        bytes_done += unit.weight
        for name, count in receipt.counts.items():
            counts[name] = counts.get(name, 0) + count
    done = {receipt.unit for receipt in receipts}
    failures = [f for f in record.failures() if f.unit not in done and f.plan == plan.id]
    rate = _rate(receipts)
    left = plan.weight - bytes_done
    if len(done) == len(plan.units):
        state = "complete"
        complete(record, plan, write=os.access(record.directory, os.W_OK))
    else:
        state = "running" if at_work else "failed" if failures else "stopped"
    seconds = left / rate if rate and left and at_work else None
    return StageStatus(
        record.stage,
        record.output,
        state,
        len(plan.units),
        len(done),
        plan.weight,
        bytes_done,
        rate,
        seconds,
        sorted(at_work),
        failures,
        counts,
    )


def _recent(attempt: LeftoverAttempt) -> bool:
    """Tell whether an attempt on another machine gave a sign of life just now."""
    known = attempt.claim is not None and attempt.liveness is not Liveness.DEAD
    return known and time.time() - attempt.beat < 6 * HEARTBEAT_SECONDS


def _rate(receipts: list[Receipt]) -> float | None:
    """Return bytes a second over the last units to finish."""
    if not receipts:
        return None
    times = [(receipt.started, receipt.finished, receipt.weight) for receipt in receipts]
    last = max(finished for _, finished, _ in times)
    lately = [(s, f, w) for s, f, w in times if (last - f).total_seconds() <= RATE_SECONDS]
    begun = min(started for started, _, _ in lately)
    seconds = (last - begun).total_seconds()
    return sum(weight for _, _, weight in lately) / seconds if seconds > 0 else None
