"""How far the level of a series wanders while nothing changes: medians of blocks of consecutive values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Values of a block: fewer than half of them may be slow by chance.
BLOCK = 10
# A range of few blocks is too small an estimate: it counts as larger by this factor, divided by their number.
_FEW_BLOCKS = 2.0
_FAR_QUARTER = 0.25
# The fewest blocks that are a level of their own.
_LEVEL_BLOCKS = 3


def compute_levels(values: Floats) -> Floats:
    """Return the medians of blocks of BLOCK values; a rest counts if it is at least half a block, or all."""
    known = values[~np.isnan(values)]
    whole = len(known) // BLOCK * BLOCK
    levels = np.median(known[:whole].reshape(-1, BLOCK), axis=1)
    rest = known[whole:]
    return np.append(levels, np.median(rest)) if len(rest) >= BLOCK / 2 or 0 < len(rest) == len(known) else levels


def stands_out(before: Floats, after: Floats, *, times: float, floor: float) -> bool:
    """Whether all levels of ``after`` are beyond all of ``before``, and further away than either wanders.

    The distance is at least ``times`` the larger range of the two, which counts as no less than ``floor`` (in values). The
    quarter of the levels that is furthest from the other side says nothing: a job may be faster for a while.
    """
    early, late = compute_levels(before), compute_levels(after)
    if not len(early) or not len(late):
        return False
    distance = float(np.median(late) - np.median(early))
    gap = late.min() - early.max() if distance > 0 else early.min() - late.max()
    early_range, late_range = (_measure_range(early, distance), _measure_range(late, -distance))
    wander = max(early_range * (1 + _FEW_BLOCKS / len(early)), late_range, floor)
    return bool(gap > 0 and abs(distance) >= times * wander)


def _measure_range(levels: Floats, direction: float) -> float:
    """Return the range of levels without the lowest quarter, or without the highest where ``direction`` is negative."""
    ordered, left_out = np.sort(levels), int(_FAR_QUARTER * len(levels))
    kept = ordered[left_out:] if direction > 0 else ordered[: len(ordered) - left_out]
    return float(kept[-1] - kept[0])


def find_split(levels: Floats, fewest: int) -> int:
    """Return the index that parts levels best into low and high ones, with at least ``fewest`` on each side (Pettitt)."""
    count = len(levels)
    ranks = np.argsort(np.argsort(levels, kind="stable"), kind="stable") + 1.0
    after = np.arange(1, count)  # the number before each possible split
    statistic = 2 * np.cumsum(ranks)[:-1] - after * (count + 1)
    possible = np.abs(statistic[fewest - 1 : count - fewest])
    return fewest + int(np.argmax(possible))


def refine_split(levels: Floats, split: int, fewest: int) -> int:
    """Return the split near another one with the smallest sum of distances from the medians of both sides."""
    low, high = max(fewest, split // 2), min(len(levels) - fewest, (split + len(levels)) // 2)
    return min(range(low, high + 1), key=lambda at: _measure_misfit(levels[:at]) + _measure_misfit(levels[at:]))


def find_last_level(values: Floats, least_share: float) -> int:
    """Return the index from which on known values keep one level: where they last changed by a share of it, for good."""
    begin = 0
    while len(levels := compute_levels(values[begin + (len(values) - begin) % BLOCK :])) >= 2 * _LEVEL_BLOCKS:
        split = refine_split(levels, find_split(levels, _LEVEL_BLOCKS), _LEVEL_BLOCKS)
        early, late = levels[:split], levels[split:]
        is_other = abs(np.median(late) - np.median(early)) >= least_share * np.median(late)
        if not is_other or not stands_out(early, late, times=0.0, floor=0.0):
            break
        begin = len(values) - (len(levels) - split) * BLOCK
    return begin


def _measure_misfit(levels: Floats) -> float:
    middle = len(levels) // 2  # the sum is the same for all values between the two in the middle
    return float(np.abs(levels - np.partition(levels, middle)[middle]).sum())


def measure_order(before: Floats, after: Floats) -> float:
    """Return the share of the pairs of two values in which the later one is larger; equal ones count half."""
    ordered = np.sort(before)
    below, upto = (np.searchsorted(ordered, after, side).sum() for side in ("left", "right"))
    return float(below + upto) / (2 * len(before) * len(after))
