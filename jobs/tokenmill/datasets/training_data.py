"""The record of all data of a run: `blend` creates it, and all of training uses it."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tokenmill.core.files.codec import content_id
from tokenmill.datasets.split import SPLITS, parse_split
from tokenmill.datasets.weighted import Pair, WeightedDataset


@dataclass(frozen=True)
class TrainingData:
    """All data of a run.

    `lists` has either the key "all", whose datasets `split` divides, or one key per split while `split` is None.
    """

    lists: dict[str, list[WeightedDataset]]
    split: str | None
    tokenizer: Path
    vocab_size: int
    max_token_id: int
    dtype: str
    eod: int | None
    eod_token: str | None
    eos_token: str | None
    fingerprint: str = ""
    """Fingerprint of the tokenizer."""
    reference: str = ""
    """Name of the tokenizer in the command that wrote the data."""
    notes: list[str] = field(default_factory=list)

    def has_split(self, name: str) -> bool:
        """Return whether the split with this name has data."""
        if self.split is None:
            return bool(self.lists.get(name))
        return parse_split(self.split)[SPLITS.index(name)] > 0

    @property
    def sources(self) -> list[WeightedDataset]:
        """The datasets of all lists."""
        return [source for sources in self.lists.values() for source in sources]

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The pairs of all datasets."""
        return tuple(pair for source in self.sources for pair in source.pairs)

    @property
    def train(self) -> list[WeightedDataset]:
        """The datasets that provide training samples, with all or a part of their sequences."""
        return self.lists.get("all") or self.lists["train"]

    @cached_property
    def hash(self) -> str:
        """Hash of the content, computed from the hashes of all manifests."""
        return content_id(sorted({source.manifest for source in self.sources}))
