"""Models as transformers saves them, and their logits: `make_hub_model.py make ROOT`, or `... logits ROOT NAME...`.

The tests run it with the interpreter that has torch and transformers. `make` writes a small model of each family to
ROOT/FAMILY in bfloat16. All weights are random, also those that a new model has as ones and zeros, so that a weight in
the place of another changes the logits. Both write ROOT/NAME/logits.npy in float32 for the tokens in ROOT/tokens.npy.
"""

import sys
from pathlib import Path

import numpy as np
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


def make(root: Path) -> None:
    """Save a model of each family, with the same weights in every call."""
    torch.manual_seed(1)
    for family, config in CONFIGS.items():
        model = transformers.AutoModelForCausalLM.from_config(config()).to(torch.bfloat16)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm = parameter.dim() == 1 and "bias" not in name
                parameter.copy_(torch.randn_like(parameter) * 0.15 + is_norm)
        model.save_pretrained(root / family, max_shard_size="300KB")
        write_logits(root, family)


def write_logits(root: Path, name: str) -> None:
    """Load a model with float32 as its dtype, and write its logits: [sequences, positions, vocabulary]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(np.load(root / "tokens.npy"))).logits
    np.save(root / name / "logits.npy", logits.numpy())


if __name__ == "__main__":
    directory = Path(sys.argv[2])
    if sys.argv[1] == "make":
        make(directory)
    for model_name in sys.argv[3:]:
        write_logits(directory, model_name)
