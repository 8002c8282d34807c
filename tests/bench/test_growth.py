"""The exponent of growth does not contain the cost of a start."""

import pytest

from bench.growth import FACTOR, find_exponent


@pytest.mark.parametrize(("power", "expected"), [(1, 1), (2, 2), (0, 0)])
def test_exponent_of_costs_after_a_start(power: int, expected: float) -> None:
    costs = [3.0 + (FACTOR**step) ** power for step in range(3)]
    assert find_exponent(costs, 0.1) == pytest.approx(expected)


def test_a_difference_below_the_least_one_is_no_growth() -> None:
    assert find_exponent([1.0, 0.98, 1.05], 0.1) == 0
