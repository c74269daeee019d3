"""A steady rise in a growing series: each block is higher than the one before by about the same amount.

Blocks of all sizes that are doublings of TREND_BLOCK are compared. So a rise of any pace is found, at a cost that does not
depend on the length of the series. A rise depends on its blocks and those before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zerotop.analysis.stats.change_points import Values

# Values of the smallest blocks (their median counts: no single value does).
TREND_BLOCK = 8
# The rise is at least this many median differences of neighbouring blocks (6 are 4 standard deviations).
TREND_SPREADS = 6.0
# A rise that continues, however unevenly, is reported again when it is higher by this factor.
TREND_REPEAT_FACTOR = 1.5
# The number of neighbouring blocks that show the noise.
_NOISE_BLOCKS = 64


class Rise(NamedTuple):
    """A rise over the values from ``begin`` to ``end`` (not included)."""

    begin: int
    end: int
    block_length: int  # values of a block
    low: float  # level of the first block
    high: float  # level of the last block

    @property
    def slope(self) -> float:
        """By how much each value exceeds the one before."""
        return (self.high - self.low) / (self.end - self.begin - self.block_length)


def measure_rise(values: Values, rise: Rise) -> tuple[float, float]:
    """Return by how much the values grew in a rise, and to what; its levels are those amid its first and last block."""
    before, first = float(values[max(0, rise.begin - 1) : rise.begin + 1][0]), float(values[rise.begin : rise.begin + 1][0])
    high = max(float(values[rise.end - 1 : rise.end][0]), rise.high)
    return high - min(before if before > 0 else first, rise.low), high


class TrendFinder:
    """Finds rises of some consecutive blocks."""

    def __init__(self, blocks: int, evenness: float) -> None:
        """``evenness``: by how much each block has to rise, as a share of an even rise."""
        self._rise_blocks, self._evenness = blocks, evenness / (blocks - 1)
        self._begin = -1  # of the series
        self._block_count = 0  # blocks of the smallest size
        self._blocks_by_size: list[list[float]] = []  # the last blocks of each size
        self._levels: deque[float] = deque(maxlen=_NOISE_BLOCKS)  # of the smallest blocks
        self._reported_high = -math.inf

    def find_rises(self, values: Values, begin: int, *, share: float, least: float = 0.0) -> Iterator[Rise]:
        """Yield the rises by at least ``share`` of their low level and ``least`` that were not yielded before.

        ``begin``: index at which the series begins, the same each time. A negative value is unknown.
        """
        self._begin = begin
        first = begin + self._block_count * TREND_BLOCK
        count = max(0, len(values) - first) // TREND_BLOCK
        if not count:
            return
        blocks = np.asarray(values[first : first + count * TREND_BLOCK], np.float64).reshape(count, TREND_BLOCK)
        levels = np.where(blocks.min(axis=1) >= 0, np.median(blocks, axis=1), np.nan)
        for level in levels.tolist():
            self._block_count += 1
            self._levels.append(level)
            self._add_level(0, level)
            rise = self._find_rise(share, least)
            if rise is not None:
                self._reported_high = rise.high
                yield rise

    def _add_level(self, size: int, level: float) -> None:
        if size == len(self._blocks_by_size):
            self._blocks_by_size.append([])
        blocks = self._blocks_by_size[size]
        blocks.append(level)
        del blocks[: -self._rise_blocks - 1]
        if self._block_count % (2 << size) == 0:
            self._add_level(size + 1, (blocks[-1] + blocks[-2]) / 2)

    def _measure_spread(self) -> float:
        steps = np.diff(self._levels)
        steps = steps[~np.isnan(steps)]
        return float(np.median(np.abs(steps - np.median(steps))))

    def _find_rise(self, share: float, least: float) -> Rise | None:
        """The rise that ends with the last block, of the smallest block size that shows one."""
        goes_on = self._reported_high > -math.inf
        for size, blocks in enumerate(self._blocks_by_size):
            if self._block_count % (1 << size) or len(blocks) < self._rise_blocks:
                break
            low, high = blocks[-self._rise_blocks], blocks[-1]
            # The cheap test first: it nearly always fails.
            if not high - low >= max(share * low, least) or high < TREND_REPEAT_FACTOR * self._reported_high:
                continue
            steps = np.diff(blocks[-self._rise_blocks :])
            if not (steps.min() > 0 if goes_on else steps.min() >= self._evenness * (high - low)):
                continue
            # Larger blocks have less noise.
            if high - low >= TREND_SPREADS * self._measure_spread() / math.sqrt(1 << size):
                end = self._begin + self._block_count * TREND_BLOCK
                return Rise(end - (self._rise_blocks * TREND_BLOCK << size), end, TREND_BLOCK << size, low, high)
        return None
