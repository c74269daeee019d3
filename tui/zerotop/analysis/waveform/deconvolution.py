"""Reconstructs a signal over an iteration from samples that are means over longer windows.

A sample is the mean of the signal over its window: 200 ms for NVML's utilization, the time between two readings for
counters. Over many iterations windows begin everywhere, so positions closer than a window can be resolved, as in a sampling
oscilloscope. The result is the curve whose means over the windows fit the samples best (outliers count less), as smooth
within a phase as the samples permit, and free to jump where a phase ends. Where windows resolve nothing, for example when an
iteration is much shorter than one, the curve is flat: the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.samples import Floats, Ints

# Quantiles of the samples that bound a curve's band.
BAND = (0.1, 0.9)

# Expected change from bin to bin, as a share of the range of values: within a phase, and where a phase ends.
_CHANGE, _JUMP = 0.1, 1.5
# Errors of a sample as a share of that range: a curve through all points would follow their rounding.
_LEAST_ERROR = 0.01
_USUAL_ERROR = 0.03
_ROUNDS = 3  # of down-weighting outliers
_STEPS = 20  # most steps of keeping the curve within its bounds
# Readings this close to a phase's end, as a share of the iteration, were made at it.
_SAME_PLACE = 1e-4
_MOST_BAND_SAMPLES = 1200  # residuals that the band is computed from: enough for both quantiles


@dataclass(frozen=True, eq=False)
class Grid:
    """Bins of an iteration."""

    edges: Floats  # (bins + 1,), seconds from 0 to the iteration's length
    breaks: NDArray[np.bool_]  # (bins,): whether a phase ends at the end of each bin; the last bin precedes the first

    @property
    def length_s(self) -> float:
        return float(self.edges[-1])

    @property
    def bin_widths(self) -> Floats:
        """Length of each bin in seconds."""
        return np.diff(self.edges)

    def spread_phase_sums(self, values: Floats) -> Floats:
        """Return, for each bin, the sum of the values of all bins of its phase."""
        phases: Ints = np.cumsum(self.breaks) - self.breaks
        return np.bincount(phases, values)[phases].astype(np.float64)


def make_grid(boundaries: Floats, most: int = 100) -> Grid:
    """Make about ``most`` bins, none across a boundary (seconds, ascending, from 0 to the iteration's length).

    Boundaries closer than half a bin to the one before are left out: nothing so short can be resolved.
    """
    length = float(boundaries[-1])
    begins = [0.0]
    for boundary in boundaries[1:-1].tolist():
        if boundary - begins[-1] >= length / most / 2 and length - boundary >= length / most / 2:
            begins.append(boundary)
    ends = [*begins[1:], length]
    edges, breaks = [0.0], []
    for begin, end in zip(begins, ends, strict=True):
        count = max(1, round((end - begin) / length * most))
        edges += [begin + (end - begin) * (number + 1) / count for number in range(count)]
        breaks += [False] * (count - 1) + [True]
    return Grid(np.array(edges), np.array(breaks))


@dataclass(frozen=True, eq=False)
class Curve:
    """A reconstructed signal with its band: see BAND."""

    median: Floats
    low: Floats
    high: Floats
    error: float  # median absolute residual of a sample


def unfold(grid: Grid, begins: Floats, lengths: Floats, values: Floats, *, most: Floats | float = np.inf) -> Curve:
    """Reconstruct the curve between 0 and ``most`` (of all bins, or of each) that fits the samples.

    Args:
        begins: begin of each window, in seconds from the begin of its iteration.
        lengths: seconds of each window, above 0; may be longer than an iteration.
    """
    groups, group_index = _group_samples(grid, begins, lengths, values)
    spread = max(float(np.ptp(values)), 1e-12)
    error = spread * 0.05
    weights = groups.counts.copy()
    most = np.broadcast_to(most, len(grid.bin_widths))
    curve = np.full(len(grid.bin_widths), float(np.median(values)))
    for _ in range(_ROUNDS):
        curve = _fit_curve(grid, groups, weights, (error / spread) ** 2, most)
        distance = np.abs(groups.compute_residuals(curve))
        error = max(_compute_weighted_median(distance, groups.counts), _LEAST_ERROR * spread)
        weights = groups.counts * np.minimum(1.0, 1.5 * error / np.maximum(distance, error))
    residuals = values + (groups.compute_residuals(curve) - groups.values)[group_index]
    low, high = _measure_band(groups, group_index, residuals)
    return Curve(curve, np.clip(curve + low, 0, most), np.clip(curve + high, 0, most), float(np.median(np.abs(residuals))))


def make_flat_curve(values: Floats) -> Curve:
    """Return a constant curve: the mean of samples whose windows are too long to resolve positions, and their band."""
    low, high = np.quantile(values, BAND)
    mean = float(values.mean())
    ends = (np.full(2, mean), np.full(2, min(mean, low)), np.full(2, max(mean, high)))
    return Curve(*ends, float(np.median(np.abs(values - mean))))


def measure_misfit(grid: Grid, begins: Floats, lengths: Floats, values: Floats) -> float:
    """Measure how badly the best curve fits, to compare shifts of the windows: its residuals, and its changes within
    phases, where none are expected. 0 without samples.
    """
    if not len(values):
        return 0.0
    groups = _SampleGroups(_compute_shares(grid, begins, lengths), values, np.ones(len(values)))
    scale = max(float(np.ptp(values)), 1e-12)
    curve = _fit_curve(grid, groups, groups.counts, _USUAL_ERROR**2, np.full(len(grid.bin_widths), np.inf))
    missed = (groups.counts * (groups.compute_residuals(curve) / (_USUAL_ERROR * scale)) ** 2).sum()
    changes = (np.roll(curve, -1) - curve) / scale / np.where(grid.breaks, _JUMP, _CHANGE)
    return float((missed + (changes**2).sum()) / len(values))


@dataclass(frozen=True, eq=False)
class _SampleGroups:
    """Groups of samples with similar windows."""

    rows: Floats  # (groups, bins): the share of the window in each bin
    values: Floats
    counts: Floats  # samples in each group

    def compute_residuals(self, curve: Floats) -> Floats:
        """Return by how much each value is above the curve's mean over its window."""
        return np.asarray(self.values - self.rows @ curve, np.float64)


def _group_samples(grid: Grid, begins: Floats, lengths: Floats, values: Floats) -> tuple[_SampleGroups, Ints]:
    """Group samples whose windows begin and end in the same bins, by the median of their values.

    Returns (groups, the group of each sample).
    """
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
    """Return the share of each window in each bin, shape (windows, bins)."""
    shares = (_measure_seconds(grid, begins + lengths) - _measure_seconds(grid, begins)) / lengths[:, None]
    return np.asarray(shares, np.float64)


def _measure_seconds(grid: Grid, times: Floats) -> Floats:
    """Return the seconds in each bin up to each time, from the begin of an iteration on through later ones."""
    cycles = np.floor(times / grid.length_s)
    inside = (times - cycles * grid.length_s)[:, None] - grid.edges[:-1]
    return np.asarray(cycles[:, None] * grid.bin_widths + np.clip(inside, 0.0, grid.bin_widths), np.float64)


def _fit_curve(grid: Grid, groups: _SampleGroups, weights: Floats, noise: float, most: Floats) -> Floats:
    """Fit by bounded least squares, with a smoothness penalty for this noise (as a share of the range, squared)."""
    bins = len(grid.bin_widths)
    matrix: Floats = groups.rows.T @ (groups.rows * weights[:, None])
    target = groups.rows.T @ (weights * groups.values)
    change = np.where(grid.breaks, _JUMP, _CHANGE) ** 2
    penalty = noise / change if bins > 1 else np.zeros(bins)
    after = np.roll(np.arange(bins), -1)
    matrix[np.arange(bins), np.arange(bins)] += penalty + np.roll(penalty, 1) + 1e-9 * weights.sum()
    matrix[np.arange(bins), after] -= penalty
    matrix[after, np.arange(bins)] -= penalty
    return _solve_bounded(matrix, target, most)


def _solve_bounded(matrix: Floats, target: Floats, most: Floats) -> Floats:
    """Minimise x @ matrix @ x / 2 - target @ x with 0 <= x <= most by the primal-dual active set method."""
    x: Floats = np.linalg.solve(matrix, target).astype(np.float64)
    multipliers, scale = np.zeros(len(x)), float(np.trace(matrix)) / len(x)
    active = np.zeros(len(x), np.int8)
    for _ in range(_STEPS):
        now = np.where(multipliers + scale * (x - most) > 0, 1, np.where(multipliers + scale * x < 0, -1, 0)).astype(np.int8)
        if np.array_equal(now, active):
            break
        active, free = now, now == 0
        x = np.where(active > 0, most, 0.0) if active.any() else x
        rest = target - matrix @ np.where(free, 0.0, x)
        x[free] = np.linalg.solve(matrix[np.ix_(free, free)], rest[free])
        multipliers = np.where(free, 0.0, target - matrix @ x)
    return np.clip(x, 0.0, most)


def _compute_weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order[min(len(values) - 1, int(np.searchsorted(sums, sums[-1] / 2)))]])


def _measure_band(groups: _SampleGroups, group_index: Ints, residuals: Floats) -> tuple[Floats, Floats]:
    """Return the BAND quantiles of the residuals in each bin, samples weighted by their share of it."""
    chosen = (
        np.arange(len(residuals))
        if len(residuals) <= _MOST_BAND_SAMPLES
        else np.linspace(0, len(residuals) - 1, _MOST_BAND_SAMPLES).astype(np.int64)
    )
    chosen = chosen[np.argsort(residuals[chosen])]
    sums = np.cumsum(groups.rows[group_index[chosen]], axis=0)
    bounds = []
    for share in BAND:
        index = (sums < share * sums[-1]).sum(axis=0)
        bounds.append(np.where(sums[-1] > 0, residuals[chosen[np.minimum(index, len(chosen) - 1)]], 0.0))
    return np.minimum(bounds[0], 0.0), np.maximum(bounds[1], 0.0)


def fold_moments(grid: Grid, positions: Floats, values: Floats) -> tuple[Floats, Curve]:
    """Fold readings of moments: the median of those in each half bin, at the median of their positions.

    Readings at a phase's begin or end have exactly that position in each iteration.
    """
    length = grid.length_s
    positions = np.where(positions >= length, positions - length, positions)
    halves = np.unique(np.concatenate((grid.edges, grid.edges[:-1] + grid.bin_widths / 2)))
    half = np.searchsorted(halves, positions + length * _SAME_PLACE, "right")
    by_value, by_position = np.lexsort((values, half)), np.lexsort((positions, half))
    _, starts, counts = np.unique(half[by_value], return_index=True, return_counts=True)
    middles = positions[by_position][starts + counts // 2]
    # The curve goes on from the last position into the next iteration, which begins like this one.
    around = np.concatenate(([middles[-1] - length], middles, [middles[0] + length]))
    at = np.concatenate(([0.0], middles[(middles > 0) & (middles < length)], [length]))
    columns = (_compute_quantiles(values[by_value], starts, counts, share) for share in (0.5, *BAND))
    median, low, high = (np.interp(at, around, np.concatenate((curve[-1:], curve, curve[:1]))) for curve in columns)
    return at, Curve(median, low, high, 0.0)


def _compute_quantiles(values: Floats, starts: Ints, counts: Ints, share: float) -> Floats:
    """Return a quantile of each group of ascending values."""
    index = (counts - 1) * share
    below, above = values[starts + np.floor(index).astype(int)], values[starts + np.ceil(index).astype(int)]
    return np.asarray(below + (above - below) * (index % 1), np.float64)
