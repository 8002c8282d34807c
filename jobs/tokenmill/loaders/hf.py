"""The samples for the Trainer of Transformers: data set, collators, and the callback that resumes.

The Trainer deals whole batches over the ranks in turn, which is the order of `tokenmill.data.Order` if its sampler is
sequential. It reads ahead, and on resume it skips batches of the present size. So the callback counts the samples of
finished steps, stores them in the checkpoint's trainer_state.json, and on resume moves the data set to that position.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenmill.errors import RequestError
from tokenmill.loaders.state import LoaderState, check_state, log_batch_change, log_start, mark
from tokenmill.loaders.torch import Tensors, read_batch
from tokenmill.samples.samples import Samples

try:
    import torch
    from torch.utils.data import Dataset
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    if error.name not in ("transformers", "accelerate"):
        raise
    raise ModuleNotFoundError(
        "tokenmill.loaders.hf needs Transformers and Accelerate: run pip install '.[hf]' in the clone of tokenmill",
        name=error.name,
    ) from None

KEY = "tokenmill"
"""The entry of the state among the callbacks' states in trainer_state.json."""

WAIT = "data_wait_seconds"
"""The entry of the waiting time in the Trainer's logs."""


class SampleDataset(Dataset):  # type: ignore[misc]
    """The samples for train_dataset or eval_dataset; `ResumeCallback` moves that of the training."""

    def __init__(self, samples: Samples) -> None:
        """Wrap samples.

        Raises:
            RequestError: the samples have documents "varlen", which describes batches and not samples.
        """
        if samples.documents == "varlen":
            raise RequestError(
                "invalid documents varlen: its cu_seqlens belong to a batch, and the Trainer collates samples; specify "
                "documents positions, and use collate_flat"
            )
        self.samples = samples
        self.first = 0
        """The sample with the number 0 here: those before it were consumed."""
        self.step = 1
        """Samples of all ranks in one step: the data set ends after a complete one."""

    def __len__(self) -> int:
        """Return the number of samples that are left, in complete steps."""
        return (len(self.samples) - self.first) // self.step * self.step

    def __getitem__(self, number: int) -> Tensors:
        """Return a sample by its number, counted from `first`."""
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Tensors]:
        """Return several samples, which are read together; a DataLoader calls this for a batch.

        The names are those of a model's arguments. Positions are left out if the model computes the same ones.
        """
        batch: Any = read_batch(self.samples, [self.first + number for number in numbers])
        names = {"input_ids": "tokens", "labels": "labels"}
        if self.samples.documents != "none":
            names["position_ids"] = "position_ids"
        if self.samples.documents == "mask":
            names["attention_mask"] = "attention_mask"
        return [{name: batch[source][row] for name, source in names.items()} for row in range(len(numbers))]


def collate(samples: Sequence[Tensors]) -> Tensors:
    """Return a batch for a causal language model; its labels are already shifted.

    A model shifts `labels` itself unless it gets `shift_labels`: without them it would train each position on the
    token after the next one.
    """
    batch: Tensors = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    batch["shift_labels"] = batch["labels"]
    return batch


def collate_flat(samples: Sequence[Tensors]) -> Tensors:
    """Return a batch in one row, with the documents' boundaries for attention kernels of variable length.

    For models with attn_implementation="flash_attention_2" or 3, and samples with documents "positions".

    Raises:
        RequestError: the samples have no positions.
    """
    if "position_ids" not in samples[0]:
        raise RequestError("collate_flat needs the documents' boundaries; specify documents positions")
    row: Tensors = {name: torch.cat([sample[name] for sample in samples])[None] for name in samples[0]}
    row["shift_labels"] = row["labels"]
    positions = torch.cat([sample["position_ids"] for sample in samples])
    (starts,) = torch.nonzero(positions == 0, as_tuple=True)
    ends = torch.cat([starts, torch.tensor([len(positions)])]).to(torch.int32)
    row["cu_seq_lens_q"] = row["cu_seq_lens_k"] = ends
    row["max_length_q"] = row["max_length_k"] = int(ends.diff().max())
    return row


class TrainerMetrics(NamedTuple):
    """The counts of a run of the Trainer.

    Attributes:
        consumed: samples of all ranks in finished steps.
        data_wait_seconds: seconds of this process between steps, except those of logs, evaluations and checkpoints.
        synthetic: whether the samples are random numbers and no text.
    """

    consumed: int
    data_wait_seconds: float
    synthetic: bool


class ResumeCallback(TrainerCallback):  # type: ignore[misc]
    """Count consumed samples, store them in checkpoints, and resume from them with any number of processes."""

    def __init__(self, dataset: SampleDataset, consumed: int | None = None) -> None:
        """Connect the callback to the train_dataset of the Trainer.

        Args:
            dataset: the data set.
            consumed: the samples that were consumed before, instead of those of the checkpoint.
        """
        self.dataset, self.start = dataset, consumed
        self.consumed = consumed or 0
        self._state: dict[str, int | str] = {}
        self._wait = self._logged_wait = 0.0
        self._ready = time.perf_counter()

    def metrics(self) -> TrainerMetrics:
        """Return the counts of the run."""
        return TrainerMetrics(self.consumed, self._wait, self.dataset.samples.identity.synthetic)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Check the arguments; the Trainer calls this at the end of its constructor.

        Raises:
            RequestError: an argument would change the order of the samples, or their labels.
        """
        check_arguments(args)
        self.dataset.first = self.start or 0
        self.dataset.step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: Any = None,
        **_: object,
    ) -> None:
        """Move the data set to the position of the checkpoint, or to the first sample.

        Raises:
            RequestError: the checkpoint belongs to other samples, has no position, or the steps need more samples than
                there are.
        """
        samples = self.dataset.samples
        step = train_dataloader.total_batch_size * args.gradient_accumulation_steps
        saved = state.stateful_callbacks.get(KEY)
        self.consumed = self.start or 0
        if self.start is None and saved is not None:
            content = check_state(saved, samples)
            self.consumed = content.consumed
            log_batch_change(samples, content.global_batch, step)
        elif self.start is None and state.global_step:
            raise RequestError(
                f"{mark(samples.identity)}the checkpoint of step {state.global_step} has no position in the samples, "
                "because it was saved without ResumeCallback; set consumed of ResumeCallback to the samples before it"
            )
        self._check_steps(state, step)
        self.dataset.first, self.dataset.step = self.consumed, step
        self._state = LoaderState.capture(samples.identity, self.consumed, step)
        self._store(state)
        log_start(samples, self.consumed, args.process_index, args.world_size)
        self._ready = time.perf_counter()

    def _check_steps(self, state: TrainerState, step: int) -> None:
        left, needed = len(self.dataset.samples) - self.consumed, (state.max_steps - state.global_step) * step
        if needed > left:
            raise RequestError(
                f"steps {state.global_step:,} to {state.max_steps:,} need {needed:,} samples, but {left:,} of "
                f"{len(self.dataset.samples):,} are left; set max_steps to at most "
                f"{state.global_step + left // step:,}, or specify more samples"
            )
        if needed <= 0 < left // step:
            raise RequestError(
                f"the run would end at step {state.max_steps:,}, and the checkpoint is of step {state.global_step:,}; "
                f"set max_steps, such as {state.global_step + left // step:,} for the samples that are left"
            )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Move the data set back, for another training in the same process."""
        self.dataset.first = self.start or 0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Count the time since the last step: the Trainer has read the batches of this one."""
        self._wait += time.perf_counter() - self._ready

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Count the samples of a step."""
        self.consumed += self.dataset.step
        self._store(state)
        self._ready = time.perf_counter()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        """Add the waiting time since the last log, and the mark of synthetic data, to the logs."""
        entries: dict[str, float] = {WAIT: round(self._wait - self._logged_wait, 6)}
        if self.dataset.samples.identity.synthetic:
            entries["SYNTHETIC"] = 1
        self._logged_wait = self._wait
        for target in (logs, state.log_history[-1] if state.log_history else None):
            if target is not None:
                target.update(entries)
        self._ready = time.perf_counter()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Leave out the time of an evaluation."""
        self._ready = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Leave out the time of a checkpoint."""
        self._ready = time.perf_counter()

    def _store(self, state: TrainerState) -> None:
        state.stateful_callbacks[KEY] = {**self._state, "consumed": self.consumed}


def check_arguments(args: TrainingArguments) -> None:
    """Raise RequestError if the arguments of a training would change the order of the samples, or their labels."""
    required = {"train_sampling_strategy": "sequential", "ignore_data_skip": True, "dataloader_in_order": True}
    for name, value in required.items():
        if getattr(args, name) != value:
            raise RequestError(
                f"invalid TrainingArguments {name}={getattr(args, name)!r}: the Trainer would read other samples than "
                f"ResumeCallback counts; set {name}={value!r}"
            )
    if args.label_smoothing_factor:
        raise RequestError(
            f"invalid TrainingArguments label_smoothing_factor={args.label_smoothing_factor}: the Trainer would shift "
            "the labels a second time; remove it"
        )
    if args.max_steps <= 0 and args.num_train_epochs > 1:
        raise RequestError(
            f"invalid TrainingArguments num_train_epochs={args.num_train_epochs}: the samples contain their epochs; "
            "set num_train_epochs=1 or max_steps, and specify samples of tokenmill.data.open"
        )
