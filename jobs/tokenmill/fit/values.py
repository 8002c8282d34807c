"""Write the best layout of a plan as values of the training chart (`tokenmill fit --values`)."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tokenmill import __version__
from tokenmill.errors import RequestError
from tokenmill.fit.fit import describe_layout
from tokenmill.fit.memory import GIB
from tokenmill.fit.options import CheckpointOptions
from tokenmill.fit.plan import GRACE_SECONDS, LayoutPlan
from tokenmill.fit.render import collect_notes
from tokenmill.models import model as models
from tokenmill.models.defaults import DEFAULT_ITERATIONS
from tokenmill.models.model import Model

PARALLELISM_FIELDS = frozenset(
    {"tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "micro_batch_size"}
)


def to_values(plan: LayoutPlan) -> dict[str, object]:
    """Return the best layout as values of the training chart."""
    layout, machines, model = plan.best, plan.request.machines, plan.request.model
    parallelism: dict[str, object] = {
        "tensorModelParallelSize": layout.tensor,
        "pipelineModelParallelSize": layout.pipeline,
        "contextParallelSize": layout.context,
        "sequenceParallel": layout.sequence_parallel,
        "useDistributedOptimizer": layout.distributed_optimizer,
        "recomputeGranularity": layout.recompute,
    }
    if layout.experts:
        parallelism["expertModelParallelSize"] = layout.expert
        parallelism["expertTensorParallelSize"] = layout.expert_tensor or layout.tensor
    if layout.virtual_stages > 1:
        parallelism["numLayersPerVirtualPipelineStage"] = layout.layers_per_virtual_stage
    training: dict[str, object] = {
        "nodes": machines.nodes,
        "gpusPerNode": machines.gpus_per_node,
        "globalBatchSize": layout.global_batch,
        "microBatchSize": layout.micro_batch,
    }
    if plan.request.estimate.iterations:
        training["iterations"] = plan.request.estimate.iterations
    if plan.save_interval:
        training["saveInterval"] = min(plan.save_interval, plan.request.estimate.iterations or DEFAULT_ITERATIONS)
    is_preset = model.name in models.preset_names()
    gpu = {"memoryGib": _simplify(machines.memory)}
    if plan.request.estimate.peak_tflops:
        gpu["peakTflops"] = _simplify(plan.request.estimate.peak_tflops)
    values: dict[str, object] = {
        "model": {"size": model.name} if is_preset else {"size": "custom", "custom": _custom_fields(model)},
        "parallelism": parallelism,
        "training": training,
        "gpu": gpu,
    }
    if plan.request.checkpoints.keep != CheckpointOptions.keep:
        values["checkpoint"] = {"keep": plan.request.checkpoints.keep}
    if plan.grace_seconds > GRACE_SECONDS:
        values["job"] = {"terminationGracePeriodSeconds": plan.grace_seconds}
    return values


def _simplify(number: float) -> float:
    """Return an integer for a number without fraction: 80 for 80.0."""
    return int(number) if number.is_integer() else number


def _custom_fields(model: Model) -> dict[str, object]:
    """Return the fields that differ from a model's defaults, except the parallel sizes, which are in `parallelism`."""
    fields = {}
    for field in msgspec.structs.fields(Model):
        value = getattr(model, field.name)
        if field.name not in PARALLELISM_FIELDS and field.name not in ("name", "note") and value != field.default:
            fields[field.encode_name] = value
    return fields


def write_values(plan: LayoutPlan, file: Path, arguments: Sequence[str]) -> None:
    """Write the best layout as a values file, with the command and the notes as comments.

    Raises:
        RequestError: the file is not writable.
    """
    import yaml

    fit = plan.fits[0][0]
    comments = [
        f"Made by tokenmill {__version__}: tokenmill {shlex.join(arguments)}",
        f"{describe_layout(fit.layout)}: {fit.total / GIB:.1f} of {plan.request.machines.memory:g} GiB per GPU, data "
        f"parallel {fit.layout.data_parallel}, cost {plan.fits[0][1].total:.2f}.",
        *collect_notes(plan),
    ]
    if plan.save_interval:
        comments.append(
            f"Young and Daly's save interval is {plan.save_interval:,} iterations; saveInterval is within the run."
        )
    lines = "".join(f"# {' '.join(line.split())}\n" for line in comments)
    try:
        file.write_text(lines + yaml.safe_dump(to_values(plan), sort_keys=False))
    except OSError as error:
        raise RequestError(f"cannot write the values {file}: {error.strerror}; choose another path") from None
