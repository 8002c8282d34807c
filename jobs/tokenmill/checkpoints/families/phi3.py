"""Phi 3 and 4: Llama's decoder with one tensor of query, key, value, and one of gate and up."""

from collections.abc import Iterator

from tokenmill.checkpoints.families.shared import rotary
from tokenmill.checkpoints.families.shared.config_reader import Config, ConfigReader, Fields
from tokenmill.checkpoints.families.shared.tensors import LAYERS, HubTensor, TensorPiece, fuse
from tokenmill.models.model import Model

FUSED = {
    f"{LAYERS}self_attention.linear_qkv.weight": ("q_proj", "qkv_proj"),
    f"{LAYERS}mlp.linear_fc1.weight": ("gate_proj", "gate_up_proj"),
}
"""For each tensor of Megatron-LM, Llama's name of the first part, and Phi's name of all parts one after the other."""


def read(reader: ConfigReader) -> Fields:
    """Return the fields of the model."""
    fields = rotary.read_decoder(reader, partial_rotation=True, find_window=rotary.window_of_all_layers)
    if "ropeScalingFactor" in fields:
        raise reader.refuse("rope_type", "rotary scaling of the type 'llama3' in this model type")
    return fields | {"hiddenDropout": reader.share("resid_pdrop")}


def computes(model: Model) -> bool:
    """Return whether a model is a Phi 3."""
    return rotary.computes_decoder(model, partial_rotation=True) and not model.rope_scaling_factor


def describe(model: Model) -> Config:
    """Return the keys of config.json: Megatron-LM trained without a window."""
    config = rotary.describe_decoder(model)
    share = {"partial_rotary_factor": model.rotary_percent}
    config["rope_parameters"] |= share
    return config | share | {"sliding_window": None, "resid_pdrop": model.hidden_dropout}


def pieces(model: Model, embedding_rows: int, prefix: str) -> Iterator[TensorPiece]:
    """Yield the pieces in the order of the layers."""
    for piece in rotary.decoder_pieces(model, embedding_rows, prefix):
        if piece.key in FUSED:
            name = piece.tensors[0].name.replace(*FUSED[piece.key])
            yield fuse(piece, HubTensor(name, piece.shape))
        else:
            yield piece


FAMILY = rotary.RotaryFamily(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    models="Phi 3 and 4 without longrope",
    summary="mistral, also with rope of a part of each head; no rotary scaling",
    tensor_names="phi3",
    defaults=rotary.DEFAULTS
    | {
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_key_value_heads": None,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "resid_pdrop": 0.0,
    },
    read=read,
    computes=computes,
    describe=describe,
    pieces=pieces,
)
