"""Decide when host memory has grown for long enough that a look at the job's lists and dicts is worth its time."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

# Time between two readings (ns), and between those that are compared: it doubles up to this number of times. Memory grows if
# the last ones differ by these bytes and this share, and each from the one before by at least this part of an even growth.
_EVERY_NS, _DOUBLINGS = 500_000_000, 11
_READINGS = 4
_GROWN_BYTES = 48 << 20
_GROWN_SHARE = 0.02
_EVENNESS = 0.5
# The first steps create buffers and compile.
_FIRST_STEPS = 10
# Between the two parts of a look: steps, bytes by which memory has grown, and the time after which it is given up (ns).
_LOOK_STEPS = 4
_LOOK_BYTES = 24 << 20
_GIVE_UP_NS = 120_000_000_000
# Time between two looks (ns), and after one that has named nothing.
_PAUSE_NS, _SHORT_PAUSE_NS = 600_000_000_000, 30_000_000_000
# The assumed cost of the first look (ns). Looks may take this part of the budget, of which some time is advanced.
_LOOK_NS = 200_000_000
_BUDGET_PART = 0.5
_ADVANCE_NS = 180_000_000_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_HELD = re.compile(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)


class HostReading(NamedTuple):
    """Resident memory of this process after a step, without pages of files: the kernel drops those when memory is short."""

    time_ns: int
    step: int
    held_bytes: int


class HostWatch:
    """The rule of one rank; all times are nanoseconds."""

    def __init__(self, share: float) -> None:
        """``share``: the budget, as a share of the training time."""
        self._share = share
        self._readings: list[deque[HostReading]] = [deque(maxlen=_READINGS) for _ in range(_DOUBLINGS)]
        self._count = 0
        self._begin_ns = self._last_ns = 0
        self._next_look_ns = 0
        self._probable_ns, self._spent_ns = _LOOK_NS, 0

    def is_due(self, time_ns: int) -> bool:
        """Whether the last reading is old enough for the next."""
        return time_ns - self._last_ns >= _EVERY_NS

    def add_reading(self, reading: HostReading) -> bool:
        """Add a reading; return whether memory grows, and a look fits into the budget."""
        self._begin_ns = self._begin_ns or reading.time_ns
        self._last_ns = reading.time_ns
        if reading.step < _FIRST_STEPS:
            return False
        is_growing = False
        for doublings, readings in enumerate(self._readings):
            if self._count % (1 << doublings):
                break
            readings.append(reading)
            is_growing |= len(readings) == _READINGS and _grows_evenly(readings)
        self._count += 1
        return is_growing and reading.time_ns >= self._next_look_ns and self._fits_budget(reading.time_ns)

    def _fits_budget(self, time_ns: int) -> bool:
        granted_ns = _BUDGET_PART * self._share * (time_ns - self._begin_ns + _ADVANCE_NS)
        return self._spent_ns + self._probable_ns <= granted_ns

    def end_look(self, time_ns: int, cost_ns: int, *, named: bool) -> None:
        """Note the end and cost of a look: the next one will probably cost the same."""
        self._next_look_ns = time_ns + (_PAUSE_NS if named else _SHORT_PAUSE_NS)
        self._probable_ns = max(self._probable_ns, cost_ns)
        self._spent_ns += cost_ns


def _grows_evenly(readings: Iterable[HostReading]) -> bool:
    """Whether memory has grown by enough, and about as fast between any two readings: buffers and pools grow at once."""
    (first, *_, last) = near = list(readings)
    grown, time_ns = last.held_bytes - first.held_bytes, last.time_ns - first.time_ns
    return grown >= max(_GROWN_BYTES, _GROWN_SHARE * first.held_bytes) and all(
        (late.held_bytes - early.held_bytes) * time_ns >= _EVENNESS * grown * (late.time_ns - early.time_ns)
        for early, late in zip(near, near[1:])
    )


def can_end_look(begin: HostReading, now: HostReading) -> bool:
    """Whether a look has seen enough growth."""
    return now.step - begin.step >= _LOOK_STEPS and now.held_bytes - begin.held_bytes >= _LOOK_BYTES


def is_too_late(begin: HostReading, now: HostReading) -> bool:
    """Whether a look has waited too long: memory no longer grows."""
    return now.time_ns - begin.time_ns > _GIVE_UP_NS


def read_held_bytes() -> int:
    """Return the anonymous and shared memory of this process, or all of it before Linux 4.5. Raises OSError."""
    with open("/proc/self/status", "rb") as file:
        sizes = _HELD.findall(file.read())
    if sizes:
        return sum(map(int, sizes)) << 10
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
