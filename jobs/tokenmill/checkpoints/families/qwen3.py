"""Qwen 3, dense: Llama's decoder with normalized heads of query and key; its windows are those of Qwen 2."""

from functools import partial

from tokenmill.checkpoints.families import qwen2
from tokenmill.checkpoints.families.shared import rotary

FAMILY = rotary.RotaryFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    models="Qwen 3 (dense)",
    summary="llama with normalized heads",
    defaults=qwen2.DEFAULTS | {"head_dim": 128},
    read=partial(rotary.read_decoder, qk_layernorm=True, find_window=qwen2.find_window),
    computes=partial(rotary.computes_decoder, qk_layernorm=True),
)
