"""Resample points at arbitrary times to one value for each column of a chart, by whole-array operations.

``x`` ascends and need not be evenly spaced. A column is a half-open interval between ``begin`` and ``end``; the last one is
closed, so that the newest point counts. A column without points is NaN; points that are NaN are ignored.

This takes a nanosecond or less for each point between ``begin`` and ``end`` (``benchmarks/chart_painter.py``); of ``x`` only
a few elements are read. Integers, such as nanoseconds, are fine too.
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


def resample_mean(x: Numbers, y: Numbers, begin: float, end: float, columns: int, *, hold: float = 0.0) -> Floats:
    """Return the mean of each column's points.

    Args:
        hold: a column without points takes the last value before it if that is at most this much older than the column.
            For values that are sampled and stay until the next sample.
    """
    y = np.asarray(y)
    bounds = _find_bounds(x, begin, end, columns)
    known = ~np.isnan(y)
    counts = _reduce_columns(np.add, known.astype(np.float64), bounds)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        means = _reduce_columns(np.add, np.where(known, y, 0.0), bounds) / counts
    if hold > 0 and len(y):
        _hold_values(x, y, begin, end, bounds, hold, means)
    return means


def _find_bounds(x: Numbers, begin: float, end: float, columns: int) -> Ints:
    """Return the index in ``x`` of each column's first point, and the end of the last column's: shape (columns + 1,)."""
    borders: NDArray[Any] = _compute_borders(begin, end, columns)
    last = end
    if np.issubdtype(np.asarray(x).dtype, np.integer):  # compare nanoseconds without a copy as floats
        borders, last = np.ceil(np.clip(borders, -_FAR, _FAR)).astype(np.int64), math.floor(min(max(end, -_FAR), _FAR))
    bounds = np.searchsorted(x, borders)
    bounds[-1] = max(bounds[-1], np.searchsorted(x, last, "right")) if columns > 0 else bounds[-1]
    return bounds


def _compute_borders(begin: float, end: float, columns: int) -> Floats:
    return np.linspace(begin, end, max(0, columns) + 1)


def _reduce_columns(operation: np.ufunc, y: Numbers, bounds: Ints) -> Floats:
    reduced = np.full(len(bounds) - 1, np.nan)
    filled = np.diff(bounds) > 0
    if filled.any():
        with np.errstate(invalid="ignore", over="ignore"):
            reduced[filled] = operation.reduceat(y[: bounds[-1]], bounds[:-1][filled])
    return reduced


def _hold_values(x: Numbers, y: Numbers, begin: float, end: float, bounds: Ints, hold: float, values: Floats) -> None:
    """Fill empty columns with the last value before them."""
    borders = _compute_borders(begin, end, len(bounds) - 1)[:-1]
    before = bounds[:-1] - 1
    empty = (np.diff(bounds) == 0) & (before >= 0)
    empty[empty] = borders[empty] - x[before[empty]] <= hold
    values[empty] = y[before[empty]]
