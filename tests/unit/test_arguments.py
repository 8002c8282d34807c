"""The arguments of every preset: Megatron-LM's parser accepts them, and their values are those of the settings."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.megatron import InvalidArguments, parse
from tokenmill.models.model import load_preset, preset_names
from tokenmill.train.arguments import DataArguments, megatron_arguments
from tokenmill.train.settings import Settings, derive_settings

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


def parse_arguments(*, model: str = "125m", **sections: Any) -> dict[str, list[Any]]:
    return parse(megatron_arguments(settings(model, **sections), DATA))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_gives_valid_arguments(name: str) -> None:
    model = load_preset(name)
    for sections in ({}, EVERYTHING, *({"parallelism": {"recomputeGranularity": g}} for g in ("none", "full"))):
        arguments = parse_arguments(model=name, **sections)
        assert arguments["--num-layers"] == [model.num_layers]
        assert arguments["--hidden-size"] == [model.hidden_size]
        assert arguments["--num-attention-heads"] == [model.num_attention_heads]
        assert arguments["--tensor-model-parallel-size"] == [model.tensor_model_parallel_size]
        assert arguments["--pipeline-model-parallel-size"] == [model.pipeline_model_parallel_size]
        assert arguments["--lr"] == [model.learning_rate]
        assert (
            ("--num-query-groups" in arguments)
            == ("--group-query-attention" in arguments)
            == bool(model.num_query_groups)
        )
        assert (
            ("--num-experts" in arguments) == ("--expert-model-parallel-size" in arguments) == bool(model.num_experts)
        )
        assert ("--rotary-base" in arguments) == (model.position_embedding == "rope")
        assert ("--swiglu" in arguments) == (model.activation == "swiglu")
        assert ("--disable-bias-linear" in arguments) != model.add_bias_linear
        assert ("--sequence-parallel" in arguments) == (model.tensor_model_parallel_size > 1)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_supports_a_cpu(name: str) -> None:
    arguments = parse_arguments(model=name, trainer={"backend": "gloo"})
    assert arguments["--distributed-backend"] == ["gloo"] and arguments["--transformer-impl"] == ["local"]


def test_every_setting_has_an_argument() -> None:
    changed = {"ropeScalingFactor": 8, "rotaryPercent": 0.5, "layersWithoutRope": [1, 31], "expertFfnHiddenSize": 512}
    arguments = parse_arguments(model="mixtral-8x7b", changed=changed, **EVERYTHING)
    assert arguments["--iterations-to-skip"] == [7, 8]
    assert arguments["--recompute-granularity"] == ["full"]
    assert arguments["--recompute-method"] == ["uniform"] and arguments["--recompute-num-layers"] == [1]
    assert arguments["--lr-decay-style"] == ["WSD"]
    assert arguments["--exit-duration-in-mins"] == [60]
    assert arguments["--tensorboard-dir"] == ["/logs"]
    assert arguments["--moe-ffn-hidden-size"] == [512] and arguments["--rope-scaling-factor"] == [8.0]
    assert arguments["--rotary-percent"] == [0.5]
    assert arguments["--no-rope-freq"] == ["[0,1" + 29 * ",0" + ",1]"]
    flags = {"--use-sharp", "--fp16", "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"}
    flags |= {"--check-for-spiky-loss", "--no-check-for-nan-in-loss-and-grad", "--dist-ckpt-optim-fully-reshardable"}
    flags |= {"--async-save", "--use-persistent-ckpt-worker", "--use-rope-scaling"}
    assert flags <= arguments.keys()
    assert not {"--bf16", "--no-create-attention-mask-in-dataloader"} & arguments.keys()


def test_unused_settings_have_no_argument() -> None:
    arguments = parse_arguments()
    assert arguments["--bf16"] == [] and "--fp16" not in arguments
    unused = {"--recompute-method", "--async-save", "--tensorboard-dir", "--use-sharp", "--kv-channels"}
    assert not (unused | {"--rotary-percent", "--no-rope-freq"}) & arguments.keys()
    assert arguments["--data-path"] == ["0.25", "/data/a", "0.75", "/data/b"]
    assert arguments["--min-lr"] == [pytest.approx(6e-5)]


def test_asynchronous_saves_use_a_persistent_worker() -> None:
    arguments = parse_arguments(checkpoint={"path": "/c", "asynchronous": True})
    assert {"--async-save", "--use-persistent-ckpt-worker"} <= arguments.keys()


def test_load_path_sets_the_pretrained_checkpoint() -> None:
    assert "--pretrained-checkpoint" not in parse_arguments()
    arguments = parse_arguments(checkpoint={"path": "/c", "loadPath": "/other"})
    assert (arguments["--save"], arguments["--load"], arguments["--pretrained-checkpoint"]) == (
        ["/c"],
        ["/c"],
        ["/other"],
    )


def test_extra_arguments_override_others() -> None:
    composed = megatron_arguments(settings(extraArgs=["--lr", "0.5", "--fp8-format", "hybrid"]), DATA)
    assert composed[-4:] == ["--lr", "0.5", "--fp8-format", "hybrid"]
    assert parse(composed, repeats=["--lr"])["--lr"] == [0.5]


@pytest.mark.parametrize("number", [1e-5, 6e-5, 1e-12, 0.1, 1e6])
def test_numbers_survive_a_round_trip(number: float) -> None:
    assert parse_arguments(training={"nodes": 16, "learningRate": number})["--lr"] == [number]


@pytest.mark.parametrize(
    "arguments",
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
def test_parser_refuses_the_rest(arguments: list[str]) -> None:
    with pytest.raises(InvalidArguments):
        parse(arguments)
