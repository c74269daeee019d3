"""Levels of a series, and the points at which one changes permanently.

A change depends on earlier values and on those up to LEVEL_STEPS after it. Later values do not affect it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The number of values that must agree before a level counts. Steps vary by 10 % on a busy machine, single ones by more.
SETTLED_STEPS = 5
# A value agrees when it is within this share of the median: the noise measured between equal steps is 10 %.
AGREE_SHARE = 0.10
# Values a level is taken from.
LEVEL_STEPS = 20
# Consecutive values that all have to be beyond the old level: one or two slow steps in a row are common on a busy machine.
SHIFT_STEPS = 4
# In a long series, more changes occur by chance. So this share of the next values must agree: an eighth of the number of
# values before, at most LEVEL_STEPS.
SHIFT_LENGTH_SHARE = 1 / 8
SHIFT_AGREE_SHARE = 0.9
# A level changes by at least this share, and by this many times the median deviation of the values before: 4 of normal
# noise are 2.7 standard deviations, and four values in a row have to be that far on the same side.
SHIFT_SHARE = 0.05
SHIFT_SPREADS = 4.0
# The part of a change that has to happen at once; else it is a drift.
SHIFT_SUDDEN_SHARE = 0.5
# The part of a change that its first value has to show; else the change begins later.
SHIFT_FIRST_SHARE = 0.25

# Values that are examined together: few after a change, as the next one may be near, then twice as many each time.
_FIRST_CHUNK, _LAST_CHUNK = 128, 8192


class Values(Protocol):
    """A series of numbers, read by a slice or by indices."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> NDArray[Any]: ...


class Shift(NamedTuple):
    """A change of level: all values from ``first`` to ``last``, both included, are beyond the level of ``before``."""

    before: slice
    first: int
    last: int


class ShiftFinder:
    """Finds changes of level in a growing series."""

    def __init__(self) -> None:
        self._start = 0  # of the level
        self._next = 0  # index at which the search continues: for a level, or for a change once it is settled
        self._is_settled = False

    def find_shifts(self, values: Values) -> Iterator[Shift]:
        """Yield the changes in all values so far that have not been yielded before, in order."""
        while self._find_level(values):
            shift = self._find_shift(values)
            if shift is None:
                return
            yield shift
            self._start = self._next = shift.first
            self._is_settled = False

    def _find_level(self, values: Values) -> bool:
        """Whether this is a level: all but one of SETTLED_STEPS values agree, or there are LEVEL_STEPS values."""
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
        end = _find_decidable_end(len(values))
        # From here on there are LEVEL_STEPS values before, and a change has to last for as many.
        whole = max(self._start + LEVEL_STEPS, _LONGEST_FROM)
        length = _FIRST_CHUNK
        while self._next < end:
            begin = self._next
            if begin < whole:
                self._next = min(whole, end)
                first = _find_early_shift(values, self._start, begin, self._next)
            else:
                self._next, length = min(begin + length, end), min(2 * length, _LAST_CHUNK)
                first = _find_first_shift(values, _find_candidates(values, begin, self._next))
            if first is not None:
                return Shift(slice(max(self._start, first - LEVEL_STEPS), first), first, first + _required_length(first) - 1)
        return None


def _as_floats(values: NDArray[Any]) -> Floats:
    return np.asarray(values, np.float64)


def _find_decidable_end(count: int) -> int:
    """Return the end (excluded) of the indices that ``count`` values are enough to judge as the begin of a change."""
    end = max(0, count - SHIFT_STEPS + 1)
    while end and end - 1 + _required_length(end - 1) > count:
        end -= 1
    return end


def _find_early_shift(values: Values, start: int, begin: int, end: int) -> int | None:
    """Return the first of these indices at which a change begins; there may be few values before it and after it."""
    known = _as_floats(values[start : end + LEVEL_STEPS])
    for place in _find_early_candidates(known, begin - start, end - start):
        index = int(place)
        before = known[max(0, index - LEVEL_STEPS) : index]
        after = known[index : index + _required_length(start + index)]
        if is_shift(before.tolist(), after.tolist()):
            return start + index
    return None


def _find_early_candidates(known: Floats, begin: int, end: int) -> Ints:
    """Return indices that may be a change.

    The earlier median is not known yet: it is between the lowest and the highest earlier value.
    """
    before = known[: end - 1]
    lowest, highest = (reduce.accumulate(before)[begin - 1 :] for reduce in (np.minimum, np.maximum))
    after = np.lib.stride_tricks.sliding_window_view(known[begin : end + SHIFT_STEPS - 1], SHIFT_STEPS)
    above, below = after.min(axis=1) > lowest * (1 + SHIFT_SHARE), after.max(axis=1) < highest * (1 - SHIFT_SHARE)
    return np.flatnonzero(above | below) + begin


def _find_candidates(values: Values, begin: int, end: int) -> Ints:
    """Indices where the next SHIFT_STEPS values all differ by SHIFT_SHARE from the median of the LEVEL_STEPS before."""
    before = np.lib.stride_tricks.sliding_window_view(_as_floats(values[begin - LEVEL_STEPS : end - 1]), LEVEL_STEPS)
    after = np.lib.stride_tricks.sliding_window_view(_as_floats(values[begin : end + SHIFT_STEPS - 1]), SHIFT_STEPS)
    level = np.median(before, axis=1)
    above, below = after.min(axis=1) > level * (1 + SHIFT_SHARE), after.max(axis=1) < level * (1 - SHIFT_SHARE)
    return np.flatnonzero(above | below) + begin


def is_shift(before: list[float], after: list[float]) -> bool:
    """Whether ``after`` begins a change from ``before``. Does what are_shifts() does, faster for a single pair."""
    if any(map(math.isnan, before)) or any(map(math.isnan, after[:SHIFT_STEPS])):
        return False
    level = _find_median(before)
    spread = _find_median([abs(value - level) for value in before])
    margin = max(SHIFT_SHARE * level, SHIFT_SPREADS * spread)
    high, low = level + margin, level - margin
    beyond = [value > high for value in after] if after[0] > high else [value < low for value in after]
    if not all(beyond[:SHIFT_STEPS]) or sum(beyond) / len(beyond) < SHIFT_AGREE_SHARE:
        return False
    next_level, last_level = _find_median(after[:SHIFT_STEPS]), _find_median(before[-SHIFT_STEPS:])
    new_level = _find_median([value for value in after if not math.isnan(value)])
    begins = abs(after[0] - level) >= SHIFT_FIRST_SHARE * abs(new_level - level)
    return begins and abs(next_level - last_level) >= SHIFT_SUDDEN_SHARE * abs(next_level - level)


def _find_median(values: list[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _find_first_shift(values: Values, candidates: Ints) -> int | None:
    """Return the first of these indices at which a change begins; all have LEVEL_STEPS values before and after."""
    around = np.arange(LEVEL_STEPS)
    for begin in range(0, len(candidates), _FIRST_CHUNK):
        some = candidates[begin : begin + _FIRST_CHUNK]
        before, after = (_as_floats(values[some[:, None] + around + shift]) for shift in (-LEVEL_STEPS, 0))
        passed = np.flatnonzero(are_shifts(before, after))
        if len(passed):
            return int(some[passed[0]])
    return None


def are_shifts(before: Floats, after: Floats) -> NDArray[np.bool_]:
    """Whether each row of ``after`` begins a change from the same row of ``before``."""
    level = np.median(before, axis=1)
    spread = np.median(np.abs(before - level[:, None]), axis=1)
    margin = np.maximum(SHIFT_SHARE * level, SHIFT_SPREADS * spread)
    next_level, last_level = np.median(after[:, :SHIFT_STEPS], axis=1), np.median(before[:, -SHIFT_STEPS:], axis=1)
    is_sudden = np.abs(next_level - last_level) >= SHIFT_SUDDEN_SHARE * np.abs(next_level - level)
    begins = np.abs(after[:, 0] - level) >= SHIFT_FIRST_SHARE * np.abs(_find_known_medians(after) - level)
    beyond = np.stack([after > (level + margin)[:, None], after < (level - margin)[:, None]])
    lasts = beyond[..., :SHIFT_STEPS].all(axis=-1) & (beyond.mean(axis=-1) >= SHIFT_AGREE_SHARE)
    passed: NDArray[np.bool_] = is_sudden & begins & lasts.any(axis=0)
    return passed


def _find_known_medians(rows: Floats) -> Floats:
    """Return the median of what is known of each row; NaN where nothing is."""
    last = np.count_nonzero(~np.isnan(rows), axis=1) - 1  # sorting puts what is not known last
    middle = np.stack([np.maximum(last, 0) // 2, (np.maximum(last, 0) + 1) // 2], axis=1)
    return np.asarray(np.take_along_axis(np.sort(rows, axis=1), middle, axis=1).mean(axis=1), np.float64)


def _required_length(first: int) -> int:
    """Return how many values a change has to last; never fewer for a later one, so changes become known in order."""
    return min(LEVEL_STEPS, max(SHIFT_STEPS, int(first * SHIFT_LENGTH_SHARE)))


# From this index on a change has to last for LEVEL_STEPS values.
_LONGEST_FROM = math.ceil(LEVEL_STEPS / SHIFT_LENGTH_SHARE)
