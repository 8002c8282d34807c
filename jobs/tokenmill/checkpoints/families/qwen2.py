"""Qwen 2 and 2.5: Llama's decoder with biases of query, key and value."""

from functools import partial

from tokenmill.checkpoints.families.shared import rotary
from tokenmill.checkpoints.families.shared.config_reader import Config, ConfigReader

DEFAULTS: Config = rotary.DEFAULTS | {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def find_window(reader: ConfigReader) -> object:
    """Return the window of the layers from max_window_layers on, or of those that layer_types names."""
    kinds = reader.value("layer_types", list) or []
    is_used = reader.flag("use_sliding_window")
    all_full = reader.value("max_window_layers", int) >= reader.count("num_hidden_layers")
    if not is_used or ("sliding_attention" not in kinds if kinds else all_full):
        return None
    return rotary.window_of_all_layers(reader)


FAMILY = rotary.RotaryFamily(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    models="Qwen 2, 2.5 (dense)",
    summary="llama with biases of query, key, value",
    defaults=DEFAULTS,
    read=partial(rotary.read_decoder, qkv_bias=True, find_window=find_window),
    computes=partial(rotary.computes_decoder, qkv_bias=True),
)
