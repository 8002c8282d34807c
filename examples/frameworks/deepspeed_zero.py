"""Train with ZeRO 1 of DeepSpeed, which divides the state of the optimizer among the processes.

torchrun --nproc-per-node 2 examples/frameworks/deepspeed_zero.py out/preprocessed --out runs/deepspeed
"""

import os

import common
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.ops

from tokenmill.loaders.deepspeed import engine_loader


def main() -> None:
    """Train to the last step."""
    options = common.parse_arguments()
    device = common.find_device()
    if device.type == "cpu":
        # gloo replaces this extension, which would be compiled at the first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    samples = common.open_samples(options)
    model = common.make_model(options)
    log = common.RunLog(options, samples, model)

    model.to(device)
    config = {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "train_batch_size": options.global_batch,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": options.clip_grad,
        "torch_autocast": {"enabled": device.type == "cuda", "dtype": "bfloat16"},
    }
    optimizer = common.make_optimizer(model, options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loader = engine_loader(engine, samples)

    if log.step:
        _, state = engine.load_checkpoint(str(log.directory(log.step)), tag="engine")
        loader.load_state_dict(state["data"])
    batches = iter(loader)
    log.start()
    while log.step < options.steps:
        for _ in range(loader.accumulation):
            batch = next(batches)
            loss = common.compute_loss(engine, batch, device)
            engine.backward(loss)
            engine.step()
            log.add(batch["tokens"], batch["labels"], loss)
        log.end_step(loader.consumed, loader.data_wait_seconds)
        if log.saves():
            state = {"data": loader.state_dict()}
            engine.save_checkpoint(str(log.directory(log.step)), tag="engine", client_state=state)
            log.end_save()
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
