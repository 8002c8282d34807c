"""Mixtral: Mistral's decoder with experts in place of the feed-forward layers."""

from collections.abc import Iterator
from functools import partial

from tokenmill.checkpoints.families import mistral
from tokenmill.checkpoints.families.shared import rotary
from tokenmill.checkpoints.families.shared.base import TRAINING_KEYS
from tokenmill.checkpoints.families.shared.config_reader import Config, ConfigReader, Fields
from tokenmill.checkpoints.families.shared.tensors import LAYERS, HubTensor, TensorPiece, derive_layout, whole_tensor
from tokenmill.models.model import Model

AUX_LOSS = "router_aux_loss_coef"


def read(reader: ConfigReader) -> Fields:
    """Return the fields of the model."""
    fields = rotary.read_decoder(reader, find_window=rotary.window_of_all_layers)
    return fields | read_experts(reader, "num_local_experts")


def read_experts(reader: ConfigReader, key: str) -> Fields:
    """Return the fields of a router that divides the weights of the chosen experts by their sum."""
    experts, chosen = reader.count(key), reader.count("num_experts_per_tok")
    if chosen > experts:
        raise reader.refuse("num_experts_per_tok", f"{chosen} of {experts} experts")
    if chosen == 1:  # this router gives the one expert the weight 1, which has no gradient
        raise reader.refuse("num_experts_per_tok", "1 expert per token with this router")
    return {"numExperts": experts, "expertsPerToken": chosen}


def describe(model: Model) -> Config:
    """Return the keys of config.json."""
    return mistral.describe(model) | {
        "intermediate_size": expert_width(model),
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        AUX_LOSS: model.expert_aux_loss_coefficient,
    }


def expert_width(model: Model) -> int:
    """Return the width of an expert's feed-forward layers."""
    return model.expert_ffn_hidden_size or derive_layout(model).ffn


def experts(
    model: Model,
    name: str,
    layer: int,
    *,
    block: str = "block_sparse_moe",
    linears: tuple[str, str, str] = ("w1", "w3", "w2"),
) -> Iterator[TensorPiece]:
    """Yield the pieces of a layer after its attention; `linears` are the names of gate, up and down in `block`."""
    count, layers = model.num_experts or 0, model.num_layers
    key = f"{LAYERS}mlp."
    norm = HubTensor(f"{name}post_attention_layernorm.weight", (model.hidden_size,))
    yield whole_tensor(f"{LAYERS}pre_mlp_layernorm.weight", norm, (layer,), (layers,))._replace(
        alias=f"{key}linear_fc1.layer_norm_weight"
    )
    router = HubTensor(f"{name}{block}.gate.weight", (count, model.hidden_size))
    yield whole_tensor(f"{key}router.weight", router, (layer,), (layers,))
    gate, up, down = linears
    shape = (expert_width(model), model.hidden_size)
    for expert in range(count):
        start = f"{name}{block}.experts.{expert}."
        names = (f"{start}{gate}.weight", f"{start}{up}.weight", f"{start}{down}.weight")
        yield from rotary.gated_feed_forward(f"{key}experts.experts.", names, shape, (layer, expert), (layers, count))


FAMILY = rotary.RotaryFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    models="Mixtral 8x7B, 8x22B",
    summary="mistral with experts, at least 2 per token",
    tensor_names="mixtral",
    defaults=mistral.DEFAULTS
    | {
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    other_names={"num_experts": "num_local_experts"},
    read=read,
    computes=partial(rotary.computes_decoder, experts=True),
    describe=describe,
    training_keys=TRAINING_KEYS | {AUX_LOSS},
    pieces=partial(rotary.decoder_pieces, feed_forward=experts),
)
