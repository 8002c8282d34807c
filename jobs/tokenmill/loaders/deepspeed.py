"""The loader of a DeepSpeed engine: its micro-batch, its accumulation steps and its data-parallel ranks.

DeepSpeed's own loader (`initialize(training_data=...)`) shuffles in its own order, so the engine gets no data.
"""

from typing import Any

from tokenmill.loaders.torch import Loader
from tokenmill.samples.samples import Samples

try:
    import torch.distributed as dist
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "tokenmill.loaders.deepspeed needs PyTorch: run pip install '.[deepspeed]' in the clone of tokenmill",
        name=error.name,
    ) from None


def engine_loader(
    engine: Any, samples: Samples, *, consumed: int = 0, prefetch: int = 2, pin_memory: bool = False
) -> Loader:
    """Return the loader of an engine that deepspeed.initialize returned.

    Pass its state to `engine.save_checkpoint(..., client_state={"data": loader.state_dict()})`, and load it from the
    client state that `engine.load_checkpoint` returns. The options are those of `Loader`.
    """
    return Loader(
        samples,
        engine.train_micro_batch_size_per_gpu(),
        rank=dist.get_rank(engine.data_parallel_group),
        world=engine.dp_world_size,
        global_batch=engine.train_batch_size(),
        consumed=consumed,
        prefetch=prefetch,
        pin_memory=pin_memory,
    )
