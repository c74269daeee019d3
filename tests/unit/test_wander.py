"""The wandering of a level in made-up series."""

from __future__ import annotations

import numpy as np
import pytest

from zerotop.analysis.stats.wander import BLOCK, Floats, compute_levels, find_last_level, stands_out


def wander(count: int, seed: int) -> Floats:
    """Return a level that goes up and down by a third, for some blocks at a time."""
    chance = np.random.default_rng(seed)
    return np.repeat(chance.choice([0.03, 0.035, 0.04], count // 40 + 1), 40)[:count] * chance.normal(1, 0.02, count)


def test_levels_are_medians_of_blocks() -> None:
    values = np.concatenate([np.full(BLOCK, 1.0), np.full(BLOCK, 2.0), np.full(4, 9.0)])
    values[[0, 12]] = 50.0, np.nan
    assert compute_levels(values).tolist() == [1.0, 2.0]
    assert compute_levels(np.array([3.0, 5.0])).tolist() == [4.0]
    assert not len(compute_levels(np.empty(0)))


@pytest.mark.parametrize("seed", range(5))
def test_a_level_that_was_visited_does_not_stand_out(seed: int) -> None:
    before = wander(400, seed)
    assert not stands_out(before, np.full(60, 0.04), times=1.0, floor=0.0)
    assert not stands_out(before, np.full(60, 0.045), times=2.0, floor=0.0)
    assert stands_out(before, np.full(60, 0.08), times=2.0, floor=0.0)


def test_few_steps_before_say_little_of_the_wandering() -> None:
    before = np.array([1.0] * BLOCK + [1.1] * BLOCK)
    assert not stands_out(before, np.full(30, 1.4), times=2.0, floor=0.0)
    assert stands_out(np.tile(before, 10), np.full(30, 1.4), times=2.0, floor=0.0)


def test_a_level_that_comes_back_does_not_stand_out() -> None:
    after = np.concatenate([np.full(40, 2.0), np.full(BLOCK, 1.0)])
    assert not stands_out(np.full(100, 1.0), after, times=0.0, floor=0.0)
    assert stands_out(np.full(100, 1.0), after[:40], times=2.0, floor=0.02)


def test_levels_on_the_far_side_say_nothing_about_this_one() -> None:
    """A job is faster for a block of steps now and then, and becomes slower by less than that; or the other way round."""
    before = np.repeat(np.where(np.arange(40) % 5, 0.018, 0.010), BLOCK)
    assert stands_out(before, np.full(60, 0.021), times=2.0, floor=0.0)
    assert not stands_out(0.030 - before, np.full(60, 0.021), times=2.0, floor=0.0)
    assert stands_out(0.030 - before, np.full(60, 0.009), times=2.0, floor=0.0)


@pytest.mark.parametrize(
    ("levels", "begin"),
    [
        ([(0.011, 90), (0.017, 111)], 90),
        ([(0.02, 35), (0.01, 60), (0.02, 200), (0.021, 45)], 295),
        ([(0.02, 200), (0.0205, 200)], 0),
        ([(0.02, 200), (0.05, 10)], 0),
        ([(0.02, 40)], 0),
        ([], 0),
    ],
    ids=["two levels", "four levels", "too near", "too short", "one level", "none"],
)
def test_the_last_level_begins_with_the_last_change(levels: list[tuple[float, int]], begin: int) -> None:
    values = np.concatenate([np.empty(0), *(np.full(count, level) for level, count in levels)])
    values *= np.random.default_rng(1).normal(1, 0.01, len(values))
    assert find_last_level(values, 0.04) == pytest.approx(begin, abs=BLOCK)


@pytest.mark.parametrize("seed", range(5))
def test_a_wandering_level_is_one_level(seed: int) -> None:
    assert find_last_level(wander(400, seed)[:370], 0.05) <= 330
