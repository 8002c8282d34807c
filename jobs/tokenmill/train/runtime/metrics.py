"""The state of a training run on this node as metrics of Prometheus.

Megatron-LM prints its iterations on the node of the last rank, and its saves on node 0. So each node has the metrics
that it knows, and a query takes the maximum over the pods of a run.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from tokenmill.errors import Stopped
from tokenmill.train.runtime.attempts import Attempt
from tokenmill.train.runtime.log_monitor import LogMonitor
from tokenmill.train.runtime.prepare import TrainingRun
from tokenmill.train.settings import Settings

if TYPE_CHECKING:
    from prometheus_client import Metric

RunState = Literal["starting", "training", "saving", "stalled", "completed", "failed", "stopped"]

JOB = "tokenmill-train"
"""The job label of a push."""


@dataclass(eq=False)  # a registry of Prometheus needs a hash
class TrainingCollector:
    """What this node knows about a run; `runtime.run` updates it."""

    run: TrainingRun | None = None
    """The run, after its settings and data were checked."""
    monitor: LogMonitor | None = None
    """The monitor of the trainer's output, after the trainer was started."""
    saved: int | None = None
    """The iteration of the last checkpoint."""
    saved_at: float | None = None
    """Time of the last checkpoint."""
    attempts: int | None = None
    """Attempts so far, this one included; only on node 0."""
    attempts_without_progress: int | None = None
    """Attempts in a row that started where this one did, this one included, without those that a signal stopped."""
    stalled: bool = False
    """The supervisor ends this attempt because it hangs."""
    exit_code: int | None = None
    ended_at: float | None = None
    """Time of the end of the attempt, with its exit code."""
    started: float = field(default_factory=time.time)

    @property
    def state(self) -> RunState:
        """Return the state of the run as this node knows it; a stopped run is started again by its operator."""
        if self.exit_code is not None:
            return (
                "completed" if self.exit_code == 0 else "stopped" if self.exit_code == Stopped.exit_code else "failed"
            )
        if self.stalled:
            return "stalled"
        if self.monitor is None or not self.monitor.training_started:
            return "starting"
        return "saving" if self.monitor.saving else "training"

    def end(self, exit_code: int) -> None:
        """Set the end of the attempt."""
        self.exit_code, self.ended_at = exit_code, time.time()

    def count_attempts(self, attempts: list[Attempt]) -> None:
        """Set the numbers of attempts; the last one is the current one."""
        self.attempts, self.attempts_without_progress = len(attempts), 0
        for attempt in reversed(attempts):
            if attempt.progress != attempts[-1].progress or attempt.settings != attempts[-1].settings:
                break
            self.attempts_without_progress += not attempt.stopped
        if (attempts[-1].saved or attempts[-1].began_at) > attempts[-1].began_at:
            self.attempts_without_progress = 0

    def collect(self) -> "Iterator[Metric]":
        """Return all metrics that are known."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        if run := self.run:
            settings = run.settings
            info = GaugeMetricFamily(
                "tokenmill_train_info",
                "Release, model and size of the run; the value is always 1.",
                labels=["release", "model", "framework", "nodes", "gpus", "node"],
            )
            size = (str(settings.training.nodes), str(settings.world_size), str(run.node.rank))
            info.add_metric([settings.release, settings.model.name, settings.trainer.framework, *size], 1)
            yield info
        states = GaugeMetricFamily(
            "tokenmill_train_state",
            "1 for the state of the run on this node, 0 for the other states.",
            labels=["state"],
        )
        current = self.state
        for state in get_args(RunState):
            states.add_metric([state], state == current)
        yield states
        for name, text, value in self._gauges():
            if value is not None:
                yield GaugeMetricFamily(f"tokenmill_train_{name}", text, value)
        for name, text, value in self._counters():
            yield CounterMetricFamily(f"tokenmill_train_{name}", text, value)

    def _gauges(self) -> Iterator[tuple[str, str, float | None]]:
        yield "start_timestamp_seconds", "Time at which this node started the attempt.", self.started
        yield "target_iteration", "Iteration at which the run is complete.", self.run.target if self.run else None
        yield "saved_iteration", "Iteration of the last checkpoint.", self.saved
        yield "last_checkpoint_timestamp_seconds", "Time of the last checkpoint.", self.saved_at
        yield "attempts", "Attempts so far.", self.attempts
        yield (
            "attempts_without_progress",
            "Attempts in a row that started at the same iteration and have saved nothing.",
            self.attempts_without_progress,
        )
        yield "exit_code", "Exit code of the attempt: 0 at the target, 143 to be repeated.", self.exit_code
        yield "end_timestamp_seconds", "Time at which the attempt ended on this node.", self.ended_at
        if (monitor := self.monitor) is None or self.run is None:
            return
        yield "training", "1 after the trainer has entered its training loop.", monitor.training_started
        yield "saving", "1 while a checkpoint is written.", monitor.saving
        yield "save_seconds", "Duration of the last save, until Megatron-LM reported it.", monitor.save_seconds
        yield from self._iteration_gauges(monitor, self.run.settings)

    def _iteration_gauges(self, monitor: LogMonitor, settings: Settings) -> Iterator[tuple[str, str, float | None]]:
        report = monitor.report
        if report is None:
            return
        yield "iteration", "Last iteration that was reported.", report.iteration
        yield "last_iteration_timestamp_seconds", "Time of that report.", monitor.reported_at
        yield (
            "report_interval_seconds",
            "Expected time between two reports, an evaluation included.",
            monitor.progress.report_interval_seconds,
        )
        yield (
            "loss",
            "Loss of the last iteration; NaN if it has none.",
            math.nan if report.loss is None else report.loss,
        )
        yield "gradient_norm", "Norm of the gradient.", report.gradient_norm
        yield "learning_rate", "Learning rate.", report.learning_rate
        yield "consumed_samples", "Samples that the run has trained on.", report.consumed_samples
        if not report.seconds:
            return
        rate = monitor.tokens_per_iteration / report.seconds
        yield "iteration_seconds", "Duration of an iteration.", report.seconds
        yield "tokens_per_second", "Tokens per second of the run.", rate
        yield "tokens_per_second_per_gpu", "Tokens per second of each GPU.", rate / settings.world_size
        if report.teraflops is not None:
            yield "flops_per_second_per_gpu", "Floating-point operations of the model.", report.teraflops * 1e12
            if monitor.peak_tflops:
                ratio = report.teraflops / monitor.peak_tflops
                yield "model_flops_utilization_ratio", "Share of the GPUs' peak (MFU).", ratio
        if monitor.data_wait_seconds is not None:
            yield (
                "data_wait_ratio",
                "Share of an iteration in which the slowest rank waited for data.",
                monitor.data_wait_seconds / report.seconds,
            )

    def _counters(self) -> Iterator[tuple[str, str, float]]:
        if (monitor := self.monitor) is None:
            return
        yield "skipped_iterations", "Iterations without an update, since this node started.", monitor.skipped_iterations
        yield "nan_iterations", "Iterations with NaN, since this node started.", monitor.nan_iterations
