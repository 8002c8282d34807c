"""The benchmark's corpus is the same each time, and no copy of it repeats another."""

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
def test_copies_differ_and_other_scripts_come_between_the_same_each_time() -> None:
    made = texts(100)
    first = [text for text in made if text.startswith("Reading")]
    assert len(set(made)) == len(made)
    assert len(first) > len(BASE)
    assert any(not text.isascii() for text in made)
    assert all(made)
    assert texts(100) == made
