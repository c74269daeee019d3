"""From points at any times to one value for each column of a chart, by whole-array operations.

``x`` ascends and need not be evenly spaced; a column is a half-open piece of ``begin`` to ``end``, the last one closed, so
that the newest point is seen. A column without points is NaN. Points that are NaN count as not there.

It takes a nanosecond or less for each point between ``begin`` and ``end`` (``benchmarks/chart_painter.py``); of ``x`` only a
few places are looked at. Whole numbers, such as nanoseconds, are fine too.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Numbers = NDArray[Any]  # of any numeric dtype
_FAR = 2.0**62  # beyond all nanoseconds


def compute_edges(begin: float, end: float, columns: int) -> Floats:
    """The ``columns`` + 1 borders of the columns."""
    return np.linspace(begin, end, max(0, columns) + 1)


def resample_minmax(
    x: Numbers, y: Numbers, begin: float, end: float, columns: int, *, hold: float = 0.0
) -> tuple[Floats, Floats]:
    """The lowest and the highest point of each column: no spike is lost, however many points a column has.

    Args:
        hold: a column without points has the last value before it, if that is at most this much older than the column.
            For values that are sampled and stay until the next sample.
    """
    y = np.asarray(y)
    places = _find_positions(x, begin, end, columns)
    low, high = _reduce_columns(np.fmin, y, places), _reduce_columns(np.fmax, y, places)
    if hold > 0 and len(y):
        _hold_values(x, y, begin, end, places, hold, low, high)
    return low, high


def resample_mean(x: Numbers, y: Numbers, begin: float, end: float, columns: int, *, hold: float = 0.0) -> Floats:
    """The mean of each column's points."""
    y = np.asarray(y)
    places = _find_positions(x, begin, end, columns)
    known = ~np.isnan(y)
    numbers = _reduce_columns(np.add, known.astype(np.float64), places)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        found = _reduce_columns(np.add, np.where(known, y, 0.0), places) / numbers
    if hold > 0 and len(y):
        _hold_values(x, y, begin, end, places, hold, found)
    return found


def resample_last(x: Numbers, y: Numbers, begin: float, end: float, columns: int, *, hold: float = 0.0) -> Floats:
    """The last point of each column, be it NaN."""
    y = np.asarray(y)
    places = _find_positions(x, begin, end, columns)
    found = np.full(len(places) - 1, np.nan)
    some = np.diff(places) > 0
    found[some] = y[places[1:][some] - 1]
    if hold > 0 and len(y):
        _hold_values(x, y, begin, end, places, hold, found)
    return found


def compute_shares(begins: Numbers, ends: Numbers, begin: float, end: float, columns: int) -> Floats:
    """How much of each column lies within these spans, which do not overlap one another: 0 to 1, shape (columns,).

    For a ribbon: one call for each phase, then the argmax over phases.
    """
    borders = compute_edges(begin, end, columns)
    length = (end - begin) / columns if columns > 0 else 0.0
    if not len(begins) or not length > 0:
        return np.zeros(max(0, columns))
    first, beyond = np.searchsorted(ends, begin), np.searchsorted(begins, end)
    starts, stops = np.asarray(begins[first:beyond], np.float64), np.asarray(ends[first:beyond], np.float64)
    if not len(starts):
        return np.zeros(columns)
    times = np.stack((starts, stops), 1).ravel()
    covered = np.stack((np.zeros(len(starts)), stops - starts), 1).ravel().cumsum()
    found: Floats = np.clip(np.diff(np.interp(borders, times, covered)) / length, 0.0, 1.0)
    return found


def bridge_gaps(values: Floats, most: int) -> Floats:
    """The values with gaps of at most ``most`` columns between two known ones filled by a straight line."""
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 2:
        return values
    after = np.searchsorted(known, np.arange(len(values)))
    inside = (after > 0) & (after < len(known))
    gap = np.zeros(len(values), np.intp)
    gap[inside] = known[after[inside]] - known[after[inside] - 1] - 1
    filled = np.interp(np.arange(len(values)), known, values[known])
    return np.where(np.isnan(values) & inside & (gap <= most), filled, values)


def _find_positions(x: Numbers, begin: float, end: float, columns: int) -> Ints:
    """Where each column's points begin in ``x``, and where the last one's end."""
    borders: NDArray[Any] = compute_edges(begin, end, columns)
    last = end
    if np.issubdtype(np.asarray(x).dtype, np.integer):  # nanoseconds: compared as they are, without a copy as floats
        borders, last = np.ceil(np.clip(borders, -_FAR, _FAR)).astype(np.int64), math.floor(min(max(end, -_FAR), _FAR))
    places = np.searchsorted(x, borders)
    places[-1] = max(places[-1], np.searchsorted(x, last, "right")) if columns > 0 else places[-1]
    return places


def _reduce_columns(operation: np.ufunc, y: Numbers, places: Ints) -> Floats:
    found = np.full(len(places) - 1, np.nan)
    some = np.diff(places) > 0
    if some.any():
        with np.errstate(invalid="ignore", over="ignore"):
            found[some] = operation.reduceat(y[: places[-1]], places[:-1][some])
    return found


def _hold_values(x: Numbers, y: Numbers, begin: float, end: float, places: Ints, hold: float, *resampled: Floats) -> None:
    """Puts the last value before into empty columns."""
    borders = compute_edges(begin, end, len(places) - 1)[:-1]
    before = places[:-1] - 1
    empty = (np.diff(places) == 0) & (before >= 0)
    empty[empty] = borders[empty] - x[before[empty]] <= hold
    for values in resampled:
        values[empty] = y[before[empty]]
