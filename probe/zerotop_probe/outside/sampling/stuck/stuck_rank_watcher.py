"""Find ranks that have stopped writing records, and have py-spy read their stacks.

While its Python runs, a rank that is silent writes stacks itself. One that does not is stopped, or in C code that keeps the
interpreter's lock. One that has not made an engine yet, or runs no loop, cannot.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from zerotop_probe.outside import procfs
from zerotop_probe.outside.sampling.stuck import nccl_ras, py_spy
from zerotop_probe.outside.sampling.stuck.start_watch import FoundStart, StartWatch
from zerotop_probe.recording import events

_PERIOD_S, _START_PERIOD_S, _ATTACHED_PERIOD_S = 1.0, 5.0, 1.0
# A rank is quiet after this time, or after this many times its longest recent gap between records, as in long steps.
_QUIET_S, _USUAL_GAPS = 10.0, 3.0
_REMEMBERED_GAPS = 20
# It is read again when it has been quiet for twice as long.
_LONGEST_PAUSE_S = 600.0
_STOPPED_STATES = ("T", "t", "Z", "X")


class Heard(NamedTuple):
    """When a rank's process wrote its last record (``time.monotonic()``)."""

    rank: int
    pid: int
    time_s: float


class _Rank:
    """The last record and the usual silences of one rank's process."""

    def __init__(self, heard: Heard) -> None:
        self.heard = heard
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED_GAPS)
        self._next_s = _QUIET_S

    def update(self, heard: Heard) -> None:
        if heard.time_s > self.heard.time_s:
            self._gaps.append(heard.time_s - self.heard.time_s)
            self._next_s = max(_QUIET_S, _USUAL_GAPS * max(self._gaps))
            self.heard = heard

    def is_due(self, now_s: float) -> bool:
        quiet_s = now_s - self.heard.time_s
        if quiet_s < self._next_s:
            return False
        self._next_s = quiet_s + min(quiet_s, _LONGEST_PAUSE_S)
        return True


class StuckRankWatcher(threading.Thread):
    """Watches the ranks of this node. Without py-spy the thread ends at once."""

    def __init__(
        self,
        list_heard: Callable[[], Iterable[Heard]],
        list_silent: Callable[[], Iterable[FoundStart]],
        write: Callable[..., object],
    ) -> None:
        """``list_heard``: ranks that write records; ``list_silent``: those that never did; ``write`` takes the time, the
        class of an event, and its fields.
        """
        super().__init__(name="stuck ranks", daemon=True)
        self._list_heard = list_heard
        self._list_silent = list_silent
        self._write = write
        self._starts = StartWatch()
        self._next_s = 0.0
        self._program = py_spy.find_program()
        self._ranks: dict[int, _Rank] = {}
        self._is_closing = threading.Event()

    def run(self) -> None:
        while self._program is not None and not self._is_closing.wait(_PERIOD_S):
            self._check_ranks(self._program)

    def _check_ranks(self, program: str) -> None:
        for heard in self._list_heard():
            rank = self._ranks.setdefault(heard.pid, _Rank(heard))
            rank.update(heard)
            if rank.is_due(time.monotonic()) and self._is_running(heard.pid):
                stacks = py_spy.dump_stacks(program, heard.pid)
                if stacks is not None:
                    # Its Python does not run, so it cannot report the collectives that it called.
                    launched = nccl_ras.read_launched(self._ranks)
                    self._write_stacks(heard.rank, heard.pid, stacks | {"launched": launched})
        if time.monotonic() >= self._next_s:
            is_new = self._check_starts(program)
            self._next_s = time.monotonic() + (_START_PERIOD_S if is_new else _ATTACHED_PERIOD_S)

    def _check_starts(self, program: str) -> bool:
        """Read the stacks of processes that have not reported yet, and may never report; return whether all are new."""
        found = [one for one in self._list_silent() if self._is_running(one.pid)]
        for due in self._starts.find_due(found, time.monotonic()):
            stacks = py_spy.dump_stacks(program, due.found.pid)
            if stacks is not None:
                launched = [] if due.found.is_new else nccl_ras.read_launched({one.pid for one in found})
                extra = {"launched": launched} if launched else {}
                self._write_stacks(due.found.rank, due.found.pid, stacks | {"idle_s": round(due.idle_s, 3)} | extra)
        return all(one.is_new for one in found)

    def _write_stacks(self, rank: int, pid: int, stacks: Mapping[str, Any]) -> None:
        self._write(time.monotonic_ns(), events.RankStacks, rank=rank, pid=pid, **stacks)

    def _is_running(self, pid: int) -> bool:
        stat = procfs.read_stat(pid)
        return stat is not None and stat.state not in _STOPPED_STATES

    def finish(self) -> None:
        """Stop watching; does not wait."""
        self._is_closing.set()
