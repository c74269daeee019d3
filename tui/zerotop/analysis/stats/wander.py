"""How far the level of a series wanders while nothing changes: medians of blocks of consecutive values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Values of a block: fewer than half of them may be slow by chance.
BLOCK = 10
# A range of few blocks is too small an estimate: it counts as larger by this factor, divided by their number.
_FEW_BLOCKS = 2.0


def compute_levels(values: Floats) -> Floats:
    """Return the medians of blocks of BLOCK values; a rest counts if it is at least half a block, or all."""
    known = values[~np.isnan(values)]
    whole = len(known) // BLOCK * BLOCK
    levels = np.median(known[:whole].reshape(-1, BLOCK), axis=1)
    rest = known[whole:]
    return np.append(levels, np.median(rest)) if len(rest) >= BLOCK / 2 or 0 < len(rest) == len(known) else levels


def stands_out(before: Floats, after: Floats, *, times: float, floor: float) -> bool:
    """Whether all levels of ``after`` are beyond all of ``before``, and further away than either wanders.

    The distance is at least ``times`` the larger range of the two, which counts as no less than ``floor`` (in values).
    """
    early, late = compute_levels(before), compute_levels(after)
    if not len(early) or not len(late):
        return False
    distance = float(np.median(late) - np.median(early))
    gap = late.min() - early.max() if distance > 0 else early.min() - late.max()
    wander = max(float(np.ptp(early)) * (1 + _FEW_BLOCKS / len(early)), float(np.ptp(late)), floor)
    return bool(gap > 0 and abs(distance) >= times * wander)
