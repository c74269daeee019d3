"""Find ranks that may be stuck before their first record: they wait for a missing rank, a lock, or a loader without data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from zerotop_probe.outside import procfs

# A rank that does nothing is due after this time, and each time after twice as long.
_IDLE_S, _LONGEST_PAUSE_S = 15.0, 600.0
# In a job that was attached to, because it hangs perhaps, that is much sooner.
_ATTACHED_IDLE_S = 3.0
# One that computes is due at these times: it may wait for others in a busy loop.
_BUSY_S, _ATTACHED_BUSY_S = (60.0, 120.0, 240.0), (5.0, 15.0, 60.0)
# A rank computes if it and its children use this many cores, or would if they had one.
_BUSY_CORES = 0.05
_WAITS_FOR_DISK = "D"
# The main thread of a rank that may train in steps of little work moves if it went to sleep so often since the last check.
_MOVES = 2
_SWITCHES = re.compile(rb"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)


class FoundStart(NamedTuple):
    """A rank's process."""

    rank: int
    pid: int
    is_new: bool = True  # False if it may have trained before it was found


class Due(NamedTuple):
    """A rank to look at, and for how long it and its children have neither computed nor waited for a disk."""

    found: FoundStart
    idle_s: float


class _Start:
    """The processor use of one rank that has not written anything."""

    def __init__(self, now_s: float, *, is_new: bool) -> None:
        self.idle_since_s = self._checked_s = now_s
        self._first_idle_s = self._next_idle_s = _IDLE_S if is_new else _ATTACHED_IDLE_S
        self._busy_s = [now_s + seconds for seconds in (_BUSY_S if is_new else _ATTACHED_BUSY_S)]
        self._wanted_s: dict[int, float] = {}  # by process: seconds on a core, and runnable without one
        self._is_new = is_new
        self._switches = -1  # of the main thread; -1 before a check, and after a look, which stops the thread

    def check(self, family: Sequence[int], now_s: float) -> None:
        """Note whether its processes have done anything since the last time."""
        stats = {pid: stat for pid in family if (stat := procfs.read_stat(pid)) is not None}
        wanted_s = {pid: stat.cpu_ticks / procfs.TICKS_PER_S + _read_waiting_s(pid) for pid, stat in stats.items()}
        grown_s = sum(max(0.0, seconds - self._wanted_s.get(pid, 0.0)) for pid, seconds in wanted_s.items())
        is_busy = grown_s > _BUSY_CORES * (now_s - self._checked_s)
        if (
            is_busy
            or (not self._is_new and self._has_moved(family[0]))
            or any(stat.state == _WAITS_FOR_DISK for stat in stats.values())
        ):
            self.idle_since_s, self._next_idle_s = now_s, self._first_idle_s
        self._wanted_s, self._checked_s = wanted_s, now_s

    def _has_moved(self, pid: int) -> bool:
        found = _SWITCHES.search(procfs.read_file(f"/proc/{pid}/task/{pid}/status", 1 << 13))
        last, self._switches = self._switches, int(found[1]) if found else -1
        return last >= 0 and self._switches >= last + _MOVES

    def is_due(self, now_s: float) -> bool:
        """Whether to look at it now; once for each such time."""
        idle_s = now_s - self.idle_since_s
        is_idle, is_late = idle_s >= self._next_idle_s, bool(self._busy_s) and now_s >= self._busy_s[0]
        if is_idle:
            self._next_idle_s = idle_s + min(idle_s, _LONGEST_PAUSE_S)
        if is_late:
            del self._busy_s[0]
        if is_idle or is_late:
            self._switches = -1
        return is_idle or is_late


def _read_waiting_s(pid: int) -> float:
    """Return for how long a process's main thread has been runnable without a core; 0 where the kernel does not count it."""
    fields = procfs.read_file(f"/proc/{pid}/schedstat", 100).split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


class StartWatch:
    """Decides when to look at which rank. Call it every few seconds: it reads the processor time of all child processes."""

    def __init__(self) -> None:
        self._starts: dict[int, _Start] = {}
        self._tree = procfs.ProcessTree()

    def find_due(self, found: Iterable[FoundStart], now_s: float) -> Iterator[Due]:
        """Yield the ranks to look at now; ``found``: those that run and have written nothing."""
        known, self._starts = self._starts, {}
        silent = list(found)
        if silent:
            self._tree.refresh()
        for one in silent:
            start = self._starts[one.pid] = known.get(one.pid) or _Start(now_s, is_new=one.is_new)
            start.check(self._tree.find_family(one.pid), now_s)
            if start.is_due(now_s):
                yield Due(one, now_s - start.idle_since_s)
