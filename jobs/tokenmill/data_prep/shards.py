"""Which shards a run reads, which split gets each shard, and the weight of each shard.

`data_prep.run` calls these functions between the stages: the stage transform writes the shards, and the stages that
read them select the files of their split.
"""

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tokenmill.data_prep.config import PerSplitConfig, PipelineConfig
from tokenmill.errors import RequestError

SPLIT_SEED = 42
"""The seed of the order in which splits get their shards: that of Nemotron's recipes, for the same splits."""


class DatasetShard(NamedTuple):
    """A shard of a dataset, by the dataset's position in the blend and the shard's position in the dataset."""

    dataset: int
    number: int


def sample_shards(shards: Sequence[int], name: str, config: PipelineConfig) -> list[int]:
    """Return the shards that `config.sample` selects, in their order; the seed depends on the dataset's name."""
    from tokenmill.stages.transform.shards import sample_shards as choose

    if config.sample is None:
        return list(shards)
    chosen = choose(len(shards), name, config.sample, config.sample_seed)
    return [shards[number] for number in chosen]


def assign_splits(counts: Sequence[int], config: PerSplitConfig) -> dict[str, list[DatasetShard]]:
    """Divide the shards of all datasets between train, valid and test; `counts` has their number for each dataset.

    The shards are shuffled together. The first ones are for test, the next ones for valid, all others for train.

    Raises:
        RequestError: no shard is left for train.
    """
    shards = [DatasetShard(dataset, number) for dataset, count in enumerate(counts) for number in range(count)]
    held_out = config.valid_shards + config.test_shards
    if len(shards) <= held_out:
        raise RequestError(
            f"there are {len(shards)} shards with rows, and PerSplitConfig holds out {held_out} of them "
            f"({config.valid_shards} for valid, {config.test_shards} for test), so that train has no rows; lower "
            "valid_shards and test_shards, raise num_shards, or add rows"
        )
    random.Random(SPLIT_SEED).shuffle(shards)
    test = config.test_shards
    return {"train": shards[held_out:], "valid": shards[test:held_out], "test": shards[:test]}


def weigh_shards(weights: Sequence[float], sizes: Mapping[DatasetShard, int]) -> dict[DatasetShard, float]:
    """Divide the weight of each dataset between its shards, in proportion to their sizes in tokens or rows.

    So a dataset is read in proportion to its weight, whatever the number and the sizes of its shards are.
    """
    totals: dict[int, int] = {}
    for shard, size in sizes.items():
        totals[shard.dataset] = totals.get(shard.dataset, 0) + size
    return {shard: weights[shard.dataset] * size / totals[shard.dataset] for shard, size in sizes.items()}
