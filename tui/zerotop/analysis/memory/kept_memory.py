"""Memory that a rank still holds after a step, by how much it grows from step to step, and since when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.memory.tensor_inventory import CountedGrowth
from zerotop.recording.reader import Source
from zerotop_probe.recording.tables import END, PHASE_CODE, TICK

_TAIL_ROWS = 4096  # readings to look back through
_STEPS = 13  # after which memory is compared
_MIN_STEPS = 5
_MIN_GROWTH = 1 << 20  # bytes a step; less is not worth a word
# A leak has so many rises, none of which is more than this part of all, or it spans steps without readings: then it is no
# more than so many times as fast as the others.
_LEAST_RISES, _LARGEST_RISE, _FASTER = 3, 0.5, 2
_LEVEL_SHARE = 0.25  # of its steps, without a rise in which memory has reached a level
# Memory after a step has changed by at least these bytes and this share: an output that is kept may vary.
_LEAST_CHANGE, _CHANGE_SHARE = 32 << 20, 0.02


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """Memory growth from step to step in the last readings of an allocator, and whether a step is in progress."""

    is_between_steps: bool  # no phase has begun since the last step ended
    growth_bytes: int  # a step, median; 0 where it does not grow in each of the last steps


class KeptLevel(NamedTuple):
    """Allocated bytes after a step."""

    step: int
    bytes: int

    def has_changed(self, before: KeptLevel) -> bool:
        return abs(self.bytes - before.bytes) > _limit_change(before.bytes)


class Growth(NamedTuple):
    """By how much memory after a step has grown beyond all that was counted, from a step to another one."""

    bytes: int
    since_step: int
    until_step: int


def read_level(source: Source, unix_ns: int) -> KeptLevel | None:
    """Return the last reading of an allocator after a step, up to a moment; None if there is none near it."""
    rows = source.until(unix_ns)[-_TAIL_ROWS:]
    ends = select_levels(rows)
    return KeptLevel(int(ends["step"][-1]), int(ends["allocated_bytes"][-1])) if len(ends) else None


def select_levels(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the readings after steps, of the device that was read last."""
    ends: NDArray[Any] = rows[(rows["edge"] == END) & (rows["phase"] == PHASE_CODE["step"])]
    return ends[ends["device"] == ends["device"][-1]] if len(ends) else ends


def measure_growth(source: Source, unix_ns: int, counted: CountedGrowth) -> Growth | None:
    """Return the growth up to a moment; None where memory has not grown by a notable part."""
    then = _find_counted_level(source, unix_ns, counted)
    if then is None:
        return None
    now = read_level(source, unix_ns)
    if now is None or now.step < counted.step:
        now = then
    size = counted.bytes + now.bytes - then.bytes
    return Growth(size, counted.since_step, now.step) if size > _limit_change(now.bytes - size) else None


def _find_counted_level(source: Source, unix_ns: int, counted: CountedGrowth) -> KeptLevel | None:
    """Return the level after the step of a count, else that before it."""
    if counted.allocated_bytes is not None:
        return KeptLevel(counted.step, counted.allocated_bytes)
    rows = select_levels(source.between(counted.unix_ns, unix_ns, rows_before=_TAIL_ROWS)[: 2 * _TAIL_ROWS])
    known = rows[rows["step"] <= counted.step]
    return KeptLevel(int(known["step"][-1]), int(known["allocated_bytes"][-1])) if len(known) else None


class Leak(NamedTuple):
    """Memory after a step that has grown in several rises, from a step to another one."""

    bytes: int
    since_step: int
    until_step: int
    base_bytes: int  # allocated after ``since_step``
    last_rise_step: int  # after which no more was left

    @property
    def bytes_each(self) -> float:
        """The mean growth a step."""
        return self.bytes / (self.until_step - self.since_step)

    @property
    def is_going_on(self) -> bool:
        """Whether it rose to the end, rather than to a level."""
        return self.until_step - self.last_rise_step <= _LEVEL_SHARE * (self.until_step - self.since_step)


def find_leak(source: Source, unix_ns: int) -> Leak | None:
    """Return the growth of an allocator's memory since the last step that left as little as any; None without a leak."""
    rows = select_levels(source.until(unix_ns))[1:]  # the first update makes the optimizer's state
    rows = rows[rows["allocated_bytes"] > 0]  # else the training is over
    if not len(rows):
        return None
    held = rows["allocated_bytes"].astype(np.int64)
    base = int(np.flatnonzero(held <= held.min() + _limit_change(int(held.min())))[-1])
    grown = int(held[-1] - held[base])
    rises = np.diff(np.maximum.accumulate(held[base:]))
    steps = rows["step"].astype(np.int64)
    gaps = np.diff(steps[base:])
    if np.count_nonzero(rises) < _LEAST_RISES or _is_jump(rises, gaps, grown):
        return None
    last_rise = base + 1 + int(np.flatnonzero(rises)[-1])
    # It may have begun in the midst of steps without readings.
    in_first = int(rises[0] / (_measure_usual(rises[1:], gaps[1:]) or 1)) + 1 if gaps[0] > 1 else 1
    since = max(int(steps[base]), int(steps[base + 1]) - in_first)
    return Leak(grown, since, int(steps[-1]), int(held[base]), int(steps[last_rise]))


def _is_jump(rises: NDArray[Any], gaps: NDArray[Any], grown: int) -> bool:
    """Return whether the largest rise is most of the growth, and not because it spans most of the steps."""
    place = int(np.argmax(rises))
    rise, gap = int(rises[place]), int(gaps[place])
    others = int(gaps.sum()) - gap
    is_slower = rise * others <= _FASTER * (grown - rise) * gap
    return rise > _LARGEST_RISE * grown and (gap == 1 or not is_slower)


def _measure_usual(rises: NDArray[Any], gaps: NDArray[Any]) -> float:
    """Return the median rise over all steps, in bytes a step."""
    rates = rises / np.maximum(gaps, 1)
    order = np.argsort(rates)
    return float(rates[order[np.searchsorted(np.cumsum(gaps[order]), gaps.sum() / 2)]])


def _limit_change(size: int) -> float:
    return max(_LEAST_CHANGE, _CHANGE_SHARE * size)


def read_kept_memory(source: Source, cursor_ns: int) -> KeptMemory:
    """Read it from an allocator's table at a cursor."""
    rows = source.until(cursor_ns)[-_TAIL_ROWS:]
    if not len(rows):
        return KeptMemory(False, 0)
    edges = np.flatnonzero((rows["edge"] != TICK) & (rows["device"] == rows["device"][-1]))
    ends = edges[(rows["edge"][edges] == END) & (rows["phase"][edges] == PHASE_CODE["step"])]
    if not len(ends):
        return KeptMemory(False, 0)
    last = rows[ends[-_STEPS:]]
    # After several counted steps there is one reading.
    growth = np.diff(last["allocated_bytes"]) / np.maximum(1, np.diff(last["step"]))
    grows = len(growth) >= _MIN_STEPS and bool((growth > 0).all())
    median = int(np.median(growth)) if grows else 0
    is_between_steps = rows["time_ns"][edges[-1]] == rows["time_ns"][ends[-1]]
    return KeptMemory(bool(is_between_steps), median if median >= _MIN_GROWTH else 0)
