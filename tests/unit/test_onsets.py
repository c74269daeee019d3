"""The step with which a change began, where most steps were only counted."""

from __future__ import annotations

import numpy as np
import pytest

from zerotop.analysis.findings.support.steps.onsets import find_growth_onset, find_onset

MIB = 1 << 20


def make_steps(seconds: list[float]) -> np.ndarray:
    steps = np.zeros(len(seconds), [("step", "i8"), ("iteration_s", "f8")])
    steps["step"], steps["iteration_s"] = np.arange(len(seconds)), seconds
    return steps


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([0.01] * 40 + [0.08] * 40, 40),
        ([0.01] * 40 + [0.5, 0.01, 0.3, 0.01] + [0.08] * 36, 44),
        ([0.08] * 40 + [0.01] * 40, 40),
        ([0.01] * 20 + [0.08] * 60, 21),
        ([0.01] * 60 + [0.08] * 20, 60),
        ([0.0100] * 40 + [0.0104] * 40, 60),
        ([0.01] * 80, 60),
    ],
    ids=["longer", "single long steps before", "shorter", "before the gap", "after it", "too little", "no change"],
)
def test_the_onset_is_between_a_step_as_before_and_one_that_is_changed(seconds: list[float], expected: int) -> None:
    """Steps 20 and 60 have phases: the latter shows the change."""
    assert find_onset(make_steps(seconds), 20, 60) == expected


def test_without_steps_between_the_first_changed_one_is_taken() -> None:
    assert find_onset(make_steps([0.01] * 20 + [0.08] * 20), 19, 20) == 20
    assert find_onset(make_steps([0.01] * 20), -1, 0) == 0


@pytest.mark.parametrize(("begin", "expected"), [(40, 40), (59, 59), (21, 21), (0, 21)])
def test_growth_began_where_it_would_have_been_nothing(begin: int, expected: int) -> None:
    """Read after steps 20, 60, 61 and 100; 32 MiB in each step from ``begin`` on."""
    steps = np.array([20, 60, 61, 100])
    held = 1000 * MIB + 32 * MIB * np.maximum(0, steps - begin + 1)
    assert find_growth_onset(steps, held, 32.0 * MIB) == expected


def test_growth_had_not_begun_where_values_hardly_differ() -> None:
    steps = np.array([20, 21, 60, 100])
    held = 1000 * MIB + MIB * np.array([0, 1, 32 * 21, 32 * 61])
    assert find_growth_onset(steps, held, 32.0 * MIB) == 40
