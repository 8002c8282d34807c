"""Provenance against a naive model: a list with the (source, record) of every record of a file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.flow.contract import Part
from tokenmill.flow.lineage import locate, narrow, source_parts

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
