"""Times Python's garbage collector, which stops a rank at whatever line it happens to run."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import NamedTuple

from zerotop_probe.inside.guard import now

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
        self._collecting_since_ns = 0
        self._done = CollectedTime()
        self._records = 0
        self._next_record_ns = 0

    def start(self) -> None:
        """Listen to the collector from now on."""
        if self._on_collection not in gc.callbacks:
            gc.callbacks.append(self._on_collection)

    def stop(self) -> None:
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def take_collections(self, time_ns: int) -> CollectedTime | None:
        """Return the collections since the last record; None while they are not worth another one."""
        done = self._done
        if done.spent_ns < _LEAST_NS or time_ns < self._next_record_ns:
            return None
        self._done = CollectedTime()
        self._records += 1
        self._next_record_ns = time_ns + (_INTERVAL_NS if self._records < _DENSE_RECORDS else _LATER_INTERVAL_NS)
        return done

    def _on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        # Python calls this wherever it collects, also within the probe's own code: nothing is written here.
        if info["generation"] < _OLDER_GENERATION:
            return
        time_ns = now()
        if phase == "start":
            self._collecting_since_ns = time_ns
        elif self._collecting_since_ns:
            begin_ns, spent_ns, count = self._done
            passed_ns = time_ns - self._collecting_since_ns
            self._done = CollectedTime(begin_ns or self._collecting_since_ns, spent_ns + passed_ns, count + 1)
            self._collecting_since_ns = 0
