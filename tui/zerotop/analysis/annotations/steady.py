"""Levels of a series, and where one changes for good. What is said of a value rests on it, up to LEVEL_STEPS after it,
and those before: what comes later changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.thresholds import (
    AGREE_SHARE,
    LEVEL_STEPS,
    SETTLED_STEPS,
    SHIFT_AGREE,
    SHIFT_LASTS,
    SHIFT_SHARE,
    SHIFT_SPREADS,
    SHIFT_STEPS,
)

Floats = NDArray[np.float64]

# Values looked at together.
_AT_ONCE = 8192


class Shift(NamedTuple):
    """A change of level: from ``first`` to ``last``, both included, all values lie beyond the level of ``before``."""

    before: slice
    first: int
    last: int


def shifts(values: Floats) -> Iterator[Shift]:
    """Changes of level, in order."""
    start = 0
    while (settled := _settled(values, start)) is not None:
        found = _next(values, start, settled + 1)
        if found is None:
            return
        yield found
        start = found.first


def _settled(values: Floats, start: int) -> int | None:
    """The first place from ``start`` on up to which SETTLED_STEPS values agree, all but one of them."""
    for begin in range(start, len(values) - SETTLED_STEPS + 1, _AT_ONCE):
        piece = values[begin : begin + _AT_ONCE + SETTLED_STEPS - 1]
        windows = np.lib.stride_tricks.sliding_window_view(piece, SETTLED_STEPS)
        middle = np.median(windows, axis=1)[:, None]
        agree = (np.abs(windows - middle) <= AGREE_SHARE * np.abs(middle)).sum(axis=1) >= SETTLED_STEPS - 1
        if agree.any():
            return begin + int(np.argmax(agree)) + SETTLED_STEPS - 1
    return None


def _next(values: Floats, start: int, begin: int) -> Shift | None:
    """The first shift from ``begin`` on, against the level since ``start``."""
    count = len(values) - SHIFT_STEPS + 1
    whole = min(count, max(begin, start + LEVEL_STEPS))
    for first in range(begin, whole):
        if _is_shift(values, start, first):
            return _shift(start, first)
    for piece in range(whole, count, _AT_ONCE):
        for first in _beyond(values, piece, min(piece + _AT_ONCE, count)).tolist():
            if _is_shift(values, start, first):
                return _shift(start, first)
    return None


def _beyond(values: Floats, begin: int, end: int) -> NDArray[np.int64]:
    """Places from begin to end with a whole level before them that SHIFT_STEPS values lie beyond by SHIFT_SHARE."""
    before = np.lib.stride_tricks.sliding_window_view(values[begin - LEVEL_STEPS : end - 1], LEVEL_STEPS)
    after = np.lib.stride_tricks.sliding_window_view(values[begin : end + SHIFT_STEPS - 1], SHIFT_STEPS)
    level = np.median(before, axis=1)
    above, below = after.min(axis=1) > level * (1 + SHIFT_SHARE), after.max(axis=1) < level * (1 - SHIFT_SHARE)
    return np.flatnonzero(above | below) + begin


def _is_shift(values: Floats, start: int, first: int) -> bool:
    before, after = values[_before(start, first)], values[first : first + _lasts(first)]
    level = float(np.median(before))
    spread = float(np.median(np.abs(before - level)))
    by = max(SHIFT_SHARE * level, SHIFT_SPREADS * spread)
    if len(after) < _lasts(first):
        return False
    return any(
        bool(beyond[:SHIFT_STEPS].all() and beyond.mean() >= SHIFT_AGREE)
        for beyond in (after > level + by, after < level - by)
    )


def _lasts(first: int) -> int:
    """How many values a change has to last; never fewer for a later one, so that none is told before an earlier."""
    return min(LEVEL_STEPS, max(SHIFT_STEPS, int(first * SHIFT_LASTS)))


def _shift(start: int, first: int) -> Shift:
    return Shift(_before(start, first), first, first + _lasts(first) - 1)


def _before(start: int, first: int) -> slice:
    return slice(max(start, first - LEVEL_STEPS), first)
