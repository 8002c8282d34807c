"""A plan for a run: the layouts that fit, batch, checkpoint and save interval, as a table, JSON, or Helm values."""

import difflib
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokenmill import __version__
from tokenmill.errors import RequestError
from tokenmill.flow.progress import duration
from tokenmill.training import ITERATIONS, SEQUENCES_A_GPU
from tokenmill.training import model as models
from tokenmill.training.model import Model
from tokenmill.training.planner import storage
from tokenmill.training.planner.fit import Cost, Fit, Machines, Wanted, described, nothing, search, step_seconds
from tokenmill.training.planner.layout import Layout
from tokenmill.training.planner.memory import GIB, RESERVE, checkpoint_bytes, parameters

GRACE_SECONDS = 900
"""job.terminationGracePeriodSeconds of charts/megatron-training."""
CUT_FIELDS = frozenset(
    {"tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "micro_batch_size"}
)


@dataclass(frozen=True)
class LayoutRequest:
    """What is to be planned; `bytes_per_second` is the storage's, `node_hours` between a node's failures."""

    model: Model
    machines: Machines
    wanted: Wanted
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
    notes: list[str]
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

    def to_json(self, top: int) -> dict[str, Any]:
        """Return all of it, sizes in bytes and times in seconds."""
        count, at = parameters(self.best), self.best
        saving = self.saving
        checkpoint: dict[str, Any] = {"bytes": checkpoint_bytes(at)}
        if saving is not None:
            checkpoint |= {
                "bytes_per_second": saving.bytes_per_second,
                "write_seconds": saving.write_seconds,
                "node_hours": saving.node_hours,
                "save_interval_seconds": saving.interval_seconds,
                "save_interval_iterations": self.save_interval,
                "lost_share": saving.lost,
                "termination_grace_seconds": self.grace_seconds,
            }
        room = self.room
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
        machines = self.request.machines
        return {
            "event": "fit",
            "model": self.request.model.name,
            "notes": self.notes,
            "parameters": count.total,
            "active_parameters": count.active,
            "gpus": machines.gpus,
            "nodes": machines.nodes,
            "gpus_per_node": machines.gpus_per_node,
            "gpu_bytes": machines.memory * GIB,
            "usable_bytes": machines.usable,
            "global_batch": at.global_batch,
            "tokens_per_iteration": at.global_batch * at.seq_length,
            "step_seconds": self.step_seconds,
            "mfu_assumed": self.request.mfu if self.request.peak_tflops else None,
            "checkpoint": checkpoint,
            "storage": held,
            "fitting": len(self.fits),
            "layouts": [_layout_json(fit, cost) for fit, cost in self.fits[:top]],
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


def model_for(name: str, custom: Path | None, changed: Sequence[str], seq_length: int | None) -> Model:
    """Return a preset, or the model in a file, with fields changed; a changed preset is custom.

    Raises:
        RequestError: no such preset, file or field, or a value of another type.
    """
    fields = dict(_change(each) for each in changed)
    if seq_length is not None:
        fields["seqLength"] = seq_length
    if (name == "custom") != (custom is not None):
        raise RequestError("--model custom and --custom FILE go together: the file holds the model's fields")
    if custom is None:
        return models.preset(name, **fields, **({"name": f"{name} (changed)"} if fields else {}))
    return models.from_fields({**_fields_in(custom), **fields}, f"the model in {custom}")


def _change(given: str) -> tuple[str, Any]:
    name, equals, value = given.partition("=")
    known = {field.encode_name: field for field in msgspec.structs.fields(Model) if field.name not in ("name", "note")}
    if not equals or name not in known:
        like = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {like[0]}?" if like else f"; fields are: {', '.join(known)}"
        raise RequestError(f"--set {given}: {'there is no field ' + repr(name) if equals else 'say FIELD=VALUE'}{hint}")
    try:
        return name, msgspec.convert(value, known[name].type, strict=False)
    except msgspec.ValidationError as problem:
        raise RequestError(f"--set {given}: {problem}") from None


def _fields_in(file: Path) -> dict[str, Any]:
    """Read a model's fields: alone, or under model.custom as in the chart's values."""
    import yaml

    try:
        content = yaml.safe_load(file.read_bytes())
    except OSError as problem:
        raise RequestError(f"the model {file} cannot be read: {problem.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise RequestError(f"the model {file} is no YAML: {problem}") from None
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"].get("custom")
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise RequestError(f"the model {file} holds no fields, such as numLayers: 24")
    return {key: float(value) if _is_exponent(value) else value for key, value in content.items()}


def _is_exponent(value: Any) -> bool:
    """Tell whether a value is a number to Helm, and text to PyYAML."""
    return isinstance(value, str) and re.fullmatch(r"[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+", value) is not None


def machines_for(gpus: int, gpus_per_node: int, memory: float) -> Machines:
    """Return whole nodes; fewer GPUs than a node's are a node."""
    per_node = min(gpus, gpus_per_node)
    if gpus % per_node:
        raise RequestError(
            f"{gpus} GPUs are no whole nodes of {per_node}: {gpus} / {per_node} leaves {gpus % per_node}"
        )
    return Machines(gpus, per_node, memory)


def storage_for(
    name: str | None, gigabytes: float | None, terabytes: float | None
) -> tuple[float | None, float | None]:
    """Return bytes a second that checkpoints are written with, and bytes that the storage has, where said."""
    if name is not None and gigabytes is not None:
        raise RequestError("--storage and --write-bandwidth both say how fast checkpoints are written: leave one out")
    capacity = None if terabytes is None else terabytes * 1e12
    if name is None:
        return None if gigabytes is None else gigabytes * 1e9, capacity
    found = storage.back_end(name)
    if found.capacity is not None and capacity is not None:
        raise RequestError(f"--storage {name} and --capacity both say how much the storage holds: leave the second out")
    return found.bytes_per_second, found.capacity if capacity is None else capacity


def make(request: LayoutRequest) -> LayoutPlan:
    """Plan.

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
    notes = [model.note] if model.note else []
    if recipe and recipe != batch:
        why = "" if request.global_batch else ", with which nothing fits"
        notes.append(
            f"global batch {batch:,} is not that of values/models/{model.name}.yaml, {recipe:,}{why}: of two -f the "
            "later one counts, and the recipe's learning rate is for its own batch"
        )
    if best.tensor > machines.gpus_per_node:
        notes.append(
            f"tensor {best.tensor} is above the {machines.gpus_per_node} GPUs of a node: "
            "every layer waits for the network"
        )
    seconds = step_seconds(best, request.peak_tflops, request.mfu) if request.peak_tflops else None
    saving = None
    if request.bytes_per_second is not None:
        hours = request.node_hours or storage.NODE_HOURS
        saving = storage.Saving(checkpoint_bytes(best), request.bytes_per_second, hours, machines.nodes)
    room = None
    if request.capacity is not None:
        room = storage.StorageRoom(request.capacity, request.data_bytes, checkpoint_bytes(best), request.kept)
    plan = LayoutPlan(request, found.fits, notes, seconds, saving, room)
    notes.extend(_gates(plan))
    return plan


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


# -- for a person


def text(plan: LayoutPlan, top: int, values: Path | None) -> str:
    """Return the plan as lines to read."""
    at, request = plan.best, plan.request
    count, machines = parameters(at), request.machines
    active = f", of which a token meets {_count(count.active)}" if at.experts else ""
    lines = [
        f"{request.model.name}: {_count(count.total)} parameters{active}; sequences of {at.seq_length:,} tokens",
        *(f"note: {note}" for note in plan.notes),
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


# -- for the chart


def values_of(plan: LayoutPlan) -> dict[str, Any]:
    """Return the best layout as values of the training chart."""
    at, machines, model = plan.best, plan.request.machines, plan.request.model
    parallelism: dict[str, Any] = {
        "tensorModelParallelSize": at.tensor,
        "pipelineModelParallelSize": at.pipeline,
        "contextParallelSize": at.context,
        "sequenceParallel": at.sequence_parallel,
        "useDistributedOptimizer": at.distributed_optimizer,
        "recomputeGranularity": at.recompute,
    }
    if at.experts:
        parallelism["expertModelParallelSize"] = at.expert
        parallelism["expertTensorParallelSize"] = at.expert_tensor or at.tensor
    if at.virtual_stages > 1:
        parallelism["numLayersPerVirtualPipelineStage"] = at.layers_per_virtual_stage
    training: dict[str, Any] = {
        "nodes": machines.nodes,
        "gpusPerNode": machines.gpus_per_node,
        "globalBatchSize": at.global_batch,
        "microBatchSize": at.micro_batch,
    }
    if plan.request.iterations:
        training["iterations"] = plan.request.iterations
    if plan.save_interval:
        training["saveInterval"] = min(plan.save_interval, plan.request.iterations or ITERATIONS)
    named = model.name in models.names()
    values: dict[str, Any] = {
        "model": {"size": model.name} if named else {"size": "custom", "custom": _custom(model)},
        "parallelism": parallelism,
        "training": training,
        "gpu": {"memoryGib": _whole(machines.memory)},
    }
    if plan.request.peak_tflops:
        values["gpu"]["peakTflops"] = _whole(plan.request.peak_tflops)
    if plan.request.kept != LayoutRequest.kept:
        values["checkpoint"] = {"keep": plan.request.kept}
    if plan.grace_seconds > GRACE_SECONDS:
        values["job"] = {"terminationGracePeriodSeconds": plan.grace_seconds}
    return values


def _whole(number: float) -> float:
    """Return 80 for 80.0, as a person writes it."""
    return int(number) if number.is_integer() else number


def _custom(model: Model) -> dict[str, Any]:
    """Return the fields that differ from what a model has by default; the cuts stand under parallelism."""
    given = {}
    for field in msgspec.structs.fields(Model):
        value = getattr(model, field.name)
        if field.name not in CUT_FIELDS and field.name not in ("name", "note") and value != field.default:
            given[field.encode_name] = value
    return given


def write_values(plan: LayoutPlan, file: Path, arguments: Sequence[str]) -> None:
    """Write the best layout as a values file, with what it was made from.

    Raises:
        RequestError: the file cannot be written.
    """
    import yaml

    fit = plan.fits[0][0]
    head = [
        f"Made by tokenmill {__version__}: tokenmill {shlex.join(arguments)}",
        f"{described(fit.layout)}: {fit.total / GIB:.1f} of {plan.request.machines.memory:g} GiB a GPU, data parallel "
        f"{fit.layout.data_parallel}, cost {plan.fits[0][1].total:.2f}.",
        *plan.notes,
    ]
    if plan.save_interval:
        head.append(
            f"Young and Daly's save interval is {plan.save_interval:,} iterations; never more than the run has."
        )
    lines = "".join(f"# {' '.join(line.split())}\n" for line in head)
    try:
        file.write_text(lines + yaml.safe_dump(values_of(plan), sort_keys=False))
    except OSError as problem:
        raise RequestError(f"the values {file} cannot be written: {problem.strerror}") from None
