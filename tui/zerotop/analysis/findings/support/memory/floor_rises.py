"""The floor of memory, to which it falls back from time to time, and its rises: what is left behind now and then stays.

A leak at each k-th step shows in few readings where most steps are counted, and not in each of them where batches differ.

Levels of memory that follow each other upwards by the same bytes, as where each 50th step leaves something behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zerotop.analysis.findings.support.evidence import Ints
from zerotop.analysis.findings.support.thresholds import CREEP_BYTES
from zerotop.analysis.stats.change_points import SETTLED_STEPS

# So many rises that are alike, by CREEP_BYTES or more from one reading to the next: smaller changes are none.
# Where readings are rare, a rise may be a few times another. How much they differ at most.
_LEVEL_RISES, _MOST_TIMES, _UNEVENNESS = 5, 3, 0.1


@dataclass
class LevelRises:
    """The levels of one process since memory fell, or rose by other bytes."""

    read: int = 0  # readings
    levels: tuple[int, ...] = ()
    first: int = 0  # the index of the last reading before the first rise

    def read_new(self, held: Ints) -> tuple[int, int] | None:
        """Return the range of readings from the one before the first rise, where new ones make or continue a series."""
        found = None
        for index in range(self.read, len(held)):
            size = int(held[index])
            is_rise = index > 0 and size - int(held[index - 1]) >= CREEP_BYTES
            if not self.levels or (abs(self.levels[-1] - size) >= CREEP_BYTES and not is_rise):
                self.levels, self.first = (size,), index
            elif not is_rise:
                self.first = index if len(self.levels) == 1 else self.first
            else:
                self.levels = (*self.levels, size)
                if not _are_alike(np.diff(self.levels)):
                    self.levels, self.first = self.levels[-2:], index - 1
                elif len(self.levels) > _LEVEL_RISES:
                    found = self.first, index + 1
        self.read = len(held)
        return found


def _are_alike(rises: Ints) -> bool:
    times = rises / rises.min()
    return bool((np.rint(times) <= _MOST_TIMES).all() and (np.abs(times - np.rint(times)) < _UNEVENNESS).all())


# Rises of the floor, and the steps from the first to the last of them.
_LEAST_RISES, _LEAST_SPAN = 5, 60
# Each quarter of the steps adds this share of the whole rise, and the later half this part of what the earlier one added:
# what is allocated once for each new shape of a batch comes ever more rarely.
_QUARTER_SHARE, _LATER_SHARE = 0.15, 0.6
# Rises by a smaller share of the whole one do not count.
_SLIGHT_SHARE = 0.02
# By how much readings may be above the floor, and the floor may have risen before in as many steps: as a share of its rise.
_MOST_ABOVE, _MOST_BEFORE = 0.25, 0.25
# The floor is looked at again after this share of more readings, and from so many points at most.
_MORE_READINGS, _MOST_BEGINS = 1 / 8, 32


@dataclass
class FloorSearch:
    """The search in the readings of one process."""

    due: int = SETTLED_STEPS + _LEAST_RISES  # readings with which the floor is looked at next

    def find_rise(self, steps: Ints, held: Ints) -> tuple[int, int] | None:
        """Return the range of readings of the first rise that new readings show. ``steps``: after which they were taken."""
        while self.due <= len(held):
            count, self.due = self.due, self.due + max(1, int(self.due * _MORE_READINGS))
            begin = find_begin(steps[SETTLED_STEPS:count], held[SETTLED_STEPS:count])
            if begin is not None:
                return SETTLED_STEPS + begin, count
        return None


def find_begin(steps: Ints, held: Ints) -> int | None:
    """Return the index of the last reading before the floor began to rise evenly, up to the last reading; None otherwise."""
    floor = np.minimum.accumulate(held[::-1])[::-1]
    begins = np.flatnonzero(np.diff(floor) > 0)
    for begin in begins[:: max(1, len(begins) // _MOST_BEGINS)].tolist():
        early = int(np.searchsorted(steps, 2 * steps[begin] - steps[-1]))
        is_new = floor[begin] - floor[early] <= _MOST_BEFORE * (floor[-1] - floor[begin])
        if is_new and _is_even(steps[begin:], floor[begin:], held[begin:]):
            slight = floor <= floor[begin] + _SLIGHT_SHARE * (floor[-1] - floor[begin])
            return int(np.flatnonzero(slight)[-1])
    return None


def _is_even(steps: Ints, floor: Ints, held: Ints) -> bool:
    total, span = int(floor[-1] - floor[0]), int(steps[-1] - steps[0])
    if total < CREEP_BYTES or span < _LEAST_SPAN or (held - floor).max() > _MOST_ABOVE * total:
        return False
    if np.count_nonzero(np.diff(floor) >= _SLIGHT_SHARE * total) < _LEAST_RISES:
        return False
    quarters = np.diff(np.interp(np.linspace(steps[0], steps[-1], 5), steps, floor))
    return bool(quarters.min() >= _QUARTER_SHARE * total and quarters[2:].sum() >= _LATER_SHARE * quarters[:2].sum())
