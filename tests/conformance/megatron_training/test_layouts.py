"""Each preset's architecture trains with real Megatron-LM, at a small width, under each layout that a CPU allows.

Sequence parallelism, context parallelism, and a mixture of experts with tensor parallelism need Transformer Engine.
"""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from support.megatron_runs import MegatronJob, count_printed_parameters
from tokenmill.checkpoints.repair import examine_tracked
from tokenmill.fit.memory import count_parameters
from tokenmill.models.model import Model, load_preset, preset_names
from tokenmill.train.settings import Settings, derive_settings

pytestmark = pytest.mark.conformance

LAYOUTS: dict[str, dict[str, int]] = {
    "data": {},
    "tensor": {"tensorModelParallelSize": 2},
    "pipeline": {"pipelineModelParallelSize": 2},
    "virtual": {"pipelineModelParallelSize": 2, "numLayersPerVirtualPipelineStage": 1},
    "expert": {"expertModelParallelSize": 2},
}
SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocabulary_size": 4096}
SIZES |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1}
SIZES |= {"micro_batch_size": 1, "learning_rate": 1e-3}


def shrink(model: Model) -> Model:
    """Return an architecture with few and narrow layers, and everything else unchanged."""
    changes: dict[str, Any] = {**SIZES, "name": "custom", "note": None}
    if model.ffn_hidden_size:
        changes["ffn_hidden_size"] = 128
    if model.num_query_groups:
        changes["num_query_groups"] = 2
    if model.kv_channels:
        changes["kv_channels"] = 32
    if model.num_experts:
        changes |= {"num_experts": 4, "experts_per_token": 2}
    if model.expert_ffn_hidden_size:
        changes["expert_ffn_hidden_size"] = 48
    return msgspec.structs.replace(model, **changes)


def architectures() -> dict[str, Model]:
    """Return the distinct architectures of all presets, each by the name of its first preset."""
    first: dict[Model, str] = {}
    for name in preset_names():
        first.setdefault(shrink(load_preset(name)), name)
    return {name: model for model, name in first.items()}


def cases() -> list[tuple[str, str]]:
    return [
        (name, layout)
        for name, model in architectures().items()
        for layout in LAYOUTS
        if (layout != "expert" or model.num_experts) and (layout != "tensor" or not model.num_experts)
    ]


@pytest.mark.parametrize(("name", "layout"), cases())
def test_architecture_trains(name: str, layout: str, job: Callable[..., MegatronJob]) -> None:
    model = architectures()[name]
    run = job(model=msgspec.to_builtins(model), training__iterations=10)
    for key, value in LAYOUTS[layout].items():
        run.settings["parallelism"][key] = value
    log = run.complete()
    losses = [float(loss) for loss in run.losses.values()]
    assert len(losses) == 10 and all(map(math.isfinite, losses)) and losses[0] < math.log(4096) + 1
    assert sum(losses[-3:]) < sum(losses[:3])
    checkpoint = examine_tracked(run.checkpoints)
    assert checkpoint is not None and checkpoint.complete and checkpoint.iteration == 10
    if layout == "data":  # the parameters of one rank are those of the model
        settings = derive_settings(msgspec.convert(run.settings, Settings))
        expected = count_parameters(settings.layout(4096)).total  # without biases
        assert count_printed_parameters(log) == pytest.approx(expected, rel=0.01)
