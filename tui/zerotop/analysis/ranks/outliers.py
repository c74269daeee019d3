"""Ranks that differ from the others: their order, and the phase in which the slowest one spends its time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.ranks.matrix import RECENT_STEPS, Matrix, Metric, RankMatrix, compute_median

Ints = NDArray[np.intp]

ALIKE_SHARE = 0.03  # of an iteration or a sampled value: ranks that differ by less are alike
_MIN_LAG_S = 0.001  # smaller differences are noise of the clocks
# Phases without communication show causes; in the others ranks wait for each other, which shows effects too.
_ALONE_METRICS = (Metric.DATA, Metric.OTHER, Metric.FORWARD)
_MEETING_METRICS = (Metric.BACKWARD, Metric.STEP)


def compute_deviations(values: Matrix, scale: float) -> Matrix:
    """Return each rank's mean distance from the median rank in recent steps, (ranks,); 0 below ALIKE_SHARE of ``scale``.

    Steps above and below the median cancel out; a small constant distance counts as much as a rare large one.
    """
    recent = values[:, -RECENT_STEPS:]
    if not recent.size:
        return np.zeros(len(values), np.float32)
    distance = recent - compute_median(recent, 0)[None, :]
    known = ~np.isnan(distance)
    mean = np.where(known, distance, 0).sum(axis=1) / np.maximum(1, known.sum(axis=1))
    known_means = mean[known.any(axis=1)]
    # The median of two is the lower one in every step: subtract the usual distance.
    deviation = np.abs(mean - (compute_median(known_means[None, :], 1)[0] if len(known_means) else 0))
    return np.where(known.any(axis=1) & (deviation >= max(ALIKE_SHARE * scale, 1e-9)), deviation, 0).astype(np.float32)


def order_outliers(deviation: Matrix) -> Ints:
    """Return rows by deviation, largest first; alike ones stay in order of rank, so that rows do not jump."""
    return np.argsort(-deviation, kind="stable")


def choose_scale(metric: Metric, matrix: RankMatrix, values: Matrix) -> float:
    """Return the scale of a metric's deviations: the iteration time, or the median of a sampled value."""
    if metric in matrix.times:
        values = matrix.times[Metric.ITERATION]
    recent = np.abs(values[:, -RECENT_STEPS:])
    return float(np.nanmedian(recent)) if recent.size and not np.isnan(recent).all() else 0.0


@dataclass(frozen=True)
class Skew:
    """The largest difference between ranks in the time of a phase; medians over the last ``steps`` steps."""

    steps: int
    ranks: int
    metric: Metric
    row: int  # of the rank in the matrix
    own_s: float
    usual_s: float  # of the median rank, or of the other one of two
    iteration_s: float

    @property
    def lag_s(self) -> float:
        """Difference from the usual time."""
        return self.own_s - self.usual_s

    @property
    def iteration_share(self) -> float:
        """Lag as a share of an iteration."""
        return self.lag_s / self.iteration_s if self.iteration_s > 0 else 0.0

    @property
    def is_alike(self) -> bool:
        """Whether no rank stands out."""
        return self.iteration_share < ALIKE_SHARE or self.lag_s < _MIN_LAG_S

    @property
    def is_waited_for(self) -> bool:
        """Whether ranks do not communicate in that phase, so that others wait for this one later."""
        return self.metric in _ALONE_METRICS


def find_skew(matrix: RankMatrix) -> Skew | None:
    """Find where ranks differ most. None where fewer than two ranks have finished a step.

    Phases without communication come first, unless another differs by far more: a rank that is late in the former makes
    others wait in the latter.
    """
    if int((matrix.ends > 0).any(axis=1).sum()) < 2:
        return None
    iteration = float(np.nanmedian(matrix.usual_times[Metric.ITERATION]))
    steps = min(RECENT_STEPS, len(matrix.steps))
    weighted: list[tuple[float, Skew]] = []
    for metric in (*_ALONE_METRICS, *_MEETING_METRICS):
        own = matrix.usual_times[metric]
        usual = float(compute_median(own[None, :], 1)[0])
        row = int(np.nanargmax(own))
        weight = 1.0 if metric in _ALONE_METRICS else 0.5
        skew = Skew(steps, len(matrix.processes), metric, row, float(own[row]), usual, iteration)
        weighted.append((weight * skew.lag_s, skew))
    return max(weighted, key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class RankComparison:
    """One figure of a rank beside the median rank's: seconds, bytes or cores."""

    metric: Metric
    own: float
    usual: float
    is_alike: bool


def compare_rank(matrix: RankMatrix, row: int, metric: Metric, values: Matrix) -> RankComparison:
    """Compare the median of a rank's recent steps with the median over ranks."""
    medians = matrix.usual_times[metric] if metric in matrix.usual_times else compute_median(values[:, -RECENT_STEPS:], 1)
    own, usual = float(medians[row]), float(compute_median(medians[None, :], 1)[0])
    scale = choose_scale(metric, matrix, values)
    return RankComparison(metric, own, usual, not abs(own - usual) >= ALIKE_SHARE * scale)
