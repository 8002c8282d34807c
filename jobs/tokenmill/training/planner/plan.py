"""A plan for a run, as numbers: the layouts that fit, best first, batch, checkpoint and save interval."""

import math
from dataclasses import dataclass

from tokenmill.errors import RequestError
from tokenmill.training import SEQUENCES_A_GPU
from tokenmill.training import model as models
from tokenmill.training.model import Model
from tokenmill.training.planner import storage
from tokenmill.training.planner.fit import Cost, Fit, LayoutConstraints, Machines, nothing, search, step_seconds
from tokenmill.training.planner.layout import Layout
from tokenmill.training.planner.memory import checkpoint_bytes

GRACE_SECONDS = 900
"""job.terminationGracePeriodSeconds of charts/megatron-training."""


@dataclass(frozen=True)
class LayoutRequest:
    """What is to be planned; `bytes_per_second` is the storage's, `node_hours` between a node's failures."""

    model: Model
    machines: Machines
    wanted: LayoutConstraints
    global_batch: int | None = None
    bytes_per_second: float | None = None
    capacity: float | None = None
    """Of the storage, in bytes."""
    data_bytes: float = 0.0
    """Beside the checkpoints."""
    kept: int = 2
    node_hours: float | None = None
    peak_tflops: float | None = None
    mfu: float = 0.4
    iterations: int | None = None


@dataclass(frozen=True)
class LayoutPlan:
    """The layouts that fit, best first, at least one; and what follows for checkpoints."""

    request: LayoutRequest
    fits: list[tuple[Fit, Cost]]
    step_seconds: float | None
    """Of the best layout."""
    saving: storage.Saving | None
    room: storage.StorageRoom | None

    @property
    def grace_seconds(self) -> int:
        """Seconds for a pod to end: a step and a save with a quarter to spare, at least what the chart has."""
        if self.saving is None:
            return GRACE_SECONDS
        last = self.saving.write_seconds + (self.step_seconds or 0)
        return GRACE_SECONDS if last < GRACE_SECONDS else math.ceil(last * 1.25 / 60) * 60

    @property
    def best(self) -> Layout:
        """The first layout."""
        return self.fits[0][0].layout

    @property
    def save_interval(self) -> int | None:
        """Iterations between saves, where a step's time and the storage's bandwidth are known."""
        if self.saving is None or self.step_seconds is None:
            return None
        return max(1, round(self.saving.interval_seconds / self.step_seconds))


def make(request: LayoutRequest) -> LayoutPlan:
    """Search the layouts that fit, and what follows from the best one for checkpoints and storage.

    Raises:
        RequestError: nothing fits, or every layout is refused.
    """
    model, machines = request.model, request.machines
    if request.wanted.expert_tensor and not model.num_experts:
        raise RequestError(
            f"expert tensor {request.wanted.expert_tensor} needs a model with experts; {model.name} has none"
        )
    recipe = models.recipe_batch(model.name)
    batch = request.global_batch or recipe or SEQUENCES_A_GPU * machines.gpus
    found = search(model, machines, batch, request.wanted)
    if not found.fits and recipe and not request.global_batch:
        batch = SEQUENCES_A_GPU * machines.gpus
        found = search(model, machines, batch, request.wanted)
    if not found.fits:
        raise nothing(model, machines, batch, request.wanted, found)
    best = found.fits[0][0].layout
    seconds = step_seconds(best, request.peak_tflops, request.mfu) if request.peak_tflops else None
    saving = None
    if request.bytes_per_second is not None:
        hours = request.node_hours or storage.NODE_HOURS
        saving = storage.Saving(checkpoint_bytes(best), request.bytes_per_second, hours, machines.nodes)
    room = None
    if request.capacity is not None:
        room = storage.StorageRoom(request.capacity, request.data_bytes, checkpoint_bytes(best), request.kept)
    return LayoutPlan(request, found.fits, seconds, saving, room)
