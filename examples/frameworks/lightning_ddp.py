"""Train with the Trainer of Lightning, which copies the model to each process (DDP).

torchrun --nproc-per-node 2 examples/frameworks/lightning_ddp.py out/preprocessed --out runs/lightning
"""

import argparse
import os

import common
import lightning
import torch

from tokenmill.loaders.lightning import DataModule


class Module(lightning.LightningModule):
    """The model, and the log of the run."""

    def __init__(self, options: argparse.Namespace, log: common.RunLog, model: torch.nn.Module) -> None:
        """Take the model with its initial weights."""
        super().__init__()
        self.options, self.run, self.model = options, log, model
        self.wait = 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer; Lightning calls this when the model is on its device."""
        return common.make_optimizer(self.model, self.options)

    def on_train_start(self) -> None:
        """Begin the first step."""
        self.run.start()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        loss = common.compute_loss(self.model, batch, self.device)
        self.run.add(batch["tokens"], batch["labels"], loss)
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        """Write the line of a step after its last micro-batch, and save."""
        if self.trainer.global_step == self.run.step:
            return
        if metrics := self.trainer.datamodule.metrics():
            self.wait = metrics.data_wait_seconds
        self.run.end_step(self.trainer.datamodule.consumed, self.wait)
        if self.run.saves():
            self.trainer.save_checkpoint(self.run.directory(self.run.step) / "lightning.ckpt", weights_only=False)
            self.run.end_save()


def main() -> None:
    """Train to the last step."""
    options = common.parse_arguments()
    device = common.find_device()
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    samples = common.open_samples(options)
    model = common.make_model(options)
    log = common.RunLog(options, samples, model)

    trainer = lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=local,
        num_nodes=world // local,
        strategy="ddp",
        use_distributed_sampler=False,
        max_steps=options.steps,
        accumulate_grad_batches=options.global_batch // (options.micro_batch * world),
        gradient_clip_val=options.clip_grad,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = log.directory(log.step) / "lightning.ckpt" if log.step else None
    data = DataModule(samples, options.micro_batch)
    trainer.fit(Module(options, log, model), datamodule=data, ckpt_path=checkpoint, weights_only=True)


if __name__ == "__main__":
    main()
