"""A plan as text for a person and as JSON for a program."""

import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenmill.flow.progress import duration
from tokenmill.training import SEQUENCES_A_GPU
from tokenmill.training import model as models
from tokenmill.training.planner import storage
from tokenmill.training.planner.fit import Cost, Fit, described
from tokenmill.training.planner.memory import GIB, RESERVE, checkpoint_bytes, parameters
from tokenmill.training.planner.plan import GRACE_SECONDS, LayoutPlan


def notes(plan: LayoutPlan) -> list[str]:
    """Return what a person should know before the plan is used."""
    model, machines, best = plan.request.model, plan.request.machines, plan.best
    lines = [model.note] if model.note else []
    recipe = models.recipe_batch(model.name)
    if recipe and recipe != best.global_batch:
        why = "" if plan.request.global_batch else ", with which nothing fits"
        lines.append(
            f"global batch {best.global_batch:,} is not that of values/models/{model.name}.yaml, {recipe:,}{why}: of "
            "two -f the later one counts, and the recipe's learning rate is for its own batch"
        )
    if best.tensor > machines.gpus_per_node:
        lines.append(
            f"tensor {best.tensor} is above the {machines.gpus_per_node} GPUs of a node: "
            "every layer waits for the network"
        )
    return [*lines, *_gates(plan)]


def _gates(plan: LayoutPlan) -> Iterator[str]:
    """Say what of checkpoints cannot work with this storage."""
    saving, room = plan.saving, plan.room
    if saving is not None and plan.grace_seconds > GRACE_SECONDS:
        step = "" if plan.step_seconds is None else f" and a step {duration(plan.step_seconds)}"
        yield (
            f"a save takes {duration(saving.write_seconds)}{step}, and a pod that is evicted has "
            f"{duration(GRACE_SECONDS)}: what was done since the last save would be lost. "
            f"job.terminationGracePeriodSeconds={plan.grace_seconds} gives the time, which --values writes"
        )
    if saving is not None and 2 * saving.failure_seconds <= saving.write_seconds:
        yield (
            f"a save takes {duration(saving.write_seconds)} and the run fails every "
            f"{duration(saving.failure_seconds)}: it would do little but save; take a faster storage"
        )
    if room is not None and room.left < 0:
        yield (
            f"the storage is too small: {_holds(room)} are {_terabytes(room.needed)}, of which "
            f"{_terabytes(-room.left)} find no room in {_terabytes(room.capacity)}; take a larger one or keep fewer"
        )


def _holds(room: storage.StorageRoom) -> str:
    return (
        f"{room.kept} checkpoints kept and one being written, {_terabytes((room.kept + 1) * room.checkpoint)}, "
        f"and {_terabytes(room.data)} of data"
    )


def _terabytes(number: float) -> str:
    return f"{number / 1e12:,.2f} TB" if number >= 1e12 else f"{number / 1e9:,.1f} GB"


def text(plan: LayoutPlan, top: int, values: Path | None) -> str:
    """Return the plan as lines to read."""
    at, request = plan.best, plan.request
    count, machines = parameters(at), request.machines
    active = f", of which a token meets {_count(count.active)}" if at.experts else ""
    lines = [
        f"{request.model.name}: {_count(count.total)} parameters{active}; sequences of {at.seq_length:,} tokens",
        *(f"note: {note}" for note in notes(plan)),
        f"{machines.gpus:,} GPUs ({machines.nodes:,} x {machines.gpus_per_node}) of {machines.memory:g} GiB, of which "
        f"{machines.usable / GIB:.1f} count: {RESERVE:.0%} go to CUDA, NCCL and fragments",
        f"global batch {at.global_batch:,} sequences = {at.global_batch * at.seq_length:,} tokens an iteration"
        f"{_assumed(plan)}",
        "",
        *_table(plan, top),
        "",
        *_explanation(plan),
        *_checkpoint(plan),
        *_room(plan),
    ]
    if len(plan.fits) > top:
        lines.append(f"{len(plan.fits) - top:,} more fit: --top {len(plan.fits)}")
    if values is not None:
        lines.append(f"next: helm install megatron-training charts/megatron-training -f {shlex.quote(str(values))} ...")
    return "\n".join(lines)


def _assumed(plan: LayoutPlan) -> str:
    """Say where a global batch that was not given comes from."""
    if plan.request.global_batch:
        return ""
    name, batch = plan.request.model.name, plan.best.global_batch
    recipe = batch == models.recipe_batch(name)
    return f": that of values/models/{name}.yaml" if recipe else f": assumed, {SEQUENCES_A_GPU} a GPU"


def _count(number: float) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"


def _table(plan: LayoutPlan, top: int) -> list[str]:
    experts = plan.best.experts
    head = ["", "TP", "PP", "VPP", "CP", *(["EP", "ETP"] if experts else [])]
    head += ["DP", "micro-batch", "accumulated", "recompute"]
    head += ["weights", "gradients", "optimizer", "activations", "GiB", "bubble", "cost"]
    rows = [head]
    for number, (fit, cost) in enumerate(plan.fits[:top], 1):
        at = fit.layout
        cuts = [at.tensor, at.pipeline, at.virtual_stages, at.context]
        cuts += [at.expert, at.expert_tensor or at.tensor] if experts else []
        sizes = [fit.held.weights, fit.held.gradients, fit.held.optimizer, fit.activations, fit.total]
        rows.append(
            [
                *map(str, [number, *cuts, at.data_parallel, at.micro_batch, at.micro_batches]),
                at.recompute,
                *(f"{size / GIB:.1f}" for size in sizes),
                f"{at.bubble:.1%}",
                f"{cost.total:.2f}",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


NAMES = {
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


def _explanation(plan: LayoutPlan) -> list[str]:
    at, cost = plan.best, plan.fits[0][1]
    parts = sorted(cost.parts.items(), key=lambda part: -part[1])
    said = " + ".join(f"{share:.2f} {NAMES[name]}" for name, share in parts if share >= 0.005)
    lines = [
        f"1: {described(at)}",
        f"   cost {cost.total:.2f} = 1{' + ' if said else ''}{said} (an estimate: docs/fit.md)",
    ]
    if plan.step_seconds is not None:
        request = plan.request
        lines.append(
            f"   a step takes {plan.step_seconds:,.2f} s at an assumed MFU of {request.mfu:.0%} of "
            f"{request.peak_tflops:g} TFLOP/s: {at.global_batch * at.seq_length / plan.step_seconds:,.0f} tokens/s"
        )
    return lines


def _checkpoint(plan: LayoutPlan) -> list[str]:
    size = f"checkpoint: {checkpoint_bytes(plan.best) / 1e9:,.1f} GB"
    saving = plan.saving
    if saving is None:
        return [f"{size}; for its write time and the save interval add --storage or --write-bandwidth"]
    steps = f" = {plan.save_interval:,} iterations" if plan.save_interval else " (in iterations with --peak-tflops)"
    return [
        f"{size}, written in {duration(saving.write_seconds)} at {saving.bytes_per_second / 1e9:,.1f} GB/s",
        f"save every {duration(saving.interval_seconds)}{steps}: a run of {saving.nodes:,} nodes fails every "
        f"{duration(saving.failure_seconds)} when a node does every {saving.node_hours:,.0f} h; saving and repeating "
        f"then take {saving.lost:.1%} of the time",
    ]


def _room(plan: LayoutPlan) -> list[str]:
    room, request = plan.room, plan.request
    if room is None:
        if not request.data_bytes:
            return []
        room = storage.StorageRoom(math.inf, request.data_bytes, checkpoint_bytes(plan.best), request.kept)
        return [f"on the storage: {_holds(room)}, {_terabytes(room.needed)}; whether it has them, with --capacity"]
    left = f"{_terabytes(room.left)} are left" if room.left >= 0 else f"{_terabytes(-room.left)} are missing"
    return [f"the storage has {_terabytes(room.capacity)}: {_holds(room)}; {left}"]


def to_json(plan: LayoutPlan, top: int) -> dict[str, Any]:
    """Return all of it, sizes in bytes and times in seconds."""
    count, at = parameters(plan.best), plan.best
    saving = plan.saving
    checkpoint: dict[str, Any] = {"bytes": checkpoint_bytes(at)}
    if saving is not None:
        checkpoint |= {
            "bytes_per_second": saving.bytes_per_second,
            "write_seconds": saving.write_seconds,
            "node_hours": saving.node_hours,
            "save_interval_seconds": saving.interval_seconds,
            "save_interval_iterations": plan.save_interval,
            "lost_share": saving.lost,
            "termination_grace_seconds": plan.grace_seconds,
        }
    room = plan.room
    held = (
        None
        if room is None
        else {
            "capacity_bytes": room.capacity,
            "data_bytes": room.data,
            "checkpoints_kept": room.kept,
            "needed_bytes": room.needed,
            "fits": room.left >= 0,
        }
    )
    machines = plan.request.machines
    return {
        "event": "fit",
        "model": plan.request.model.name,
        "notes": notes(plan),
        "parameters": count.total,
        "active_parameters": count.active,
        "gpus": machines.gpus,
        "nodes": machines.nodes,
        "gpus_per_node": machines.gpus_per_node,
        "gpu_bytes": machines.memory * GIB,
        "usable_bytes": machines.usable,
        "global_batch": at.global_batch,
        "tokens_per_iteration": at.global_batch * at.seq_length,
        "step_seconds": plan.step_seconds,
        "mfu_assumed": plan.request.mfu if plan.request.peak_tflops else None,
        "checkpoint": checkpoint,
        "storage": held,
        "fitting": len(plan.fits),
        "layouts": [_layout_json(fit, cost) for fit, cost in plan.fits[:top]],
    }


def _layout_json(fit: Fit, cost: Cost) -> dict[str, Any]:
    at = fit.layout
    return {
        "tensor": at.tensor,
        "pipeline": at.pipeline,
        "virtual_stages": at.virtual_stages,
        "layers_per_virtual_stage": at.layers_per_virtual_stage,
        "context": at.context,
        "expert": at.expert,
        "expert_tensor": (at.expert_tensor or at.tensor) if at.experts else None,
        "data_parallel": at.data_parallel,
        "micro_batch": at.micro_batch,
        "micro_batches": at.micro_batches,
        "recompute": at.recompute,
        "sequence_parallel": at.sequence_parallel_on,
        "weight_bytes": fit.held.weights,
        "gradient_bytes": fit.held.gradients,
        "optimizer_bytes": fit.held.optimizer,
        "activation_bytes": fit.activations,
        "total_bytes": fit.total,
        "bubble": at.bubble,
        "cost": cost.total,
        "cost_parts": cost.parts,
    }
