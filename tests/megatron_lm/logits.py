"""Write the logits of a loaded model, for the variable MEGATRON_LOGITS of `pretrain.py`: a directory with tokens.npy.

The logits are those of the weights before the first iteration, computed in float32, so that they can be compared with
the logits of another implementation on the same weights. The process then ends, because the model is in float32.
"""

import os
import sys
from pathlib import Path
from typing import Any


def write_logits(directory: Path) -> None:
    """Let `pretrain` write logits.npy, [sequences, positions, rows of the embedding], in place of the training."""
    import megatron.training

    # Training a mixture of experts with tensor parallelism needs sequence parallelism, which needs Transformer Engine's
    # norms. The logits are the same without it.
    sys.argv = [argument for argument in sys.argv if argument != "--sequence-parallel"]

    pretrain = megatron.training.pretrain

    def run(config: Any, provider: Any, kind: Any, step: Any, **named: Any) -> Any:
        def first_step(batches: Any, model: Any, *rest: Any) -> Any:
            _write(directory, model)
            os._exit(0)

        return pretrain(config, provider, kind, first_step, **named)

    megatron.training.pretrain = run


def _write(directory: Path, wrapped: Any) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron.core.utils import unwrap_model

    tokens = torch.from_numpy(np.load(directory / "tokens.npy"))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    model = unwrap_model(wrapped).float().eval()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.bf16, module.config.params_dtype = False, torch.float32
    with torch.no_grad():
        logits = gather_from_tensor_model_parallel_region(model(tokens, positions, None))
    if mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_data_parallel_rank() == 0:
        np.save(directory / "logits.npy", logits.float().numpy())
    dist.barrier()
