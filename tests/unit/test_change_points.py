"""Changes of level in made-up series: noise is none, and later values change nothing."""

from typing import Any

import numpy as np
import pytest

from zerotop.analysis.stats.change_points import Shift, ShiftFinder, are_shifts, is_shift


def find_shifts(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> list[Shift]:
    """Find the shifts of the whole series at once."""
    return list(ShiftFinder().find_shifts(values))


def make_noisy_levels(
    levels: list[tuple[int, float]], noise: float, seed: int = 1
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return ``count`` values around each level."""
    generator = np.random.default_rng(seed)
    return np.concatenate([level * (1 + noise * generator.standard_normal(count)) for count, level in levels])


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03, 0.1])
def test_noise_alone_is_no_shift(noise: float) -> None:
    assert find_shifts(make_noisy_levels([(5000, 1.0)], noise)) == []


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("after", [0.7, 1.3, 3.0])
@pytest.mark.parametrize("begin", [12, 60, 9000])
def test_a_level_that_changes_is_found_where_it_does(noise: float, after: float, begin: int) -> None:
    (shift,) = find_shifts(make_noisy_levels([(begin, 1.0), (50, after)], noise))
    assert shift.first == begin
    assert shift.last == begin + min(20, max(4, begin // 8)) - 1


def test_single_slow_steps_are_no_shift() -> None:
    values = make_noisy_levels([(200, 1.0)], 0.01)
    values[[0, 30, 31, 80, 81, 82, 150]] = 4.0
    assert find_shifts(values) == []


def test_a_shift_and_its_return_are_two() -> None:
    assert [shift.first for shift in find_shifts(make_noisy_levels([(30, 1.0), (30, 2.0), (30, 1.0)], 0.02))] == [30, 60]


@pytest.mark.parametrize(("begin", "longer"), [(30, 2), (300, 2), (300, 8)])
def test_a_level_does_not_begin_with_somewhat_longer_steps_before_it(begin: int, longer: int) -> None:
    values = make_noisy_levels([(begin, 1.0), (50, 8.0)], 0.01)
    values[begin - longer : begin] = 1.4
    assert [shift.first for shift in find_shifts(values)] == [begin]


def test_later_values_change_nothing() -> None:
    values = make_noisy_levels([(30, 1.0), (40, 1.5), (30, 1.0), (3, 3.0), (40, 0.8)], 0.03)
    whole = find_shifts(values)
    assert len(whole) >= 3
    for count in range(len(values) + 1):
        assert find_shifts(values[:count]) == [shift for shift in whole if shift.last < count]


@pytest.mark.parametrize("piece", [1, 3, 7, 50])
def test_values_may_come_in_pieces(piece: int) -> None:
    values = make_noisy_levels([(30, 1.0), (40, 1.5), (300, 1.0), (3, 3.0), (400, 0.8)], 0.03)
    levels = ShiftFinder()
    found: list[Any] = []
    for end in range(0, len(values) + piece, piece):
        found += levels.find_shifts(values[:end])
    assert found == find_shifts(values)
    assert [shift.first for shift in found] == [30, 70, 373]


def test_too_few_values_have_no_shift() -> None:
    for count in range(9):
        assert find_shifts(np.full(count, 1.0)) == []


@pytest.mark.parametrize("spoilt", [None, np.nan, np.inf])
def test_one_row_is_judged_as_many_rows_are(spoilt: float | None) -> None:
    generator = np.random.default_rng(3)
    found = 0
    for _ in range(2000):
        before_count, after_count = generator.integers(5, 21), generator.integers(4, 21)
        longer = (int(generator.integers(0, 6)), 1.4)  # than before, but perhaps not yet at the new level
        levels = [(int(before_count), 1.0), longer, (int(after_count), generator.choice([0.0, 0.8, 1.0, 1.1, 1.2, 3.0]))]
        values = make_noisy_levels(levels, generator.choice([0.0, 0.02, 0.1]), int(generator.integers(2**32)))
        if spoilt is not None:
            values[generator.integers(len(values))] = spoilt
        before, after = values[:before_count], values[before_count:]
        with np.errstate(invalid="ignore"):
            expected = bool(are_shifts(before[None], after[None])[0])
        assert is_shift(before.tolist(), after.tolist()) is expected
        found += expected
    assert 100 < found < 1900
