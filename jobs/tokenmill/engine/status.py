"""The progress of all stages below a directory, read from their state files alone, also when no worker runs.

`tokenmill status` prints the result.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.core.files.lease import HEARTBEAT_SECONDS, Liveness
from tokenmill.engine.attempt import LeftoverAttempt, is_planning, list_leftovers
from tokenmill.engine.contract import Failure, Receipt, StageKind
from tokenmill.engine.record import StageRecord, complete
from tokenmill.engine.stage_input import select_records
from tokenmill.errors import RequestError

RATE_SECONDS = 300.0
"""The rate is computed from the units that finished in the last 300 seconds before the newest receipt."""


@dataclass(frozen=True)
class StageStatus:
    """The state of one stage: complete, running, failed (units failed and no worker runs), stopped or planning."""

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


def list_statuses(path: Path, kinds: Sequence[StageKind], stage: str | None = None) -> list[StageStatus]:
    """Return the status of each stage of `kinds` that was started in `path` or below, or only of `stage`.

    Raises:
        RequestError: no such stage was started there.
    """
    statuses = [load_status(record) for record in select_records(path, kinds, stage)]
    if not statuses:
        raise RequestError(f"no stage of tokenmill was started in {path} or below it; specify an output directory")
    return statuses


def load_status(record: StageRecord) -> StageStatus:
    """Return the status of one stage, and write its manifest if it is complete and the directory is writable."""
    # Read the attempts before the receipts. In the other order, a unit that finishes in between is in neither list, and
    # a running stage is reported as stopped.
    planning = is_planning(record)
    plan = record.read_plan()
    if plan is None:
        failures = record.failures()
        state = "planning" if planning else "failed while planning" if failures else "stopped while planning"
        return StageStatus(record.stage, record.output, state, 0, 0, 0, 0, None, None, [], failures, {})
    running = [
        unit
        for unit, leftovers in list_leftovers(record).items()
        if any(leftover.liveness is Liveness.ALIVE or _is_recent(leftover) for leftover in leftovers)
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
    rate = _measure_rate(receipts)
    left = plan.weight - bytes_done
    if len(done) == len(plan.units):
        state = "complete"
        complete(record, plan, write=os.access(record.directory, os.W_OK))
    else:
        state = "running" if running else "failed" if failures else "stopped"
    seconds = left / rate if rate and left and running else None
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
        sorted(running),
        failures,
        counts,
    )


def _is_recent(attempt: LeftoverAttempt) -> bool:
    """Return whether an attempt on another machine gave a heartbeat in the last minute."""
    readable = attempt.claim is not None and attempt.liveness is not Liveness.DEAD
    return readable and time.time() - attempt.last_heartbeat < 6 * HEARTBEAT_SECONDS


def _measure_rate(receipts: list[Receipt]) -> float | None:
    """Return the bytes per second of the units that finished last."""
    if not receipts:
        return None
    times = [(receipt.started, receipt.finished, receipt.weight) for receipt in receipts]
    last = max(finished for _, finished, _ in times)
    recent = [(s, f, w) for s, f, w in times if (last - f).total_seconds() <= RATE_SECONDS]
    first = min(started for started, _, _ in recent)
    seconds = (last - first).total_seconds()
    return sum(weight for _, _, weight in recent) / seconds if seconds > 0 else None
