"""The benchmark's corpus is the same each time, and no copy of it repeats another."""

import itertools

from bench.corpus import documents

BASE = [
    {"text": f"Reading chapter {n} of the manual: functions return 12345 values, numbered {n * 7919}.\n" * 20}
    for n in range(40)
]


def texts(count: int) -> list[str]:
    return [record["text"] for record in itertools.islice(documents(BASE), count)]


def test_same_base_gives_same_documents() -> None:
    assert texts(400) == texts(400)


def test_copies_differ_and_other_scripts_come_between() -> None:
    made = texts(400)
    first = [text for text in made if text.startswith("Reading")]
    assert len(set(made)) == len(made)
    assert len(first) > 40
    assert any(not text.isascii() for text in made)
    assert all(made)
