"""A steady rise in a series that grows: block after block is higher than the one before, by about as much each time.

Blocks are looked at in all sizes that are doublings of TREND_BLOCK, so that a rise is found whatever its pace, at a cost
that does not depend on how long the series is. What is said rests on the blocks of the rise and those before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.support.thresholds import TREND_BLOCK, TREND_REPEAT_FACTOR, TREND_SPREADS

# Neighbouring blocks of which noise is taken.
_NOISE_BLOCKS = 64


class Rise(NamedTuple):
    """A rise over the values from ``begin`` to ``end`` (not included)."""

    begin: int
    end: int
    block_length: int  # how many values a block has
    low: float  # the first block's level
    high: float  # the last one's

    @property
    def slope(self) -> float:
        """By how much each value is above the one before."""
        return (self.high - self.low) / (self.end - self.begin - self.block_length)


class TrendFinder:
    """Looks for rises in so many blocks, each higher by at least a share of what it would be if all rose alike."""

    def __init__(self, blocks: int, evenness: float) -> None:
        self._rise_blocks, self._evenness = blocks, evenness / (blocks - 1)
        self._begin = -1  # of the series: what lies before counts nothing
        self._block_count = 0  # blocks of the smallest size
        self._blocks_by_size: list[list[float]] = []  # the last blocks of each size
        self._levels: deque[float] = deque(maxlen=_NOISE_BLOCKS)  # of the smallest size, for the noise
        self._reported_high = -math.inf

    def find_rises(self, values: NDArray[Any], begin: int, *, share: float, least: float = 0.0) -> Iterator[Rise]:
        """Those of at least a share of their low level and so much that were not told before; a later one is higher still.

        ``begin``: where the series begins, the same each time. A negative value is unknown.
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
            found = self._find_rise(share, least)
            if found is not None:
                self._reported_high = found.high
                yield found

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
        """The one that ends with the last block, of the smallest size that shows one."""
        for size, blocks in enumerate(self._blocks_by_size):
            if self._block_count % (1 << size) or len(blocks) < self._rise_blocks:
                break
            low, high = blocks[-self._rise_blocks], blocks[-1]
            # Nearly always this says no, at once.
            if not high - low >= max(share * low, least) or high < TREND_REPEAT_FACTOR * self._reported_high:
                continue
            steps = np.diff(blocks[-self._rise_blocks :])
            # Larger blocks have less noise.
            noise = TREND_SPREADS * self._measure_spread() / math.sqrt(1 << size)
            if high - low >= noise and steps.min() >= self._evenness * (high - low):
                end = self._begin + self._block_count * TREND_BLOCK
                return Rise(end - (self._rise_blocks * TREND_BLOCK << size), end, TREND_BLOCK << size, low, high)
        return None
