"""Let py-spy read the stacks of DataLoader workers while their rank waits for data: at most once a minute on a node.

Those of a rank that may hang are read once in each of its silences.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from zerotop_probe.outside import procfs
from zerotop_probe.outside.sampling.loader_workers import list_workers
from zerotop_probe.outside.sampling.stuck import py_spy
from zerotop_probe.recording import events

_PERIOD_S = 1.0
# A rank counts as waiting for data after this many looks in a row at which it waited.
_LOOKS = 2
_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 960.0
# It reads workers until this many of them load a batch, and at most so many: reading those that are idle costs little.
_MOST_LOADING, _MOST_WORKERS = 3, 8
# If half of them are idle, or more, it looks again so soon, and so often: whether one loads always.
_AGAIN_S, _MOST_AGAIN = 5.0, 2
_FETCH = "torch/utils/data/_utils/fetch.py"


class Waiting(NamedTuple):
    """A rank's process, and whether it waits for data now, or pauses in some steps, of which that is not known."""

    rank: int
    pid: int
    is_waiting: bool
    has_pauses: bool = False
    is_silent: bool = False  # it may stand still


class LoaderWatcher(threading.Thread):
    """Watches the ranks of this node. Without py-spy the thread ends at once."""

    def __init__(self, list_waiting: Callable[[], Iterable[Waiting]], write: Callable[..., object]) -> None:
        """``write`` takes the time, the class of an event, and its fields."""
        super().__init__(name="loader workers", daemon=True)
        self._list_waiting = list_waiting
        self._write = write
        self._program = py_spy.find_program()
        self._looks: dict[int, int] = {}
        self._read_s: dict[int, float] = {}  # when the workers of a rank were read last
        self._silent: set[int] = set()  # ranks' processes whose workers were read since they are silent
        self._next_s, self._pause_s = 0.0, _PAUSE_S
        self._again, self._suspect = 0, 0  # how often it has looked again, and at the workers of which rank
        self._is_closing = threading.Event()

    def run(self) -> None:
        while self._program is not None and not self._is_closing.wait(_PERIOD_S):
            self._check_ranks(self._program)

    def _check_ranks(self, program: str) -> None:
        waiting = [
            one
            for one in self._list_waiting()
            if one.is_silent or one.is_waiting or (one.has_pauses and _is_loading(one.pid))
        ]
        self._silent &= {one.pid for one in waiting if one.is_silent}
        self._looks = {one.pid: self._looks.get(one.pid, 0) + 1 for one in waiting}
        due = [one for one in waiting if self._looks[one.pid] >= _LOOKS]
        silent = next((one for one in due if one.is_silent and one.pid not in self._silent), None)
        if silent is not None:
            self._silent.add(silent.pid)
            self._read_workers(program, silent, list_workers(silent.pid)[:_MOST_WORKERS])
            return
        due = [one for one in due if not one.is_silent]
        if not due or time.monotonic() < self._next_s:
            return
        chosen = min(due, key=lambda one: (one.pid != self._suspect, self._read_s.get(one.pid, 0.0)))
        if workers := list_workers(chosen.pid)[:_MOST_WORKERS]:
            self._read_s[chosen.pid] = time.monotonic()
            are_loading = self._read_workers(program, chosen, workers)
            is_odd = len(are_loading) == len(workers) and 0 < are_loading.count(True) <= len(workers) / 2
            self._plan_next(chosen.pid if is_odd else 0)

    def _read_workers(self, program: str, chosen: Waiting, workers: Iterable[int]) -> list[bool]:
        """Write the stacks of workers of a rank. Returns whether each of them was loading a batch."""
        are_loading: list[bool] = []
        for pid in workers:
            stacks = py_spy.dump_stacks(program, pid) if are_loading.count(True) < _MOST_LOADING else None
            if stacks is None:
                break  # it is not allowed, or takes long
            facts = {"rank": chosen.rank, "pid": chosen.pid, "worker": pid, **stacks, "stacks": stacks["stacks"][:1]}
            self._write(time.monotonic_ns(), events.LoaderStacks, **facts)
            are_loading.append(any(frame["file"].endswith(_FETCH) for frame in stacks["frames"]))
        return are_loading

    def _plan_next(self, suspect: int) -> None:
        """Choose when to look next. ``suspect``: the rank's process of whose workers some were idle, or 0."""
        if suspect and self._again < _MOST_AGAIN:
            self._suspect, self._again = suspect, self._again + 1
            self._next_s = time.monotonic() + _AGAIN_S
            return
        self._suspect, self._again = 0, 0
        self._next_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def finish(self) -> None:
        """Stop watching; does not wait."""
        self._is_closing.set()


def _is_loading(pid: int) -> bool:
    """Whether most workers of a rank run, or wait for the disk."""
    states = [stat.state for worker in list_workers(pid) if (stat := procfs.read_stat(worker)) is not None]
    return sum(state in ("R", "D") for state in states) > len(states) / 2
