"""The entries of each phase: a pair, or ranges of it, and how many samples of it the phase draws.

An epoch of a pair is drawn in as many phases as it takes. A phase that needs more than an epoch has left finishes it,
reads complete epochs, and begins another one, with an entry for each. The rest at the end of an epoch is shorter than
a sample; the next epoch draws it in addition. So the numbers of times that the tokens of a pair were drawn differ
by at most one at each transition, except for such a tail.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tokenmill.datasets.blend_file import WeightedSource
from tokenmill.datasets.sources import open_pairs
from tokenmill.datasets.split import divide, parse_fractions
from tokenmill.datasets.weighted import Pair, WeightedDataset
from tokenmill.errors import RequestError
from tokenmill.samples.draws import plan_blend
from tokenmill.samples.epochs import count_epochs
from tokenmill.samples.pair_blend import load_order
from tokenmill.samples.pair_order import release
from tokenmill.samples.phases.plan_file import Phase, Share
from tokenmill.samples.phases.ranges import Ranges, find_left, join
from tokenmill.samples.phases.views import write_view

MAX_ROUNDS = 200
"""Attempts to find exact weights; of 20,000 random lists, none needed more than 5."""

SURPLUS = 0.0
"""Megatron-LM's --mid-level-dataset-surplus: the numbers of samples are exact, so no entry has more."""


@dataclass(frozen=True)
class Entry:
    """`samples` of a phase from a pair, or from a view of it."""

    pair: Pair
    samples: int


@dataclass(frozen=True)
class DatasetDraw:
    """The tokens that a phase draws from a dataset, and the epochs before and after the phase."""

    path: str
    tokens: int
    size: int
    """Tokens of an epoch."""
    before: float
    after: float

    @property
    def epochs_completed(self) -> int:
        """Return how many epochs end in the phase."""
        return int(self.after + 1e-9) - int(self.before + 1e-9)


@dataclass(frozen=True)
class PlannedPhase:
    """A phase: its samples, its entries with their weights for Megatron-LM, and what it draws from each dataset."""

    label: str
    samples: int
    seq_length: int
    seed: int
    entries: tuple[Entry, ...]
    weights: tuple[float, ...]
    draws: tuple[DatasetDraw, ...]


@dataclass
class _PairState:
    """The draws from the training part of a pair.

    `left` are the ranges that are left in the current epoch, None before it began. `owed` are those that earlier epochs
    left, and that the next one draws in addition. `views` is the directory of the views.
    """

    pair: Pair
    whole: Ranges | None
    """The training part; None for all of the pair."""
    tokens: int
    views: Path
    index_cache: Path | None
    left: Ranges | None = None
    owed: Ranges | None = None
    drawn: int = 0

    def draw(self, need: int, seq_length: int, seed: int) -> Iterator[Entry]:
        """Yield the entries that draw `need` samples, write their views, and note what they leave."""
        self.drawn += need * seq_length
        if self.left is not None:
            taken = min(need, _capacity(self.left.tokens, seq_length))
            if taken:
                entry = Entry(write_view(self.views, self.pair, self.left), taken)
                yield entry
                self.left = self._find_rest(entry, seq_length, seed)
            need -= taken
            if not need:
                return
            self.left, self.owed = None, self.left
        while need:
            owed = self.owed.tokens if self.owed is not None else 0
            begins = self.tokens > seq_length and need <= _capacity(self.tokens + owed, seq_length)
            if begins:
                epochs, taken = 1, need
            elif self.tokens > seq_length:
                epochs = ((need + 1) * seq_length - owed) // self.tokens
                taken = _capacity(epochs * self.tokens + owed, seq_length)
            else:  # a sample has more than an epoch: all samples, and what is left is less than a sample
                epochs, taken = -(-(need * seq_length + 1 - owed) // self.tokens), need
            entry = Entry(self._begin(epochs), taken)
            yield entry
            rest = self._find_rest(entry, seq_length, seed)
            need -= taken
            self.owed = None
            if begins:
                self.left = rest
            elif rest.lengths.size:
                self.owed = rest

    def _begin(self, epochs: int) -> Pair:
        """Return the pair of epochs from their beginning, with the ranges that are owed: a view, or the pair itself."""
        if self.owed is None and self.whole is None:
            return self.pair
        whole = self.whole if self.whole is not None else Ranges(self.pair.reader.pointers, self.pair.reader.lengths)
        if self.owed is None and epochs == 1:
            return write_view(self.views, self.pair, whole)
        ranges = join(self.views, *[whole] * epochs, *([] if self.owed is None else [self.owed]))
        return write_view(self.views, self.pair, ranges)

    def _find_rest(self, entry: Entry, seq_length: int, seed: int) -> Ranges:
        """Return the ranges that an entry leaves."""
        reader = entry.pair.reader
        epochs = count_epochs(entry.pair.tokens, entry.samples, seq_length)
        order = load_order(entry.pair, (0, reader.sequences), epochs, seed, self.index_cache)
        release(reader.lengths)
        return find_left(order, entry.samples, seq_length, reader.pointers, reader.dtype.itemsize, self.views)


def _capacity(tokens: int, seq_length: int) -> int:
    """Return the complete samples of a stream of tokens, whose last sample needs a label."""
    return max(0, tokens - 1) // seq_length


@dataclass
class PhasePlanner:
    """Plans phases one after the other; all have the same datasets at hand."""

    datasets: dict[str, WeightedDataset]
    fractions: Sequence[float]
    views: Path
    """The directory of the views."""
    index_cache: Path | None = None
    """The directory of large orders; None for tokenmill's cache."""
    _states: dict[str, _PairState] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        paths: Sequence[str],
        split: str | None,
        views: Path,
        *,
        key: str | None = None,
        index_cache: Path | None = None,
    ) -> "PhasePlanner":
        """Open the datasets of all phases.

        Raises:
            RequestError: one is missing, unfinished or damaged, or their tokenizers differ.
        """
        names = list(dict.fromkeys(paths))
        opened = open_pairs([WeightedSource(name) for name in names], key)
        fractions = parse_fractions(split) if split is not None else [1.0, 0.0, 0.0]
        return cls(dict(zip(names, opened, strict=True)), fractions, views, index_cache)

    def plan(self, phase: Phase, global_batch: int = 1) -> PlannedPhase:
        """Plan the next phase, and write its views.

        Raises:
            RequestError: its entries do not add up to its samples, or a dataset is read more often than allowed.
        """
        shares = [(share, self._list_states(share.path)) for share in phase.shares]
        if len({share.path for share in phase.shares}) < len(shares):
            raise RequestError(f"{phase.label} names a dataset twice; write one entry for each dataset")
        samples, counts = _allocate(phase, shares, global_batch)
        entries: list[Entry] = []
        draws: list[DatasetDraw] = []
        places = iter(counts)
        for share, states in shares:
            size, before = sum(state.tokens for state in states), sum(state.drawn for state in states)
            for state in states:
                entries += state.draw(next(places), phase.seq_length, phase.seed)
            after = sum(state.drawn for state in states)
            draws.append(DatasetDraw(share.path, after - before, size, before / size, after / size))
            if share.max_epochs is not None and after > share.max_epochs * size + phase.seq_length:
                raise RequestError(
                    f"{phase.label} reads {share.path} until epoch {after / size:.2f}, but max_epochs is "
                    f"{share.max_epochs:g}: it has {max(0, int(share.max_epochs * size) - before):,} tokens left for "
                    f"{after - before:,}; shorten the phase, lower the weight, or raise max_epochs"
                )
        weights = exact_weights([entry.samples for entry in entries])
        return PlannedPhase(
            phase.label, samples, phase.seq_length, phase.seed, tuple(entries), tuple(weights), tuple(draws)
        )

    def _list_states(self, path: str) -> list[_PairState]:
        """Return the states of the pairs of a dataset that have tokens in the training part."""
        states = []
        for pair in self.datasets[path].pairs:
            if pair.prefix not in self._states:
                reader = pair.reader
                bounds = divide(self.fractions, reader.sequences)[0] or (0, 0)
                part = Ranges(reader.pointers[slice(*bounds)], reader.lengths[slice(*bounds)])
                is_whole = bounds == (0, reader.sequences)
                whole = None if is_whole else part
                self._states[pair.prefix] = _PairState(pair, whole, part.tokens, self.views, self.index_cache)
            states.append(self._states[pair.prefix])
        with_tokens = [state for state in states if state.tokens > 0]
        if not with_tokens:
            raise RequestError(f"{path} has no tokens for training with this split; give train a larger share")
        return with_tokens


def _allocate(
    phase: Phase, shares: Sequence[tuple[Share, list[_PairState]]], global_batch: int
) -> tuple[int, list[int]]:
    """Return the samples of a phase, and those of each pair."""
    fixed = [
        share.tokens / phase.seq_length
        if share.tokens is not None
        else (share.epochs * sum(state.tokens for state in states) - 1) / phase.seq_length
        if share.epochs is not None
        else 0.0
        for share, states in shares
    ]
    weights = [share.weight or 0.0 for share, _ in shares]
    samples = phase.samples
    if samples is None:
        samples = int(sum(fixed) // global_batch) * global_batch
        if not samples:
            raise RequestError(
                f"{phase.label} has {sum(fixed):.1f} samples, less than one global batch of {global_batch:,}; add "
                "tokens"
            )
        fixed = [part * samples / sum(fixed) for part in fixed]
    rest = samples - sum(fixed)
    if rest < -1 or (rest > 1 and not sum(weights)):
        raise RequestError(
            f"{phase.label} has {samples:,} samples, but its entries in tokens and epochs have {sum(fixed):,.0f}; "
            "remove its length, or add an entry with a weight"
        )
    wanted = [
        (part + (max(0.0, rest) * weight / sum(weights) if weight else 0.0)) * state.tokens / size
        for part, weight, (_, states) in zip(fixed, weights, shares, strict=True)
        for size in [sum(state.tokens for state in states)]
        for state in states
    ]
    scale = samples / sum(wanted) if sum(wanted) else 0.0
    if not scale:
        raise RequestError(f"{phase.label} has only entries of weight 0; give one of them a weight")
    exact = np.array(wanted) * scale
    counts = np.floor(exact + 1e-9).astype(np.int64)
    missing = samples - int(counts.sum())
    largest = np.argsort(counts - exact, kind="stable")[: max(0, missing)]
    counts[largest] += 1
    return samples, counts.tolist()


def exact_weights(counts: Sequence[int]) -> list[float]:
    """Return weights from which Megatron-LM computes exactly these numbers of samples, without surplus.

    It rounds each share up, so a share that is a hair too large would ask for one sample more than there is.
    """
    weights = [float(count) for count in counts]
    for _ in range(MAX_ROUNDS):
        requested = plan_blend(weights, sum(counts), SURPLUS).requested
        others = [place for place, count in enumerate(counts) if requested[place] != count]
        if not others:
            return weights
        for place in others:
            weights[place] = math.nextafter(weights[place], 0)
    raise RequestError(
        f"no weights give exactly {counts} samples; change the number of samples of the phase by one batch"
    )
