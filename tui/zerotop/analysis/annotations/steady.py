"""Levels of a series: where one is settled, and where it changes for good. All windows end at the step they speak of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.thresholds import (
    AGREE_SHARE,
    LEVEL_STEPS,
    SETTLED_STEPS,
    SHIFT_SHARE,
    SHIFT_SPREADS,
    SHIFT_STEPS,
)

Floats = NDArray[np.float64]


class Shift(NamedTuple):
    """A change of level: steps ``first`` to ``last`` (both included) lie beyond the level of ``before`` (a slice)."""

    before: slice
    first: int
    last: int


def settled(values: Floats) -> NDArray[np.bool_]:
    """Where the last SETTLED_STEPS values up to here agree, all but one of them (n,)."""
    found = np.zeros(len(values), np.bool_)
    if len(values) >= SETTLED_STEPS:
        windows = np.lib.stride_tricks.sliding_window_view(values, SETTLED_STEPS)
        middle = np.median(windows, axis=1)[:, None]
        agree = np.abs(windows - middle) <= AGREE_SHARE * np.abs(middle)
        found[SETTLED_STEPS - 1 :] = agree.sum(axis=1) >= SETTLED_STEPS - 1
    return found


def shifts(values: Floats) -> Iterator[Shift]:
    """Changes of level, in order."""
    start = 0
    while (begin := _first(settled(values[start:]))) is not None:
        begin += start
        found = next(_candidates(values, start, begin + 1), None)
        if found is None:
            return
        yield found
        start = found.first


def _first(flags: NDArray[np.bool_]) -> int | None:
    found = int(np.argmax(flags)) if len(flags) else 0
    return found if len(flags) and flags[found] else None


def _candidates(values: Floats, start: int, begin: int) -> Iterator[Shift]:
    """Steps from ``begin`` on after which all of SHIFT_STEPS lie beyond the level since ``start``."""
    count = len(values) - SHIFT_STEPS + 1
    if count <= begin:
        return
    after = np.lib.stride_tricks.sliding_window_view(values, SHIFT_STEPS)
    low, high = after.min(axis=1), after.max(axis=1)
    # The level moves little from step to step: what is not beyond the widest of a block's cannot be beyond its own.
    for first in range(begin, count):
        before = slice(max(start, first - LEVEL_STEPS), first)
        level = float(np.median(values[before]))
        spread = float(np.median(np.abs(values[before] - level)))
        by = max(SHIFT_SHARE * level, SHIFT_SPREADS * spread)
        if low[first] > level + by or high[first] < level - by:
            yield Shift(before, first, first + SHIFT_STEPS - 1)
