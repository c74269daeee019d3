"""Which rank is different: the order in which to show ranks, and what the one that is behind spends its time in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.ranks.matrix import RECENT_STEPS, Matrix, Metric, RankMatrix, compute_median

Ints = NDArray[np.intp]

ALIKE_SHARE = 0.03  # of an iteration, or of a sampled value: ranks that differ by less are alike
_MIN_LAG_S = 0.001  # a difference of less is the noise of any two clocks
# Phases that a rank spends by itself: a cause. In the others ranks wait for each other, so that they show effects too.
_ALONE_METRICS = (Metric.DATA, Metric.OTHER, Metric.FORWARD)
_MEETING_METRICS = (Metric.BACKWARD, Metric.STEP)


def compute_deviations(values: Matrix, scale: float) -> Matrix:
    """How far each rank's recent steps lie from the rank in the middle, (ranks,); 0 where less than ALIKE of ``scale``.

    What is now above and now below cancels out; what is always a little off counts as what is far off now and then.
    """
    recent = values[:, -RECENT_STEPS:]
    if not recent.size:
        return np.zeros(len(values), np.float32)
    off = recent - compute_median(recent, 0)[None, :]
    known = ~np.isnan(off)
    mean = np.where(known, off, 0).sum(axis=1) / np.maximum(1, known.sum(axis=1))
    told = mean[known.any(axis=1)]
    # Of two ranks the lower one is the middle of every step: what is usual is to be that far off.
    far = np.abs(mean - (compute_median(told[None, :], 1)[0] if len(told) else 0))
    return np.where(known.any(axis=1) & (far >= max(ALIKE_SHARE * scale, 1e-9)), far, 0).astype(np.float32)


def order_outliers(deviation: Matrix) -> Ints:
    """Rows by deviation, the largest first; those that are alike stay in the order of their rank, so that nothing jumps."""
    return np.argsort(-deviation, kind="stable")


def choose_scale(metric: Metric, matrix: RankMatrix, values: Matrix) -> float:
    """What a deviation is measured by: an iteration's time, or the usual size of what was sampled."""
    if metric in matrix.times:
        values = matrix.times[Metric.ITERATION]
    recent = np.abs(values[:, -RECENT_STEPS:])
    return float(np.nanmedian(recent)) if recent.size and not np.isnan(recent).all() else 0.0


@dataclass(frozen=True)
class Skew:
    """The largest difference between ranks in the time of a phase, medians of the last ``steps`` steps."""

    steps: int
    ranks: int
    metric: Metric
    row: int  # of the matrix
    own_s: float
    usual_s: float  # of the rank in the middle, or of the other one of two
    iteration_s: float

    @property
    def lag_s(self) -> float:
        """By how much the rank differs."""
        return self.own_s - self.usual_s

    @property
    def iteration_share(self) -> float:
        """Of an iteration."""
        return self.lag_s / self.iteration_s if self.iteration_s > 0 else 0.0

    @property
    def is_alike(self) -> bool:
        """Whether no rank stands out."""
        return self.iteration_share < ALIKE_SHARE or self.lag_s < _MIN_LAG_S

    @property
    def is_waited_for(self) -> bool:
        """Whether the rank is by itself in that phase, so that others wait for it later."""
        return self.metric in _ALONE_METRICS


def find_skew(matrix: RankMatrix) -> Skew | None:
    """Where ranks differ most. None where fewer than two ranks have finished a step.

    A phase that ranks spend alone is named before one in which they meet, unless the latter differs by far more: who is
    late in the first makes others wait in the second.
    """
    if int((matrix.ends > 0).any(axis=1).sum()) < 2:
        return None
    iteration = float(np.nanmedian(matrix.usual_times[Metric.ITERATION]))
    steps = min(RECENT_STEPS, len(matrix.steps))
    found: list[tuple[float, Skew]] = []
    for metric in (*_ALONE_METRICS, *_MEETING_METRICS):
        own = matrix.usual_times[metric]
        usual = float(compute_median(own[None, :], 1)[0])
        row = int(np.nanargmax(own))
        weight = 1.0 if metric in _ALONE_METRICS else 0.5
        one = Skew(steps, len(matrix.processes), metric, row, float(own[row]), usual, iteration)
        found.append((weight * one.lag_s, one))
    return max(found, key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class RankComparison:
    """One figure of a rank beside the rank in the middle: seconds, bytes or cores."""

    metric: Metric
    own: float
    usual: float
    is_alike: bool


def compare_rank(matrix: RankMatrix, row: int, metric: Metric, values: Matrix) -> RankComparison:
    """The median of a rank's recent steps against the median over ranks."""
    each = matrix.usual_times[metric] if metric in matrix.usual_times else compute_median(values[:, -RECENT_STEPS:], 1)
    own, usual = float(each[row]), float(compute_median(each[None, :], 1)[0])
    scale = choose_scale(metric, matrix, values)
    return RankComparison(metric, own, usual, not abs(own - usual) >= ALIKE_SHARE * scale)
