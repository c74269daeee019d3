"""Ranks that differ from the others: their order, and the phase in which the slowest one spends its time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.ranks.delays import RankDelay
from zerotop.analysis.ranks.matrix import Matrix, RankMatrix, RankMetric, compute_median

Ints = NDArray[np.intp]

ALIKE_SHARE = 0.03  # of an iteration or a sampled value: ranks that differ by less are alike
_ONSET_SHARE = 0.9  # share of the steps since a difference began that show it
WARNING_SHARE = 0.1  # of an iteration: larger differences are a warning
_DELAY_SHARE = 0.05  # of an iteration: a rank for which others wait this long is shown first
_SAME_DELAY = 1.25  # times: by as much a delay differs from the one that a finding told of a part of its steps
_FEWEST_TIMED = 8  # steps with phases of each rank that show it, in many
_CLEAR = 2.0  # standard errors of the difference's mean over steps: smaller differences are chance
_MIN_LAG_S = 0.001  # smaller differences are noise of the clocks
# Phases without communication show causes. In the others ranks wait for each other, so they show effects too.
# With sharded parameters they do so in the forward, too.
_ALONE_METRICS = (RankMetric.DATA, RankMetric.OTHER, RankMetric.APART, RankMetric.FORWARD)
MEETING_METRICS = (RankMetric.BACKWARD, RankMetric.STEP)


def measure_deviations(matrix: RankMatrix, metric: RankMetric, values: Matrix) -> Matrix:
    """Return how far each rank deviates in a metric, (ranks,), by its figures; ``values`` are those of the metric."""
    figured = matrix.find_figured(metric, values)
    return compute_deviations(figured, find_least_difference(metric, matrix, values))


def compute_deviations(values: Matrix, least: float) -> Matrix:
    """Return each rank's mean distance from the median rank, shape (ranks,); 0 below ``least``.

    Steps above and below the median cancel out. A small constant distance counts as much as a large rare one.
    """
    if not values.size:
        return np.zeros(len(values), np.float32)
    distance = values - compute_median(values, 0)[None, :]
    known = ~np.isnan(distance)
    mean = np.where(known, distance, 0).sum(axis=1) / np.maximum(1, known.sum(axis=1))
    known_means = mean[known.any(axis=1)]
    # The median of two is the lower one in every step: subtract the usual distance.
    deviation = np.abs(mean - (compute_median(known_means[None, :], 1)[0] if len(known_means) else 0))
    return np.where(known.any(axis=1) & (deviation >= least), deviation, 0).astype(np.float32)


def is_metric_alike(matrix: RankMatrix, metric: RankMetric, values: Matrix) -> bool:
    """Whether ranks differ neither in their steps nor in their figures."""
    figures = matrix.find_usual(metric, values)
    spread = float(np.nanmax(figures) - np.nanmin(figures)) if not np.isnan(figures).all() else 0.0
    return spread < find_least_difference(metric, matrix, values) and not measure_deviations(matrix, metric, values).any()


def order_outliers(deviation: Matrix) -> Ints:
    """Return rows by deviation, largest first. Similar ones stay in order of rank, so that rows do not jump."""
    return np.argsort(-deviation, kind="stable")


def find_least_difference(metric: RankMetric, matrix: RankMatrix, values: Matrix) -> float:
    """Return from which difference on ranks are not alike: a share of the iteration, or of a sampled value's median."""
    if metric in matrix.times:
        return max(ALIKE_SHARE * float(np.nanmedian(matrix.usual_times[RankMetric.ITERATION])), _MIN_LAG_S)
    recent = np.abs(matrix.cut_recent(values))
    return max(ALIKE_SHARE * float(np.nanmedian(recent)) if not np.isnan(recent).all() else 0.0, 1e-9)


@dataclass(frozen=True)
class Skew:
    """The largest difference between ranks in the usual time of a phase, in the steps since it began."""

    steps: int  # since it began, of the recent ones
    since_step: int | None  # the step in which it began; None if it is as old as the figures
    ranks: int
    metric: RankMetric
    row: int  # of the rank in the matrix
    own_s: float
    usual_s: float  # of the median rank, or of the other one of two
    iteration_s: float
    delay_s: float  # for how long the others usually wait for this rank
    longest_delay_s: float  # the same of the rank for which they wait longest
    timed_steps: int  # those whose phases are known: those of others are estimated from them
    meets_in_forward: bool = False  # ranks wait for each other in the forward, too
    is_in_each: bool = True  # most of the steps show it; else it is an average
    most_s: float = 0.0  # the largest difference of a rank from the usual one, longer or shorter, in any phase
    told: RankDelay | None = None  # the same delay, as a finding has measured it
    is_clear: bool = True  # larger than its spread over the steps explains
    fewest_timed: int | None = None  # as ``timed_steps``, of the rank or the usual other one, whichever has fewer

    @property
    def lag_s(self) -> float:
        """Difference from the usual time."""
        return self.own_s - self.usual_s

    @property
    def iteration_share(self) -> float:
        """Lag as a share of an iteration."""
        return self.lag_s / self.iteration_s if self.iteration_s > 0 else 0.0

    @property
    def delay_share(self) -> float:
        """Delay as a share of an iteration."""
        return self.delay_s / self.iteration_s if self.iteration_s > 0 else 0.0

    @property
    def is_alike(self) -> bool:
        """Whether no rank stands out."""
        is_small = self.iteration_share < ALIKE_SHARE or self.lag_s < _MIN_LAG_S
        return is_small or not self.is_clear or not self.is_well_known

    @property
    def is_waited_for(self) -> bool:
        """Whether ranks do not communicate in that phase, so that the others wait for this rank later.

        They do not wait where it makes up for the phase in another one.
        """
        is_alone = _is_alone(self.metric, self.meets_in_forward)
        return is_alone and self.delay_s >= self.lag_s / 2 and self.is_well_known and self.is_clear

    @property
    def is_effect(self) -> bool:
        """Whether the rank waits for others, and not they for it: ranks meet in that phase, and none is late."""
        is_alone = _is_alone(self.metric, self.meets_in_forward)
        return not is_alone and self.longest_delay_s < _DELAY_SHARE * self.iteration_s

    @property
    def delays_others(self) -> bool:
        """Whether the others wait for this rank longer than by chance."""
        return not self.is_alike and self.is_waited_for and self.iteration_share >= _DELAY_SHARE

    @property
    def is_well_known(self) -> bool:
        """Whether enough steps were recorded with phases to say who waits for whom."""
        timed = self.timed_steps if self.fewest_timed is None else self.fewest_timed
        return timed >= min(_FEWEST_TIMED, self.steps)


def find_skew(matrix: RankMatrix) -> Skew | None:
    """Find where ranks differ most. None where fewer than two ranks have finished a step.

    Phases without communication come first, unless another differs by far more: a rank that is late in the former makes
    others wait in the latter.
    """
    if int((matrix.ends > 0).any(axis=1).sum()) < 2:
        return None
    weighted: list[tuple[bool, float, RankMetric, int]] = []
    for metric in (*_ALONE_METRICS, *MEETING_METRICS):
        own = matrix.usual_times[metric]
        row = int(np.nanargmax(own))
        weight = 1.0 if _is_alone(metric, matrix.meets_in_forward) else 0.5
        lag_s = float(own[row]) - _find_usual(own)
        # Ranks are only alike if no phase differs.
        differs = lag_s >= find_least_difference(metric, matrix, matrix.times[metric])
        weighted.append((differs, weight * lag_s, metric, row))
    _, _, metric, row = max(weighted, key=lambda entry: entry[:2])
    skew = _measure_skew(matrix, metric, row)
    return replace(skew, told=_find_told(matrix, skew))


def _find_told(matrix: RankMatrix, skew: Skew) -> RankDelay | None:
    """Return the last delay of this rank that findings tell; None where it is not of about the length it has now."""
    rank = int(matrix.rank_numbers[skew.row])
    told = next((delay for delay in reversed(matrix.delays) if delay.rank == rank), None)
    is_same = told is not None and skew.delays_others and 1 / _SAME_DELAY <= skew.delay_s / told.late_s <= _SAME_DELAY
    return told if is_same else None


def _is_alone(metric: RankMetric, meets_in_forward: bool) -> bool:
    return metric in _ALONE_METRICS and not (metric is RankMetric.FORWARD and meets_in_forward)


def _find_usual(own: Matrix) -> float:
    return float(compute_median(own[None, :], 1)[0])


def _measure_skew(matrix: RankMatrix, metric: RankMetric, row: int) -> Skew:
    """Measure a rank's lag over the steps since it began; an effect over all that other figures are of."""
    recent = matrix.cut_recent(matrix.times[metric])
    is_compared = np.count_nonzero(~np.isnan(recent), axis=0) > 1
    lag = np.where(is_compared, recent[row] - compute_median(recent, 0), np.nan)
    if np.count_nonzero(is_compared) < min(_FEWEST_TIMED, len(lag)):
        return replace(_measure_since(matrix, metric, row, 0), is_in_each=False)
    usual = matrix.usual_times[metric]
    if float(np.nanmedian(lag)) < (float(usual[row]) - _find_usual(usual)) / 2:  # it has pauses, now and then
        return replace(_measure_since(matrix, metric, row, 0), is_in_each=False)
    skew = _measure_since(matrix, metric, row, _find_onset(lag, float(np.nanmedian(lag)) / 2))
    return _measure_since(matrix, metric, row, 0) if skew.is_effect or skew.is_alike else skew


def _measure_since(matrix: RankMatrix, metric: RankMetric, row: int, onset: int) -> Skew:
    since = int(matrix.recent_steps[onset]) if onset or matrix.is_delayed else None
    # Of a matrix of these steps, as the table is: phases of counted steps are estimated from the others of the same matrix.
    matrix = matrix.cut_to(len(matrix.recent_steps) - onset)
    own, iterations, delays = (matrix.usual_times[one] for one in (metric, RankMetric.ITERATION, RankMetric.WAIT))
    figures = float(own[row]), _find_usual(own), float(np.nanmedian(iterations)), float(delays[row])
    longest, timed = float(np.nanmax(delays, initial=0.0)), matrix.figured_steps
    most = max(_find_most(matrix.usual_times[one]) for one in (*_ALONE_METRICS, *MEETING_METRICS))
    return Skew(
        matrix.recent_count,
        since,
        len(matrix.processes),
        metric,
        row,
        *figures,
        longest,
        timed,
        matrix.meets_in_forward,
        most_s=most,
        is_clear=_is_clear(matrix, metric, row),
        fewest_timed=_count_fewest_timed(matrix, row),
    )


def _is_clear(matrix: RankMatrix, metric: RankMetric, row: int) -> bool:
    """Whether a rank's mean difference from the others is too large for chance, given its spread over the steps."""
    values = matrix.find_figured(metric, matrix.times[metric])
    lag = values[row] - compute_median(np.delete(values, row, axis=0), 0)
    lag = lag[~np.isnan(lag)].astype(np.float64)
    return len(lag) < 2 or bool(lag.mean() >= _CLEAR * lag.std(ddof=1) / np.sqrt(len(lag)))


def _count_fewest_timed(matrix: RankMatrix, row: int) -> int | None:
    """Return how many steps with phases a rank has, or the usual other one if it has fewer; None if none has phases."""
    if not matrix.has_phases:
        return None
    timed = (~np.isnan(matrix.cut_recent(matrix.times[RankMetric.OTHER]))).sum(axis=1)
    return int(min(timed[row], np.median(np.delete(timed, row))))


def _find_most(own: Matrix) -> float:
    """Return the largest difference from the median rank, of longer and of shorter ones."""
    return float(np.nanmax(np.abs(own - _find_usual(own)), initial=0.0))


def _find_onset(lag: Matrix, least: float) -> int:
    """Return the step from which on nearly all lag by ``least``; 0 if there is no such step."""
    late = np.nan_to_num(lag, nan=np.inf) >= least  # an unknown step ends nothing, and begins nothing
    share = np.cumsum(late[::-1])[::-1] / np.arange(len(late), 0, -1)
    found = np.flatnonzero(late & ~np.isnan(lag) & (share >= _ONSET_SHARE))
    return int(found[0]) if len(found) else 0


@dataclass(frozen=True)
class RankComparison:
    """One figure of a rank beside the median rank's, of two ranks beside the other's: seconds, bytes or cores."""

    metric: RankMetric
    own: float
    usual: float
    is_alike: bool


def compare_rank(matrix: RankMatrix, row: int, metric: RankMetric, values: Matrix) -> RankComparison:
    """Compare the usual value of a rank's recent steps with the median over ranks, of two ranks with the other one's."""
    figures = matrix.find_usual(metric, values)
    own, usual = float(figures[row]), float(figures[1 - row]) if len(figures) == 2 else _find_usual(figures)
    is_alike = not abs(own - usual) >= find_least_difference(metric, matrix, values)
    return RankComparison(metric, own, usual, is_alike)
