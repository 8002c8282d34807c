"""Whether Megatron-LM can draw the samples of a blend from its parts: it says no only once every GPU is taken.

Of each dataset it builds its share of the samples asked for, rounded up, and half a percent more, in whole
epochs; then it draws as many from all of them as the rounded shares come to. With many small datasets that
is more than was asked for, and a large one with little text in its part of the split runs out (IndexError in
megatron/core/datasets/blended_dataset.py). Everything here follows it to the rounding.
"""

import math
from pathlib import Path

from tokenmill.errors import RequestError
from tokenmill.training.data.datasets import Pair, TrainingData
from tokenmill.training.data.index_child import parse, samples
from tokenmill.training.data.split import SPLITS, cuts, fractions
from tokenmill.training.settings import Settings

MOST_DRAWS = 200_000
"""Draws that are followed one by one, a second's work; beyond, half a percent is more than the rounding."""


def check_draws(corpus: TrainingData, settings: Settings) -> None:
    """Refuse a blend of which Megatron-LM would draw more samples than it builds; `settings` are derived ones."""
    training = settings.training
    words = {
        "--train-iters": training.iterations,
        "--global-batch-size": training.global_batch_size,
        "--eval-interval": training.eval_interval,
        "--eval-iters": training.eval_iterations,
    }
    args = parse([str(word) for pair in words.items() for word in pair] + settings.extra_args)
    for number, (name, asked) in enumerate(zip(SPLITS, samples(args), strict=True)):
        if corpus.split is not None and not fractions(corpus.split)[number]:
            continue
        sources = corpus.lists.get("all") or corpus.lists.get(name, [])
        weighted = [each for source in sources for each in source.weighted()]
        if len(weighted) > 1:
            _check(name, number, weighted, asked, args.mid_level_dataset_surplus, corpus.split, settings)


def _check(
    name: str,
    number: int,
    weighted: list[tuple[float, Pair]],
    asked: int,
    surplus: float,
    split: str | None,
    settings: Settings,
) -> None:
    import numpy as np

    weights = np.array([weight for weight, _ in weighted])
    weights = weights / np.sum(weights)
    targets = [math.ceil(asked * weight) for weight in weights.tolist()]
    built = [math.ceil(target * (1 + surplus)) for target in targets]
    size = sum(targets)
    weights = weights / np.sum(weights)  # once more, as BlendedDataset does
    # What is drawn lags behind its weight before each draw, so that it is at most one ahead after it.
    most = [math.floor(weight * size) + 1 for weight in weights.tolist()]
    doubtful = {
        i: there
        for i, (_, pair) in enumerate(weighted)
        if most[i] > built[i] and most[i] > (there := _length(pair, split, number, built[i], settings.model.seq_length))
    }
    if not doubtful or size > MOST_DRAWS:
        return
    drawn = np.zeros(len(weighted))
    for draw in range(size):
        drawn[np.argmax(weights * max(draw, 1) - drawn)] += 1
    for i, there in doubtful.items():
        if drawn[i] > there:
            raise RequestError(
                f"Megatron-LM would draw {int(drawn[i]):,} {name} samples from {weighted[i][1].prefix}, of which it "
                f"builds {there:,}: {asked:,} samples from {len(weighted)} pairs come to {size:,} when each share is "
                f"rounded up; give {name} a larger share of dataset.split, or make fewer, larger pairs (tokenmill "
                "preprocess --target-files)"
            )


def _length(pair: Pair, split: str | None, number: int, built: int, sequence_length: int) -> int:
    """Count the samples of a pair's part: whole epochs, as many as hold those to be built."""
    from tokenmill.tokens.formats.indexed.reader import open_index

    tokens = pair.tokens
    cut = cuts(split, pair.sequences)[number] if split is not None else None
    if cut is not None:
        index, (begin, end) = open_index(Path(f"{pair.prefix}.idx")), cut
        span = int(index.pointers[end - 1]) - int(index.pointers[begin])
        tokens = span // index.dtype.itemsize + int(index.lengths[end - 1])
    epochs = max(1, math.ceil((built * sequence_length + 1) / tokens))
    return (epochs * tokens - 1) // sequence_length
