"""Provenance against a naive model: a list with the (source, record) of every record of a file."""

import base64
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.contract import Part
from tokenmill.engine.lineage import locate, narrow, select, source_parts

Model = list[tuple[str, int]]
PARTS = st.lists(
    st.builds(Part, st.sampled_from("ab/c"), st.integers(0, 50), st.integers(0, 6)),
    max_size=6,
)


def model(parts: list[Part]) -> Model:
    return [(part.source, part.first + index) for part in parts for index in range(part.count or 0)]


@given(PARTS)
def test_record_is_located_by_the_parts(parts: list[Part]) -> None:
    records = model(parts)
    assert [locate(parts, ordinal) for ordinal in range(len(records))] == records
    assert locate(parts, len(records)) is None


@given(PARTS, st.data())
def test_only_rejected_records_are_removed(parts: list[Part], data: st.DataObject) -> None:
    records = model(parts)
    for _ in range(3):  # each stage narrows the output of the previous stage
        rejected = data.draw(st.sets(st.integers(0, max(0, len(records) - 1))) if records else st.just(set()))
        parts = narrow(parts, len(records), data.draw(st.permutations(sorted(rejected))))
        records = [record for ordinal, record in enumerate(records) if ordinal not in rejected]
        assert model(parts) == records
        assert all(part.count for part in parts)


@given(st.integers(0, 20), st.data())
def test_source_of_unknown_length_is_cut_to_its_records(records: int, data: st.DataObject) -> None:
    rejected = data.draw(st.sets(st.integers(0, records - 1)) if records else st.just(set()))
    assert locate(source_parts("s"), records) == ("s", records)
    kept = narrow(source_parts("s"), records, sorted(rejected))
    assert model(kept) == [("s", index) for index in range(records) if index not in rejected]


@given(PARTS, PARTS)
def test_joined_files_keep_the_order_of_records(first: list[Part], second: list[Part]) -> None:
    joined = [*narrow(first, len(model(first))), *narrow(second, len(model(second)))]
    assert model(joined) == model(first) + model(second)


@given(PARTS, st.integers(1, 5))
def test_wrong_number_of_records_is_refused(parts: list[Part], more: int) -> None:
    with pytest.raises(ValueError, match="records"):
        narrow(parts, len(model(parts)) + more)
    if model(parts):
        with pytest.raises(ValueError, match="records"):
            narrow(parts, len(model(parts)) - 1)


def positions(parts: list[Part]) -> Model:
    """Return the records of parts with steps and bitmaps, each bit decoded on its own."""
    records: Model = []
    for part in parts:
        bits = "".join(f"{byte:08b}"[::-1] for byte in base64.b64decode(part.kept)) or "1" * (part.count or 0)
        ordinals = [index for index, bit in enumerate(bits) if bit == "1"]
        assert len(ordinals) == part.count
        records += [(part.source, part.first + index * part.step) for index in ordinals]
    return records


@given(PARTS, st.data())
def test_selected_records_of_a_divided_file(parts: list[Part], data: st.DataObject) -> None:
    records = model(parts)
    for _ in range(3):  # each stage selects from the output of the previous stage
        first, step = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 4))
        ordinals = range(first, len(records), step)
        kept = data.draw(st.integers(0, (1 << len(ordinals)) - 1))
        parts = select(parts, len(records), kept, first, step)
        records = [records[ordinal] for index, ordinal in enumerate(ordinals) if kept >> index & 1]
        assert positions(parts) == records
        assert [locate(parts, ordinal) for ordinal in range(len(records))] == records
        assert locate(parts, len(records)) is None
        assert [Part.from_json(part.to_json()) for part in parts] == parts


@given(st.integers(0, 300), st.data())
def test_rejected_records_of_a_bitmap(records: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(0, (1 << records) - 1))
    parts = select(source_parts("s"), records, kept)
    count = kept.bit_count()
    rejected = data.draw(st.sets(st.integers(0, count - 1))) if count else set()
    ordinals = [index for index in range(records) if kept >> index & 1]
    expected = [("s", number) for index, number in enumerate(ordinals) if index not in rejected]
    assert positions(narrow(parts, count, sorted(rejected))) == expected


def test_many_dropped_records_need_one_bit_each() -> None:
    kept = random.Random(1).getrandbits(100_000)
    parts = select(source_parts("train/chat.jsonl"), 800_000, kept, 3, 8)
    assert len(parts) == 1 and len(parts[0].kept) < 17_000
    assert locate(parts, kept.bit_count() - 1) == ("train/chat.jsonl", 3 + 8 * (kept.bit_length() - 1))


def test_a_divided_file_has_one_short_range() -> None:
    (part,) = select(source_parts("a"), 1000, (1 << 125) - 1, 5, 8)
    assert part.to_json() == {"source": "a", "first": 5, "count": 125, "step": 8}


def test_few_dropped_records_are_ranges() -> None:
    kept = ((1 << 100_000) - 1) & ~(1 << 5000)
    assert select(source_parts("a"), 100_000, kept) == [Part("a", 0, 5000), Part("a", 5001, 94_999)]


@pytest.mark.parametrize("records", [9, 11])
def test_selection_from_a_wrong_number_of_records_is_refused(records: int) -> None:
    with pytest.raises(ValueError, match="parts for 10 records"):
        select([Part("a", 0, 10)], records, 1)
