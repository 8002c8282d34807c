"""The benchmark's corpus is reproducible, and no copy of the base repeats another copy."""

import itertools

import pytest

from bench.corpus import documents

BASE = [
    {"text": f"Reading chapter {n} of the manual: functions return 12345 values, numbered {n * 7919}.\n" * 20}
    for n in range(40)
]


def texts(count: int) -> list[str]:
    return [record["text"] for record in itertools.islice(documents(BASE), count)]


@pytest.mark.slow
def test_copies_differ_and_are_reproducible() -> None:
    generated = texts(100)
    first = [text for text in generated if text.startswith("Reading")]
    assert len(set(generated)) == len(generated)
    assert len(first) > len(BASE)
    assert any(not text.isascii() for text in generated)
    assert all(generated)
    assert texts(100) == generated
