"""Rises of the memory that PyTorch reserves beyond the highest that was ever allocated: cached blocks do not fit.

A reserve also grows while batches have new shapes, by ever less: here it grows on, and becomes several times as large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Ints, Process
from zerotop.analysis.findings.support.thresholds import CREEP_BYTES, FRAGMENTED_SHARE
from zerotop.recording.samples import Samples

# Rises, the steps from the first to the last of them, and the part of the whole rise that a single one may be.
_LEAST_RISES, _LEAST_SPAN, _LARGEST_SHARE = 8, 24, 1 / 3
# Each quarter of the steps adds this share of the whole rise, and the later half this part of what the earlier one added.
_QUARTER_SHARE, _LATER_SHARE = 0.02, 0.6
# The part of what is unused that was reserved since the rise began, and by how much the peak may rise with it.
_NEW_SHARE, _PEAK_SHARE = 0.5, 0.5
# The reserve is looked at again after this share of more rises, from so many points at most.
_MORE_RISES, _MOST_BEGINS = 1 / 8, 32
# It is told again when it has grown by this factor, and when it has ended: after so many steps without a rise, or so many
# times the most steps between two rises.
_TOLD_AGAIN, _END_STEPS, _END_LEVELS = 1.5, 24, 2


class _Level(NamedTuple):
    """The reserve after a rise. ``segments``: -1 where they are not counted."""

    time_ns: int
    before: int  # the number of steps that had finished at the record before
    steps: int  # that had finished
    reserved: int
    unused: int
    segments: int


class ReserveRise(NamedTuple):
    """A rise from the first level to the last one (bytes)."""

    levels: tuple[_Level, ...]
    known_ns: int
    has_ended: bool

    @property
    def first_steps(self) -> int:
        """The number of steps that had finished when it began."""
        return self.levels[1].before

    @property
    def per_step(self) -> float:
        """By how much what is unused has grown a step in the later half of the steps."""
        steps, unused = _list_steps(self.levels), np.array([one.unused for one in self.levels])
        middle = min(int(np.searchsorted(steps, (steps[0] + steps[-1]) / 2)), len(steps) - 2)
        return float(unused[-1] - unused[middle]) / max(1, int(steps[-1] - steps[middle]))

    @property
    def segment_bytes(self) -> tuple[float, float] | None:
        """How large new segments were in the earlier and the later half of the rises; None where they are not counted."""
        half = len(self.levels) // 2
        ends = (self.levels[0], self.levels[half]), (self.levels[half], self.levels[-1])
        counts = [last.segments - first.segments for first, last in ends]
        if min(one.segments for one in self.levels) < 0 or min(counts) <= 0:
            return None
        early, late = ((last.reserved - first.reserved) / count for (first, last), count in zip(ends, counts, strict=True))
        return early, late


class ReserveSearch:
    """The search in the records of one process's allocator, each of which it reads once."""

    def __init__(self) -> None:
        self._levels: list[_Level] = []
        self._due = _LEAST_RISES
        self._last_bytes = self._highest_bytes = 0  # reserved in the last record; allocated in any
        self._last_finished = 0  # steps, at the last record
        self._begin = -1  # of the rise that was told
        self._told: _Level | None = None
        self._has_ended = False

    def find_rises(self, process: Process, samples: Samples, least_bytes: float) -> Iterator[ReserveRise]:
        """Yield each rise as soon as new records show it, again as it grows, and once it has ended."""
        if not len(samples):
            return
        rows, finished = samples.rows, np.searchsorted(process.steps["end_unix_ns"], samples.times, "right")
        reserved = rows["reserved_bytes"].astype(np.int64)
        allocated = np.maximum(rows["allocated_bytes"], rows["allocated_peak_bytes"]).astype(np.int64)
        highest = np.maximum.accumulate(np.maximum(allocated, self._highest_bytes))
        segments = rows["segments"] if "segments" in (rows.dtype.names or ()) else np.full(len(rows), -1)
        is_new = np.diff(reserved, prepend=self._last_bytes) != 0
        if not self._levels:  # the first one is that of the first step
            is_new[np.searchsorted(finished, 1) :][:1] = True
        before = np.concatenate([[self._last_finished], finished[:-1]])
        self._last_finished = int(finished[-1])
        self._last_bytes, self._highest_bytes = int(reserved[-1]), int(highest[-1])
        read = 0
        for index in np.flatnonzero(is_new).tolist():
            yield from self._find_end(samples.times[read:index], finished[read:index])
            read = index
            if not finished[index]:
                continue
            size, moment = int(reserved[index]), (int(samples.times[index]), int(before[index]), int(finished[index]))
            yield from self._add(_Level(*moment, size, size - int(highest[index]), int(segments[index])), least_bytes)
        yield from self._find_end(samples.times[read:], finished[read:])

    def _add(self, level: _Level, least_bytes: float) -> Iterator[ReserveRise]:
        if self._levels and level.reserved < self._levels[-1].reserved:
            if self._levels[-1].reserved - level.reserved >= CREEP_BYTES:  # returned to the driver
                self._levels, self._due, self._begin, self._told = [level], _LEAST_RISES, -1, None
            return
        if self._has_ended:  # it goes on, or another one begins
            self._levels, self._due, self._begin, self._told = self._levels[-1:], _LEAST_RISES, -1, None
            self._has_ended = False
        self._levels.append(level)
        if self._told is not None:
            if level.unused >= _TOLD_AGAIN * self._told.unused:
                self._told = level
                yield ReserveRise(tuple(self._levels[self._begin :]), level.time_ns, has_ended=False)
        elif len(self._levels) > self._due:
            self._due += max(1, int(self._due * _MORE_RISES))
            begin = _find_begin(self._levels, least_bytes)
            if begin is not None:
                self._begin, self._told = begin, level
                yield ReserveRise(tuple(self._levels[begin:]), level.time_ns, has_ended=False)

    def _find_end(self, times: Ints, finished: Ints) -> Iterator[ReserveRise]:
        if self._told is None or self._has_ended or not len(times):
            return
        steps = _list_steps(self._levels[self._begin :])
        last = steps[-1] + max(_END_STEPS, _END_LEVELS * int(np.diff(steps).max()))
        index = int(np.searchsorted(finished, last))
        if index < len(times):
            self._has_ended = True
            yield ReserveRise(tuple(self._levels[self._begin :]), int(times[index]), has_ended=True)


def _list_steps(levels: Sequence[_Level]) -> Ints:
    """Return the steps that had finished at each level; at the first, those before the rise from it."""
    return np.array([levels[1].before, *(one.steps for one in levels[1:])], np.int64)


def _find_begin(levels: list[_Level], least_bytes: float) -> int | None:
    """Return the index of the last level before the reserve began to grow evenly, up to the last one; None otherwise."""
    reserved, unused = (np.array([getattr(one, name) for one in levels], np.int64) for name in ("reserved", "unused"))
    if unused[-1] < FRAGMENTED_SHARE * reserved[-1]:
        return None
    for begin in range(0, len(levels) - _LEAST_RISES, max(1, len(levels) // _MOST_BEGINS)):
        if _is_even(_list_steps(levels[begin:]), unused[begin:], reserved[begin:], least_bytes):
            slight = unused[begin:] <= unused[begin] + _QUARTER_SHARE * (unused[-1] - unused[begin])
            return begin + int(np.flatnonzero(slight)[-1])
    return None


def _is_even(steps: Ints, unused: Ints, reserved: Ints, least_bytes: float) -> bool:
    total, peaks, rises = int(unused[-1] - unused[0]), reserved - unused, np.diff(unused)
    if total < max(least_bytes, _NEW_SHARE * unused[-1]) or peaks[-1] - peaks[0] > _PEAK_SHARE * total:
        return False
    if rises.max() > _LARGEST_SHARE * total or steps[-1] - steps[0] < _LEAST_SPAN:
        return False
    quarters = np.diff(np.interp(np.linspace(steps[0], steps[-1], 5), steps, unused))
    return bool(quarters.min() >= _QUARTER_SHARE * total and quarters[2:].sum() >= _LATER_SHARE * quarters[:2].sum())
