"""The samples as a data module of Lightning, which resumes with any number of processes.

Lightning reads one batch ahead, so the data module counts the batches that Lightning has trained, and not those that it
has read. It counts complete steps of the optimizer: a checkpoint does not contain the gradients of an incomplete one.
Lightning adds its distributed sampler only to torch's DataLoader; the loader here has the ranks itself.
"""

from collections.abc import Iterator, Mapping

from tokenmill.errors import RequestError
from tokenmill.loaders.state import LoaderState, check_state, log_batch_change, mark
from tokenmill.loaders.torch import Loader, LoaderMetrics, Tensors
from tokenmill.samples.samples import Samples

try:
    from lightning.pytorch import LightningDataModule, Trainer
except ModuleNotFoundError as error:
    if error.name not in ("lightning", "torch"):
        raise
    raise ModuleNotFoundError(
        "tokenmill.loaders.lightning needs Lightning: run pip install '.[lightning]' in the clone of tokenmill",
        name=error.name,
    ) from None


class DataModule(LightningDataModule):  # type: ignore[misc]
    """Training samples, and optionally validation samples, for Trainer.fit(model, datamodule=...)."""

    trainer: "Trainer"

    def __init__(
        self,
        samples: Samples,
        micro_batch: int,
        *,
        validation: Samples | None = None,
        consumed: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        """Wrap samples; micro_batch is the number of samples of one process in one batch, the rest as of `Loader`."""
        super().__init__()
        self.samples, self.validation, self.micro_batch = samples, validation, micro_batch
        self._prefetch, self._pin_memory = prefetch, pin_memory
        self._position = consumed
        self._position_known = consumed > 0
        self._saved_batch: int | None = None
        self._loader: Loader | None = None
        self._trained = 0  # batches that Lightning had trained when it reached _position

    @property
    def consumed(self) -> int:
        """Samples that all processes together have trained, in complete steps of the optimizer."""
        if self._loader is None:
            return self._position
        trained = self._count_trained() - self._trained
        return self._position + trained // self._loader.accumulation * self._loader.global_batch

    def train_dataloader(self) -> "_Trained":
        """Return the batches of this process; Lightning calls this after it has restored a checkpoint.

        Raises:
            RequestError: the checkpoint has no position, or the steps need more samples than there are.
        """
        trainer = self.trainer
        self._position, self._trained = self.consumed, self._count_trained()
        if trainer.global_step and not self._position_known:
            raise RequestError(
                f"{mark(self.samples.identity)}the checkpoint of step {trainer.global_step} has no position in the "
                "samples: it was saved without this data module; set consumed to the samples before it"
            )
        self._position_known = True
        loader = self._loader = self._make(self.samples, trainer.accumulate_grad_batches, self._position)
        if self._saved_batch is not None:
            log_batch_change(self.samples, self._saved_batch, loader.global_batch)
            _align_steps(trainer, loader)
            self._saved_batch = None
        _check_steps(trainer, loader)
        return _Trained(self, loader)

    def val_dataloader(self) -> "_Evaluated | list[object]":
        """Return the batches of the validation samples; an incomplete last batch of all processes is left out."""
        if self.validation is None:
            return []
        return _Evaluated(self._make(self.validation, 1, 0))

    def state_dict(self) -> dict[str, int | str]:
        """Return the state, which Lightning stores in its checkpoints."""
        batch = self._loader.global_batch if self._loader is not None else 0
        return LoaderState.capture(self.samples.identity, self.consumed, batch)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue after the samples of a checkpoint; Lightning calls this.

        Raises:
            RequestError: the state is damaged, or belongs to other samples; the message lists the differences.
        """
        content = check_state(state, self.samples)
        self._position, self._position_known, self._saved_batch = content.consumed, True, content.global_batch
        self._loader = None

    def metrics(self) -> LoaderMetrics | None:
        """Return the counts of the loader, such as the time spent waiting for data; None before the first batch."""
        return self._loader.metrics() if self._loader is not None else None

    def teardown(self, stage: str) -> None:
        """End the loader's thread; Lightning calls this."""
        self._position = self.consumed
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _make(self, samples: Samples, accumulation: int, consumed: int) -> Loader:
        ranks = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return Loader(
            samples,
            self.micro_batch,
            rank=ranks["rank"],
            world=ranks["num_replicas"],
            global_batch=self.micro_batch * ranks["num_replicas"] * accumulation,
            consumed=consumed,
            prefetch=self._prefetch,
            pin_memory=self._pin_memory,
        )

    def _count_trained(self) -> int:
        """Return the batches of this process that went through the training step."""
        count: int = self.trainer.fit_loop.epoch_loop.batch_progress.total.processed
        return count


class _Trained:
    """The batches after the trained ones. It has no length: after a resume, Lightning would compare it wrongly."""

    def __init__(self, module: DataModule, loader: Loader) -> None:
        self._module, self._loader = module, loader

    def __iter__(self) -> Iterator[Tensors]:
        self._loader.seek(self._module.consumed)
        if not len(self._loader):
            raise RequestError(
                f"all {len(self._loader.samples):,} samples were trained; set max_epochs=1 or max_steps, or "
                "specify more samples"
            )
        yield from self._loader


class _Evaluated:
    """All batches, from the first one in each iteration."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._count = len(loader)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Tensors]:
        self._loader.seek(0)
        yield from self._loader


def _align_steps(trainer: "Trainer", loader: Loader) -> None:
    """Count the batches before a resume in batches of the present size.

    Lightning steps the optimizer when the number of batches is a multiple of accumulate_grad_batches. The number in the
    checkpoint has batches of another size if the number of processes or the micro-batch changed, so that the first step
    would end too early.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    batches = -(-loader.consumed // loader.global_batch) * loader.accumulation
    shift = batches - progress.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress, name, getattr(progress, name) + shift)


def _check_steps(trainer: "Trainer", loader: Loader) -> None:
    if trainer.max_steps >= 0:
        left = len(loader) // loader.accumulation
        needed = trainer.max_steps - trainer.global_step
        if needed > left and trainer.lightning_module.automatic_optimization:
            raise RequestError(
                f"steps {trainer.global_step:,} to {trainer.max_steps:,} need {needed * loader.global_batch:,} "
                f"samples, but {left * loader.global_batch:,} are left; set max_steps to at most "
                f"{trainer.global_step + left:,}, or specify more samples"
            )
    elif trainer.max_epochs != 1:
        raise RequestError(
            f"invalid max_epochs {trainer.max_epochs}: the samples contain their epochs; set max_epochs=1 or "
            "max_steps, and specify samples of tokenmill.data.open"
        )
