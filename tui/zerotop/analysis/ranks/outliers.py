"""Which rank is different: the order in which to show ranks, and what the one that is behind spends its time in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.ranks.matrix import RECENT, Matrix, Metric, RankMatrix, median

Ints = NDArray[np.intp]

ALIKE = 0.03  # of an iteration, or of a sampled value: ranks that differ by less are alike
_LEAST_S = 0.001  # a difference of less is the noise of any two clocks
# Phases that a rank spends by itself: a cause. In the others ranks wait for each other, so that they show effects too.
_ALONE = (Metric.DATA, Metric.OTHER, Metric.FORWARD)
_MET = (Metric.BACKWARD, Metric.STEP)


def deviations(values: Matrix, scale: float) -> Matrix:
    """How far each rank's recent steps lie from the rank in the middle, (ranks,); 0 where less than ALIKE of ``scale``.

    What is now above and now below cancels out; what is always a little off counts as what is far off now and then.
    """
    recent = values[:, -RECENT:]
    if not recent.size:
        return np.zeros(len(values), np.float32)
    off = recent - median(recent, 0)[None, :]
    known = ~np.isnan(off)
    mean = np.where(known, off, 0).sum(axis=1) / np.maximum(1, known.sum(axis=1))
    told = mean[known.any(axis=1)]
    # Of two ranks the lower one is the middle of every step: what is usual is to be that far off.
    far = np.abs(mean - (median(told[None, :], 1)[0] if len(told) else 0))
    return np.where(known.any(axis=1) & (far >= max(ALIKE * scale, 1e-9)), far, 0).astype(np.float32)


def outliers_first(deviation: Matrix) -> Ints:
    """Rows by deviation, the largest first; those that are alike stay in the order of their rank, so that nothing jumps."""
    return np.argsort(-deviation, kind="stable")


def scale_of(metric: Metric, matrix: RankMatrix, values: Matrix) -> float:
    """What a deviation is measured by: an iteration's time, or the usual size of what was sampled."""
    if metric in matrix.times:
        values = matrix.times[Metric.ITERATION]
    recent = np.abs(values[:, -RECENT:])
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
    def late_s(self) -> float:
        """By how much the rank differs."""
        return self.own_s - self.usual_s

    @property
    def share(self) -> float:
        """Of an iteration."""
        return self.late_s / self.iteration_s if self.iteration_s > 0 else 0.0

    @property
    def alike(self) -> bool:
        """Whether no rank stands out."""
        return self.share < ALIKE or self.late_s < _LEAST_S

    @property
    def waited_for(self) -> bool:
        """Whether the rank is by itself in that phase, so that others wait for it later."""
        return self.metric in _ALONE


def skew(matrix: RankMatrix) -> Skew | None:
    """Where ranks differ most. None where fewer than two ranks have finished a step.

    A phase that ranks spend alone is named before one in which they meet, unless the latter differs by far more: who is
    late in the first makes others wait in the second.
    """
    if int((matrix.ends > 0).any(axis=1).sum()) < 2:
        return None
    iteration = float(np.nanmedian(matrix.usual[Metric.ITERATION]))
    steps = min(RECENT, len(matrix.steps))
    found: list[tuple[float, Skew]] = []
    for metric in (*_ALONE, *_MET):
        own = matrix.usual[metric]
        usual = float(median(own[None, :], 1)[0])
        row = int(np.nanargmax(own))
        weight = 1.0 if metric in _ALONE else 0.5
        one = Skew(steps, len(matrix.processes), metric, row, float(own[row]), usual, iteration)
        found.append((weight * one.late_s, one))
    return max(found, key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class Compared:
    """One figure of a rank beside the rank in the middle: seconds, bytes or cores."""

    metric: Metric
    own: float
    usual: float
    alike: bool


def compared(matrix: RankMatrix, row: int, metric: Metric, values: Matrix) -> Compared:
    """The median of a rank's recent steps against the median over ranks."""
    each = matrix.usual[metric] if metric in matrix.usual else median(values[:, -RECENT:], 1)
    own, usual = float(each[row]), float(median(each[None, :], 1)[0])
    scale = scale_of(metric, matrix, values)
    return Compared(metric, own, usual, not abs(own - usual) >= ALIKE * scale)
