"""Qwen 3 with experts: the attention of Qwen 3, and the router of Mixtral, with experts in all layers."""

from functools import partial

from tokenmill.checkpoints.families import mixtral
from tokenmill.checkpoints.families.shared import rotary
from tokenmill.checkpoints.families.shared.base import TRAINING_KEYS
from tokenmill.checkpoints.families.shared.config_reader import Config, ConfigReader, Fields
from tokenmill.models.model import Model


def find_window(reader: ConfigReader) -> object:
    """Return the window, which all layers have: unlike Qwen 2, the class ignores max_window_layers."""
    return rotary.window_of_all_layers(reader) if reader.flag("use_sliding_window") else None


def read(reader: ConfigReader) -> Fields:
    """Return the fields of the model."""
    if (step := reader.value("decoder_sparse_step", int)) != 1:
        raise reader.refuse("decoder_sparse_step", f"experts in only some layers, as the value {step} means")
    if dense := reader.value("mlp_only_layers", list):
        raise reader.refuse("mlp_only_layers", f"the layers {reader.show(dense)} without experts")
    if not reader.flag("norm_topk_prob"):
        raise reader.refuse("norm_topk_prob", "a router whose weights do not add up to 1, as without the value true")
    return (
        rotary.read_decoder(reader, qk_layernorm=True, find_window=find_window)
        | mixtral.read_experts(reader, "num_experts")
        | {"expertFfnHiddenSize": reader.count("moe_intermediate_size")}
    )


def describe(model: Model) -> Config:
    """Return the keys of config.json."""
    return rotary.describe_decoder(model) | {
        "moe_intermediate_size": mixtral.expert_width(model),
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        mixtral.AUX_LOSS: model.expert_aux_loss_coefficient,
    }


FAMILY = rotary.RotaryFamily(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    models="Qwen 3 with experts: 30B-A3B, 235B-A22B, Coder",
    summary="qwen3 with experts in all layers, at least 2 per token, whose weights add up to 1 (`norm_topk_prob`)",
    tensor_names="qwen3_moe",
    defaults=rotary.DEFAULTS
    | {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    other_names={"num_local_experts": "num_experts"},
    read=read,
    computes=partial(rotary.computes_decoder, qk_layernorm=True, experts=True),
    describe=describe,
    training_keys=TRAINING_KEYS | {mixtral.AUX_LOSS},
    pieces=partial(
        rotary.decoder_pieces,
        feed_forward=partial(mixtral.experts, block="mlp", linears=("gate_proj", "up_proj", "down_proj")),
    ),
)
