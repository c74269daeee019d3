"""Decide when host memory has grown for long enough that a look at the job's lists and dicts is worth its time."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

# Time between two readings at first (ns), and at most: it doubles while memory grows too slowly to show. Memory grows if the
# last readings, each higher than the one before, differ by these bytes and this share.
_EVERY_NS, _LONGEST_NS = 1_000_000_000, 64_000_000_000
_READINGS = 5
_GROWN_BYTES = 96 << 20
_GROWN_SHARE = 0.02
# The first steps create buffers and compile.
_FIRST_STEPS = 10
# Between the two parts of a look: steps, bytes by which memory has grown, and the time after which it is given up (ns).
_LOOK_STEPS = 4
_LOOK_BYTES = 24 << 20
_GIVE_UP_NS = 120_000_000_000
# Time between two looks (ns).
_PAUSE_NS = 600_000_000_000
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
        self._readings: list[HostReading] = []
        self._every_ns = _EVERY_NS
        self._begin_ns = self._last_ns = 0
        self._looked_ns = -_PAUSE_NS
        self._probable_ns, self._spent_ns = _LOOK_NS, 0

    def is_due(self, time_ns: int) -> bool:
        """Whether the last reading is old enough for the next."""
        return time_ns - self._last_ns >= self._every_ns

    def add_reading(self, reading: HostReading) -> bool:
        """Add a reading; return whether memory grows, and a look fits into the budget."""
        self._begin_ns = self._begin_ns or reading.time_ns
        self._last_ns = reading.time_ns
        if self._readings and reading.held_bytes < self._readings[0].held_bytes:
            self._readings, self._every_ns = [], _EVERY_NS
        if self._readings and reading.held_bytes <= self._readings[-1].held_bytes:
            return False
        self._readings.append(reading)
        first = self._readings[0]
        if first.step < _FIRST_STEPS or len(self._readings) < _READINGS:
            self._readings = self._readings if first.step >= _FIRST_STEPS else []
            return False
        grown_bytes = reading.held_bytes - first.held_bytes
        is_growing = grown_bytes >= max(_GROWN_BYTES, _GROWN_SHARE * first.held_bytes)
        if is_growing:
            del self._readings[0]
        else:
            self._readings, self._every_ns = self._readings[::2], min(_LONGEST_NS, 2 * self._every_ns)
        return is_growing and self._fits_budget(reading.time_ns) and reading.time_ns - self._looked_ns >= _PAUSE_NS

    def _fits_budget(self, time_ns: int) -> bool:
        granted_ns = _BUDGET_PART * self._share * (time_ns - self._begin_ns + _ADVANCE_NS)
        return self._spent_ns + self._probable_ns <= granted_ns

    def begin_look(self, time_ns: int) -> None:
        """Note that a look begins."""
        self._looked_ns = time_ns

    def end_look(self, cost_ns: int) -> None:
        """Note the cost of a look: the next one will probably cost the same."""
        self._probable_ns = cost_ns
        self._spent_ns += cost_ns


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
