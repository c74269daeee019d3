"""Whether a rank waits for its data now, by the last records of its phases, or may wait for it, by those of its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from itertools import pairwise

from zerotop_probe.recording.tables import BOUNDARY, COUNTED, PHASE_CODE, SPANS

# This many last waits, without the longest, which may be the first of an epoch, must reach this average (ns), and this share
# of their iterations as far as recorded: workers in step with each other deliver two batches at once. Where all wait for one
# of them, only every n-th step waits: then more waits tell.
_WAITS, _MORE_WAITS = 7, 24
_LEAST_NS, _SHARE = 20_000_000, 0.2
# Of this many last steps, counted ones included, some took so many times the usual time, and that share of all.
_STEPS, _PAUSE_TIMES = 12, 3
# If a rank's last wait is older than this (ns), it does something else.
_OLDEST_NS = 20_000_000_000
# A rank of which no phase and no step has ended for so long, and for so many of its longest last iterations, may hang: half
# of the time after which it is told that it does.
_SILENT_NS, _SILENT_TIMES = 5_000_000_000, 5
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
        self._waits: deque[_Wait] = deque(maxlen=_MORE_WAITS)
        self._ends: deque[int] = deque(maxlen=_STEPS + 1)  # of steps
        self._last_ns = 0  # when a phase or a step ended last

    def add_records(self, table: str, records: Iterable[bytes]) -> None:
        """Take new records of the rank; those of other tables are left out."""
        for record in records if table == SPANS.name else ():
            span = self._struct.unpack(record)
            begin_ns, end_ns = span[:2]
            self._last_ns = max(self._last_ns, end_ns)
            if span[_FLAGS] & BOUNDARY:
                self._ends.append(end_ns)
            if span[_DEPTH] or span[_FLAGS] & COUNTED:
                continue
            if span[_PHASE] == _DATA:
                self._waits.append(_Wait(end_ns - begin_ns, end_ns))
            elif self._waits:
                self._waits[-1].later_ns += end_ns - begin_ns

    def has_pauses(self) -> bool:
        """Whether a notable part of its last steps was in a few that took far longer, for which it may wait for data."""
        ends = list(self._ends)
        if len(ends) <= _STEPS or time.monotonic_ns() - ends[-1] > _OLDEST_NS:
            return False
        taken = sorted(later - earlier for earlier, later in pairwise(ends))
        usual_ns = taken[len(taken) // 2]
        paused_ns = [one - usual_ns for one in taken if one >= max(_PAUSE_TIMES * usual_ns, _LEAST_NS)]
        return len(paused_ns) > 1 and sum(paused_ns) >= _SHARE * sum(taken)

    def is_silent(self) -> bool:
        """Whether the rank may stand still, perhaps because it waits for a worker that does. Any thread may ask."""
        ends = list(self._ends)
        longest_ns = max((later - earlier for earlier, later in pairwise(ends)), default=0)
        return longest_ns > 0 and time.monotonic_ns() - self._last_ns >= max(_SILENT_NS, _SILENT_TIMES * longest_ns)

    def is_waiting(self) -> bool:
        """Whether the rank has spent a notable part of its last iterations so. Any thread may ask."""
        waits = list(self._waits)
        if len(waits) < _WAITS or time.monotonic_ns() - waits[-1].end_ns > _OLDEST_NS:
            return False
        return _are_long(waits[-_WAITS:]) or (len(waits) == _MORE_WAITS and _are_long(waits))


def _are_long(waits: list[_Wait]) -> bool:
    usual = sorted(waits, key=lambda wait: wait.waited_ns)[:-1]
    waited_ns, later_ns = sum(wait.waited_ns for wait in usual), sum(wait.later_ns for wait in usual)
    return waited_ns >= max(len(usual) * _LEAST_NS, _SHARE * (waited_ns + later_ns))
