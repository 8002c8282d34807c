"""The draws of a blend: Megatron-LM's rule for any shares, compiled or not, from the start or stored counts."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill.samples.draw_loop import Groups, draw
from tokenmill.samples.draws import BLOCK, STRIDE, Draws, normalize

RULES: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "uniform": lambda random, count: random.random(count) + 0.01,
    "skewed": lambda random, count: random.lognormal(0, 2, count),
    "few different": lambda random, count: random.integers(1, 4, count),
    "equal": lambda random, count: np.ones(count),
}


def draw_by_the_rule(shares: list[float], number: int, sizes: list[int] | None) -> tuple[list[int], list[int]]:
    """Compare all datasets for each draw, as Megatron-LM does."""
    counts = np.zeros(len(shares))
    datasets, samples = list[int](), list[int]()
    for place in range(number):
        behind = np.array(shares) * max(place, 1) - counts
        if sizes is not None:
            behind[counts == sizes] = -np.inf
        chosen = int(behind.argmax())
        datasets.append(chosen)
        samples.append(int(counts[chosen]))
        counts[chosen] += 1
    return datasets, samples


def compute(shares: list[float], number: int, sizes: list[int] | None, *, compiled: bool) -> Any:
    """Compute draws in two parts, and check the counts."""
    groups = Groups.build(shares, sizes)
    drawn = np.zeros(len(groups.shares), np.int64)
    datasets, samples = np.empty(number, np.int16), np.empty(number, np.int64)
    for part in (slice(0, number // 3), slice(number // 3, number)):
        draw(groups, drawn, part.start, datasets[part], samples[part], compiled=compiled)
    assert groups.count_members(drawn).tolist() == np.bincount(datasets, minlength=len(shares)).tolist()
    return datasets.tolist(), samples.tolist()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_draws_follow_the_rule(rule: str, compiled: bool) -> None:
    random = np.random.default_rng(len(rule))
    for count in (1, 2, 7, 60, 700):
        shares = normalize(RULES[rule](random, count).tolist())
        number = 3000 if count < 100 else 6000
        assert compute(shares, number, None, compiled=compiled) == draw_by_the_rule(shares, number, None)


@pytest.mark.parametrize("compiled", [False, True])
def test_every_sample_is_drawn_once(compiled: bool) -> None:
    random = np.random.default_rng(5)
    for _ in range(30):
        sizes = [int(size) for size in random.integers(0, 60, int(random.integers(1, 30)))]
        total = max(sum(sizes), 1)
        shares = [size / total for size in sizes]
        assert compute(shares, sum(sizes), sizes, compiled=compiled) == draw_by_the_rule(shares, sum(sizes), sizes)


FULL_DISK = """
import resource, sys
import numpy as np
from tokenmill.samples.draw_loop import Groups, draw
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
datasets = np.empty(4, np.int16)
draw(Groups.build([0.25, 0.75], None), np.zeros(2, np.int64), 0, datasets, np.empty(4, np.int64), compiled=True)
sys.stdout.write(str(datasets.tolist()))
"""


@pytest.mark.slow
def test_the_compiled_code_need_not_be_stored(tmp_path: Path) -> None:
    """A full disk ends no program that reads a blend."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[1, 0, 1, 1]", done.stderr


def long_draws(directory: Path) -> Draws:
    shares = normalize(np.random.default_rng(1).lognormal(0, 1, 40).tolist())
    return Draws(shares, 5 * STRIDE * BLOCK, directory=directory)


def test_a_late_start_reads_one_record(tmp_path: Path) -> None:
    numbers = np.array([4 * STRIDE * BLOCK + 70_000])
    first = long_draws(tmp_path).get(numbers)
    (stored,) = (path for path in (tmp_path / "draws").iterdir() if path.suffix != ".lock")
    records = stored.read_bytes()
    size = len(records) // 5
    stored.write_bytes(bytes(4 * size) + records[4 * size :])  # only the last record is needed
    started = long_draws(tmp_path)
    assert [array.tolist() for array in started.get(numbers)] == [array.tolist() for array in first]
    assert stored.read_bytes()[: 4 * size] == bytes(4 * size)
    stored.write_bytes(records[:-9] + b"x" + records[-8:])  # a damaged record is computed again
    assert [array.tolist() for array in long_draws(tmp_path).get(numbers)] == [array.tolist() for array in first]
    assert stored.read_bytes() == records


def count_stored(directory: Path, numbers: Any) -> bool:
    draws = long_draws(directory)
    draws.get(numbers)
    return bool(draws.count_first(int(numbers[0])).sum() == numbers[0])


@pytest.mark.slow
def test_processes_that_start_together_store_the_same_counts(tmp_path: Path) -> None:
    numbers = np.array([3 * STRIDE * BLOCK + 5])
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert all(pool.starmap(count_stored, [(tmp_path, numbers)] * 3))
    (stored,) = (path for path in (tmp_path / "draws").iterdir() if path.suffix != ".lock")
    alone = tmp_path / "alone"
    assert count_stored(alone, numbers)
    assert stored.read_bytes() == (alone / "draws" / stored.name).read_bytes()
