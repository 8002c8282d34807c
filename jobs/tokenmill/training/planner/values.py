"""A plan's best layout as values of the training chart."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokenmill import __version__
from tokenmill.errors import RequestError
from tokenmill.training import ITERATIONS
from tokenmill.training import model as models
from tokenmill.training.model import Model
from tokenmill.training.planner.fit import described
from tokenmill.training.planner.memory import GIB
from tokenmill.training.planner.plan import GRACE_SECONDS, LayoutPlan, LayoutRequest
from tokenmill.training.planner.render import notes

CUT_FIELDS = frozenset(
    {"tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "micro_batch_size"}
)


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
        *notes(plan),
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
