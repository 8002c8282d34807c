"""Save a small model with random weights as transformers does: `python make_hub_model.py FAMILY DIRECTORY [DTYPE]`.

The tests run it with the interpreter that has torch and transformers. All weights are random, also those that a new model has
as ones and zeros, so that a weight in the place of another changes the logits.
"""

import sys

import torch
import transformers

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
    "llama-tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=False),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=None, tie_word_embeddings=False),
    "mixtral": lambda: transformers.MixtralConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=4096, bos_token_id=0, eos_token_id=0
    ),
}


def main(family: str, directory: str, dtype: str = "float32") -> None:
    """Save a model, with the same weights in every call."""
    torch.manual_seed(len(family))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).to(getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and "bias" not in name
            parameter.copy_(torch.randn_like(parameter) * 0.15 + is_norm)
    model.save_pretrained(directory, max_shard_size="300KB")


if __name__ == "__main__":
    main(*sys.argv[1:])
