"""The datasets that a run reads, with their pairs and shares: what `blend` gathers, and all else of training takes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tokenmill.files.codec import content_id
from tokenmill.training.data.split import SPLITS, cuts, fractions


@dataclass(frozen=True, slots=True)
class Pair:
    """A `.bin` and `.idx` with tokens; `prefix` is the absolute path without suffix, `bytes` the `.bin`'s size.

    `hashes` are those of both files' bytes.
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
    """One dataset of a list: an output of preprocess, or one pair of it, with its share of the samples (0..1).

    `label` says where it was named, `empty` counts pairs without tokens, which are left out: Megatron-LM
    cannot map them.
    """

    label: str
    path: str
    manifest: str
    pairs: tuple[Pair, ...]
    empty: int = 0
    share: float = 1.0
    alone: bool = False

    @cached_property
    def tokens(self) -> int:
        """Tokens of all its pairs."""
        return sum(pair.tokens for pair in self.pairs)

    @cached_property
    def documents(self) -> int:
        """Documents of all its pairs."""
        return sum(pair.documents for pair in self.pairs)

    @cached_property
    def sequences(self) -> int:
        """Sequences of all its pairs: what a split counts. A document has one, unless its text is a list."""
        return sum(pair.sequences for pair in self.pairs)

    @cached_property
    def bytes(self) -> int:
        """Size of its `.bin` files."""
        return sum(pair.bytes for pair in self.pairs)

    @cached_property
    def content(self) -> str:
        """Names the bytes of its pairs, in their order, wherever they lie."""
        return content_id([pair.hashes for pair in self.pairs])

    def sequences_in(self, split: str | None, part: str) -> int:
        """Count the sequences that fall into a part of the split; without a split, all of them."""
        if split is None:
            return self.sequences
        number = SPLITS.index(part)
        return sum(cut[1] - cut[0] for pair in self.pairs if (cut := cuts(split, pair.sequences)[number]))

    def trained_on(self, split: str | None) -> float:
        """Return the tokens that go to training, were all sequences of one length."""
        return self.tokens * self.sequences_in(split, "train") / self.sequences

    def epochs(self, split: str | None, total: int | float) -> float:
        """Return how often a run of `total` tokens reads what goes to training."""
        return total * self.share / self.trained_on(split)

    def weighted(self) -> Iterator[tuple[float, Pair]]:
        """Yield its pairs with their weights: its share, divided by tokens."""
        for pair in self.pairs:
            yield self.share * pair.tokens / self.tokens, pair


@dataclass(frozen=True)
class TrainingData:
    """All that a run reads: `lists` has "all", which `split` cuts, or a list for each of SPLITS, without `split`."""

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
    """Of the tokenizer."""
    reference: str = ""
    """What the tokenizer was called when the data were made."""
    notes: list[str] = field(default_factory=list)

    def has(self, part: str) -> bool:
        """Tell whether a part of the split has data."""
        if self.split is None:
            return bool(self.lists.get(part))
        return fractions(self.split)[SPLITS.index(part)] > 0

    @property
    def sources(self) -> list[WeightedDataset]:
        """The datasets of all lists."""
        return [source for sources in self.lists.values() for source in sources]

    @property
    def train(self) -> list[WeightedDataset]:
        """The datasets of which training samples are made, or a part of each."""
        return self.lists.get("all") or self.lists["train"]

    @cached_property
    def hash(self) -> str:
        """Names the content: the hashes of all manifests."""
        return content_id(sorted({source.manifest for source in self.sources}))
