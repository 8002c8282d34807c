"""Mistral: Llama's decoder with a sliding window in all layers."""

from functools import partial

from tokenmill.checkpoints.families.shared import rotary
from tokenmill.checkpoints.families.shared.config_reader import Config
from tokenmill.models.model import Model

DEFAULTS: Config = rotary.DEFAULTS | {
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}


def describe(model: Model) -> Config:
    """Return the keys of config.json: Megatron-LM trained without a window."""
    return rotary.describe_decoder(model) | {"sliding_window": None}


FAMILY = rotary.RotaryFamily(
    model_type="mistral",
    architecture="MistralForCausalLM",
    models="Mistral 7B and its successors",
    summary="llama without a sliding window: with one, `seqLength` must not exceed it",
    defaults=DEFAULTS,
    read=partial(rotary.read_decoder, find_window=rotary.window_of_all_layers),
    for_new_models=False,
    describe=describe,
)
