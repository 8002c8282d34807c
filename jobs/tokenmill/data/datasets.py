"""The records of datasets with their pairs and shares: `pair_sources` creates them; loaders and training use them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tokenmill.data.split import SPLITS, split_ranges
from tokenmill.files.codec import content_id

MAX_PAIRS = 32_766
"""Pairs in one list: Megatron-LM numbers them in int16 and asserts fewer than 32,767 (blended_dataset.py)."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A `.bin` and an `.idx` file with at least one token.

    `prefix` is an absolute path without suffix, `bytes` the size of the `.bin` file, and `hashes` the concatenated
    content hashes of both files.
    """

    prefix: str
    documents: int
    sequences: int
    tokens: int
    bytes: int
    dtype: str
    hashes: str = ""


@dataclass(frozen=True)
class WeightedDataset:
    """One dataset of a list, an output of preprocess or one pair of it, with its share of the samples.

    `share` is between 0 and 1. `label` is the option that names the dataset. `empty` counts pairs without tokens; they
    are left out, because Megatron-LM cannot map an empty file. `single_pair` is true when the user named one pair
    instead of a directory. `origin` is the address of the text, with its commit if it has one.
    """

    label: str
    path: str
    manifest: str
    pairs: tuple[Pair, ...]
    empty: int = 0
    share: float = 1.0
    single_pair: bool = False
    origin: str = ""

    @cached_property
    def tokens(self) -> int:
        """Number of tokens in all pairs."""
        return sum(pair.tokens for pair in self.pairs)

    @cached_property
    def documents(self) -> int:
        """Number of documents in all pairs."""
        return sum(pair.documents for pair in self.pairs)

    @cached_property
    def sequences(self) -> int:
        """Number of sequences in all pairs, which a split divides.

        A document has one sequence, unless its record is a list of texts.
        """
        return sum(pair.sequences for pair in self.pairs)

    @cached_property
    def bytes(self) -> int:
        """Total size of the `.bin` files."""
        return sum(pair.bytes for pair in self.pairs)

    @cached_property
    def content(self) -> str:
        """Hash of the content of all pairs in their order; it does not depend on their paths."""
        return content_id([pair.hashes for pair in self.pairs])

    def sequences_in(self, split: str | None, name: str) -> int:
        """Return the number of sequences in the split with this name; all sequences when `split` is None."""
        if split is None:
            return self.sequences
        number = SPLITS.index(name)
        return sum(
            bounds[1] - bounds[0] for pair in self.pairs if (bounds := split_ranges(split, pair.sequences)[number])
        )

    def training_tokens(self, split: str | None) -> float:
        """Return the number of tokens in the train split, assuming that all sequences have the same length."""
        return self.tokens * self.sequences_in(split, "train") / self.sequences

    def epochs(self, split: str | None, total: int | float) -> float:
        """Return how often a run of `total` tokens reads the train split of this dataset."""
        return total * self.share / self.training_tokens(split)

    def weighted_pairs(self) -> Iterator[tuple[float, Pair]]:
        """Yield each pair with its weight: the dataset's share, divided in proportion to the tokens."""
        for pair in self.pairs:
            yield self.share * pair.tokens / self.tokens, pair
