"""Train with the Trainer of Transformers.

torchrun --nproc-per-node 2 examples/frameworks/transformers_trainer.py out/preprocessed --out runs/transformers
"""

import os

import common
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

from tokenmill.loaders.hf import ResumeCallback, SampleDataset, collate


class LoggedTrainer(Trainer):
    """A Trainer that adds each micro-batch to the log."""

    log_of_run: common.RunLog

    def training_step(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *items: object) -> torch.Tensor:
        """Train a micro-batch; its loss is divided by the number of micro-batches."""
        loss = super().training_step(model, inputs, *items)
        steps = self.current_gradient_accumulation_steps
        self.log_of_run.add(inputs["input_ids"], inputs["labels"], loss * steps)
        return loss


class LogCallback(TrainerCallback):
    """Ends the steps and the checkpoints in the log."""

    def __init__(self, log: common.RunLog, data: ResumeCallback) -> None:
        """Take the log, and the callback that counts samples."""
        self.run, self.data = log, data

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Begin the first step."""
        self.run.start()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Write the line of a step."""
        self.run.end_step(self.data.consumed, self.data.metrics().data_wait_seconds)

    def on_save(self, *_: object, **__: object) -> None:
        """Make a checkpoint the newest one."""
        self.run.end_save()


def main() -> None:
    """Train to the last step."""
    options = common.parse_arguments()
    device = common.find_device()
    world = int(os.environ["WORLD_SIZE"])
    arguments = TrainingArguments(
        str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.global_batch // (options.micro_batch * world),
        max_grad_norm=options.clip_grad,
        lr_scheduler_type="constant",
        bf16=device.type == "cuda",
        use_cpu=device.type == "cpu",
        ddp_backend="nccl" if device.type == "cuda" else "gloo",
        train_sampling_strategy="sequential",
        ignore_data_skip=True,
        save_strategy="steps",
        save_steps=options.save_interval,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    samples = common.open_samples(options)
    model = common.make_model(options)
    log = common.RunLog(options, samples, model)

    dataset = SampleDataset(samples)
    data = ResumeCallback(dataset)
    optimizer = common.make_optimizer(model, options)
    trainer = LoggedTrainer(
        model,
        arguments,
        train_dataset=dataset,
        data_collator=collate,
        callbacks=[data, LogCallback(log, data)],
        optimizers=(optimizer, None),
    )
    trainer.log_of_run = log
    trainer.train(resume_from_checkpoint=str(log.directory(log.step)) if log.step else None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
