"""The records of pairs, and of the datasets of a list with their weights or shares: `datasets.sources` makes them."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.core.buckets.mirror import find_address
from tokenmill.core.files.codec import content_id
from tokenmill.datasets.split import SPLITS, split_ranges
from tokenmill.engine.contract import Origin, Part
from tokenmill.errors import RequestError

if TYPE_CHECKING:
    from tokenmill.datasets.formats.indexed.reader import IndexedReader

MAX_PAIRS = 32_766
"""Pairs in one list: Megatron-LM numbers them in int16 and asserts fewer than 32,767 (blended_dataset.py)."""

MAX_OPENING = 32
"""Pairs in buckets that are opened at the same time."""

CONTENT_BYTES, CONTENT_BLOCKS = 256 << 20, 64
"""Bytes of ids without a record that are hashed completely, in 0.03 s, and blocks of 4 KiB of longer ones."""


@dataclass(frozen=True)
class Pair:
    """A `.bin` and an `.idx` file with at least one token.

    `prefix` is an absolute path without suffix, `bytes` the size of the `.bin` file, and `hashes` the concatenated
    content hashes of both files, empty for a pair without a record. `parts` are the sources of the documents, `origin`
    is the source of the text. With a `pack_size`, the documents are packed rows of so many tokens, and the
    sequences are what a row attends to separately; without one it is 0.
    """

    prefix: str
    documents: int
    sequences: int
    tokens: int
    bytes: int
    dtype: str
    hashes: str = ""
    pack_size: int = 0
    parts: Sequence[Part] = field(default=(), repr=False, compare=False)
    origin: Origin | None = field(default=None, repr=False, compare=False)

    @cached_property
    def reader(self) -> "IndexedReader":
        """The reader of the pair, opened when it is first used."""
        from tokenmill.datasets.formats.indexed.reader import map_pair

        return map_pair(Path(self.prefix))

    @cached_property
    def content(self) -> str:
        """Hash of the content: the recorded hashes, or all lengths and a part of the ids."""
        from tokenmill.datasets.sampled_hash import hash_samples

        return self.hashes or content_id(
            [self.order_content, hash_samples(self.reader.ids, CONTENT_BLOCKS, CONTENT_BYTES)]
        )

    @cached_property
    def order_content(self) -> str:
        """Hash of everything in the `.idx` that determines an order."""
        import xxhash

        from tokenmill.datasets.sampled_hash import hash_samples

        lengths = xxhash.xxh3_128(self.reader.lengths.view("u1").data).hexdigest()
        return content_id([lengths, hash_samples(self.reader.pointers)])


def open_readers(pairs: Sequence[Pair]) -> None:
    """Open the readers of pairs in buckets at the same time: each needs several answers of the store."""
    from tokenmill.datasets.formats.indexed.reader import map_pair

    remote = [pair for pair in pairs if find_address(Path(pair.prefix))]
    if remote:
        with ThreadPoolExecutor(MAX_OPENING) as executor:
            for pair, reader in zip(
                remote, executor.map(map_pair, [Path(pair.prefix) for pair in remote]), strict=True
            ):
                vars(pair)["reader"] = reader  # of the cached property


@dataclass(frozen=True)
class WeightedDataset:
    """One dataset of a list: an output of preprocess, one pair of it, or a pair without a record.

    `weight` is the number in the list, if it has one, and `share` the part of the samples, between 0 and 1. `label` is
    the option that names the dataset. `manifest` is the hash of the output's manifest, `tokenizer` the fingerprint of
    its tokenizer; both are empty without a record. `empty` counts pairs without tokens; they are left out, because
    Megatron-LM cannot map an empty file. `single_pair` is true when the user named one pair instead of a directory.
    """

    label: str
    path: str
    manifest: str
    pairs: tuple[Pair, ...]
    empty: int = 0
    weight: float | None = None
    share: float = 1.0
    single_pair: bool = False
    tokenizer: str = ""
    eod: int | None = None

    @property
    def origin(self) -> str:
        """The address of the text, with its commit if it has one."""
        origin = self.pairs[0].origin
        return f"{origin.uri or ''}{f'@{origin.commit}' if origin.commit else ''}" if origin else ""

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
        return content_id([pair.content for pair in self.pairs])

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


def refuse_rows(datasets: Sequence[WeightedDataset], reader: str) -> None:
    """Raise RequestError if a dataset has packed rows, which a reader would not read as rows."""
    for dataset in datasets:
        if any(pair.pack_size for pair in dataset.pairs):
            raise RequestError(
                f"{dataset.path} has packed rows, which {reader} does not read yet; specify the dataset from which it "
                "was packed"
            )
