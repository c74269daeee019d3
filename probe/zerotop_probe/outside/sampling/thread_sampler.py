"""The threads of one process: how long each ran and how long it waited for a core, at little cost.

``task/TID/schedstat`` has nanoseconds since the thread began: running, and runnable but waiting. Reading it
through a kept descriptor costs 1 to 3 us. Still, of the 200 threads of a rank few run at any time, so only those
are read at every sample; the process's own clock tells when another one must have run, and then all are read.
Where a kernel has no schedstat, ``stat`` is read instead: in clock ticks (10 ms), and without waiting times.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable
from typing import NamedTuple

from zerotop_probe.outside import procfs

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
# Processor time that the threads read do not explain, per wall time and per time of the process: above, all
# are read.
_UNEXPLAINED = 0.03
_UNEXPLAINED_SHARE = 0.05
# A thread that used more of a core than this since all were read is read at every sample.
_HOT = 0.005


def has_schedstat() -> bool:
    """Whether this kernel counts how long threads run and wait for a core."""
    return procfs.read("/proc/self/schedstat", 100).split()[:1] not in ([], [b"0"])


class Budget:
    """How many descriptors may be kept open; beyond them files are opened for each reading."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def open(self, path: str) -> int | None:
        """Opens a file to be kept; None if that is not possible or would be too many."""
        if self._left <= 0:
            return None
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        self._left -= 1
        return descriptor

    def close(self, descriptor: int | None) -> None:
        """Gives a descriptor back."""
        if descriptor is not None:
            os.close(descriptor)
            self._left += 1


class Thread:
    """Counters of one thread: now, when read before, when all were read, when a row was written; and when that was."""

    __slots__ = (
        "before_at_ns",
        "before_ns",
        "cpu_ns",
        "descriptor",
        "gone",
        "hot",
        "read_at_ns",
        "row_at_ns",
        "row_ns",
        "scan_ns",
        "text",
        "tid",
        "wait_ns",
    )

    def __init__(self, tid: int, descriptor: int | None, born_ns: int) -> None:
        """``born_ns`` is a time before which it did not run."""
        self.tid = tid
        self.descriptor = descriptor
        self.text = b""
        self.hot = self.gone = False
        self.cpu_ns = self.wait_ns = self.before_ns = self.scan_ns = self.row_ns = 0
        self.read_at_ns = self.before_at_ns = self.row_at_ns = born_ns


class Use(NamedTuple):
    """What the threads did since the sample before."""

    waited_ns: int | None  # None where the kernel does not say
    busy: int  # threads that ran for at least half of the time


class Busiest(NamedTuple):
    """One of the threads that ran most since this was asked before."""

    tid: int
    cpu_ns: int
    wait_ns: int
    ran_ns: int
    cores: float  # processor time per wall time


class Threads:
    """All threads of one process."""

    def __init__(self, pid: int, budget: Budget, *, schedstat: bool, now_ns: int) -> None:
        self._folder = f"/proc/{pid}/task"
        self._file = "schedstat" if schedstat else "stat"
        self._read_one = self._read_schedstat if schedstat else self._read_stat
        self._schedstat = schedstat
        self._budget = budget
        self._all: dict[int, Thread] = {}
        self._hot: list[Thread] = []
        self._scan_ns = self._listed_ns = now_ns
        self._scanned = False
        self.list_again(now_ns)
        # What a process did before it was found is not what it does now. A thread born later has only a now.
        for thread in self._all.values():
            thread.before_ns = thread.scan_ns = thread.row_ns = thread.cpu_ns

    def __len__(self) -> int:
        return len(self._all)

    def list_again(self, now_ns: int) -> None:
        """Looks which threads there are now."""
        try:
            present = {int(name) for name in os.listdir(self._folder)}
        except OSError:
            present = set()
        for thread in [thread for thread in self._all.values() if thread.gone or thread.tid not in present]:
            self._budget.close(self._all.pop(thread.tid).descriptor)
            thread.descriptor, thread.gone = None, True
        self._hot = [thread for thread in self._hot if not thread.gone]
        for tid in present.difference(self._all):
            thread = Thread(tid, self._budget.open(f"{self._folder}/{tid}/{self._file}"), self._listed_ns)
            self._read_one(thread)
            thread.read_at_ns = now_ns
            self._all[tid] = thread
        self._listed_ns = now_ns

    def sample(self, now_ns: int, elapsed_ns: int, process_ns: int, *, everything: bool) -> Use:
        """Brings the counters up to date. ``process_ns`` is what the whole process ran in ``elapsed_ns``."""
        waited = sum(self._advance(thread, now_ns) for thread in self._hot)
        explained = sum(thread.cpu_ns - thread.before_ns for thread in self._hot)
        read: Iterable[Thread] = self._hot
        if everything or process_ns - explained > _UNEXPLAINED * elapsed_ns + _UNEXPLAINED_SHARE * process_ns:
            read = self._all.values()
            waited += sum(self._waited_lately(thread, now_ns, elapsed_ns) for thread in read if not thread.hot)
            self._choose_hot(now_ns)
        busy = sum(2 * (thread.cpu_ns - thread.before_ns) >= thread.read_at_ns - thread.before_at_ns for thread in read)
        return Use(waited if self._schedstat else None, busy)

    def _advance(self, thread: Thread, now_ns: int) -> int:
        """Reads one thread; returns how much longer it has waited."""
        thread.before_ns, thread.before_at_ns, thread.read_at_ns = thread.cpu_ns, thread.read_at_ns, now_ns
        waited = thread.wait_ns
        self._read_one(thread)
        return thread.wait_ns - waited

    def _waited_lately(self, thread: Thread, now_ns: int, elapsed_ns: int) -> int:
        """The same for one that was not read for a while: what it waited then is spread over that time."""
        waited = self._advance(thread, now_ns)
        return waited * elapsed_ns // max(now_ns - thread.before_at_ns, 1)

    def _read_schedstat(self, thread: Thread) -> None:
        text = self._text(thread)
        if text == thread.text:  # it slept: most do
            return
        thread.text = text
        fields = text.split()
        if len(fields) > 1:
            thread.cpu_ns, thread.wait_ns = int(fields[0]), int(fields[1])

    def _read_stat(self, thread: Thread) -> None:
        facts = procfs.parse_stat(self._text(thread))
        if facts is not None:
            thread.cpu_ns = facts.cpu_ticks * TICK_NS

    def _text(self, thread: Thread) -> bytes:
        if thread.descriptor is None:
            return procfs.read(f"{self._folder}/{thread.tid}/{self._file}", 1024)
        try:
            return os.pread(thread.descriptor, 1024, 0)
        except OSError:  # it has ended
            thread.gone = True
            return b""

    def _choose_hot(self, now_ns: int) -> None:
        least = _HOT * (now_ns - self._scan_ns)
        self._scan_ns, self._scanned = now_ns, True
        self._hot = []
        for thread in self._all.values():
            thread.hot = thread.cpu_ns - thread.scan_ns > least
            thread.scan_ns = thread.cpu_ns
            if thread.hot:
                self._hot.append(thread)

    def busiest(self, count: int, least_cores: float) -> list[Busiest]:
        """The threads that used most of a core since the last call, and at least so much; the busiest first."""
        ran = []
        # The others have not been read since, or have not run.
        for thread in self._all.values() if self._scanned else self._hot:
            ran_ns, elapsed_ns = thread.cpu_ns - thread.row_ns, thread.read_at_ns - thread.row_at_ns
            thread.row_ns, thread.row_at_ns = thread.cpu_ns, thread.read_at_ns
            if ran_ns and ran_ns >= least_cores * elapsed_ns:
                cores = ran_ns / max(elapsed_ns, 1)
                ran.append(Busiest(thread.tid, thread.cpu_ns, thread.wait_ns, ran_ns, cores))
        self._scanned = False
        return heapq.nlargest(count, ran, key=lambda thread: thread.cores)

    def close(self) -> None:
        """Gives all descriptors back."""
        for thread in self._all.values():
            self._budget.close(thread.descriptor)
        self._all.clear()
        self._hot.clear()
