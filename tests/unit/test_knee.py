"""The knee of a series that is flat at first, and the line beyond it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotop.analysis.stats.knee import fit_knee, is_gradual

X = np.arange(128, 2049, 128).astype(float)


@given(
    knee=st.floats(450, 1500),
    slope=st.floats(1e3, 5e6),
    level=st.floats(0, 5e10),
    seed=st.integers(0, 1000),
)
def test_finds_knee_and_line(knee: float, slope: float, level: float, seed: int) -> None:
    rise = slope * np.maximum(0, X - knee)
    y = level + rise + np.random.default_rng(seed).normal(0, 0.002 * rise.max(), len(X))
    fit = fit_knee(X, y)
    assert fit is not None
    assert fit.knee_x is not None
    assert fit.knee_x == pytest.approx(knee, abs=64)
    assert fit.slope == pytest.approx(slope, rel=0.05)
    assert fit.intercept == pytest.approx(level - slope * knee, abs=0.06 * slope * knee)
    assert fit.r_squared > 0.99


@given(slope=st.floats(1e3, 5e6), level=st.floats(0, 5e10), seed=st.integers(0, 1000))
def test_a_line_has_no_knee(slope: float, level: float, seed: int) -> None:
    rise = slope * X
    fit = fit_knee(X, level + rise + np.random.default_rng(seed).normal(0, 0.002 * rise.max(), len(X)))
    assert fit is not None
    assert fit.knee_x is None
    assert fit.line_points == len(X)
    assert fit.solve(fit.predict(1000)) == pytest.approx(1000)


def test_a_knee_needs_two_distinct_points() -> None:
    assert fit_knee(np.array([5.0]), np.array([1.0])) is None
    assert fit_knee(np.array([5.0, 5.0]), np.array([1.0, 2.0])) is None
    fit = fit_knee(np.array([2.0, 1.0]), np.array([20.0, 10.0]))
    assert fit is not None
    assert (fit.slope, fit.intercept, fit.knee_x) == (pytest.approx(10), pytest.approx(0), None)


def test_a_flat_series_reaches_nothing() -> None:
    fit = fit_knee(X, np.full(len(X), 7.0))
    assert fit is not None
    assert (fit.slope, fit.knee_x, fit.solve(8.0)) == (0, None, None)
    assert fit.predict(300) == 7


def test_points_in_unequal_distances_are_gradual_where_they_lie_on_a_line() -> None:
    places = np.array([*range(10), 20, 60, 100, 140, 180], float)
    assert is_gradual(places / 10, places)
    assert not is_gradual(np.where(places < 50, 1.0, 3.0), places)


def test_many_points_take_little_time() -> None:
    """With each of them as a knee, they would take minutes."""
    places, begin_s = np.arange(100_003.0), time.process_time()
    assert is_gradual(places)
    assert not is_gradual(np.where(places < 70_010, 1.0, 3.0))
    assert time.process_time() - begin_s < 5


@pytest.mark.parametrize("count", range(3))
def test_a_few_points_are_not_known_to_be_gradual(count: int) -> None:
    assert not is_gradual(np.arange(float(count)))
