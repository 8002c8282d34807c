"""Llama 2 and 3."""

from tokenmill.checkpoints.families.shared import rotary

FAMILY = rotary.RotaryFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    models="Llama 2, 3, 3.1 to 3.3 (text only)",
    summary="swiglu, RMSNorm and rope, no biases; rotary scaling only with the values of Llama 3",
    defaults=rotary.DEFAULTS
    | {"intermediate_size": 11_008, "num_key_value_heads": None, "max_position_embeddings": 2048},
)
