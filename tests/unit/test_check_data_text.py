"""`tokenmill check-data` tells the tokens of text from random tokens."""

import pydoc_data.topics as topics
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tokenmill.loaders.check.text_test import MIN_EVENNESS, MIN_ORDER_BITS, MIN_TOKENS, TextFigures, measure_text

Array = npt.NDArray[Any]

TEXTS = {
    "prose": "".join(topics.topics.values()),
    "code": Path(re.__file__).read_text() + Path(np.__file__).read_text(),
    "several scripts": (Path(__file__).parents[1] / "conformance/inputs/mixed.jsonl").read_text()[:200_000],
}
SIZES = (MIN_TOKENS, 65_536)


def measure(ids: Array) -> TextFigures:
    figures = measure_text([ids])
    assert figures is not None
    return figures


def as_bytes(text: str) -> Array:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


def as_words(text: str) -> Array:
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(word, len(numbers)) for word in re.findall(r" ?\w+|[^\w]", text)])


@pytest.mark.parametrize("encode", [as_bytes, as_words])
@pytest.mark.parametrize("name", TEXTS)
def test_text_does_not_look_random(name: str, encode: Any) -> None:
    ids = encode(TEXTS[name])
    for size in SIZES:
        for start in (0, (len(ids) - size) // 2):
            if len(ids) >= start + size > 0:
                figures = measure(ids[start : start + size])
                assert figures.reasons == [], figures
                assert figures.evenness > 1.4 * MIN_EVENNESS
                assert figures.order > 2 * MIN_ORDER_BITS


def uniform(random: np.random.Generator, size: int) -> Array:
    return random.integers(0, 50_000, size)


def bytes_of_noise(random: np.random.Generator, size: int) -> Array:
    return random.integers(0, 256, size)


def part_of_the_vocabulary(random: np.random.Generator, size: int) -> Array:
    return random.integers(30_000, 30_500, size)


def with_eod(random: np.random.Generator, size: int) -> Array:
    return np.where(random.random(size) < 0.01, 0, random.integers(0, 50_000, size))


def permutation(random: np.random.Generator, size: int) -> Array:
    return random.permutation(100_000)[:size]


def shuffled_text(random: np.random.Generator, size: int) -> Array:
    return random.permutation(as_bytes(TEXTS["prose"])[:size])


def frequencies_of_text(random: np.random.Generator, size: int) -> Array:
    return np.minimum(random.zipf(1.3, size), 50_000)


@pytest.mark.parametrize(
    "make",
    [
        uniform,
        bytes_of_noise,
        part_of_the_vocabulary,
        with_eod,
        permutation,
        shuffled_text,
        frequencies_of_text,
    ],
)
def test_random_tokens_look_random(make: Any) -> None:
    for size in SIZES:
        assert measure(make(np.random.default_rng(size), size)).reasons


def test_few_tokens_are_not_tested() -> None:
    assert measure_text([]) is None
    assert measure_text([np.arange(MIN_TOKENS - 1)]) is None


def test_blocks_are_not_joined() -> None:
    """A pair of tokens across two blocks does not count, so the result does not depend on the order of the blocks."""
    ids = as_bytes(TEXTS["prose"])
    first, second = measure_text([ids[:9000], ids[50_000:60_000]]), measure_text([ids[50_000:60_000], ids[:9000]])
    assert first is not None and second is not None
    assert first.order == pytest.approx(second.order, abs=0.02) and first.entropy == second.entropy
