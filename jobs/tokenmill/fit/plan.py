"""The numbers of a plan for a run: the layouts that fit, best first, batch, checkpoint and save interval.

`tokenmill fit` calls `make_plan`; `render` and `values` write the result.
"""

import math
from dataclasses import dataclass

from tokenmill.errors import RequestError
from tokenmill.fit import storage
from tokenmill.fit.fit import Cost, Fit, Machines, estimate_step_seconds, explain_no_fit, search_layouts
from tokenmill.fit.layout import Layout
from tokenmill.fit.memory import checkpoint_bytes
from tokenmill.fit.options import CheckpointOptions, EstimateOptions, LayoutConstraints
from tokenmill.models import model as models
from tokenmill.models.defaults import SEQUENCES_PER_GPU
from tokenmill.models.model import Model

GRACE_SECONDS = 900
"""Default of job.terminationGracePeriodSeconds in charts/megatron-training."""


@dataclass(frozen=True)
class LayoutRequest:
    """The input of a plan; `bytes_per_second` and `capacity`, in bytes, are those of the storage, if they are known."""

    model: Model
    machines: Machines
    constraints: LayoutConstraints
    estimate: EstimateOptions
    checkpoints: CheckpointOptions
    bytes_per_second: float | None = None
    capacity: float | None = None

    @property
    def data_bytes(self) -> float:
        """Bytes on the storage other than the checkpoints."""
        return self.checkpoints.data * 1e12


@dataclass(frozen=True)
class LayoutPlan:
    """At least one layout that fits, best first, and the numbers for its checkpoints."""

    request: LayoutRequest
    fits: list[tuple[Fit, Cost]]
    step_seconds: float | None
    """Time of an iteration with the best layout."""
    schedule: storage.CheckpointSchedule | None
    room: storage.StorageRoom | None

    @property
    def grace_seconds(self) -> int:
        """Grace period of a pod in seconds: an iteration and a save plus 25 %, at least the chart's default."""
        if self.schedule is None:
            return GRACE_SECONDS
        required = self.schedule.write_seconds + (self.step_seconds or 0)
        return GRACE_SECONDS if required < GRACE_SECONDS else math.ceil(required * 1.25 / 60) * 60

    @property
    def best(self) -> Layout:
        """The best layout."""
        return self.fits[0][0].layout

    @property
    def save_interval(self) -> int | None:
        """Iterations between saves, if the time of an iteration and the throughput of the storage are known."""
        if self.schedule is None or self.step_seconds is None:
            return None
        return max(1, round(self.schedule.interval_seconds / self.step_seconds))


def make_plan(request: LayoutRequest) -> LayoutPlan:
    """Search the layouts that fit, and compute checkpoints and storage for the best layout.

    Raises:
        RequestError: no layout fits, or Megatron-LM refuses every layout.
    """
    model, machines, estimate = request.model, request.machines, request.estimate
    if request.constraints.expert_tensor and not model.num_experts:
        raise RequestError(
            f"expert tensor {request.constraints.expert_tensor} needs a model with experts, and {model.name} has no "
            "experts; remove --expert-tensor"
        )
    recipe_batch = models.recipe_batch_size(model.name)
    batch = estimate.global_batch or recipe_batch or SEQUENCES_PER_GPU * machines.gpus
    result = search_layouts(model, machines, batch, request.constraints)
    if not result.fits and recipe_batch and not estimate.global_batch:
        batch = SEQUENCES_PER_GPU * machines.gpus
        result = search_layouts(model, machines, batch, request.constraints)
    if not result.fits:
        raise explain_no_fit(model, machines, batch, request.constraints, result)
    best = result.fits[0][0].layout
    step_seconds = estimate_step_seconds(best, estimate.peak_tflops, estimate.mfu) if estimate.peak_tflops else None
    schedule = None
    if request.bytes_per_second is not None:
        hours = request.checkpoints.node_hours(machines.nodes) or storage.NODE_HOURS
        restart_seconds = (request.checkpoints.restart_time or 0.0) * 3600
        schedule = storage.CheckpointSchedule(
            checkpoint_bytes(best), request.bytes_per_second, hours, machines.nodes, restart_seconds
        )
    room = None
    if request.capacity is not None:
        room = storage.StorageRoom(
            request.capacity, request.data_bytes, checkpoint_bytes(best), request.checkpoints.keep
        )
    return LayoutPlan(request, result.fits, step_seconds, schedule, room)
