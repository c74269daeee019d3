"""The search for the largest value that fits, on memory that grows along a line beyond a flat part."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotop.analysis.sweeps.search import LargestSearch

GIB = float(1 << 30)


def run_search(
    search: LargestSearch, largest: int, measure: float | None = None, flat: float = 0.0, base: float = 0.0
) -> int:
    """Returns how many values were tried. ``measure``: bytes for each unit, None if memory is not measured."""
    tried: list[int] = []
    while (value := search.choose_next()) is not None:
        assert value not in tried
        tried.append(value)
        if value <= largest:
            search.note_fitting(value, None if measure is None else max(flat, base + measure * value))
        else:
            search.note_failing(value)
    return len(tried)


@given(st.integers(1, 400), st.integers(0, 500), st.one_of(st.none(), st.floats(0, 1e5)))
def test_always_finds_the_largest(count: int, largest: int, predicted: float | None) -> None:
    values = list(range(1, count + 1))
    search = LargestSearch(values, predicted=predicted)
    runs = run_search(search, largest)
    assert search.largest_fitting == min(largest, count) - 1
    assert runs <= 3 * math.log2(count + 1) + 4


@pytest.mark.parametrize("error", [0.3, 0.7, 1.0, 1.5, 3.0])
def test_the_line_saves_runs(error: float) -> None:
    """3 MB a unit and 6 GiB below; the first prediction is wrong by a factor."""
    values = list(range(128, 65537, 128))
    limit, slope, base = 78 * GIB, 3e6, 6 * GIB
    largest = int((limit - base) / slope)
    search = LargestSearch(values, limit, predicted=largest * error)
    assert run_search(search, largest, slope, 10 * GIB, base) <= 6
    assert values[search.largest_fitting] == largest // 128 * 128


def test_nothing_fits_and_everything_fits() -> None:
    search = LargestSearch([1, 2, 4, 8], predicted=4)
    run_search(search, 0)
    assert (search.largest_fitting, search.smallest_failing) == (-1, 0)
    search = LargestSearch([1, 2, 4, 8], predicted=1000)
    assert run_search(search, 8) == 1
    assert (search.largest_fitting, search.smallest_failing) == (3, -1)
