"""Random datasets and plans of phases, in which each token names its place."""

import random
from pathlib import Path
from typing import Any

import numpy as np

from support.pairs import write_ids


def write_dataset(path: Path, first: int, lengths: list[int]) -> Path:
    """Write a pair whose ids, from `first` on, are those of one token each."""
    count = sum(lengths)
    return write_ids(path, np.arange(first, first + count), np.array(lengths), "int32")


def random_plan(rng: random.Random, directory: Path) -> tuple[dict[str, Any], dict[str, range], int]:
    """Write random datasets and a plan of their phases; return the plan, the ids by dataset, and the seq_length."""
    seq_length = rng.choice([4, 8, 16, 31])
    names: dict[str, range] = {}
    for number in range(rng.randint(1, 5)):
        lengths = [rng.randint(0, 60) for _ in range(rng.randint(2, 60))] + [rng.randint(1, 9)]
        if rng.random() < 0.1:
            lengths = [rng.randint(1, 2 * seq_length)]
        path = directory / f"d{number}"
        write_dataset(path, 1_000_000 * (number + 1), lengths)
        names[str(path)] = range(1_000_000 * (number + 1), 1_000_000 * (number + 1) + sum(lengths))
    batch = rng.choice([1, 1, 2, 4])
    phases: list[dict[str, Any]] = []
    for _ in range(rng.randint(2, 6)):
        chosen = rng.sample(list(names), rng.randint(1, len(names)))
        blend: list[dict[str, Any]] = [{"path": path, "weight": rng.choice([1, 2, 0.3, 0.05])} for path in chosen]
        phase: dict[str, Any] = {"samples": batch * rng.randint(1, 80), "blend": blend}
        kind = rng.random()
        if kind < 0.2:
            phase = {"blend": [{"path": path, "epochs": rng.choice([1, 0.5, 2.2])} for path in chosen]}
        elif kind < 0.3:
            phase["steps"] = 2
            phase["samples"] += 2 * batch
            blend[0]["to"] = 3
        if rng.random() < 0.3:
            phase["seed"] = rng.randint(0, 2**32 - 1)
        phases.append(phase)
    return {"phases": phases, "global_batch": batch}, names, seq_length
