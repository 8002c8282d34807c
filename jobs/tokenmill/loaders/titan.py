"""The samples as the data loader of torchtitan, which resumes with any number of data-parallel ranks.

torchtitan builds it from its Config, and stores its state in each checkpoint. It reads a batch when it trains that
batch, so the count of yielded batches is exact.

The arguments of torchtitan decide the form of a batch. Up to release 0.3 they are `seq_len` and `local_batch_size`, and
tensors have the shape (samples, tokens). From August 2026 on (commit 1b04fc1c3) they are `max_context_length` and
`num_tokens_per_batch`, and tensors have one dimension: the samples of a batch one after the other, whose positions
start again with each sample.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tokenmill.errors import RequestError
from tokenmill.loaders.torch import Loader, LoaderMetrics, Tensors
from tokenmill.samples.batch import Documents
from tokenmill.samples.opening import open as open_samples
from tokenmill.samples.samples import Samples

try:
    import torch

    try:
        from torchtitan.components.data.loader import BaseDataLoader
    except ModuleNotFoundError as error:
        if error.name not in ("torchtitan.components.data", "torchtitan.components.data.loader"):
            raise
        from torchtitan.components.dataloader import BaseDataLoader  # up to release 0.3
except ModuleNotFoundError as error:
    if error.name not in ("torchtitan", "torch"):
        raise
    raise ModuleNotFoundError(
        "tokenmill.loaders.titan needs torchtitan: run pip install torchtitan", name=error.name
    ) from None


class TitanLoader(BaseDataLoader):  # type: ignore[misc]
    """The batches of one data-parallel rank as torchtitan reads them: ({"input": ..., "positions": ...}, labels).

    torchtitan makes the masks of its Flex and Varlen attention from the positions, and fails without them. With
    `max_context_length`, all tensors have one dimension.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """The arguments of `tokenmill.data.open`; `dataset_path` is the source, which may be a file of a blend.

        `phases` names a file of phases in its place, with `global_batch` and `views`.
        """

        dataset_path: str | None = None
        phases: str | None = None
        global_batch: int | None = None
        views: str | None = None
        samples: int | None = None
        """Samples that the run needs: steps times the global batch."""
        seed: int = 1234
        split: str | None = None
        part: str = "train"
        documents: str = "none"
        """none, or positions: positions that restart with each document, so that a token attends only to its own."""
        boundaries: str = "sequence"
        mask_eod: bool = False
        index_cache: str | None = None
        prefetch: int = 2
        pin_memory: bool = False
        repeat: bool = False
        """Start again after the last sample; torchtitan sets it for a validation that has a number of steps."""
        infinite: bool = False
        """The name of `repeat` up to release 0.3."""

    def __init__(
        self,
        config: "TitanLoader.Config",
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int | None = None,
        local_batch_size: int | None = None,
        max_context_length: int | None = None,
        num_tokens_per_batch: int | None = None,
        **_: object,
    ) -> None:
        """Open the samples; torchtitan calls this through `Config.build`.

        Raises:
            RequestError: the configuration has no source, `tokenmill.data.open` refuses it, or the tokens of a batch
                are not a multiple of those of a sample.
        """
        self._flat = max_context_length is not None
        self._repeat = config.repeat or config.infinite
        length = seq_len or max_context_length
        if length and num_tokens_per_batch:
            if num_tokens_per_batch % length:
                raise RequestError(
                    f"{num_tokens_per_batch} tokens of a microbatch are not divisible by the {length} tokens of a "
                    "sample; set training.num_tokens_per_microbatch_per_dp_rank to a multiple of "
                    "training.max_context_length"
                )
            local_batch_size = num_tokens_per_batch // length
        if not length or not local_batch_size:
            raise TypeError(
                "TitanLoader needs seq_len and local_batch_size, or max_context_length and num_tokens_per_batch"
            )
        source = config.dataset_path or getattr(config, "dataset", None)  # of the Config up to release 0.3
        if not source and not config.phases:
            raise RequestError("the data loader has no source; set dataset_path to an output of tokenmill preprocess")
        if config.documents not in ("none", "positions"):
            raise RequestError(
                f"invalid documents {config.documents!r}: torchtitan makes masks from positions; choose none or "
                "positions"
            )
        samples = open_samples(
            source or None,
            seq_length=length,
            samples=config.samples,
            seed=config.seed,
            split=config.split,
            part=config.part,
            documents=cast(Documents, config.documents),
            boundaries=cast(Any, config.boundaries),
            mask_eod=config.mask_eod,
            phases=config.phases,
            global_batch=config.global_batch,
            views=config.views,
            index_cache=config.index_cache,
        )
        self.loader = Loader(
            samples,
            local_batch_size,
            rank=dp_rank,
            world=dp_world_size,
            prefetch=config.prefetch,
            pin_memory=config.pin_memory,
        )

    @property
    def samples(self) -> Samples:
        """The samples."""
        return self.loader.samples

    def __iter__(self) -> "Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]":
        """Yield the batches that are left, and with `repeat` the batches of all samples again and again."""
        while True:
            for batch in self.loader:
                yield self._convert(batch)
            if not self._repeat or len(self.loader):  # another iteration reads the batches that are left
                return
            self.loader.seek(0)
            if not len(self.loader):
                return

    def _convert(self, batch: Tensors) -> "tuple[dict[str, torch.Tensor], torch.Tensor]":
        names = {"input": "tokens", "positions": "position_ids", "labels": "labels"}
        tensors = {name: cast(Any, batch[source]) for name, source in names.items()}
        if self._flat:
            tensors = {name: tensor.flatten() for name, tensor in tensors.items()}
        return tensors, tensors.pop("labels")

    def state_dict(self) -> dict[str, int | str]:
        """Return the state: the same on all ranks."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Continue after the samples of a checkpoint (RequestError: it belongs to other samples)."""
        self.loader.load_state_dict(state_dict)

    def close(self) -> None:
        """End an iteration and its thread."""
        self.loader.close()

    def metrics(self) -> LoaderMetrics:
        """Return the counts since the loader was made."""
        return self.loader.metrics()
