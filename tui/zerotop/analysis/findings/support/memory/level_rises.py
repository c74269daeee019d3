"""Levels of memory that follow each other upwards by the same bytes, as where each 50th step leaves something behind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zerotop.analysis.findings.support.evidence import Ints
from zerotop.analysis.findings.support.thresholds import CREEP_BYTES

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
