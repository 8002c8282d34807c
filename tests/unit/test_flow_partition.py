"""Shares of units and runs of files: disjoint, complete and balanced for any number of workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.contract import Record
from tokenmill.engine.partition import select_units, split_by_weight
from tokenmill.engine.record import Unit

WEIGHTS = st.lists(st.integers(0, 10**12) | st.integers(0, 5), max_size=60)


def units(weights: list[int]) -> list[Unit]:
    return [Unit(f"unit-{index:03d}", weight, Record(), []) for index, weight in enumerate(weights)]


@given(WEIGHTS, st.integers(1, 80))
def test_shares_are_disjoint_complete_and_balanced(weights: list[int], workers: int) -> None:
    all_units = units(weights)
    shares = [select_units(all_units, worker, workers) for worker in range(workers)]
    assert sorted(unit.id for share in shares for unit in share) == [unit.id for unit in all_units]
    loads = [sum(unit.weight + 1 for unit in share) for share in shares]
    # The last unit goes to the smallest share: two shares differ by at most one unit.
    assert max(loads) - min(loads) <= max((unit.weight + 1 for unit in all_units), default=0)


@given(WEIGHTS, st.integers(1, 8))
def test_a_share_does_not_depend_on_the_order_of_units(weights: list[int], workers: int) -> None:
    all_units = units(weights)
    for worker in range(workers):
        assert select_units(all_units, worker, workers) == select_units(all_units[::-1], worker, workers)


@given(WEIGHTS, st.integers(1, 8))
def test_worker_starts_with_its_largest_unit(weights: list[int], workers: int) -> None:
    for worker in range(workers):
        share = [unit.weight for unit in select_units(units(weights), worker, workers)]
        assert share == sorted(share, reverse=True)


def test_empty_units_are_spread_too() -> None:
    assert [len(select_units(units([0] * 1000), worker, 7)) for worker in range(7)] == [143] * 6 + [142]


@given(WEIGHTS.filter(bool), st.data())
def test_runs_cover_all_in_order_and_none_is_empty(weights: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(weights)))
    runs = split_by_weight(weights, count)
    assert len(runs) == count
    assert all(runs)
    assert [index for run in runs for index in run] == list(range(len(weights)))


@given(st.integers(1, 200), st.data())
def test_runs_of_equal_files_differ_by_one_at_most(length: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, length))
    sizes = [len(run) for run in split_by_weight([1000] * length, count)]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 100), min_size=1, max_size=60), st.data())
def test_run_is_close_to_its_share_of_the_total(weights: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(weights)))
    costs = [weight + 1 for weight in weights]
    for run in split_by_weight(weights, count):
        assert sum(costs[index] for index in run) <= sum(costs) / count + 2 * max(costs)


@pytest.mark.parametrize(("length", "count"), [(3, 4), (3, 0), (0, 1), (0, 0)])
def test_more_runs_than_files_are_refused(length: int, count: int) -> None:
    with pytest.raises(ValueError, match="cannot cut"):
        split_by_weight([1] * length, count)
