"""Train with FSDP2 of PyTorch.

torchrun --nproc-per-node 2 examples/frameworks/fsdp.py out/preprocessed --out runs/fsdp
"""

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from tokenmill.loaders.torch import Loader


def main() -> None:
    """Train to the last step."""
    options = common.parse_arguments()
    device = common.find_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    samples = common.open_samples(options)
    model = common.make_model(options)
    log = common.RunLog(options, samples, model)

    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    model.to(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = common.make_optimizer(model, options)
    loader = Loader(samples, options.micro_batch, global_batch=options.global_batch)

    if log.step:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state, "data": loader}, checkpoint_id=log.directory(log.step))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    batches = iter(loader)
    log.start()
    while log.step < options.steps:
        for _ in range(loader.accumulation):
            batch = next(batches)
            loss = common.compute_loss(model, batch, device)
            (loss / loader.accumulation).backward()
            log.add(batch["tokens"], batch["labels"], loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        log.end_step(loader.consumed, loader.data_wait_seconds)
        if log.saves():
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state, "data": loader}, checkpoint_id=log.directory(log.step))
            log.end_save()
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
