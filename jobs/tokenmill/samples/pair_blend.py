"""The samples of one or several pairs, with the arithmetic of Megatron-LM's builder of blended datasets.

The cases are those of megatron/core/datasets/blended_megatron_dataset_builder.py (0.16.1):

- one pair: as many epochs as the requested samples need;
- weights and a number of samples: of each pair its share, rounded up, plus `surplus`, in complete epochs; the blend has
  the sum of the rounded shares;
- no weights and a number of samples: one epoch of each pair, and at most the requested number;
- no weights and no number: every sample of one epoch of each pair, once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tokenmill.core.files.codec import content_id
from tokenmill.datasets.formats.indexed.reader import DamagedPair, read_view
from tokenmill.datasets.split import SPLITS, divide
from tokenmill.datasets.weighted import MAX_PAIRS, Pair, WeightedDataset
from tokenmill.errors import RequestError
from tokenmill.samples.draws import Draws, normalize, plan_blend
from tokenmill.samples.epochs import Epochs, count_epochs
from tokenmill.samples.order_store import MIN_SEQUENCES, load_or_build
from tokenmill.samples.pair_order import Allocate, PairOrder, build_order
from tokenmill.samples.pair_samples import PairSamples
from tokenmill.samples.row_order import count_row_epochs, find_rows
from tokenmill.samples.row_samples import RowSamples
from tokenmill.samples.sample_sources import PairSource


@dataclass(frozen=True, kw_only=True)
class PartRequest:
    """The samples that are requested from a list of pairs.

    Attributes:
        fractions: the shares of train, validation and test.
        part: the number of the requested one.
        seq_length: the tokens of a sample.
        samples: the number of requested samples, or None.
        seed: the seed of the permutations.
        surplus: the part of a pair's samples that is built in addition, for a blend with weights.
        keep_partial: keep the last, incomplete sample.
        blended: whether the samples are drawn, even if there is only one pair.
        index_cache: directory of the orders of large datasets, or None.
    """

    fractions: Sequence[float]
    part: int
    seq_length: int
    samples: int | None
    seed: int
    surplus: float
    keep_partial: bool
    blended: bool
    index_cache: Path | None


def choose_weights(datasets: Sequence[WeightedDataset], samples: int | None) -> list[float] | None:
    """Return the weight of each pair, or None for a blend without weights.

    If one of the datasets is a directory, the weights are those with which `tokenmill train` blends them: the share of
    a dataset, by default in proportion to its tokens, is divided among its pairs in proportion to their tokens. Weights
    of single pairs are as given, and pairs without weights are read once, as by Megatron-LM.

    Raises:
        RequestError: there are weights, but no number of samples.
    """
    weighted = datasets[0].weight is not None
    if samples is None:
        if weighted:
            raise RequestError("datasets with weights need a number of samples; specify samples")
        return None
    if all(dataset.single_pair for dataset in datasets):
        return [dataset.weight or 0.0 for dataset in datasets] if weighted else None
    tokens = [sum(pair.reader.tokens for pair in dataset.pairs) for dataset in datasets]  # a record could be wrong
    sizes = [
        float(count if dataset.weight is None else dataset.weight)
        for dataset, count in zip(datasets, tokens, strict=True)
    ]
    total = sum(sizes)
    return [
        size / total * pair.reader.tokens / count
        for dataset, size, count in zip(datasets, sizes, tokens, strict=True)
        for pair in dataset.pairs
    ]


def build_pair_source(pairs: Sequence[Pair], weights: Sequence[float] | None, request: PartRequest) -> PairSource:
    """Return the samples of pairs.

    Raises:
        RequestError: the part has no sequences or no complete sample, or fewer samples than the blend draws.
    """
    if len(pairs) > MAX_PAIRS:
        raise RequestError(
            f"the source has {len(pairs):,} pairs, but Megatron-LM accepts at most {MAX_PAIRS:,}; run tokenmill join, "
            "which writes fewer, larger pairs"
        )
    if not request.blended or (len(pairs) == 1 and weights is None):
        return PairSource([_build_part(pairs[0], request.samples, request)])
    if weights is None:
        parts = [_build_part(pair, None, request) for pair in pairs]
        sizes = [len(part) for part in parts]
        if request.samples is None:
            return PairSource(parts, Draws.of_everything(sizes, request.index_cache))
        draws = Draws(normalize(sizes), min(request.samples, sum(sizes)), directory=request.index_cache)
    else:
        assert request.samples is not None  # noqa: S101
        requested, draws = plan_blend(weights, request.samples, request.surplus, request.index_cache)
        parts = [_build_part(pair, count, request) for pair, count in zip(pairs, requested, strict=True)]
    _check_draws(pairs, parts, draws, request)
    return PairSource(parts, draws)


def _build_part(pair: Pair, samples: int | None, request: PartRequest) -> PairSamples:
    """Return the samples of a part of a pair."""
    reader, name = pair.reader, SPLITS[request.part]
    bounds = divide(request.fractions, reader.sequences)[request.part]
    if bounds is None:
        raise RequestError(f"the split gives {name} no share of the data; set split to give {name} a share above 0")
    if pair.pack_size:
        return _build_rows(pair, bounds, samples, request)
    first, end = bounds
    tokens = int(reader.lengths[first:end].sum(dtype=np.int64)) if first < end else 0
    if tokens > reader.ids.size and read_view(Path(pair.prefix)) is None:  # a view may name a range twice
        raise DamagedPair(
            Path(f"{pair.prefix}.idx"), f"its sequences have {tokens:,} tokens, but the .bin has {reader.ids.size:,}"
        )
    if tokens <= 0:
        raise RequestError(
            f"{name} has no tokens in {pair.prefix}: the split gives it the sequences {first:,} to {end:,} of "
            f"{reader.sequences:,}; set split to give {name} a larger share, or open fewer, larger pairs"
        )
    if tokens == 1 and samples is None:
        raise RequestError(f"{name} has one token in {pair.prefix}; specify a larger pair")
    epochs = count_epochs(tokens, samples, request.seq_length, keep_partial=request.keep_partial)
    if request.keep_partial and epochs.samples != -(-(epochs.number * tokens - 1) // request.seq_length):
        raise RequestError(
            f"{name} has {epochs.number * tokens:,} tokens of {pair.prefix}, whose samples of {request.seq_length} "
            "Megatron-LM counts with 32-bit numbers, and wrongly; set keep_partial to False, or use a larger seq_length"
        )
    if not epochs.samples:
        raise RequestError(
            f"{name} has {tokens:,} tokens in {pair.prefix}, fewer than one sample of {request.seq_length:,} and its "
            "last label; use a smaller seq_length, or specify samples to read the data several times"
        )
    if epochs.number * (end - first) > MAX_ORDER:
        raise RequestError(
            f"{samples or 0:,} samples would read {pair.prefix} {epochs.number:,} times, an order of "
            f"{epochs.number * (end - first):,} sequences; use fewer samples or a larger dataset"
        )
    return PairSamples(
        Path(pair.prefix), reader, epochs, request.seq_length, partial(_load_order, pair, bounds, epochs, request)
    )


def _build_rows(pair: Pair, bounds: tuple[int, int], samples: int | None, request: PartRequest) -> RowSamples:
    """Return the samples of a part of a packed pair, which are its rows."""
    if request.seq_length != pair.pack_size:
        raise RequestError(
            f"invalid seq_length {request.seq_length:,}: the rows of {pair.prefix} have {pair.pack_size:,} tokens; use "
            f"seq_length {pair.pack_size}, or run tokenmill pack with another --pack-size"
        )
    rows = find_rows(pair.reader.document_indices, *bounds)
    count = rows[1] - rows[0]
    if not count:
        raise RequestError(
            f"{SPLITS[request.part]} has no row of {pair.prefix}; set split to give it a larger share, or open fewer, "
            "larger pairs"
        )
    epochs = count_row_epochs(count, samples)
    if epochs * count > MAX_ORDER:
        raise RequestError(
            f"{samples or 0:,} samples would read {pair.prefix} {epochs:,} times, an order of {epochs * count:,} rows; "
            "use fewer samples or a larger dataset"
        )
    return RowSamples(Path(pair.prefix), pair.reader, rows, epochs, request.seed, request.seq_length)


MAX_ORDER = 1 << 34
"""Entries of the longest order, with 12 bytes each: 200 GB."""


def _load_order(pair: Pair, bounds: tuple[int, int], epochs: Epochs, request: PartRequest) -> PairOrder:
    return load_order(pair, bounds, epochs, request.seed, request.index_cache)


def load_order(pair: Pair, bounds: tuple[int, int], epochs: Epochs, seed: int, index_cache: Path | None) -> PairOrder:
    """Return the order of a part of a pair, from the store if it is large."""
    first, end = bounds

    def build(allocate: Allocate) -> PairOrder:
        lengths = pair.reader.lengths
        if int(lengths[first:end].min()) < 0:
            raise DamagedPair(Path(f"{pair.prefix}.idx"), "the length of a sequence is negative")
        return build_order(lengths, first, end, epochs, seed, allocate)

    count = epochs.number * (end - first)
    key = ""
    if count >= MIN_SEQUENCES:
        key = content_id([pair.order_content, first, end, *epochs, seed])
    return load_or_build(key, count, index_cache, build)


def _check_draws(pairs: Sequence[Pair], parts: Sequence[PairSamples], draws: Draws, request: PartRequest) -> None:
    """Raise RequestError if more samples are drawn from a pair than it has, where Megatron-LM raises IndexError."""
    if all(bound <= len(part) for bound, part in zip(draws.bounds, parts, strict=True)):
        return
    for count, part, pair in zip(draws.count_all().tolist(), parts, pairs, strict=True):
        if count > len(part):
            raise RequestError(
                f"{count:,} {SPLITS[request.part]} samples would be drawn from {pair.prefix}, which has {len(part):,} "
                f"with surplus {request.surplus}; set split to give {SPLITS[request.part]} a larger share, or raise "
                "surplus (Megatron-LM: --mid-level-dataset-surplus)"
            )
