"""Levels of a series, and where one changes for good. What is said of a value rests on it, up to LEVEL_STEPS after it,
and those before: what comes later changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.support.thresholds import (
    AGREE_SHARE,
    LEVEL_STEPS,
    SETTLED_STEPS,
    SHIFT_AGREE_SHARE,
    SHIFT_LENGTH_SHARE,
    SHIFT_SHARE,
    SHIFT_SPREADS,
    SHIFT_STEPS,
    SHIFT_SUDDEN_SHARE,
)

Floats = NDArray[np.float64]
Values = NDArray[Any]  # any numbers

# Values looked at together.
_CHUNK_LENGTH = 8192


class Shift(NamedTuple):
    """A change of level: from ``first`` to ``last``, both included, all values lie beyond the level of ``before``."""

    before: slice
    first: int
    last: int


class ShiftFinder:
    """Looks for changes of level in a series that grows."""

    def __init__(self) -> None:
        self._start = 0  # of the level
        self._next = 0  # where to look on: for a level, or once it is settled for a change of it
        self._is_settled = False

    def find_shifts(self, values: Values) -> Iterator[Shift]:
        """Changes that can be seen in all values so far and were not told before, in order."""
        while self._find_level(values):
            found = self._find_shift(values)
            if found is None:
                return
            yield found
            self._start = self._next = found.first
            self._is_settled = False

    def _find_level(self, values: Values) -> bool:
        """Up to where SETTLED_STEPS values agree, all but one of them; LEVEL_STEPS are a level however they vary."""
        end = self._start + LEVEL_STEPS
        if not self._is_settled and self._next + SETTLED_STEPS <= min(len(values), end):
            windows = np.lib.stride_tricks.sliding_window_view(_as_floats(values[self._next : end]), SETTLED_STEPS)
            middle = np.median(windows, axis=1)[:, None]
            agree = (np.abs(windows - middle) <= AGREE_SHARE * np.abs(middle)).sum(axis=1) >= SETTLED_STEPS - 1
            self._is_settled = bool(agree.any())
            self._next += int(np.argmax(agree)) + SETTLED_STEPS if self._is_settled else len(windows)
        if not self._is_settled and len(values) >= end:
            self._is_settled, self._next = True, end
        return self._is_settled

    def _find_shift(self, values: Values) -> Shift | None:
        """The first one against the level since it began."""
        end = _find_decidable_end(len(values))
        whole = self._start + LEVEL_STEPS
        while self._next < end:
            piece = min(whole, end) if self._next < whole else min(self._next + _CHUNK_LENGTH, end)
            places = range(self._next, piece) if self._next < whole else _find_candidates(values, self._next, piece).tolist()
            self._next = piece
            for first in places:
                if _is_shift(values, self._start, first):
                    return Shift(_slice_before(self._start, first), first, first + _required_length(first) - 1)
        return None


def _as_floats(values: Values) -> Floats:
    return np.asarray(values, np.float64)


def _find_decidable_end(count: int) -> int:
    """Up to which place (excluded) it can be said of so many values whether a change begins there."""
    end = max(0, count - SHIFT_STEPS + 1)
    while end and end - 1 + _required_length(end - 1) > count:
        end -= 1
    return end


def _find_candidates(values: Values, begin: int, end: int) -> NDArray[np.int64]:
    """Places from begin to end with a whole level before them that SHIFT_STEPS values lie beyond by SHIFT_SHARE."""
    before = np.lib.stride_tricks.sliding_window_view(_as_floats(values[begin - LEVEL_STEPS : end - 1]), LEVEL_STEPS)
    after = np.lib.stride_tricks.sliding_window_view(_as_floats(values[begin : end + SHIFT_STEPS - 1]), SHIFT_STEPS)
    level = np.median(before, axis=1)
    above, below = after.min(axis=1) > level * (1 + SHIFT_SHARE), after.max(axis=1) < level * (1 - SHIFT_SHARE)
    return np.flatnonzero(above | below) + begin


def _is_shift(values: Values, start: int, first: int) -> bool:
    before, after = (
        _as_floats(values[_slice_before(start, first)]),
        _as_floats(values[first : first + _required_length(first)]),
    )
    level = float(np.median(before))
    spread = float(np.median(np.abs(before - level)))
    by = max(SHIFT_SHARE * level, SHIFT_SPREADS * spread)
    now, just = float(np.median(after[:SHIFT_STEPS])), float(np.median(before[-SHIFT_STEPS:]))
    if abs(now - just) < SHIFT_SUDDEN_SHARE * abs(now - level):
        return False  # it came slowly
    return any(
        bool(beyond[:SHIFT_STEPS].all() and beyond.mean() >= SHIFT_AGREE_SHARE)
        for beyond in (after > level + by, after < level - by)
    )


def _required_length(first: int) -> int:
    """How many values a change has to last; never fewer for a later one, so that none is told before an earlier."""
    return min(LEVEL_STEPS, max(SHIFT_STEPS, int(first * SHIFT_LENGTH_SHARE)))


def _slice_before(start: int, first: int) -> slice:
    return slice(max(start, first - LEVEL_STEPS), first)
