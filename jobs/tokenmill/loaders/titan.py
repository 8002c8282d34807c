"""The samples as the data loader of torchtitan, which resumes with any number of data-parallel ranks.

torchtitan builds it from its Config, and stores its state in each checkpoint. It reads a batch when it trains that
batch, so the count of yielded batches is exact.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tokenmill.data import Samples
from tokenmill.data import open as open_samples
from tokenmill.data.batch import Documents
from tokenmill.errors import RequestError
from tokenmill.loaders.torch import Loader, LoaderMetrics

try:
    import torch
    from torchtitan.components.dataloader import BaseDataLoader
except ModuleNotFoundError as error:
    if error.name not in ("torchtitan", "torch"):
        raise
    raise ModuleNotFoundError(
        "tokenmill.loaders.titan needs torchtitan: run pip install torchtitan", name=error.name
    ) from None


class TitanLoader(BaseDataLoader):  # type: ignore[misc]
    """The batches of one data-parallel rank as torchtitan reads them: ({"input": tokens, ...}, labels)."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """The arguments of `tokenmill.data.open`; `dataset_path` is the source, which may be a file of a blend."""

        samples: int | None = None
        """Samples that the run needs: steps times the global batch."""
        seed: int = 1234
        split: str | None = None
        part: str = "train"
        documents: str = "none"
        """none, or positions: positions that restart with each document, from which torchtitan makes its masks."""
        boundaries: str = "sequence"
        mask_eod: bool = False
        index_cache: str | None = None
        prefetch: int = 2
        pin_memory: bool = False

    def __init__(
        self,
        config: "TitanLoader.Config",
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: object,
    ) -> None:
        """Open the samples; torchtitan calls this through `Config.build`.

        Raises:
            RequestError: the configuration has no source, or `tokenmill.data.open` refuses it.
        """
        source = config.dataset_path or config.dataset
        if not source:
            raise RequestError("the data loader has no source; set dataset_path to an output of tokenmill preprocess")
        if config.documents not in ("none", "positions"):
            raise RequestError(
                f"invalid documents {config.documents!r}: torchtitan makes masks from positions; choose none or "
                "positions"
            )
        samples = open_samples(
            source,
            seq_length=seq_len,
            samples=config.samples,
            seed=config.seed,
            split=config.split,
            part=config.part,
            documents=cast(Documents, config.documents),
            boundaries=cast(Any, config.boundaries),
            mask_eod=config.mask_eod,
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
        """Yield the batches that are left."""
        for batch in self.loader:
            inputs = {"input": batch["tokens"]}
            if self.samples.documents == "positions":
                inputs["positions"] = batch["position_ids"]
            yield inputs, batch["labels"]

    def state_dict(self) -> dict[str, int | str]:
        """Return the state: the same on all ranks."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Continue after the samples of a checkpoint (RequestError: it belongs to other samples)."""
        self.loader.load_state_dict(state_dict)

    def metrics(self) -> LoaderMetrics:
        """Return the counts since the loader was made."""
        return self.loader.metrics()
