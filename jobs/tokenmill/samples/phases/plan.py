"""The entries of each phase: a pair, or ranges of it, and how many samples of it the phase draws.

An epoch of a pair is drawn in as many phases as it takes. A phase that needs more than an epoch has left finishes it,
reads complete epochs, and begins another one, with an entry for each. The rest at the end of an epoch is shorter than
a sample; the next epoch draws it in addition. So the numbers of times that the tokens of a pair were drawn differ
by at most one at each transition, except for such a tail.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tokenmill.datasets.blend_file import WeightedSource
from tokenmill.datasets.formats.indexed.reader import find_source, read_view
from tokenmill.datasets.sources import open_pairs
from tokenmill.datasets.split import divide, parse_fractions
from tokenmill.datasets.weighted import Pair, WeightedDataset, refuse_rows
from tokenmill.errors import RequestError
from tokenmill.samples.draws import plan_blend
from tokenmill.samples.epochs import count_epochs
from tokenmill.samples.pair_blend import MAX_ORDER, load_order
from tokenmill.samples.pair_order import release
from tokenmill.samples.phases.plan_file import Cut, Phase, PhaseShare
from tokenmill.samples.phases.ranges import Ranges, RangesBuilder, find_left, join
from tokenmill.samples.phases.views import write_view

MAX_EPOCHS = 100_000
"""Epochs of a dataset in one phase; a plan with more is a mistake."""

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


@dataclass(frozen=True)
class PlannedPhase:
    """A phase: its samples, its entries with their weights for Megatron-LM, and what it draws from each dataset.

    Its order is that of `ordered` samples. Where that is more, the phase was cut, and the entries have more samples
    than it draws.
    """

    label: str
    samples: int
    ordered: int
    seq_length: int
    seed: int
    entries: tuple[Entry, ...]
    weights: tuple[float, ...]
    draws: tuple[DatasetDraw, ...]
    surplus: float = SURPLUS
    blended: bool = True


@dataclass
class _PairState:
    """The draws from the training part of a pair.

    `left` are the ranges that are left in the current epoch, None before it began. `owed` are those that earlier epochs
    left, and that the next one draws in addition. `views` is the directory of the views.
    """

    pair: Pair
    identity: str
    """The prefix without links."""
    whole: Ranges | None
    """The training part; None for all of the pair."""
    tokens: int
    views: Path
    index_cache: Path | None
    left: Ranges | None = None
    owed: Ranges | None = None
    drawn: int = 0

    def count_left(self) -> int:
        """Return the tokens that are left in the current epoch, or those of the next one before it began."""
        if self.left is not None:
            return self.left.tokens
        return self.tokens + (self.owed.tokens if self.owed is not None else 0)

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
            if epochs * self.pair.reader.sequences > MAX_ORDER:
                raise RequestError(
                    f"a phase reads {self.pair.prefix} {epochs:,} times, an order of "
                    f"{epochs * self.pair.reader.sequences:,} sequences; reduce its length"
                )
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

    def cut(self, entries: Sequence[tuple[Entry, int]], seq_length: int, seed: int) -> None:
        """Take back what entries would have drawn after their first samples, with the number of these.

        The rest at the end of an entry is also part of the following one.
        """
        parts = []
        for place, (entry, drawn) in enumerate(entries):
            until = entry.samples if place < len(entries) - 1 else None
            parts.append(self._find_rest(entry, seq_length, seed, drawn, until))
            self.drawn -= (entry.samples - drawn) * seq_length
        self.left, self.owed = join(self.views, *parts), None

    def begin(self, samples: int) -> Entry:
        """Return the entry with which a run without phases reads samples of the training part."""
        return Entry(self._begin(1), samples)

    def _find_rest(
        self, entry: Entry, seq_length: int, seed: int, drawn: int | None = None, until: int | None = None
    ) -> Ranges:
        """Return the ranges that the first samples of an entry leave, by default all of them."""
        reader = entry.pair.reader
        epochs = count_epochs(entry.pair.tokens, entry.samples, seq_length)
        if max(epochs.number * reader.sequences, epochs.samples) > MAX_ORDER:
            raise RequestError(
                f"a phase reads {self.pair.prefix} {epochs.number:,} times, an order of {epochs.samples:,} samples; "
                "reduce its length"
            )
        order = load_order(entry.pair, (0, reader.sequences), epochs, seed, self.index_cache)
        release(reader.lengths)
        return find_left(
            order,
            entry.samples if drawn is None else drawn,
            seq_length,
            reader.pointers,
            reader.dtype.itemsize,
            self.views,
            until,
        )


def _capacity(tokens: int, seq_length: int) -> int:
    """Return the complete samples of a stream of tokens, whose last sample needs a label."""
    return max(0, tokens - 1) // seq_length


@dataclass
class _DatasetState:
    """The pairs of a dataset, and the samples that rounding has given it in excess in earlier phases, negative."""

    pairs: list[_PairState]
    credit: float = 0.0
    """Tokens that earlier phases should have drawn in addition."""

    @property
    def tokens(self) -> int:
        """The tokens of an epoch."""
        return sum(pair.tokens for pair in self.pairs)

    @property
    def drawn(self) -> int:
        """The tokens that were drawn."""
        return sum(pair.drawn for pair in self.pairs)

    def divide(self, need: int, seq_length: int) -> list[int]:
        """Divide samples among the pairs: no pair begins an epoch before the others have ended theirs."""
        sizes = np.array([pair.tokens for pair in self.pairs], np.int64)
        left = np.array([pair.count_left() for pair in self.pairs], np.int64)
        counts = np.zeros(len(sizes), np.int64)
        while need:
            capacity = np.maximum(left - 1, 0) // seq_length
            if need <= capacity.sum():
                exact = need * capacity / capacity.sum()
                parts = np.minimum(np.floor(exact).astype(np.int64), capacity)
                order = np.argsort(parts - exact, kind="stable")
                for place in [*order, *order][: len(order) * 2]:
                    if parts.sum() == need:
                        break
                    parts[place] += parts[place] < capacity[place]
                counts += parts
                break
            epochs = max(0, (need * seq_length - int(left.sum())) // int(sizes.sum()) - 1)
            if epochs:  # complete epochs at once
                left = left + epochs * sizes
                continue
            counts += capacity
            need -= int(capacity.sum())
            left = left - capacity * seq_length + sizes
        return [int(count) for count in counts]


@dataclass
class PhasePlanner:
    """Plans phases one after the other; all have the same datasets at hand."""

    datasets: dict[str, WeightedDataset]
    fractions: Sequence[float]
    views: Path
    """The directory of the views."""
    index_cache: Path | None = None
    """The directory of large orders; None for tokenmill's cache."""
    divides: bool = False
    """Whether a split divides the datasets."""
    max_epochs: dict[str, float] = field(default_factory=dict)
    """The most epochs of datasets in all phases, by path."""
    _states: dict[str, _PairState] = field(default_factory=dict)
    _datasets: dict[tuple[str, tuple[str, ...] | None], _DatasetState] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        phases: Sequence[Phase],
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
        shares = [share for phase in phases for share in phase.shares]
        names = list(dict.fromkeys(share.path for share in shares))
        opened = open_pairs([WeightedSource(name) for name in names], key)
        refuse_rows(opened, "a run with phases")
        fractions = parse_fractions(split) if split is not None else [1.0, 0.0, 0.0]
        limits: dict[str, float] = {}
        for share in shares:
            if share.max_epochs is not None:
                limits[share.path] = min(share.max_epochs, limits.get(share.path, share.max_epochs))
        return cls(dict(zip(names, opened, strict=True)), fractions, views, index_cache, split is not None, limits)

    def plan(self, phase: Phase, global_batch: int = 1) -> PlannedPhase:
        """Plan the next phase, and write its views.

        Raises:
            RequestError: its entries do not add up to its samples, or a dataset is read more often than allowed.
        """
        datasets = [self._find_state(share) for share in phase.shares]
        prefixes = [state.identity for dataset in datasets for state in dataset.pairs]
        if len(set(prefixes)) < len(prefixes):
            raise RequestError(f"{phase.label} names a dataset twice; write one entry for each dataset")
        if phase.cut is not None and phase.cut.surplus is not None:
            return self._plan_plain(phase, datasets, phase.cut)
        drawn_before = [dataset.drawn for dataset in datasets]
        ordered, counts = _allocate(phase, datasets, global_batch)
        drawing = list[tuple[_PairState, Entry]]()
        for share, dataset, count in zip(phase.shares, datasets, counts, strict=True):
            if phase.cut is None:
                self._check_epochs(phase, share.path, dataset, count * phase.seq_length)
            for state, part in zip(dataset.pairs, dataset.divide(count, phase.seq_length), strict=True):
                drawing += [(state, entry) for entry in state.draw(part, phase.seq_length, phase.seed)]
        weights = exact_weights([entry.samples for _, entry in drawing])
        if phase.cut is not None and phase.samples is not None:
            _cut(phase, drawing, plan_blend(weights, ordered, SURPLUS).draws.count_first(phase.samples).tolist())
            for dataset, count, before in zip(datasets, counts, drawn_before, strict=True):
                dataset.credit += count * phase.samples / ordered * phase.seq_length - (dataset.drawn - before)
        return PlannedPhase(
            phase.label,
            ordered if phase.cut is None else phase.samples or 0,
            ordered,
            phase.seq_length,
            phase.seed,
            tuple(entry for _, entry in drawing),
            tuple(weights),
            _describe_draws(phase, datasets, drawn_before),
        )

    def _plan_plain(self, phase: Phase, datasets: Sequence[_DatasetState], cut: Cut) -> PlannedPhase:
        """Plan the first samples of a run without phases, in which Megatron-LM blends pairs by their weights."""
        assert phase.samples is not None and cut.surplus is not None  # noqa: S101 - `list_phases` has checked both
        drawn_before = [dataset.drawn for dataset in datasets]
        weights = [
            weight
            for share in phase.shares
            for weight, _ in replace(self._select(share), share=share.weight or 0.0).weighted_pairs()
        ]
        states = [state for dataset in datasets for state in dataset.pairs]
        if len(weights) != len(states):
            raise RequestError(f"{phase.label}: a pair has no tokens for training; restore the split of the run")
        blended = len(states) > 1 or not self.divides
        if blended:
            requested, draws = plan_blend(weights, cut.samples, cut.surplus)
            drawn = draws.count_first(phase.samples).tolist()
        else:
            requested, drawn = [cut.samples], [phase.samples]
        drawing = []
        for state, count in zip(states, requested, strict=True):
            state.drawn += count * phase.seq_length
            drawing.append((state, state.begin(count)))
        _cut(phase, drawing, drawn)
        return PlannedPhase(
            phase.label,
            phase.samples,
            cut.samples,
            phase.seq_length,
            phase.seed,
            tuple(entry for _, entry in drawing),
            tuple(weights),
            _describe_draws(phase, datasets, drawn_before),
            cut.surplus,
            blended,
        )

    def _check_epochs(self, phase: Phase, path: str, dataset: _DatasetState, tokens: int) -> None:
        """Raise RequestError if a phase reads a dataset more often than its max_epochs, or absurdly often."""
        after, most = dataset.drawn + tokens, self.max_epochs.get(path)
        if most is not None and after > most * dataset.tokens:
            raise RequestError(
                f"{phase.label} reads {path} until epoch {after / dataset.tokens:.2f}, but max_epochs is {most:g}: it "
                f"has {max(0, int(most * dataset.tokens) - dataset.drawn):,} tokens left for {tokens:,}; shorten the "
                "phase, lower the weight, or raise max_epochs"
            )
        if tokens > MAX_EPOCHS * dataset.tokens:
            raise RequestError(
                f"{phase.label} reads {path} {tokens / dataset.tokens:,.0f} times, more than {MAX_EPOCHS:,}; shorten "
                "the phase, or lower the weight"
            )

    def _select(self, share: PhaseShare) -> WeightedDataset:
        """Return the dataset of an entry, with the pairs that it names.

        Raises:
            RequestError: it has no such pairs any more.
        """
        dataset = self.datasets[share.path]
        return dataset if share.pairs is None else select_pairs(dataset, share.pairs)

    def _continue_source(self, state: _PairState) -> None:
        """Let a view without forgotten documents continue where the phases have left its pair."""
        view = read_view(Path(state.pair.prefix))
        if view is None:
            return
        source = self._states.get(os.path.realpath(find_source(Path(state.pair.prefix), view)))
        if source is not None and source.drawn:
            state.left, state.owed = (
                None if ranges is None else _keep(ranges, state.pair, self.views)
                for ranges in (source.left, source.owed)
            )

    def _find_state(self, share: PhaseShare) -> _DatasetState:
        """Return the state of a dataset, with those of its pairs that have tokens in the training part."""
        states = []
        for pair in self._select(share).pairs:
            identity = os.path.realpath(pair.prefix)  # two names of a pair are one pair
            if identity not in self._states:
                reader = pair.reader
                bounds = divide(self.fractions, reader.sequences)[0] or (0, 0)
                part = Ranges(reader.pointers[slice(*bounds)], reader.lengths[slice(*bounds)])
                whole = None if bounds == (0, reader.sequences) else part
                state = _PairState(pair, identity, whole, part.tokens, self.views, self.index_cache)
                self._states[identity] = state
                self._continue_source(state)
            states.append(self._states[identity])
        dataset = self._datasets.setdefault(
            (share.path, share.pairs), _DatasetState([state for state in states if state.tokens > 0])
        )
        if not dataset.pairs:
            raise RequestError(f"{share.path} has no tokens for training with this split; give train a larger share")
        return dataset


def _keep(ranges: Ranges, pair: Pair, views: Path) -> Ranges:
    """Return those of some ranges of a `.bin` that begin in a sequence of a pair."""
    reader, size = pair.reader, pair.reader.dtype.itemsize
    builder = RangesBuilder(views)
    for block in ranges.blocks():
        places = np.maximum(reader.pointers.searchsorted(block.offsets, "right") - 1, 0)
        ends = reader.pointers[places] + reader.lengths[places].astype(np.int64) * size
        kept = (block.offsets >= reader.pointers[places]) & (block.offsets < ends)
        builder.add(Ranges(block.offsets[kept], block.lengths[kept]))
    return builder.finish()


def select_pairs(dataset: WeightedDataset, names: Sequence[str]) -> WeightedDataset:
    """Return a dataset with the pairs of these names, in its order.

    Raises:
        RequestError: it has no such pairs any more.
    """
    wanted = set(names)
    pairs = tuple(pair for pair in dataset.pairs if Path(pair.prefix).name in wanted)
    if len(pairs) != len(wanted):
        raise RequestError(
            f"{dataset.path} has {len(pairs):,} of the {len(wanted):,} pairs that the run has read; restore the others"
        )
    return replace(dataset, pairs=pairs)


def _cut(phase: Phase, drawing: Sequence[tuple[_PairState, Entry]], drawn: Sequence[int]) -> None:
    """Take back the samples after the first ones of each entry."""
    by_pair: dict[str, tuple[_PairState, list[tuple[Entry, int]]]] = {}
    for (state, entry), count in zip(drawing, drawn, strict=True):
        by_pair.setdefault(state.identity, (state, []))[1].append((entry, count))
    for state, entries in by_pair.values():
        state.cut(entries, phase.seq_length, phase.seed)


def _describe_draws(
    phase: Phase, datasets: Sequence[_DatasetState], drawn_before: Sequence[int]
) -> tuple[DatasetDraw, ...]:
    return tuple(
        DatasetDraw(
            share.path, dataset.drawn - before, dataset.tokens, before / dataset.tokens, dataset.drawn / dataset.tokens
        )
        for share, dataset, before in zip(phase.shares, datasets, drawn_before, strict=True)
    )


def _allocate(phase: Phase, datasets: Sequence[_DatasetState], global_batch: int) -> tuple[int, list[int]]:
    """Return the samples of a phase, and those of each dataset; what rounding costs a dataset, it gets later."""
    length = phase.seq_length
    fixed = [
        share.tokens / length
        if share.tokens is not None
        else (share.epochs * dataset.tokens - 1) / length
        if share.epochs is not None
        else 0.0
        for share, dataset in zip(phase.shares, datasets, strict=True)
    ]
    weights = [share.weight or 0.0 for share in phase.shares]
    samples = phase.samples if phase.cut is None else phase.cut.samples
    if samples is None:
        samples = int(sum(fixed) // global_batch) * global_batch
        if not samples:
            raise RequestError(
                f"{phase.label} has {sum(fixed):.1f} samples, less than one global batch of {global_batch:,}; add "
                "tokens"
            )
        fixed = [part * samples / sum(fixed) for part in fixed]
    rest = samples - sum(fixed)
    if not sum(weights) and not sum(fixed):
        raise RequestError(f"{phase.label} has only entries of weight 0; give one of them a weight")
    if rest < -1 or (rest > 1 and not sum(weights)):
        raise RequestError(
            f"{phase.label} has {samples:,} samples, but its entries in tokens and epochs have {sum(fixed):,.0f}; "
            "remove its length, or add an entry with a weight"
        )
    wanted = [
        part + (max(0.0, rest) * weight / sum(weights) if weight else 0.0)
        for part, weight in zip(fixed, weights, strict=True)
    ]
    scale = samples / sum(wanted)
    exact = np.array(wanted) * scale
    due = np.where(exact > 0, exact + np.array([dataset.credit for dataset in datasets]) / length, 0.0)
    counts = np.maximum(np.floor(due + 1e-9), 0).astype(np.int64)
    while (missing := samples - int(counts.sum())) != 0:
        behind = np.where(exact > 0, due - counts, -np.inf)
        if missing > 0:
            counts[int(behind.argmax())] += 1
        else:
            counts[int(np.where(counts > 0, behind, np.inf).argmin())] -= 1
    for dataset, part, count in zip(datasets, exact.tolist(), counts.tolist(), strict=True):
        dataset.credit += (part - count) * length
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
