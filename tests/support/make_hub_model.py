"""Models as transformers saves them, and their logits: `make_hub_model.py make|logits ROOT NAME...`.

The tests run it with the interpreter that has torch and transformers. `make` writes a model in bfloat16 for each
ROOT/NAME/config.json. All weights are random, also those that a new model has as ones and zeros, so that a weight in
the place of another changes the logits. Both write ROOT/NAME/logits.npy in float32 for the tokens in ROOT/tokens.npy.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def make(root: Path, names: list[str]) -> None:
    """Save the models, with the same weights in every call."""
    torch.manual_seed(1)
    for name in names:
        config = transformers.AutoConfig.from_pretrained(root / name)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                is_norm = parameter.dim() == 1 and "bias" not in key
                parameter.copy_(torch.randn_like(parameter) * 0.15 + is_norm)
        model.save_pretrained(root / name, max_shard_size="300KB")
        write_logits(root, name)


def write_logits(root: Path, name: str) -> None:
    """Load a model with float32 as its dtype, and write its logits: [sequences, positions, vocabulary]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(np.load(root / "tokens.npy"))).logits
    np.save(root / name / "logits.npy", logits.numpy())


if __name__ == "__main__":
    directory = Path(sys.argv[2])
    if sys.argv[1] == "make":
        make(directory, sys.argv[3:])
    else:
        for model_name in sys.argv[3:]:
            write_logits(directory, model_name)
