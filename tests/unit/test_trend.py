"""Rises in made-up series: noise and single steps are none, and pieces make no difference."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from zerotop.analysis.stats.trend import TrendFinder

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def make_series(count: int, slope: float, noise: float, seed: int = 1) -> Floats:
    """Return values around 1 that rise by ``slope`` each."""
    return 1 + slope * np.arange(count) + noise * np.random.default_rng(seed).standard_normal(count)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_no_rise(noise: float, seed: int) -> None:
    assert list(TrendFinder(6, 0.2).find_rises(make_series(20_000, 0, noise, seed), 0, share=0.15)) == []


@pytest.mark.parametrize("slope", [0.02, 0.002, 0.0002, 0.00002])
def test_a_rise_is_found_whatever_its_pace(slope: float) -> None:
    rise = next(TrendFinder(6, 0.2).find_rises(make_series(int(2 / slope), slope, 0.02), 0, share=0.15))
    assert rise.slope == pytest.approx(slope, rel=0.3)
    assert rise.high >= 1.15 * rise.low
    # Found when it has risen by 15 %, or as soon as there are enough blocks.
    assert slope * rise.end < 1.0


def test_one_step_is_no_rise_but_many_are() -> None:
    assert list(TrendFinder(6, 0.2).find_rises(np.repeat([1.0, 2.0], 200), 0, share=0.15)) == []
    assert list(TrendFinder(6, 0.2).find_rises(np.repeat([1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2], 16), 0, share=0.15)) != []


def test_a_cache_that_fills_is_no_growth() -> None:
    filling = 1e9 * (1 - np.exp(-np.arange(400) / 20)) + 1e8
    assert list(TrendFinder(4, 0.8).find_rises(filling, 0, share=0.02, least=256 << 20)) == []


def test_a_long_rise_is_repeated_seldom() -> None:
    highs = [rise.high for rise in TrendFinder(6, 0.2).find_rises(make_series(5000, 0.01, 0.01), 0, share=0.15)]
    assert 3 <= len(highs) <= 15
    assert all(later >= 1.5 * before for before, later in pairwise(highs))


def test_a_rise_that_goes_on_need_not_be_even() -> None:
    """It gains more and more speed, and is level in the end."""
    growth = np.concatenate([np.full(100, 0.02), 0.02 * np.exp(0.015 * np.arange(200)), np.zeros(100)])
    highs = [rise.high for rise in TrendFinder(4, 0.8).find_rises(1 + np.cumsum(growth), 0, share=0.5, least=1.5)]
    assert highs[-1] > 20


def test_unknown_values_are_no_rise() -> None:
    values = make_series(400, 0.01, 0.0)
    values[::7] = -1
    assert list(TrendFinder(6, 0.2).find_rises(values, 0, share=0.15)) == []


@pytest.mark.parametrize("piece", [1, 5, 8, 33])
def test_values_may_come_in_pieces(piece: int) -> None:
    values = make_series(900, 0.004, 0.02)
    trend = TrendFinder(6, 0.2)
    found: list[Any] = []
    for end in range(0, len(values) + piece, piece):
        found += trend.find_rises(values[:end], 5, share=0.15)
    assert found == list(TrendFinder(6, 0.2).find_rises(values, 5, share=0.15)) != []
