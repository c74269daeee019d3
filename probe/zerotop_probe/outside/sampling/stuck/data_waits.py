"""Whether a rank waits for its data now, by the last records of its phases."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from zerotop_probe.recording.tables import COUNTED, PHASE_CODE, SPANS

# This many last waits, without the longest, which may be the first of an epoch, must reach this average (ns), and this share
# of their iterations as far as recorded: workers in step with each other deliver two batches at once.
_WAITS = 7
_LEAST_NS, _SHARE = 20_000_000, 0.2
# If a rank's last wait is older than this (ns), it does something else.
_OLDEST_NS = 20_000_000_000
_DATA = PHASE_CODE["data"]
_NAMES = [field.name for field in SPANS.fields]
_PHASE, _DEPTH, _FLAGS = (_NAMES.index(name) for name in ("phase", "depth", "flags"))


class _Wait:
    """A wait, and the phases after it (ns)."""

    __slots__ = ("end_ns", "later_ns", "waited_ns")

    def __init__(self, waited_ns: int, end_ns: int) -> None:
        self.waited_ns, self.end_ns, self.later_ns = waited_ns, end_ns, 0


class DataWaits:
    """The last times in which one rank loaded data."""

    def __init__(self) -> None:
        self._struct = SPANS.record_struct
        self._waits: deque[_Wait] = deque(maxlen=_WAITS)

    def add_records(self, table: str, records: Iterable[bytes]) -> None:
        """Take new records of the rank; those of other tables are left out."""
        for record in records if table == SPANS.name else ():
            span = self._struct.unpack(record)
            begin_ns, end_ns = span[:2]
            if span[_DEPTH] or span[_FLAGS] & COUNTED:
                continue
            if span[_PHASE] == _DATA:
                self._waits.append(_Wait(end_ns - begin_ns, end_ns))
            elif self._waits:
                self._waits[-1].later_ns += end_ns - begin_ns

    def is_waiting(self) -> bool:
        """Whether the rank has spent a notable part of its last iterations so. Any thread may ask."""
        waits = list(self._waits)
        if len(waits) < _WAITS or time.monotonic_ns() - waits[-1].end_ns > _OLDEST_NS:
            return False
        usual = sorted(waits, key=lambda wait: wait.waited_ns)[:-1]
        waited_ns, later_ns = sum(wait.waited_ns for wait in usual), sum(wait.later_ns for wait in usual)
        return waited_ns >= max(len(usual) * _LEAST_NS, _SHARE * (waited_ns + later_ns))
