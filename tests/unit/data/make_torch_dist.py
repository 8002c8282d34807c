"""Write a small checkpoint with Megatron-LM itself, on two CPU ranks: torchrun --nproc-per-node 2 THIS DIRECTORY.

Needs torch, psutil and either Megatron-LM on PYTHONPATH or megatron-core 0.16; no GPU: what the save asks of CUDA
is answered for it.
"""

import inspect
import os
import sys

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    weight = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4) + rank
    cut = (0, rank, world)
    state = {
        "model": {
            "weight": ShardedTensor.from_rank_offsets("decoder.weight", weight, cut),
            "bias": ShardedTensor.from_rank_offsets("decoder.bias", torch.ones(4), replica_id=rank),
        },
        "optimizer": {"exp_avg": ShardedTensor.from_rank_offsets("optimizer.exp_avg.weight", weight.float(), cut)},
        "rng_state": ShardedObject("rng_state", [{"random_rng_state": rank}], (world,), (rank,), replica_id=0),
        "iteration": 100,
    }
    if rank == 0:
        os.makedirs(directory, exist_ok=True)
    dist.barrier()
    asked = inspect.signature(TorchDistSaveShardedStrategy).parameters
    strategy = TorchDistSaveShardedStrategy(*(("torch_dist", 1) if "backend" in asked else ()))
    more = (
        {"verify_integrity": True}
        if "verify_integrity" in inspect.signature(dist_checkpointing.save).parameters
        else {}
    )
    dist_checkpointing.save(state, directory, strategy, **more)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
