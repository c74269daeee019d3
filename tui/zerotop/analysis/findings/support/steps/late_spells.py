"""The times in which the other ranks wait for one and the same rank, read step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from zerotop.analysis.findings.support.thresholds import (
    BETWEEN_SECONDS,
    MOST_SHARE,
    NEAR_STEPS,
    STALL_SECONDS,
    STRAGGLER_SHARE,
)
from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop.recording.samples import Floats, Ints

# A delay is another one from this many times, or this part, of the one before on.
_OTHER_TIMES = 2.0
# A rank that is late in a smaller share of the last steps is no longer the one that others wait for.
_LATE_SHARE = 0.25
# A delay that takes this share of an iteration counts from BETWEEN_SECONDS on, others only from STALL_SECONDS on.
_HALF = 0.5


def find_late(late_s: Floats, iteration_s: Floats) -> NDArray[np.bool_]:
    """Return which steps show a straggling rank, whose own work takes ``late_s`` longer than that of any other rank."""
    least_s = np.clip(_HALF * iteration_s, BETWEEN_SECONDS, STALL_SECONDS)
    is_late: NDArray[np.bool_] = late_s >= np.maximum(least_s, STRAGGLER_SHARE * iteration_s)
    return is_late


def begins_spell(late_s: Floats, iteration_s: Floats) -> bool:
    """Whether a rank is late in as many steps in a row as begin a spell, or in most, if there are fewer."""
    is_late = find_late(late_s, iteration_s)
    if len(is_late) < SETTLED_STEPS:
        return bool(is_late.mean() > MOST_SHARE)
    return bool(sliding_window_view(is_late, SETTLED_STEPS).all(axis=1).any())


class LateStep(NamedTuple):
    """A step: its index, the index of the rank that the others waited for (-1: none), and the seconds."""

    at: int
    rank: int
    late_s: float


@dataclass(slots=True)
class LateSpell:
    """Steps in which the others wait for a rank, with its index."""

    rank: int
    steps: Ints  # the first ones
    late_s: float  # in these
    after: Ints | None = None  # the first steps after its end; None while it lasts
    end_index: int = -1  # of the step with which its end is known

    def has(self, step: LateStep) -> bool:
        """Whether a step shows the same delay."""
        return step.rank == self.rank and self.late_s / _OTHER_TIMES < step.late_s < self.late_s * _OTHER_TIMES


class LateSpells:
    """A search for such times: each begins with SETTLED_STEPS steps in a row.

    It ends with as many steps of another rank, or of twice or half the delay, or when most of NEAR_STEPS are not late.
    """

    def __init__(self) -> None:
        self.open: LateSpell | None = None
        self._recent: deque[LateStep] = deque()  # the last ones of the spell, or without one those before it

    def read(self, steps: Iterable[LateStep]) -> list[LateSpell]:
        """Return the spells that begin in these steps, the next ones."""
        return [begun for step in steps if (begun := self._read_step(step)) is not None]

    def _read_step(self, step: LateStep) -> LateSpell | None:
        recent = self._recent
        if self.open is None and step.rank < 0:
            recent.clear()
            return None
        recent.append(step)
        while len(recent) > SETTLED_STEPS and step.at - recent[1].at >= NEAR_STEPS - 1:
            recent.popleft()
        last = list(recent)[-SETTLED_STEPS:]
        if self._begins(last):
            begun = LateSpell(step.rank, np.array([one.at for one in last]), float(np.median([one.late_s for one in last])))
            self._end(begun.steps, step.at)
            self.open, self._recent = begun, deque(last)
            return begun
        if self.open is not None and len(last) == SETTLED_STEPS and step.at - recent[0].at >= NEAR_STEPS - 1:
            is_late = np.array([self.open.has(one) for one in recent])
            if is_late.mean() < _LATE_SHARE:
                # The end is where most steps before it are late, and most after it are not.
                wrong = np.append(0, np.cumsum(~is_late)) + np.append(np.cumsum(is_late[::-1])[::-1], 0)
                self._end(np.array([one.at for one in recent])[int(np.argmin(wrong)) :][:SETTLED_STEPS], step.at)
        return None

    def _begins(self, last: list[LateStep]) -> bool:
        """Whether these are the first steps of a spell: all show the same rank, and none the delay of the spell before."""
        is_of_one = len(last) == SETTLED_STEPS and last[0].rank >= 0 and len({one.rank for one in last}) == 1
        if not is_of_one or self.open is None or self.open.rank != last[0].rank:
            return is_of_one
        is_more = {one.late_s > self.open.late_s for one in last}
        return len(is_more) == 1 and not any(self.open.has(one) for one in last)

    def _end(self, after: Ints, known: int) -> None:
        if self.open is not None:
            self.open.after, self.open.end_index, self.open = after, known, None
