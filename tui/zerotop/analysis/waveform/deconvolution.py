"""What a sensor would have shown at each place of an iteration, from samples that each look back over a while.

A sample is the mean of what is looked for over its window: 200 ms for NVML's utilization, the time between two looks for
counters. Over many iterations windows begin everywhere, so that places shorter than a window can be told apart: a sampling
oscilloscope does the same. Found is the curve whose means over the windows come closest to the samples (most of them: single
ones far off count less), with as little change from place to place within a phase as they permit, and free to jump where a
phase ends. Where windows tell nothing, as when an iteration is much shorter than one, that curve is flat: the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Values at which 10 % and 90 % of samples lie below.
BAND = (0.1, 0.9)

# A change from one place to the next that is to be expected within a phase, as a share of all values seen, and the same
# where a phase ends.
_CHANGE, _JUMP = 0.1, 1.5
# The least error of a sample, likewise: a curve through all points would follow their rounding.
_LEAST_ERROR = 0.01
_USUAL_ERROR = 0.03
_ROUNDS = 3  # in which samples far off are told from others
_STEPS = 20  # of keeping the curve within its bounds, at most
# Readings so near to a phase's end, as a share of the iteration, were made at it.
_SAME_PLACE = 1e-4
_MOST_BAND_SAMPLES = 1200  # samples whose distances from the curve make its band: enough for a tenth and nine tenths


@dataclass(frozen=True, eq=False)
class Grid:
    """Places of an iteration: bins between ``edges`` (seconds from its begin), ``breaks``: edges at which a phase ends."""

    edges: Floats  # (bins + 1,), from 0 to the iteration's length
    breaks: NDArray[np.bool_]  # (bins,): whether a phase ends at the end of each bin; after the last the next one begins

    @property
    def length_s(self) -> float:
        """How long an iteration is."""
        return float(self.edges[-1])

    @property
    def bin_widths(self) -> Floats:
        """Seconds of each bin."""
        return np.diff(self.edges)


def make_grid(boundaries: Floats, most: int = 100) -> Grid:
    """About ``most`` bins, none over a boundary (seconds, ascending, from 0 to the iteration's length).

    Boundaries closer than half a bin to the one before are left out: nothing is seen of what is so short.
    """
    length = float(boundaries[-1])
    kept = [0.0]
    for boundary in boundaries[1:-1].tolist():
        if boundary - kept[-1] >= length / most / 2 and length - boundary >= length / most / 2:
            kept.append(boundary)
    ends = [*kept[1:], length]
    edges, breaks = [0.0], []
    for begin, end in zip(kept, ends, strict=True):
        count = max(1, round((end - begin) / length * most))
        edges += [begin + (end - begin) * (place + 1) / count for place in range(count)]
        breaks += [False] * (count - 1) + [True]
    return Grid(np.array(edges), np.array(breaks))


@dataclass(frozen=True, eq=False)
class Curve:
    """What was found for each bin: the middle one of the samples there, and where a tenth and nine tenths of them lie."""

    median: Floats
    low: Floats
    high: Floats
    error: float  # median distance of a sample from what the curve says it should be


def unfold(grid: Grid, begins: Floats, lengths: Floats, values: Floats, *, most: float = np.inf) -> Curve:
    """The curve between 0 and ``most`` behind samples.

    Args:
        begins: where each window begins, seconds from the begin of its iteration.
        lengths: seconds of the window, above 0; may be longer than an iteration.
    """
    groups, of = _group_samples(grid, begins, lengths, values)
    spread = max(float(np.ptp(values)), 1e-12)
    error = spread * 0.05
    weights = groups.counts.copy()
    curve = np.full(len(grid.bin_widths), float(np.median(values)))
    for _ in range(_ROUNDS):
        curve = _fit_curve(grid, groups, weights, (error / spread) ** 2, most)
        distance = np.abs(groups.compute_residuals(curve))
        error = max(_compute_weighted_median(distance, groups.counts), _LEAST_ERROR * spread)
        weights = groups.counts * np.minimum(1.0, 1.5 * error / np.maximum(distance, error))
    away = values + (groups.compute_residuals(curve) - groups.values)[of]
    low, high = _measure_band(groups, of, away)
    return Curve(curve, np.clip(curve + low, 0, most), np.clip(curve + high, 0, most), float(np.median(np.abs(away))))


def make_flat_curve(values: Floats) -> Curve:
    """The same everywhere: the mean of samples whose windows are too long to tell places apart, and their spread."""
    low, high = np.quantile(values, BAND)
    mean = float(values.mean())
    ends = (np.full(2, mean), np.full(2, min(mean, low)), np.full(2, max(mean, high)))
    return Curve(*ends, float(np.median(np.abs(values - mean))))


def measure_misfit(grid: Grid, begins: Floats, lengths: Floats, values: Floats, *, most: float = np.inf) -> float:
    """How badly the best curve does, for comparing where windows may lie: by what it misses, and how much it must change
    within phases, where a change is not to be expected. 0 without samples.
    """
    if not len(values):
        return 0.0
    groups = _SampleGroups(_compute_shares(grid, begins, lengths), values, np.ones(len(values)))
    scale = max(float(np.ptp(values)), 1e-12)
    curve = _fit_curve(grid, groups, groups.counts, _USUAL_ERROR**2, most)
    missed = (groups.counts * (groups.compute_residuals(curve) / (_USUAL_ERROR * scale)) ** 2).sum()
    changes = (np.roll(curve, -1) - curve) / scale / np.where(grid.breaks, _JUMP, _CHANGE)
    return float((missed + (changes**2).sum()) / len(values))


@dataclass(frozen=True, eq=False)
class _SampleGroups:
    """Samples, or groups of them: the share of each window that lies in each bin, what it says, and how many say so."""

    rows: Floats  # (samples, bins)
    values: Floats
    counts: Floats

    def compute_residuals(self, curve: Floats) -> Floats:
        """By how much each value lies above what the curve says it should be."""
        return np.asarray(self.values - self.rows @ curve, np.float64)


def _group_samples(grid: Grid, begins: Floats, lengths: Floats, values: Floats) -> tuple[_SampleGroups, Ints]:
    """Samples whose windows begin and end in the same bins as one, with the middle of their values; and which is whose."""
    bins, length = len(grid.bin_widths), grid.length_s
    ends = begins + lengths
    cycles = np.floor(ends / length)
    first = np.clip(np.searchsorted(grid.edges, begins, "right") - 1, 0, bins - 1)
    last = np.clip(np.searchsorted(grid.edges, ends - cycles * length, "right") - 1, 0, bins - 1)
    keys = (first * bins + last) * (int(cycles.max(initial=0)) + 1) + cycles.astype(np.int64)
    order = np.lexsort((values, keys))
    _, of, counts = np.unique(keys, return_inverse=True, return_counts=True)
    sorted_values, starts = values[order], np.cumsum(counts) - counts
    middles = (sorted_values[starts + (counts - 1) // 2] + sorted_values[starts + counts // 2]) / 2
    rows = _compute_shares(grid, np.bincount(of, begins) / counts, np.bincount(of, lengths) / counts)
    return _SampleGroups(rows, middles, counts.astype(np.float64)), of


def _compute_shares(grid: Grid, begins: Floats, lengths: Floats) -> Floats:
    """The share of each window that lies in each bin, shape (windows, bins)."""
    shares = (_measure_seconds(grid, begins + lengths) - _measure_seconds(grid, begins)) / lengths[:, None]
    return np.asarray(shares, np.float64)


def _measure_seconds(grid: Grid, times: Floats) -> Floats:
    """Seconds spent in each bin up to each time, counted from the begin of an iteration and on through later ones."""
    cycles = np.floor(times / grid.length_s)
    inside = (times - cycles * grid.length_s)[:, None] - grid.edges[:-1]
    return np.asarray(cycles[:, None] * grid.bin_widths + np.clip(inside, 0.0, grid.bin_widths), np.float64)


def _fit_curve(grid: Grid, groups: _SampleGroups, weights: Floats, noise: float, most: float) -> Floats:
    """Least squares with the penalty that the noise (as a share of the spread, squared) calls for, within bounds."""
    bins = len(grid.bin_widths)
    matrix: Floats = groups.rows.T @ (groups.rows * weights[:, None])
    wanted = groups.rows.T @ (weights * groups.values)
    change = np.where(grid.breaks, _JUMP, _CHANGE) ** 2
    penalty = noise / change if bins > 1 else np.zeros(bins)
    after = np.roll(np.arange(bins), -1)
    matrix[np.arange(bins), np.arange(bins)] += penalty + np.roll(penalty, 1) + 1e-9 * weights.sum()
    matrix[np.arange(bins), after] -= penalty
    matrix[after, np.arange(bins)] -= penalty
    return _solve_bounded(matrix, wanted, most)


def _solve_bounded(matrix: Floats, wanted: Floats, most: float) -> Floats:
    """The least x @ matrix @ x / 2 - wanted @ x with 0 <= x <= most, by the primal-dual active set method."""
    found: Floats = np.linalg.solve(matrix, wanted).astype(np.float64)
    push, scale = np.zeros(len(found)), float(np.trace(matrix)) / len(found)
    held = np.zeros(len(found), np.int8)
    for _ in range(_STEPS):
        now = np.where(push + scale * (found - most) > 0, 1, np.where(push + scale * found < 0, -1, 0)).astype(np.int8)
        if np.array_equal(now, held):
            break
        held, free = now, now == 0
        found = np.where(held > 0, most, 0.0) if held.any() else found
        rest = wanted - matrix @ np.where(free, 0.0, found)
        found[free] = np.linalg.solve(matrix[np.ix_(free, free)], rest[free])
        push = np.where(free, 0.0, wanted - matrix @ found)
    return np.clip(found, 0.0, most)


def _compute_weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order[min(len(values) - 1, int(np.searchsorted(sums, sums[-1] / 2)))]])


def _measure_band(groups: _SampleGroups, group_index: Ints, residuals: Floats) -> tuple[Floats, Floats]:
    """For each bin the distances below which a tenth and nine tenths of the samples lie, by how much they look at it."""
    chosen = (
        np.arange(len(residuals))
        if len(residuals) <= _MOST_BAND_SAMPLES
        else np.linspace(0, len(residuals) - 1, _MOST_BAND_SAMPLES).astype(np.int64)
    )
    chosen = chosen[np.argsort(residuals[chosen])]
    sums = np.cumsum(groups.rows[group_index[chosen]], axis=0)
    found = []
    for share in BAND:
        place = (sums < share * sums[-1]).sum(axis=0)
        found.append(np.where(sums[-1] > 0, residuals[chosen[np.minimum(place, len(chosen) - 1)]], 0.0))
    return np.minimum(found[0], 0.0), np.maximum(found[1], 0.0)


def fold_moments(grid: Grid, positions: Floats, values: Floats) -> tuple[Floats, Curve]:
    """Readings of moments: the middle one of those in each half bin, at the middle of their places, where there are any.

    What is read where a phase begins or ends lies at exactly that place in each iteration.
    """
    length = grid.length_s
    positions = np.where(positions >= length, positions - length, positions)
    halves = np.unique(np.concatenate((grid.edges, grid.edges[:-1] + grid.bin_widths / 2)))
    of = np.searchsorted(halves, positions + length * _SAME_PLACE, "right")
    by_value, by_place = np.lexsort((values, of)), np.lexsort((positions, of))
    _, starts, counts = np.unique(of[by_value], return_index=True, return_counts=True)
    middles = positions[by_place][starts + counts // 2]
    # From the last of them on into the next iteration, which begins like this one.
    around = np.concatenate(([middles[-1] - length], middles, [middles[0] + length]))
    at = np.concatenate(([0.0], middles[(middles > 0) & (middles < length)], [length]))
    columns = (_compute_quantiles(values[by_value], starts, counts, share) for share in (0.5, *BAND))
    median, low, high = (np.interp(at, around, np.concatenate((of[-1:], of, of[:1]))) for of in columns)
    return at, Curve(median, low, high, 0.0)


def _compute_quantiles(values: Floats, starts: Ints, counts: Ints, share: float) -> Floats:
    """Of each group of ascending values the one below which this share of them lies."""
    place = (counts - 1) * share
    below, above = values[starts + np.floor(place).astype(int)], values[starts + np.ceil(place).astype(int)]
    return np.asarray(below + (above - below) * (place % 1), np.float64)
