"""Megatron-LM's command line: every preset's words are words that it takes, and say what the settings say."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.megatron import InvalidArguments, parse
from tokenmill.training.arguments import DataArguments, megatron_arguments
from tokenmill.training.model import load_preset, preset_names
from tokenmill.training.settings import Settings, derive_settings

DATA = DataArguments(
    ["--data-path", "0.25", "/data/a", "0.75", "/data/b", "--split", "990,9,1"], Path("/t"), Path("/cache")
)
EVERYTHING: dict[str, Any] = {
    "training": {
        "nodes": 16,
        "precision": "fp16",
        "useSharp": True,
        "resetPositionIds": True,
        "resetAttentionMask": True,
        "eodMaskLoss": True,
        "iterationsToSkip": [7, 8],
        "checkForSpikyLoss": True,
        "checkForNan": False,
        "decayStyle": "WSD",
    },
    "parallelism": {
        "numLayersPerVirtualPipelineStage": 1,
        "expertTensorParallelSize": 1,
        "contextParallelSize": 2,
        "recomputeGranularity": "full",
    },
    "checkpoint": {"path": "/c", "asynchronous": True, "fullyReshardable": True, "loadPath": "/other"},
    "supervision": {"exitDurationMinutes": 60},
    "logs": {"path": "/logs"},
}


def settings(model: str = "125m", *, changed: dict[str, Any] | None = None, **sections: Any) -> Settings:
    base = {
        "release": "r",
        "model": msgspec.to_builtins(load_preset(model, **(changed or {}))),
        "training": {"nodes": 16},
        "checkpoint": {"path": "/c"},
        "dataset": {"path": "/data"},
    }
    return derive_settings(msgspec.convert(base | sections, Settings))


def words(*, model: str = "125m", **sections: Any) -> dict[str, list[Any]]:
    return parse(megatron_arguments(settings(model, **sections), DATA))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_composes_what_megatron_takes(name: str) -> None:
    model = load_preset(name)
    for sections in ({}, EVERYTHING, *({"parallelism": {"recomputeGranularity": g}} for g in ("none", "full"))):
        found = words(model=name, **sections)
        assert found["--num-layers"] == [model.num_layers]
        assert found["--hidden-size"] == [model.hidden_size]
        assert found["--num-attention-heads"] == [model.num_attention_heads]
        assert found["--tensor-model-parallel-size"] == [model.tensor_model_parallel_size]
        assert found["--pipeline-model-parallel-size"] == [model.pipeline_model_parallel_size]
        assert found["--lr"] == [model.learning_rate]
        assert ("--num-query-groups" in found) == ("--group-query-attention" in found) == bool(model.num_query_groups)
        assert ("--num-experts" in found) == ("--expert-model-parallel-size" in found) == bool(model.num_experts)
        assert ("--rotary-base" in found) == (model.position_embedding == "rope")
        assert ("--swiglu" in found) == (model.activation == "swiglu")
        assert ("--disable-bias-linear" in found) != model.add_bias_linear
        assert ("--sequence-parallel" in found) == (model.tensor_model_parallel_size > 1)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_composes_for_a_cpu_too(name: str) -> None:
    found = words(model=name, trainer={"backend": "gloo"})
    assert found["--distributed-backend"] == ["gloo"] and found["--transformer-impl"] == ["local"]


def test_everything_that_can_be_said_is_said() -> None:
    found = words(model="mixtral-8x7b", changed={"ropeScalingFactor": 8, "expertFfnHiddenSize": 512}, **EVERYTHING)
    assert found["--iterations-to-skip"] == [7, 8]
    assert found["--recompute-granularity"] == ["full"]
    assert found["--recompute-method"] == ["uniform"] and found["--recompute-num-layers"] == [1]
    assert found["--lr-decay-style"] == ["WSD"]
    assert found["--exit-duration-in-mins"] == [60]
    assert found["--tensorboard-dir"] == ["/logs"]
    assert found["--moe-ffn-hidden-size"] == [512] and found["--rope-scaling-factor"] == [8.0]
    flags = {"--use-sharp", "--fp16", "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"}
    flags |= {"--check-for-spiky-loss", "--no-check-for-nan-in-loss-and-grad", "--dist-ckpt-optim-fully-reshardable"}
    flags |= {"--async-save", "--use-persistent-ckpt-worker", "--use-rope-scaling"}
    assert flags <= found.keys()
    assert not {"--bf16", "--no-create-attention-mask-in-dataloader"} & found.keys()


def test_nothing_is_said_twice_or_for_nothing() -> None:
    found = words()
    assert found["--bf16"] == [] and "--fp16" not in found
    assert (
        not {"--recompute-method", "--async-save", "--tensorboard-dir", "--use-sharp", "--kv-channels"} & found.keys()
    )
    assert found["--data-path"] == ["0.25", "/data/a", "0.75", "/data/b"]
    assert found["--min-lr"] == [pytest.approx(6e-5)]


def test_asynchronous_saves_come_with_the_worker_they_need() -> None:
    found = words(checkpoint={"path": "/c", "asynchronous": True})
    assert {"--async-save", "--use-persistent-ckpt-worker"} <= found.keys()


def test_other_weights_are_for_a_run_without_a_checkpoint_of_its_own() -> None:
    assert "--pretrained-checkpoint" not in words()
    found = words(checkpoint={"path": "/c", "loadPath": "/other"})
    assert (found["--save"], found["--load"], found["--pretrained-checkpoint"]) == (["/c"], ["/c"], ["/other"])


def test_extra_arguments_come_last_and_win() -> None:
    composed = megatron_arguments(settings(extraArgs=["--lr", "0.5", "--fp8-format", "hybrid"]), DATA)
    assert composed[-4:] == ["--lr", "0.5", "--fp8-format", "hybrid"]
    assert parse(composed, repeats=["--lr"])["--lr"] == [0.5]


@pytest.mark.parametrize("number", [1e-5, 6e-5, 1e-12, 0.1, 1e6])
def test_numbers_are_written_so_that_they_come_back(number: float) -> None:
    assert words(training={"nodes": 16, "learningRate": number})["--lr"] == [number]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--num-layer", "2"],
        ["--num-layers"],
        ["--num-layers", "2", "3"],
        ["--num-layers", "two"],
        ["--num-layers", "2", "--num-layers", "2"],
        ["--bf16", "true"],
        ["--attention-backend", "AttnBackend.auto"],
        ["--attention-backend", "best"],
        ["--lr-decay-style", "step"],
        ["--rampup-batch-size", "1", "2"],
        ["2"],
    ],
)
def test_the_parser_takes_nothing_else(wrong: list[str]) -> None:
    with pytest.raises(InvalidArguments):
        parse(wrong)
