"""Batches that grow and never shrink, in several jumps or a little each step, as a curriculum makes them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Ints, Process, Rows
from zerotop.recording.steps.growable_array import GrowingArray

# So many rises, with at least so many steps from one to the next, and steps of known size show a plan; or many rises.
_PLANNED_RISES, _PLANNED_STEPS, _LEAST_SIZES, _MANY_RISES = 2, 3, 20, 8
# The most smaller batches in between, as the last one of each epoch: a share of the steps.
_SMALLER_SHARE = 0.05
# Sizes that grow with the steps themselves, as in a curriculum, explain everything: they cannot be told from a leak.
_MOST_ALIKE = 0.8
UNKNOWN_SIZES = "See whether its batches are larger: their sizes were not recorded."
"""Advice about a slow rank, before any other, where :func:`name_size` knows nothing."""

_LEVEL_DTYPE = np.dtype([("row", "<i8"), ("size", "<i8"), ("step", "<i8")])
# Of each step: how many sizes were the largest yet, the last row with the largest one, how many sizes are known, and how
# many are smaller than one before; whether a rise came just after another one, whether growth is by a plan, and ever shrank.
_STEP_DTYPE = np.dtype(
    [(name, "<i4") for name in ("step", "levels", "last_row", "known", "smaller")]
    + [(name, "?") for name in ("is_quick", "is_planned", "has_varied")]
)


class GrowingBatches(NamedTuple):
    """What is known of the sizes of batches, as tokens or rows, at the end of a step: those that were the largest yet.

    Steps between two of them, of which only the end was recorded, have a size between the sizes of these.
    """

    sizes: Ints  # ascending
    first_steps: Ints  # with each size, of those that are known
    last_steps: Ints
    is_planned: bool  # they have grown so often that it is by a plan

    def find_first(self, share: float) -> int:
        """Return the last known step whose size is at most ``1 + share`` times the first size."""
        return int(self.last_steps[self.sizes <= (1 + share) * self.sizes[0]].max())

    def find_last(self, share: float) -> int:
        """Return the first known step whose size is at least the last size over ``1 + share``."""
        return int(self.first_steps[self.sizes >= self.sizes[-1] / (1 + share)].min())

    def has_level(self, first: int, last: int) -> bool:
        """Whether two steps and those between them have the same size."""
        return bool(((self.first_steps <= first) & (last <= self.last_steps)).any())


class BatchHistory:
    """The growth of batches up to the end of each step with phases. Each step is read once."""

    def __init__(self) -> None:
        self._rows, self._levels = GrowingArray(_STEP_DTYPE), GrowingArray(_LEVEL_DTYPE)

    @classmethod
    def read(cls, process: Process) -> BatchHistory:
        """Return the growth of a process's batches up to now."""
        history = process.derive(_begin_history)
        fresh = process.phased_steps[len(history.rows) :]
        history.add_steps(get_batch_sizes(fresh), fresh["step"])
        return history

    @property
    def rows(self) -> Rows:
        """What is known at the end of each step."""
        return self._rows.rows

    @property
    def levels(self) -> Rows:
        """The sizes that were the largest yet, and the first step with each."""
        return self._levels.rows

    def add_steps(self, sizes: Ints, steps: Ints) -> None:
        """Add the next steps with phases. ``sizes``: 0 where unknown."""
        if not len(steps):
            return
        begin, levels_before = len(self._rows), len(self._levels)
        last = self._rows.rows[-1].copy() if begin else np.zeros(1, _STEP_DTYPE)[0]
        is_known = (sizes > 0) & (steps != 0)  # the first one may be a trial
        before = self.levels["size"][-1:].tolist() or [0]
        largest = np.maximum.accumulate(np.concatenate([before, np.where(is_known, sizes, 0)]))
        is_new, is_smaller = is_known & (sizes > largest[:-1]), is_known & (sizes < largest[:-1])
        begins = np.flatnonzero(is_new)
        levels, rows = self._levels.add_rows(len(begins)), self._rows.add_rows(len(steps))
        levels["row"], levels["size"], levels["step"] = begin + begins, sizes[begins], steps[begins]
        rows["step"], rows["levels"] = steps, last["levels"] + np.cumsum(is_new)
        is_again = is_known & ~is_smaller
        rows["last_row"] = np.maximum.accumulate(np.where(is_again, begin + np.arange(len(steps)), last["last_row"]))
        for name, is_one in (("known", is_known), ("smaller", is_smaller)):
            rows[name] = last[name] + np.cumsum(is_one)
        is_quick = np.zeros(len(steps), np.bool_)
        gaps = np.diff(self.levels["step"][max(1, levels_before - 1) :])
        is_quick[self.levels["row"][max(2, levels_before) :][gaps < _PLANNED_STEPS] - begin] = True
        rows["is_quick"] = last["is_quick"] | np.logical_or.accumulate(is_quick)
        is_enough = rows["known"] >= _LEAST_SIZES
        varies = is_enough & (rows["smaller"] > np.maximum(1, _SMALLER_SHARE * rows["known"]))
        is_often = rows["levels"] > np.where(rows["is_quick"], _MANY_RISES, _PLANNED_RISES)
        rows["is_planned"] = is_often & is_enough & ~varies
        rows["has_varied"] = last["has_varied"] | np.logical_or.accumulate(varies)

    def after(self, count: int) -> GrowingBatches:
        """Return the growth after so many steps with phases."""
        rows = self.rows[:count]
        levels = self.levels[: rows["levels"][-1] if count else 0]
        ends = rows["last_row"][np.append(levels["row"][1:], count)[: len(levels)] - 1]
        is_planned = bool(count and rows["is_planned"][-1])
        return GrowingBatches(levels["size"], levels["step"], rows["step"][ends], is_planned)


def _begin_history(process: Process) -> BatchHistory:
    return BatchHistory()


def read_growth(process: Process, until_ns: int) -> GrowingBatches:
    """Return the growth of a process's batches as known at a time."""
    return BatchHistory.read(process).after(len(process.phased_steps_until(until_ns)))


def get_batch_sizes(rows: Rows) -> Ints:
    """Return the tokens of each step, or its rows if the model takes no tokens; 0 if neither is known."""
    sizes: Ints = np.where(rows["tokens"] > 0, rows["tokens"], np.maximum(rows["rows"], 0)).astype(np.int64)
    return sizes


def follow_steps(sizes: Ints, steps: Ints) -> bool:
    """Whether batches are known to grow, or to shrink, with the steps themselves. ``sizes``: 0 where unknown."""
    known = sizes > 0
    if not known.any() or not np.ptp(sizes[known]):
        return False
    return abs(float(np.corrcoef(sizes[known], steps[known])[0, 1])) > _MOST_ALIKE


def spread_sizes(rows: Rows) -> Ints:
    """Return the size of each step; counted ones have that of their neighbours where both agree, else 0."""
    sizes = get_batch_sizes(rows)
    known = np.flatnonzero(sizes)
    if not len(known):
        return sizes
    after = np.searchsorted(known, np.arange(len(sizes)))
    before = np.searchsorted(known, np.arange(len(sizes)), "right") - 1
    is_between = (before >= 0) & (after < len(known))
    low, high = sizes[known[before]], sizes[known[np.minimum(after, len(known) - 1)]]
    return np.where(is_between & (low == high), low, 0)


def name_size(rows: Rows) -> str | None:
    """Return what is known of the size of all these steps' batches: tokens, rows, or None."""
    return next((name for name in ("tokens", "rows") if len(rows) and (rows[name] > 0).all()), None)
