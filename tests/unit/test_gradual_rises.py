"""What a drift is: iterations that take ever longer, not those that take longer from one step on."""

from __future__ import annotations

import numpy as np
import pytest

from zerotop.analysis.findings.pace.iteration_drift import _is_gradual
from zerotop.analysis.stats.trend import Rise

STEPS = np.arange(96.0)


@pytest.mark.parametrize(
    ("shape", "is_gradual"),
    [
        (STEPS, True),
        (np.maximum(0, STEPS - 60), True),
        (np.square(STEPS), True),
        (100.0 * (STEPS >= 30), False),
        (100.0 * (STEPS >= 80), False),
    ],
)
@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])
def test_a_jump_is_no_drift(shape: np.ndarray, is_gradual: bool, block: int, noise: float) -> None:
    values = 0.1 * (1 + shape / shape.max()) * (1 + noise * np.random.default_rng(1).standard_normal(len(shape)))
    assert _is_gradual(values, Rise(0, len(values), block, values[0], values[-1])) == is_gradual
