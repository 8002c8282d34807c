"""The state of the stages of a command as metrics of Prometheus.

`engine.worker` updates a `StageMetrics` when units start and end; `StageCollector` turns them into metrics at a scrape.
Labels have few values: the stage, the index of the worker, a state, a kind of fault, a reason of rejection.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from tokenmill.engine.faults import read_faults
from tokenmill.engine.record import REJECTED, REJECTED_PREFIX, Counts
from tokenmill.errors import RequestError, Stopped, TokenmillError

if TYPE_CHECKING:
    from prometheus_client import Metric

State = Literal["planning", "running", "finished", "failed", "stopped"]

MAX_REASONS = 20
"""Reasons of rejection that have a label of their own; a user's transform may have any number."""
OTHER = "other"

_COUNTS_OF_ALL_STAGES = ("in", "out")
_TOKEN_STAGES = ("preprocess", "chat", "adopt")
"""Stages whose units count tokens. Their counters start with 0: a later start gives no rate for the first unit."""

_REASON = re.compile(r"[a-z][a-z0-9_]{0,49}")


@dataclass
class StageMetrics:
    """The progress of this worker's share of a stage."""

    stage: str
    worker: int = 0
    workers: int = 1
    state: State = "planning"
    plan: str = ""
    units: int = 0
    input_bytes: int = 0
    read_progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Returns the input bytes and the units done, those of earlier runs included."""
    running: int = 0
    counts: Counts = field(default_factory=dict)
    """Counts of the finished units, those of earlier runs included."""
    failed: dict[str, int] = field(default_factory=lambda: {"permanent": 0, "transient": 0})
    started: float = field(default_factory=time.time)
    planning_seconds: float | None = None
    ended: float | None = None
    publish: Callable[[], None] = lambda: None
    """Gives the metrics to their destinations now, before a process ends without clean-up."""
    _progress: tuple[int, int, State] = (0, 0, "planning")
    _progress_at: float = field(default_factory=time.time)

    def count(self, counts: Counts) -> None:
        """Add the counts of a finished unit."""
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def count_failure(self, problem: TokenmillError) -> None:
        """Count a unit that failed."""
        self.failed["permanent" if problem.exit_code == RequestError.exit_code else "transient"] += 1

    def end(self, problem: BaseException | None) -> None:
        """Set the last state."""
        if problem is None:
            self.state = "finished"
        else:
            self.state = "stopped" if isinstance(problem, Stopped) else "failed"
        self.ended, self.running = time.time(), 0

    def measure(self) -> tuple[int, int, float]:
        """Return bytes and units done, and the time at which a scrape first observed them, or this state."""
        progress = (*self.read_progress(), self.state)
        if progress != self._progress:
            self._progress, self._progress_at = progress, time.time()
        return (*progress[:2], self._progress_at)

    def reasons(self) -> dict[str, int]:
        """Return the number of rejected records by reason; reasons that are not identifiers count as "other"."""
        reasons: dict[str, int] = {}
        rejected = self.counts.get(REJECTED, 0)
        for name in sorted(name for name in self.counts if name.startswith(REJECTED_PREFIX)):
            reason = name.removeprefix(REJECTED_PREFIX)
            if len(reasons) < MAX_REASONS and _REASON.fullmatch(reason):
                reasons[reason] = self.counts[name]
                rejected -= self.counts[name]
        return {**reasons, OTHER: max(0, rejected)} if rejected > 0 or not reasons else reasons


class StageCollector:
    """All stages that a command has started."""

    def __init__(self) -> None:
        """Start without a stage."""
        self.publish: Callable[[], None] = lambda: None
        """Gives the metrics to their destinations now; the owner of an exporter sets it."""
        self._stages: list[StageMetrics] = []

    def start(self, stage: str, worker: int, workers: int) -> StageMetrics:
        """Return the metrics of a stage, which replace those of an earlier run of it."""
        metrics = StageMetrics(stage, worker, workers, publish=self.publish)
        self._stages = [other for other in self._stages if other.stage != stage] + [metrics]
        return metrics

    def collect(self) -> "Iterator[Metric]":
        """Return the metrics of all stages."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        stages = self._stages
        measured = {id(stage): stage.measure() for stage in stages}
        names = ["stage", "worker"]

        def gauge(name: str, text: str, read: Callable[[StageMetrics], float | None]) -> GaugeMetricFamily:
            family = GaugeMetricFamily(f"tokenmill_stage_{name}", text, labels=names)
            for stage in stages:
                if (value := read(stage)) is not None:
                    family.add_metric([stage.stage, str(stage.worker)], value)
            return family

        def count(name: str, text: str, count: str) -> CounterMetricFamily:
            family = CounterMetricFamily(f"tokenmill_stage_{name}", text, labels=names)
            for stage in stages:
                if (
                    count in stage.counts
                    or count in _COUNTS_OF_ALL_STAGES
                    or (count == "tokens" and stage.stage in _TOKEN_STAGES)
                ):
                    family.add_metric([stage.stage, str(stage.worker)], stage.counts.get(count, 0))
            return family

        info = GaugeMetricFamily(
            "tokenmill_stage_info",
            "Plan of the stage and number of its workers; the value is always 1.",
            labels=[*names, "plan", "workers"],
        )
        state = GaugeMetricFamily(
            "tokenmill_stage_state", "1 for the state of the worker, 0 for the other states.", labels=[*names, "state"]
        )
        failed = CounterMetricFamily(
            "tokenmill_stage_failed_units",
            "Units that failed: transient if another attempt may succeed.",
            labels=[*names, "kind"],
        )
        rejected = CounterMetricFamily(
            "tokenmill_stage_rejected_records",
            "Invalid records of finished units, which were copied to rejected/.",
            labels=[*names, "reason"],
        )
        for stage in stages:
            labels = [stage.stage, str(stage.worker)]
            info.add_metric([*labels, stage.plan, str(stage.workers)], 1)
            for value in get_args(State):
                state.add_metric([*labels, value], stage.state == value)
            for kind, number in stage.failed.items():
                failed.add_metric([*labels, kind], number)
            for reason, number in stage.reasons().items():
                rejected.add_metric([*labels, reason], number)
        yield from (info, state, failed, rejected)
        retries = CounterMetricFamily(
            "tokenmill_requests_repeated", "Requests that were repeated, by kind of fault.", labels=["fault"]
        )
        for fault, number in read_faults().items():
            retries.add_metric([fault], number)
        yield retries
        yield gauge("units", "Units of this worker.", lambda stage: stage.units)
        yield gauge("done_units", "Finished units of this worker.", lambda stage: measured[id(stage)][1])
        yield gauge("running_units", "Units that are running.", lambda stage: stage.running)
        yield gauge("input_bytes", "Input of this worker's units.", lambda stage: stage.input_bytes)
        yield gauge(
            "done_input_bytes", "Input that is done; less after a failed unit.", lambda stage: measured[id(stage)][0]
        )
        yield count("records", "Records that finished units have read.", "in")
        yield count("written_records", "Records that finished units have written.", "out")
        yield count("dropped_records", "Valid records that finished units have left out.", "dropped")
        yield count("tokens", "Tokens that finished units have written.", "tokens")
        yield gauge("start_timestamp_seconds", "Time of the start.", lambda stage: stage.started)
        yield gauge("planning_seconds", "Duration of planning.", lambda stage: stage.planning_seconds)
        yield gauge(
            "last_progress_timestamp_seconds",
            "Time of the first scrape after the last progress.",
            lambda stage: measured[id(stage)][2],
        )
        yield gauge("end_timestamp_seconds", "Time of the end.", lambda stage: stage.ended)
