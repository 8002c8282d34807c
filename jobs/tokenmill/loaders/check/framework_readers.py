"""Read the samples of a part through a framework, as its training loop receives them.

Each function runs in the process of its framework (`framework_child`), because a framework takes seconds to import, and
may crash or hang. It yields the tokens and the labels of one or several samples, shape (samples, seq_length); labels
that are not trained are -100.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.datasets.split import SPLITS
from tokenmill.loaders.check.framework_records import FrameworkPart, FrameworkRequest
from tokenmill.loaders.megatron import MegatronData, describe_data
from tokenmill.samples.batch import IGNORED
from tokenmill.samples.opening import open as open_samples
from tokenmill.samples.samples import SampleDigest, Samples

Array = npt.NDArray[Any]

SampleStream = Iterator[tuple[Array, Array]]
Reader = Callable[[FrameworkRequest, FrameworkPart, Path], SampleStream]
"""Reads a part; the path is a directory for temporary files."""


def digest_samples(stream: SampleStream, count: int) -> list[str]:
    """Return the digest of each of the first `count` samples of a stream."""
    digests: list[str] = []
    for tokens, labels in stream:
        for row in range(min(len(tokens), count - len(digests))):
            digest = SampleDigest()
            digest.add(tokens[row : row + 1], labels[row : row + 1])
            digests.append(digest.hexdigest())
        if len(digests) == count:
            break
    return digests


class TokenizerStub:
    """The attributes of a tokenizer that Megatron-LM's and NeMo Automodel's datasets use."""

    def __init__(self, request: FrameworkRequest) -> None:
        self.eod = self.eos_token_id = request.eod if request.eod is not None else -2
        self.pad_token_id = request.pad
        self.bos_token_id = None
        self.vocab_size = None
        self.name_or_path = "tokenmill check-data"
        self.unique_identifiers = {"class": self.name_or_path, "pad": str(request.pad)}
        if request.pad is not None:
            # Megatron-LM ignores a pad that equals another special token. Here it may be the EOD: that is the check.
            self.pad = request.pad
            self.special_tokens_dict = {"pad_token": request.pad, "eos_token": -3}


def read_megatron_core(request: FrameworkRequest, part: FrameworkPart, directory: Path) -> SampleStream:
    """Read with Megatron-LM's GPTDataset, built as pre-training builds it."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset

    config, sizes = _configure_megatron(request, part, directory)
    datasets = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return _read_items(datasets[SPLITS.index(part.name)], "tokens", part.count)


def read_megatron_bridge(request: FrameworkRequest, part: FrameworkPart, directory: Path) -> SampleStream:
    """Read with the datasets that Megatron-Bridge's function for pre-training builds."""
    from megatron.bridge.data.utils import pretrain_train_valid_test_datasets_provider

    config, sizes = _configure_megatron(request, part, directory)
    datasets = pretrain_train_valid_test_datasets_provider(sizes, config)
    return _read_items(datasets[SPLITS.index(part.name)], "tokens", part.count)


def _configure_megatron(
    request: FrameworkRequest, part: FrameworkPart, directory: Path
) -> tuple[Any, list[int | None]]:
    """Return the GPTDatasetConfig of a part, and the numbers of requested samples."""
    from megatron.core.datasets import utils
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        utils.compile_helpers()
    _start_process_group()
    config = GPTDatasetConfig(tokenizer=TokenizerStub(request), **_describe(request, part, directory).core())
    number = SPLITS.index(part.name)
    if config.blend is not None:  # the other parts are not built: they may be too small
        config.split_matrix = [bounds if place == number else None for place, bounds in enumerate(config.split_matrix)]
    return config, [part.requested if part.requested is None or place == number else 0 for place in range(len(SPLITS))]


def read_automodel(request: FrameworkRequest, part: FrameworkPart, directory: Path) -> SampleStream:
    """Read with the dataset of NeMo Automodel's MegatronPretraining."""
    from nemo_automodel.components.datasets.llm.megatron_dataset import MegatronPretraining

    arguments = _describe(request, part, directory).automodel(part.name)
    del arguments["_target_"]
    _start_process_group()
    tokenizer = TokenizerStub(request)
    builder = MegatronPretraining(**arguments, tokenizer=tokenizer, micro_batch_size=1, global_batch_size=1)
    builder.build()
    return _read_items(builder.get_dataset(part.name), "input_ids", part.count)


def _describe(request: FrameworkRequest, part: FrameworkPart, directory: Path) -> MegatronData:
    return describe_data(
        request.source,
        seq_length=request.seq_length,
        cache=directory,
        samples=part.requested,
        seed=request.seed,
        split=request.split,
        key=request.key,
    )


def _start_process_group() -> None:
    """Start a process group of this process alone: the builders need a rank before they save the index of a blend."""
    import torch

    if not torch.distributed.is_initialized():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def _read_items(dataset: Any, tokens: str, count: int) -> SampleStream:
    """Yield the first items of a map-style dataset with masks of the loss."""
    for number in range(min(count, len(dataset))):
        item = dataset[number]
        ids, labels, mask = (np.asarray(item[name]) for name in (tokens, "labels", "loss_mask"))
        yield ids[None], np.where(mask != 0, labels, IGNORED)[None]


def _open(request: FrameworkRequest, part: FrameworkPart) -> Samples:
    return open_samples(
        request.source,
        seq_length=request.seq_length,
        samples=part.requested,
        seed=request.seed,
        split=request.split,
        part=part.name,
        key=request.key,
        pad=request.pad,
    )


def read_torch(request: FrameworkRequest, part: FrameworkPart, directory: Path) -> SampleStream:
    """Read with `tokenmill.loaders.torch.Loader`, as loops in PyTorch do (DDP, FSDP2)."""
    from tokenmill.loaders.torch import Loader

    with Loader(_open(request, part), 1, rank=0, world=1) as loader:
        for batch in loader:
            yield _to_numpy(batch["tokens"]), _to_numpy(batch["labels"])


def read_transformers(request: FrameworkRequest, part: FrameworkPart, directory: Path) -> SampleStream:
    """Read the batches of the Trainer of Transformers."""
    import torch
    from transformers import Trainer, TrainingArguments

    from tokenmill.loaders.hf import ResumeCallback, SampleDataset, collate

    dataset = SampleDataset(_open(request, part))
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=part.count,
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
        ignore_data_skip=True,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(
        torch.nn.Linear(1, 1),
        arguments,
        train_dataset=dataset,
        data_collator=collate,
        callbacks=[ResumeCallback(dataset)],
    )
    for batch in trainer.get_train_dataloader():
        yield _to_numpy(batch["input_ids"]), _to_numpy(batch["shift_labels"])


def read_lightning(request: FrameworkRequest, part: FrameworkPart, directory: Path) -> SampleStream:
    """Read the batches of the training steps of Lightning's Trainer."""
    import torch
    from lightning.pytorch import LightningModule, Trainer

    from tokenmill.loaders.lightning import DataModule

    batches: list[tuple[Array, Array]] = []

    class Recorder(LightningModule):  # type: ignore[misc]
        """A model that keeps its batches."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, _: int) -> Any:
            batches.append((_to_numpy(batch["tokens"]), _to_numpy(batch["labels"])))
            return self.weight.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=part.count,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Recorder(), datamodule=DataModule(_open(request, part), 1))
    yield from batches


def read_torchtitan(request: FrameworkRequest, part: FrameworkPart, directory: Path) -> SampleStream:
    """Read with the data loader that torchtitan builds from its configuration."""
    from tokenmill.loaders.titan import TitanLoader

    config = TitanLoader.Config(
        dataset_path=request.source,
        samples=part.requested,
        seed=request.seed,
        split=request.split,
        part=part.name,
    )
    loader = config.build(dp_world_size=1, dp_rank=0, seq_len=request.seq_length, local_batch_size=1)
    for inputs, labels in loader:
        yield _to_numpy(inputs["input"]), _to_numpy(labels)


def read_deepspeed(request: FrameworkRequest, part: FrameworkPart, directory: Path) -> SampleStream:
    """Read with the loader of a DeepSpeed engine."""
    import deepspeed
    import torch

    from tokenmill.loaders.deepspeed import engine_loader

    os.environ["LOCAL_RANK"] = "0"
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo replaces it; it takes a minute to compile
    _start_process_group()
    model = torch.nn.Linear(1, 1)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        config={"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True},
    )
    with engine_loader(engine, _open(request, part)) as loader:
        for batch in loader:
            yield _to_numpy(batch["tokens"]), _to_numpy(batch["labels"])


def read_grain(request: FrameworkRequest, part: FrameworkPart, directory: Path) -> SampleStream:
    """Read with the iterator of `tokenmill.loaders.grain.RankDataset`."""
    from tokenmill.loaders.grain import RankDataset

    with closing(iter(RankDataset(_open(request, part), 1, rank=0, world=1))) as batches:
        for batch in batches:
            yield batch["tokens"], batch["labels"]


def _to_numpy(tensor: Any) -> Array:
    return np.asarray(tensor.cpu())
