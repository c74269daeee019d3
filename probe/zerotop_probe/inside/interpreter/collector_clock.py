"""Times Python's garbage collector, which stops a rank at whatever line it happens to run.

Only C code can do that without harm: a signal handler of the job may raise as soon as a callback in Python begins, and
Python prints such an exception instead of passing it on. Without the C code collections are not timed.
"""

from __future__ import annotations

import gc
from typing import NamedTuple

from zerotop_probe.inside import native

# Collections of the youngest objects take microseconds.
_OLDER_GENERATION = 1
# A shorter time is not worth a record (ns). The first records are at least a second apart, later ones a minute.
_LEAST_NS = 10_000_000
_DENSE_RECORDS = 60
_INTERVAL_NS, _LATER_INTERVAL_NS = 1_000_000_000, 60_000_000_000


class CollectedTime(NamedTuple):
    """Garbage collections over some time."""

    begin_ns: int = 0  # of the first collection, CLOCK_MONOTONIC
    spent_ns: int = 0
    collections: int = 0


class CollectorClock:
    """Adds up collections, without those of the youngest objects."""

    def __init__(self) -> None:
        code = native.counted_steps
        self._timer = code.CollectionTimer() if code is not None else None
        self._records = 0
        self._next_record_ns = 0
        if self._timer is not None:
            self._timer.generation = _OLDER_GENERATION

    def start(self) -> None:
        """Listen to the collector from now on."""
        if self._timer is not None and self._timer not in gc.callbacks:
            gc.callbacks.append(self._timer)

    def stop(self) -> None:
        if self._timer in gc.callbacks:
            gc.callbacks.remove(self._timer)

    def take_collections(self, time_ns: int) -> CollectedTime | None:
        """Return the collections since the last record; None while they are not worth another one."""
        timer = self._timer
        if timer is None or timer.spent_ns < _LEAST_NS or time_ns < self._next_record_ns:
            return None
        done = CollectedTime(timer.begin_ns, timer.spent_ns, timer.collections)
        timer.begin_ns = timer.spent_ns = timer.collections = 0
        self._records += 1
        self._next_record_ns = time_ns + (_INTERVAL_NS if self._records < _DENSE_RECORDS else _LATER_INTERVAL_NS)
        return done
