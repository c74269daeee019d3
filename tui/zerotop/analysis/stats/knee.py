"""A series that is flat at first and then rises along a line: where the flat part ends, and the line beyond it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from zerotop.recording.samples import Floats

# Points on each side of a knee: a line through two is always exact.
LEAST_FLAT, LEAST_LINE = 2, 3
# Knees that are tried between two neighbouring points.
_TRIALS = 40
# Differences up to this share of the range count as noise: without it a flat part of two equal points always wins.
_NOISE_SHARE = 0.005
# The most blocks of points among which a knee or a jump is looked for: the time grows with their square.
_MOST_BLOCKS = 400


@dataclass(frozen=True, slots=True)
class KneeFit:
    """A flat part up to ``knee_x`` and the line ``slope * x + intercept`` beyond it."""

    slope: float
    intercept: float
    r_squared: float  # of the points on the line
    line_points: int
    knee_x: float | None = None  # None without a flat part
    flat_level: float | None = None

    def predict(self, x: float) -> float:
        """Return the fitted value at ``x``."""
        value = self.slope * x + self.intercept
        if self.knee_x is not None and self.flat_level is not None and x < self.knee_x:
            return self.flat_level
        return value

    def solve(self, y: float) -> float | None:
        """Return the ``x`` at which the line reaches ``y``; None if it does not rise or starts above."""
        if self.slope <= 0:
            return None
        x = (y - self.intercept) / self.slope
        return x if x > (self.knee_x or 0.0) else None


def fit_knee(x: Floats, y: Floats) -> KneeFit | None:
    """Fit ``level + slope * max(0, x - knee)`` for the knee, then a line by least squares to the points beyond it.

    A knee is reported if it explains the points better than one line by the Bayesian information criterion. With fewer than
    LEAST_FLAT + LEAST_LINE points there is only the line. ``x`` and ``y``: shape (n,), in any order. Return None for fewer
    than two different values of ``x``.
    """
    order = np.argsort(x, kind="stable")
    x, y = np.asarray(x, np.float64)[order], np.asarray(y, np.float64)[order]
    if len(np.unique(x)) < 2:
        return None
    knee_x = _find_knee(x, y)
    level = float(np.median(y[x <= knee_x])) if knee_x is not None else None
    beyond = x >= knee_x if knee_x is not None else np.ones(len(x), np.bool_)
    slope, intercept = _fit_line(x[beyond], y[beyond])
    r_squared = _compute_r_squared(y[beyond], slope * x[beyond] + intercept)
    if knee_x is not None and level is not None and slope > 0:
        knee_x = max(float(x[0]), (level - intercept) / slope)
    return KneeFit(slope, intercept, r_squared, int(beyond.sum()), knee_x, level)


def _find_knee(x: Floats, y: Floats) -> float | None:
    """Return the knee; None if one line is as good."""
    if len(x) < LEAST_FLAT + LEAST_LINE:
        return None
    edges = x[LEAST_FLAT - 1 : len(x) - LEAST_LINE + 1]
    knees = np.unique(np.concatenate([np.linspace(low, high, _TRIALS) for low, high in pairwise(edges)] or [edges]))
    rises = np.maximum(0.0, x - knees[:, None])
    centred = rises - rises.mean(axis=1, keepdims=True)
    slopes = (centred * (y - y.mean())).sum(axis=1) / (centred**2).sum(axis=1)
    levels = y.mean() - slopes * rises.mean(axis=1)
    errors = ((slopes[:, None] * rises + levels[:, None] - y) ** 2).sum(axis=1)
    errors[slopes <= 0] = np.inf
    best = int(errors.argmin())
    slope, intercept = _fit_line(x, y)
    line_error = float(((slope * x + intercept - y) ** 2).sum())
    noise = len(x) * (_NOISE_SHARE * float(np.ptp(y))) ** 2
    is_better = (line_error + noise) > (float(errors[best]) + noise) * len(x) ** (1 / len(x))
    return float(knees[best]) if is_better else None


def _fit_line(x: Floats, y: Floats) -> tuple[float, float]:
    """Return slope and intercept by least squares."""
    centred = x - x.mean()
    spread = float((centred**2).sum())
    slope = float((centred * (y - y.mean())).sum()) / spread if spread > 0 else 0.0
    return slope, float(y.mean()) - slope * float(x.mean())


def _compute_r_squared(y: Floats, fitted: Floats) -> float:
    total = float(((y - y.mean()) ** 2).sum())
    return 1.0 - float(((y - fitted) ** 2).sum()) / total if total > 0 else 1.0


def is_gradual(points: Floats, places: Floats | None = None) -> bool:
    """Whether points rose along a line, perhaps after a level part, and not in one jump, which is a change of level.

    ``places``: where the points are, if not in equal distances.
    """
    places = np.arange(len(points), dtype=np.float64) if places is None else places
    points, places = _average_blocks(points), _average_blocks(places)
    lines = (_measure_misfit(points, np.maximum(0.0, places - knee)) for knee in places[:-2])
    steps = (_measure_misfit(points, (places >= at).astype(np.float64)) for at in places[1:])
    return min(lines, default=inf) < min(steps, default=inf)


def _average_blocks(values: Floats) -> Floats:
    """Return the means of so few blocks of the values that each can be tried as a knee."""
    begins = np.arange(0, len(values), -(-len(values) // _MOST_BLOCKS) or 1)
    return np.asarray(np.add.reduceat(values, begins) / np.diff(begins, append=len(values)), np.float64)


def _measure_misfit(points: Floats, shape: Floats) -> float:
    """Return the sum of squared differences from the level and the multiple of ``shape`` that fit best."""
    centred, rest = shape - shape.mean(), points - points.mean()
    return float(np.square(rest - centred * (centred @ rest) / (centred @ centred)).sum())
