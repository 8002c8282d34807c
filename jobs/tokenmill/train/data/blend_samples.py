"""Check that Megatron-LM can draw a run's samples from a blend, before it fails with all GPUs allocated.

For each dataset Megatron-LM builds the dataset's share of the requested samples, rounded up, plus half a percent, in
complete epochs. It then draws as many samples from the blend as the sum of the rounded shares. With many small datasets
this sum exceeds the requested samples, and a large dataset with little text in its split runs out of samples
(IndexError in megatron/core/datasets/blended_dataset.py). This module repeats Megatron-LM's arithmetic, including the
rounding. `resolve` calls it.
"""

from pathlib import Path

from tokenmill.datasets.split import SPLITS, parse_split, split_ranges
from tokenmill.datasets.training_data import TrainingData
from tokenmill.datasets.weighted import Pair
from tokenmill.errors import RequestError
from tokenmill.samples.epochs import count_epochs
from tokenmill.samples.row_order import count_row_epochs, find_rows
from tokenmill.train.data.data_arguments import count_samples, parse_data_arguments
from tokenmill.train.settings import Settings

MAX_BLEND_SAMPLES = 200_000
"""Draws that the check repeats, about one second of work; for more draws the half percent exceeds the rounding."""


def check_blend_samples(data: TrainingData, settings: Settings) -> None:
    """Raise RequestError when Megatron-LM would draw more samples of a pair than it builds.

    `settings` are derived ones.
    """
    training = settings.training
    options = {
        "--train-iters": training.iterations,
        "--global-batch-size": training.global_batch_size,
        "--eval-interval": training.eval_interval,
        "--eval-iters": training.eval_iterations,
    }
    args = parse_data_arguments([str(item) for option in options.items() for item in option] + settings.extra_args)
    for number, (name, requested) in enumerate(zip(SPLITS, count_samples(args), strict=True)):
        if data.split is not None and not parse_split(data.split)[number]:
            continue
        sources = data.lists.get("all") or data.lists.get(name, [])
        weighted = [weighted_pair for source in sources for weighted_pair in source.weighted_pairs()]
        if len(weighted) > 1:
            _check_split_samples(
                name, number, weighted, requested, args.mid_level_dataset_surplus, data.split, settings
            )


def _check_split_samples(
    name: str,
    number: int,
    weighted: list[tuple[float, Pair]],
    requested: int,
    surplus: float,
    split: str | None,
    settings: Settings,
) -> None:
    """Raise RequestError when a pair has fewer samples in one split than Megatron-LM draws from it."""
    from tokenmill.samples.draws import plan_blend

    built, draws = plan_blend([weight for weight, _ in weighted], requested, surplus)
    upper_bounds = draws.bounds
    available = {
        i: samples
        for i, (_, pair) in enumerate(weighted)
        if upper_bounds[i] > built[i]
        and upper_bounds[i] > (samples := _available_samples(pair, split, number, built[i], settings.model.seq_length))
    }
    if not available or draws.size > MAX_BLEND_SAMPLES:
        return
    drawn = draws.count_all().tolist()
    for i, samples in available.items():
        if drawn[i] > samples:
            raise RequestError(
                f"Megatron-LM would draw {drawn[i]:,} {name} samples from {weighted[i][1].prefix}, of which it "
                f"builds {samples:,}: it requests {requested:,} samples from {len(weighted)} pairs, and rounds each "
                f"share up, to {draws.size:,} in total; set dataset.split to give {name} a larger share, or write "
                "fewer, larger pairs (tokenmill join)"
            )


def _available_samples(pair: Pair, split: str | None, number: int, built: int, sequence_length: int) -> int:
    """Return the samples of a pair's split: those of the complete epochs that contain the built samples."""
    from tokenmill.datasets.formats.indexed.reader import open_index

    tokens = pair.tokens
    bounds = split_ranges(split, pair.sequences)[number] if split is not None else None
    if pair.pack_size:
        rows = find_rows(pair.reader.document_indices, *(bounds or (0, pair.sequences)))
        return count_row_epochs(rows[1] - rows[0], built) * (rows[1] - rows[0]) if rows[0] < rows[1] else 0
    if bounds is not None:
        index, (begin, end) = open_index(Path(f"{pair.prefix}.idx")), bounds
        span = int(index.pointers[end - 1]) - int(index.pointers[begin])
        tokens = span // index.dtype.itemsize + int(index.lengths[end - 1])
    return count_epochs(tokens, built, sequence_length).samples
