"""Render a plan of `tokenmill fit` as text and as JSON."""

import math
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tokenmill.core.json_lines import JsonEvent
from tokenmill.core.printing import PrintedTable, align, format_bytes, format_duration
from tokenmill.fit import storage
from tokenmill.fit.fit import Cost, Fit, describe_layout
from tokenmill.fit.memory import GIB, RESERVED_SHARE, checkpoint_bytes, count_parameters, format_parameters
from tokenmill.fit.plan import GRACE_SECONDS, LayoutPlan
from tokenmill.models import model as models
from tokenmill.models.defaults import SEQUENCES_PER_GPU


def collect_notes(plan: LayoutPlan) -> list[str]:
    """Return the notes that a user should read before using the plan."""
    model, machines, best = plan.request.model, plan.request.machines, plan.best
    lines = [model.note] if model.note else []
    recipe = models.recipe_batch_size(model.name)
    if recipe and recipe != best.global_batch:
        reason = "" if plan.request.estimate.global_batch else ", with which no layout fits"
        lines.append(
            f"global batch {best.global_batch:,} differs from {recipe:,} in values/models/{model.name}.yaml{reason}: "
            "pass this file with a later -f, and check the learning rate, which is for the recipe's batch"
        )
    if best.tensor > machines.gpus_per_node:
        lines.append(
            f"tensor {best.tensor} is above the {machines.gpus_per_node} GPUs of a node: "
            "every layer waits for the network"
        )
    return [*lines, *_storage_notes(plan)]


def _storage_notes(plan: LayoutPlan) -> Iterator[str]:
    """Yield the problems of the checkpoints on this storage."""
    schedule, room = plan.schedule, plan.room
    if schedule is not None and plan.grace_seconds > GRACE_SECONDS:
        iteration = "" if plan.step_seconds is None else f" and an iteration {format_duration(plan.step_seconds)}"
        yield (
            f"a save takes {format_duration(schedule.write_seconds)}{iteration}, but an evicted pod has only "
            f"{format_duration(GRACE_SECONDS)}: it would lose all work since the last save; set "
            f"job.terminationGracePeriodSeconds={plan.grace_seconds}, as --values does"
        )
    if schedule is not None and 2 * schedule.failure_seconds <= schedule.write_seconds:
        yield (
            f"a save takes {format_duration(schedule.write_seconds)}, and the run fails every "
            f"{format_duration(schedule.failure_seconds)}: it would mostly write checkpoints; use a faster storage"
        )
    if room is not None and room.free < 0:
        yield (
            f"the storage is too small: {_describe_contents(room)} need {format_bytes(room.needed)}, "
            f"{format_bytes(-room.free)} more than its {format_bytes(room.capacity)}; use a larger storage, or lower "
            "--keep"
        )


def _describe_contents(room: storage.StorageRoom) -> str:
    return (
        f"{room.kept} checkpoints and the next save, {format_bytes((room.kept + 1) * room.checkpoint)}, "
        f"and {format_bytes(room.data)} of data"
    )


def to_text(plan: LayoutPlan, top: int, values: Path | None) -> str:
    """Return the plan as text for a terminal, with `top` layouts."""
    layout, request = plan.best, plan.request
    count, machines = count_parameters(layout), request.machines
    active = f", of which a token uses {format_parameters(count.active)}" if layout.experts else ""
    lines = [
        f"{request.model.name}: {format_parameters(count.total)} parameters{active}; "
        f"sequences of {layout.seq_length:,} tokens",
        *(f"note: {note}" for note in collect_notes(plan)),
        f"{machines.gpus:,} GPUs ({machines.nodes:,} x {machines.gpus_per_node}) of {machines.memory:g} GiB, of which "
        f"{machines.usable_bytes / GIB:.1f} are usable: {RESERVED_SHARE:.0%} are for CUDA, NCCL and fragmentation",
        f"global batch {layout.global_batch:,} sequences = {layout.global_batch * layout.seq_length:,} tokens per "
        f"iteration{_batch_source(plan)}",
        "",
        *_format_table(plan, top),
        "",
        *_explain_best(plan),
        *_describe_checkpoint(plan),
        *_describe_storage(plan),
    ]
    if len(plan.fits) > top:
        lines.append(f"{len(plan.fits) - top:,} more layouts fit; show them with --top {len(plan.fits)}")
    if values is not None:
        lines.append(f"next: helm install megatron-training charts/megatron-training -f {shlex.quote(str(values))} ...")
    return "\n".join(lines)


def _batch_source(plan: LayoutPlan) -> str:
    """Return the source of a global batch that the user did not specify."""
    if plan.request.estimate.global_batch:
        return ""
    name, batch = plan.request.model.name, plan.best.global_batch
    recipe = batch == models.recipe_batch_size(name)
    return f" (from values/models/{name}.yaml)" if recipe else f" (assumed: {SEQUENCES_PER_GPU} per GPU)"


def _format_table(plan: LayoutPlan, top: int) -> list[str]:
    experts = plan.best.experts
    header = ["", "TP", "PP", "VPP", "CP", *(["EP", "ETP"] if experts else [])]
    header += ["DP", "micro-batch", "accumulated", "recompute"]
    header += ["weights", "gradients", "optimizer", "activations", "GiB", "bubble", "cost"]
    rows = list[list[str]]()
    for number, (fit, cost) in enumerate(plan.fits[:top], 1):
        layout = fit.layout
        parallel_sizes = [layout.tensor, layout.pipeline, layout.virtual_stages, layout.context]
        parallel_sizes += [layout.expert, layout.expert_tensor or layout.tensor] if experts else []
        sizes = [fit.memory.weights, fit.memory.gradients, fit.memory.optimizer, fit.activations, fit.total]
        rows.append(
            [
                *map(str, [number, *parallel_sizes, layout.data_parallel, layout.micro_batch, layout.micro_batches]),
                layout.recompute,
                *(f"{size / GIB:.1f}" for size in sizes),
                f"{layout.bubble:.1%}",
                f"{cost.total:.2f}",
            ]
        )
    return align(PrintedTable("layouts", header, rows))


COST_PART_NAMES = {
    "uneven": "the output layer on the last stage",
    "recompute": "recomputation",
    "tensor": "tensor parallel",
    "context": "context parallel",
    "expert": "expert parallel",
    "stages": "stage to stage",
    "small": "small micro-batch",
    "bubble": "bubble",
    "data": "data parallel",
}


def _explain_best(plan: LayoutPlan) -> list[str]:
    layout, cost = plan.best, plan.fits[0][1]
    parts = sorted(cost.parts.items(), key=lambda part: -part[1])
    terms = " + ".join(f"{share:.2f} {COST_PART_NAMES[name]}" for name, share in parts if share >= 0.005)
    lines = [
        f"1: {describe_layout(layout)}",
        f"   cost {cost.total:.2f} = 1{' + ' if terms else ''}{terms} (an estimate, see docs/fit.md)",
    ]
    if plan.step_seconds is not None:
        request = plan.request
        lines.append(
            f"   an iteration takes {plan.step_seconds:,.2f} s at an assumed MFU of {request.estimate.mfu:.0%} of "
            f"{request.estimate.peak_tflops:g} TFLOP/s: "
            f"{layout.global_batch * layout.seq_length / plan.step_seconds:,.0f} tokens/s"
        )
    return lines


def _describe_checkpoint(plan: LayoutPlan) -> list[str]:
    size = f"checkpoint: {format_bytes(checkpoint_bytes(plan.best))}"
    schedule = plan.schedule
    if schedule is None:
        return [f"{size}; add --storage or --write-bandwidth for its write time and the save interval"]
    iterations = (
        f" = {plan.save_interval:,} iterations"
        if plan.save_interval
        else " (add --peak-tflops for the number of iterations)"
    )
    return [
        f"{size}, written in {format_duration(schedule.write_seconds)} at {format_bytes(schedule.bytes_per_second)}/s",
        f"save every {format_duration(schedule.interval_seconds)}{iterations}: a run of {schedule.nodes:,} nodes fails "
        f"every {format_duration(schedule.failure_seconds)} if a node fails every {schedule.node_hours:,.0f} h; "
        f"saves{', repeated work and restarts' if schedule.restart_seconds else ' and repeated work'} take "
        f"{schedule.lost_share:.1%} of the time",
    ]


def _describe_storage(plan: LayoutPlan) -> list[str]:
    room, request = plan.room, plan.request
    if room is None:
        if not request.data_bytes:
            return []
        room = storage.StorageRoom(math.inf, request.data_bytes, checkpoint_bytes(plan.best), request.checkpoints.keep)
        return [
            f"on the storage: {_describe_contents(room)}, {format_bytes(room.needed)} in all; "
            "add --capacity to check it"
        ]
    balance = f"{format_bytes(room.free)} are free" if room.free >= 0 else f"{format_bytes(-room.free)} are missing"
    return [f"the storage has {format_bytes(room.capacity)}: {_describe_contents(room)}; {balance}"]


class CheckpointCost(msgspec.Struct, frozen=True):
    """The size of a checkpoint; without a known storage, only this is known."""

    bytes: float


class ScheduledCheckpointCost(CheckpointCost, frozen=True, kw_only=True):
    """The size of a checkpoint, and the cost of its saves on a storage."""

    bytes_per_second: float
    write_seconds: float
    node_hours: float
    run_hours: float
    restart_seconds: float
    save_interval_seconds: float
    save_interval_iterations: int | None
    lost_share: float
    termination_grace_seconds: int


class StorageUse(msgspec.Struct, frozen=True):
    """The room that data and checkpoints need on a storage of known capacity."""

    capacity_bytes: float
    data_bytes: float
    checkpoints_kept: int
    needed_bytes: float
    fits: bool


class LayoutSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that fits, with the memory of its fullest GPU; `cost_parts` sum up to `cost` - 1."""

    tensor: int
    pipeline: int
    virtual_stages: int
    layers_per_virtual_stage: int | None
    context: int
    expert: int
    expert_tensor: int | None
    data_parallel: int
    micro_batch: int
    micro_batches: int
    recompute: str
    sequence_parallel: bool
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    total_bytes: float
    bubble: float
    cost: float
    cost_parts: dict[str, float]


class FitEvent(JsonEvent, frozen=True, tag="fit", kw_only=True):
    """The result of `tokenmill fit`; `fitting` is the number of all layouts that fit."""

    model: str
    notes: list[str]
    parameters: float
    active_parameters: float
    gpus: int
    nodes: int
    gpus_per_node: int
    gpu_bytes: float
    usable_bytes: float
    global_batch: int
    tokens_per_iteration: int
    step_seconds: float | None
    mfu_assumed: float | None
    checkpoint: CheckpointCost
    storage: StorageUse | None
    fitting: int
    layouts: list[LayoutSummary]


def make_event(plan: LayoutPlan, top: int) -> FitEvent:
    """Return the form of the plan for --json, with sizes in bytes and times in seconds."""
    count, layout, room = count_parameters(plan.best), plan.best, plan.room
    machines = plan.request.machines
    return FitEvent(
        model=plan.request.model.name,
        notes=collect_notes(plan),
        parameters=count.total,
        active_parameters=count.active,
        gpus=machines.gpus,
        nodes=machines.nodes,
        gpus_per_node=machines.gpus_per_node,
        gpu_bytes=machines.memory * GIB,
        usable_bytes=machines.usable_bytes,
        global_batch=layout.global_batch,
        tokens_per_iteration=layout.global_batch * layout.seq_length,
        step_seconds=plan.step_seconds,
        mfu_assumed=plan.request.estimate.mfu if plan.request.estimate.peak_tflops else None,
        checkpoint=_summarize_checkpoint(plan),
        storage=StorageUse(room.capacity, room.data, room.kept, room.needed, room.free >= 0) if room else None,
        fitting=len(plan.fits),
        layouts=[_summarize_layout(fit, cost) for fit, cost in plan.fits[:top]],
    )


def _summarize_checkpoint(plan: LayoutPlan) -> CheckpointCost:
    size, schedule = checkpoint_bytes(plan.best), plan.schedule
    if schedule is None:
        return CheckpointCost(size)
    return ScheduledCheckpointCost(
        size,
        bytes_per_second=schedule.bytes_per_second,
        write_seconds=schedule.write_seconds,
        node_hours=schedule.node_hours,
        run_hours=schedule.failure_seconds / 3600,
        restart_seconds=schedule.restart_seconds,
        save_interval_seconds=schedule.interval_seconds,
        save_interval_iterations=plan.save_interval,
        lost_share=schedule.lost_share,
        termination_grace_seconds=plan.grace_seconds,
    )


def _summarize_layout(fit: Fit, cost: Cost) -> LayoutSummary:
    layout = fit.layout
    return LayoutSummary(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual_stages=layout.virtual_stages,
        layers_per_virtual_stage=layout.layers_per_virtual_stage,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=(layout.expert_tensor or layout.tensor) if layout.experts else None,
        data_parallel=layout.data_parallel,
        micro_batch=layout.micro_batch,
        micro_batches=layout.micro_batches,
        recompute=layout.recompute,
        sequence_parallel=layout.sequence_parallel_on,
        weight_bytes=fit.memory.weights,
        gradient_bytes=fit.memory.gradients,
        optimizer_bytes=fit.memory.optimizer,
        activation_bytes=fit.activations,
        total_bytes=fit.total,
        bubble=layout.bubble,
        cost=cost.total,
        cost_parts=cost.parts,
    )
