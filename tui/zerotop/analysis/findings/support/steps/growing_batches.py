"""Batches that grow and never shrink, in several jumps or a little each step, as a curriculum makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Ints, Rows

# So many rises, with at least so many steps from one to the next, and steps of known size show a plan; or many rises.
_PLANNED_RISES, _PLANNED_STEPS, _LEAST_SIZES, _MANY_RISES = 2, 3, 20, 8
# The most smaller batches in between, as the last one of each epoch: a share of the steps.
_SMALLER_SHARE = 0.05
# Sizes that grow with the steps themselves, as in a curriculum, explain everything: they cannot be told from a leak.
_MOST_ALIKE = 0.8
UNKNOWN_SIZES = "See whether its batches are larger: their sizes were not recorded."
"""Advice about a slow rank, before any other, where :func:`name_size` knows nothing."""


class SizeLevel(NamedTuple):
    """Steps of the same size: the first and the last of them that are known."""

    size: int
    first_step: int
    last_step: int


@dataclass
class GrowingBatches:
    """The sizes of steps with phases, as tokens or rows, while they only grow.

    Steps between two of them, of which only the end was recorded, have a size between the sizes of these.
    """

    levels: list[SizeLevel] = field(default_factory=list)
    count: int = 0  # of known sizes
    smaller: int = 0  # of them that are smaller than one before
    quick: int = 0  # rises that came just after another one

    def add_step(self, size: int, step: int) -> None:
        """Add the size of the next step with phases."""
        if size <= 0 or step == 0:  # the first one may be a trial
            return
        self.count += 1
        level = self.levels[-1] if self.levels else None
        if level is not None and size < level.size:
            self.smaller += 1
        elif level is not None and size == level.size:
            self.levels[-1] = level._replace(last_step=step)
        else:
            self.quick += len(self.levels) > 1 and step - self.levels[-1].first_step < _PLANNED_STEPS
            self.levels.append(SizeLevel(size, step, step))

    @property
    def has_varied(self) -> bool:
        """Whether batches are known to shrink, too."""
        return self.count >= _LEAST_SIZES and self.smaller > max(1, _SMALLER_SHARE * self.count)

    @property
    def is_planned(self) -> bool:
        """Whether they have grown so often that it is by a plan."""
        rises = len(self.levels) - 1
        is_often = rises >= (_MANY_RISES if self.quick else _PLANNED_RISES)
        return is_often and self.count >= _LEAST_SIZES and not self.has_varied

    def find_first(self, share: float) -> int:
        """Return the last known step whose size is at most ``1 + share`` times the first size."""
        most = (1 + share) * self.levels[0].size
        return max(level.last_step for level in self.levels if level.size <= most)

    def find_last(self, share: float) -> int:
        """Return the first known step whose size is at least the last size over ``1 + share``."""
        least = self.levels[-1].size / (1 + share)
        return min(level.first_step for level in self.levels if level.size >= least)


def read_growth(rows: Rows) -> GrowingBatches:
    """Return the growth of the batches in steps with phases."""
    growth = GrowingBatches()
    for size, step in zip(get_batch_sizes(rows).tolist(), rows["step"].tolist(), strict=True):
        growth.add_step(size, step)
    return growth


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
