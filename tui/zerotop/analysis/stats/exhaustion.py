"""When something that falls steadily is used up.

The last values are divided into blocks. They show a steady fall if each block is lower than the one before by about the same
amount, and the last one still falls. Windows of several lengths are tried: the longest that shows one has the
least noise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Values of the shortest block, the number of lengths, each twice the one before, and the blocks of a window.
BLOCK = 8
_LENGTHS = 7
_BLOCKS = 4
# Falls between blocks may differ by this factor; up to the smaller one they are as good as equal.
_UNEVEN, _EVEN = 2.0, 1.25
# A fall that slows down by more than this share may end by itself.
_SLOWING = 0.7
# Values stray from the line by at most this share of the fall from block to block.
_STRAY = 0.25
# A forecast reaches this many windows ahead at most.
_REACH = 10


class Forecast(NamedTuple):
    """When a value reaches 0, in values after the last one."""

    window: int  # number of values that it rests on
    fallen: float  # by how much they fell
    soonest: float
    expected: float
    latest: float

    @property
    def is_even(self) -> bool:
        """Whether the soonest and the latest are about the same."""
        return self.latest <= _EVEN * self.soonest


def forecast_end(values: NDArray[Any], least: float) -> Forecast | None:
    """Return when the last of the values, evenly spaced, reach 0; None unless they fall steadily, by ``least`` at least.

    A window is tried each time that a block of its length is full: the count of values must be a multiple of BLOCK.
    """
    count = len(values) // BLOCK
    for length in reversed(range(_LENGTHS)):
        if count % (1 << length) == 0 and count >= _BLOCKS << length:
            found = _check_window(values[-(_BLOCKS * BLOCK << length) :], least)
            if found is not None:
                return found
    return None


def has_stopped(values: NDArray[Any], forecast: Forecast) -> bool:
    """Whether values no longer fall as they did in a forecast: from its last two blocks on by less than a third of that."""
    block = forecast.window // _BLOCKS
    if len(values) % block or len(values) < 3 * block:
        return False
    before, after = (float(np.median(part)) for part in (values[-3 * block : -2 * block], values[-block:]))
    return before - after < 2 / 3 * forecast.fallen / (_BLOCKS - 1)


def _check_window(values: NDArray[Any], least: float) -> Forecast | None:
    if not values[0] - values[-1] >= least:  # the cheap test first; NaN: unknown
        return None
    block = len(values) // _BLOCKS
    blocks = values.reshape(_BLOCKS, block)
    levels = np.median(blocks, axis=1)
    falls = -np.diff(levels)
    slowest, fastest = float(falls.min()), float(falls.max())
    if not (slowest > 0 and fastest <= _UNEVEN * slowest and falls[-1] >= _SLOWING * falls[0]):
        return None
    times = np.arange(len(values), dtype=np.float64)
    slope, start = np.polyfit(times, values, 1)
    stray = float(np.median(np.abs(values - (slope * times + start))))
    recent = float(np.median(blocks[-1, : block // 2]) - np.median(blocks[-1, block // 2 :]))
    if stray > _STRAY * falls.mean() or recent < slowest / 4:  # half a block later: half of the fall is expected
        return None
    left = float(np.median(values[-BLOCK:]))
    expected = block * left / float(falls.mean())
    if not 0 < expected <= _REACH * len(values):
        return None
    return Forecast(len(values), float(levels[0] - levels[-1]), block * left / fastest, expected, block * left / slowest)
