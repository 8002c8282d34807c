"""The time and the rates of stages, from the receipts of their units, and the lineage of an output."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenmill.core.redaction import redact
from tokenmill.engine.attempt import is_planning
from tokenmill.engine.contract import IN_PLACE, Receipt, StageKind
from tokenmill.engine.record import REJECTED, Counts, Manifest, Plan, StageRecord
from tokenmill.engine.stage_input import find_records
from tokenmill.engine.status import load_status
from tokenmill.errors import RequestError
from tokenmill.reports.contract import LineageStep, StageTiming
from tokenmill.stages.registry import KINDS

_WORKING_DIRECTORY = "the working directory of the command"
SEARCHED_PARENTS = 2
"""Directories above an output in which the outputs of earlier stages are searched."""


class UnitTimes(msgspec.Struct):
    """The times of the units of a stage."""

    elapsed: float = 0.0
    busy: float = 0.0
    units: float = 0.0
    at_once: int = 0


def measure_times(receipts: Sequence[Receipt]) -> UnitTimes:
    """Return the time from the first start to the last end, the part in which units ran, and the sum of all units."""
    times = UnitTimes()
    if not receipts:
        return times
    spans = sorted((receipt.started, max(receipt.started, receipt.finished)) for receipt in receipts)
    times.units = sum((end - start).total_seconds() for start, end in spans)
    first, last = spans[0][0], max(end for _, end in spans)
    times.elapsed = (last - first).total_seconds()
    reached, busy = first, timedelta()  # which adds without rounding
    for start, end in spans:
        if end > reached:
            busy += end - max(start, reached)
            reached = end
    times.busy = busy.total_seconds()
    # At equal times, an end comes before a start, so that one worker counts as one.
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans], key=lambda item: item)
    running = 0
    for _, change in changes:
        running += change
        times.at_once = max(times.at_once, running)
    times.at_once = max(1, times.at_once)
    return times


class ReadStage(NamedTuple):
    """A stage, the valid receipts of its units, its counts, and the summary."""

    record: StageRecord
    receipts: list[Receipt]
    counts: Counts
    timing: StageTiming


def read_stage(record: StageRecord) -> ReadStage:
    """Read the receipts of a stage, and return its progress, its counts and its rates."""
    status = load_status(record)
    plan = record.read_plan()
    receipts = [receipt for _, receipt in record.receipts(plan) if receipt] if plan else []
    counts: Counts = status.counts
    times = measure_times(receipts)
    read = counts.get("in", 0)
    tokens = counts.get("tokens")

    def divide(amount: float | None) -> float | None:
        return amount / times.busy if amount is not None and times.busy > 0 else None

    timing = StageTiming(
        stage=plan.command if plan else record.stage,
        output=redact(str(record.output)),
        state=status.state,
        units=status.units,
        units_done=status.units_done,
        failures=len(status.failures),
        records=read,
        written=counts.get("out", 0),
        rejected=counts.get(REJECTED, 0),
        dropped=counts.get("dropped", 0),
        tokens=tokens,
        input_bytes=status.bytes_done,
        output_bytes=sum(entry.bytes for receipt in receipts for entry in receipt.outputs),
        started=min(receipt.started for receipt in receipts).isoformat(timespec="seconds") if receipts else None,
        finished=max(receipt.finished for receipt in receipts).isoformat(timespec="seconds") if receipts else None,
        elapsed_seconds=times.elapsed,
        busy_seconds=times.busy,
        unit_seconds=times.units,
        units_at_once=times.at_once,
        machines=len({receipt.host for receipt in receipts}),
        bytes_per_second=divide(status.bytes_done),
        records_per_second=divide(read or None),
        tokens_per_second=divide(tokens),
    )
    return ReadStage(record, receipts, counts, timing)


def is_started(record: StageRecord) -> bool:
    """Return whether a stage has a plan, a failure, or a process that makes the plan."""
    return record.tree.size(record.plan_path) is not None or bool(record.failure_names()) or is_planning(record)


def read_manifest(record: StageRecord) -> Manifest | None:
    """Return the manifest of a finished stage, None if there is no valid one."""
    return record.stored_manifest(record.plan_id())


def trace_lineage(record: StageRecord) -> tuple[list[StageRecord], list[LineageStep]]:
    """Return the records of the earlier stages that are near this output, and the steps back to the source."""
    steps, records = list[LineageStep](), list[StageRecord]()
    manifest = read_manifest(record)
    plan = record.read_plan()
    if plan is None:
        return records, steps
    steps.append(LineageStep(plan.command, redact(str(record.output)), manifest.hash if manifest else ""))
    upstream, output = plan.upstream, record.output
    while upstream.maker:
        wanted = upstream.manifest or ""
        earlier = next(
            (
                (candidate, content)
                for candidate in _list_candidates(output, upstream.maker)
                if (content := read_manifest(candidate)) is not None and content.hash == wanted
            ),
            None,
        )
        if earlier is None:
            steps.append(LineageStep(upstream.maker, "its state files are not near this output", wanted))
            break
        records.insert(0, earlier[0])
        steps.append(LineageStep(upstream.maker, redact(str(earlier[0].output)), wanted))
        upstream, output = earlier[1].upstream, earlier[0].output
    first = (records[0].read_plan() if records else None) or plan
    identity = first.source.commit or (f"listing {upstream.listing}" if upstream.listing else "")
    steps.append(LineageStep("source", _describe_source(first, output), identity))
    return records, steps


def find_source(record: StageRecord, plan: Plan) -> str:
    """Return the place of the text that an output was made from, without secrets; see `trace_lineage`."""
    try:
        return trace_lineage(record)[1][-1].place
    except RequestError:  # an output near this one is damaged
        return _describe_source(plan, record.output)


def _describe_source(plan: Plan, output: Path) -> str:
    """Return the address of the source of a plan; of a directory its path, or its name if the plan has no path."""
    uri = plan.source.uri or "unknown"
    if uri.startswith("file:"):
        if plan.source.adopted == IN_PLACE:
            return redact(str(output))
        request = plan.request.get("source")
        address = request.get("source") if isinstance(request, dict) else request
        uri = str(address).removeprefix("file://") if address else uri.removeprefix("file:") or _WORKING_DIRECTORY
    return redact(uri, uri)


def _list_candidates(output: Path, stage: str) -> Iterable[StageRecord]:
    """Yield the records of a stage in an output, in the directories above it, and directly below these."""
    kinds: list[StageKind] = [kind for kind in KINDS if kind.name == stage]
    nearest = (output, *output.absolute().parents[:SEARCHED_PARENTS])
    yield from (StageRecord(directory, kind) for directory in nearest for kind in kinds)
    unread: list[Path] = []
    for directory in output.absolute().parents[:SEARCHED_PARENTS]:
        try:
            yield from find_records(directory, kinds, 1, unread)
        except (OSError, RequestError):
            continue
