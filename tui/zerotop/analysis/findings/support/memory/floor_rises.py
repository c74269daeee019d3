"""The floor of memory, to which it falls back from time to time, and its rises: what is left behind now and then stays.

A leak at each k-th step shows in few readings where most steps are counted, and not in each of them where batches differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zerotop.analysis.findings.support.evidence import Ints
from zerotop.analysis.findings.support.thresholds import CREEP_BYTES
from zerotop.analysis.stats.change_points import SETTLED_STEPS

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
