"""Sampling the threads of one process cheaply: how long each ran, and how long it waited for a core.

``task/TID/schedstat`` counts nanoseconds since the thread began: running, and runnable but waiting. Reading it through an
open descriptor costs 1 to 3 us. Of the 200 threads of a rank few run at a time, so only those are read at every sample. The
process's CPU clock reveals when another one must have run, and then all are read. On a kernel without schedstat, ``stat`` is
read instead: in clock ticks (10 ms), without waiting times.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable
from typing import NamedTuple

from zerotop_probe.outside import procfs

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
# All threads are read if those read so far leave more CPU time of the process unexplained than this share of the wall time
# plus this share of the CPU time.
_UNEXPLAINED = 0.03
_UNEXPLAINED_SHARE = 0.05
# A thread that used more of a core than this since the last scan is read at every sample.
_HOT_SHARE = 0.005


def has_schedstat() -> bool:
    """Whether this kernel counts how long threads run and wait for a core."""
    return procfs.read_file("/proc/self/schedstat", 100).split()[:1] not in ([], [b"0"])


class DescriptorBudget:
    """The number of descriptors that may stay open; other files are opened for each reading."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def open(self, path: str) -> int | None:
        """Open a file that stays open; None if that fails or exceeds the budget."""
        if self._left <= 0:
            return None
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        self._left -= 1
        return descriptor

    def close(self, descriptor: int | None) -> None:
        if descriptor is not None:
            os.close(descriptor)
            self._left += 1


class ThreadCounters:
    """Counters of one thread: now, at the previous reading, scan and row, and the times of these readings."""

    __slots__ = (
        "before_at_ns",
        "before_ns",
        "cpu_ns",
        "descriptor",
        "has_ended",
        "is_hot",
        "ran_after_ns",
        "read_at_ns",
        "row_at_ns",
        "row_ns",
        "scan_ns",
        "text",
        "tid",
        "wait_ns",
    )

    def __init__(self, tid: int, descriptor: int | None, born_ns: int) -> None:
        """``born_ns`` is a time at which the thread did not exist yet."""
        self.tid = tid
        self.descriptor = descriptor
        self.text = b""
        self.is_hot = self.has_ended = False
        self.cpu_ns = self.wait_ns = self.before_ns = self.scan_ns = self.row_ns = 0
        self.read_at_ns = self.before_at_ns = self.row_at_ns = born_ns
        self.ran_after_ns = born_ns  # a time after which it was seen to have run last


class ThreadActivity(NamedTuple):
    """Activity of the threads since the previous sample."""

    waited_ns: int | None  # None if the kernel does not count it
    busy_threads: int  # threads that ran for at least half of the time


class SampledThread(NamedTuple):
    """One of the threads that ran most since the previous query."""

    tid: int
    cpu_ns: int
    wait_ns: int
    ran_ns: int
    cores: float  # CPU time per wall time


class ProcessThreads:
    """All threads of one process."""

    def __init__(self, pid: int, budget: DescriptorBudget, *, schedstat: bool, now_ns: int) -> None:
        self._folder = f"/proc/{pid}/task"
        self._file_name = "schedstat" if schedstat else "stat"
        self._read_one = self._read_schedstat if schedstat else self._read_stat
        self._schedstat = schedstat
        self._budget = budget
        self._thread_by_tid: dict[int, ThreadCounters] = {}
        self._hot_threads: list[ThreadCounters] = []
        self._scan_ns = self._listed_ns = now_ns
        self._scanned = False
        self.list_threads(now_ns)
        # CPU time from before the process was found does not count as recent use; all of a later thread's time does.
        for thread in self._thread_by_tid.values():
            thread.before_ns = thread.scan_ns = thread.row_ns = thread.cpu_ns

    def __len__(self) -> int:
        return len(self._thread_by_tid)

    def list_threads(self, now_ns: int) -> None:
        try:
            present = {int(name) for name in os.listdir(self._folder)}
        except OSError:
            present = set()
        for thread in [thread for thread in self._thread_by_tid.values() if thread.has_ended or thread.tid not in present]:
            self._budget.close(self._thread_by_tid.pop(thread.tid).descriptor)
            thread.descriptor, thread.has_ended = None, True
        self._hot_threads = [thread for thread in self._hot_threads if not thread.has_ended]
        for tid in present.difference(self._thread_by_tid):
            thread = ThreadCounters(tid, self._budget.open(f"{self._folder}/{tid}/{self._file_name}"), self._listed_ns)
            self._read_one(thread)
            thread.read_at_ns = now_ns
            self._thread_by_tid[tid] = thread
        self._listed_ns = now_ns

    def update_counters(self, now_ns: int, elapsed_ns: int, process_ns: int, *, everything: bool) -> ThreadActivity:
        """Update the counters. ``process_ns`` is the CPU time of the whole process during ``elapsed_ns``."""
        waited = sum(self._read_thread(thread, now_ns) for thread in self._hot_threads)
        explained = sum(thread.cpu_ns - thread.before_ns for thread in self._hot_threads)
        read: Iterable[ThreadCounters] = self._hot_threads
        unexplained_ns = _UNEXPLAINED * elapsed_ns + _UNEXPLAINED_SHARE * process_ns
        if everything or process_ns - explained > unexplained_ns:
            read = self._thread_by_tid.values()
            waited += sum(self._read_cold_thread(thread, now_ns, elapsed_ns) for thread in read if not thread.is_hot)
            if process_ns - sum(thread.cpu_ns - thread.before_ns for thread in read) > unexplained_ns:
                self.list_threads(now_ns)  # one that is not known runs
            self._choose_hot(now_ns)
        busy = sum(2 * (thread.cpu_ns - thread.before_ns) >= thread.read_at_ns - thread.before_at_ns for thread in read)
        return ThreadActivity(waited if self._schedstat else None, busy)

    def _read_thread(self, thread: ThreadCounters, now_ns: int) -> int:
        """Read one thread; return how much its waiting time has grown.

        When a thread runs again, the kernel adds the time that it waited, at most the time since it ran last. A few kernels
        add days if the clocks of two cores differ.
        """
        thread.before_ns, thread.before_at_ns, thread.read_at_ns = thread.cpu_ns, thread.read_at_ns, now_ns
        waited, text = thread.wait_ns, thread.text
        self._read_one(thread)
        if thread.text is text:
            return 0
        longest_ns, thread.ran_after_ns = now_ns - thread.ran_after_ns, thread.before_at_ns
        return max(0, min(thread.wait_ns - waited, longest_ns))

    def _read_cold_thread(self, thread: ThreadCounters, now_ns: int, elapsed_ns: int) -> int:
        """Read a thread that was not read for a while; spread the growth of its waiting time over that while."""
        waited = self._read_thread(thread, now_ns)
        # One that was listed in this sample was read a moment ago.
        return waited * elapsed_ns // max(now_ns - thread.before_at_ns, elapsed_ns, 1)

    def _read_schedstat(self, thread: ThreadCounters) -> None:
        text = self._read_text(thread)
        if text == thread.text:  # it slept, as most do
            return
        thread.text = text
        fields = text.split()
        if len(fields) > 1:
            thread.cpu_ns, thread.wait_ns = int(fields[0]), int(fields[1])

    def _read_stat(self, thread: ThreadCounters) -> None:
        stat = procfs.parse_stat(self._read_text(thread))
        if stat is not None:
            thread.cpu_ns = stat.cpu_ticks * TICK_NS

    def _read_text(self, thread: ThreadCounters) -> bytes:
        if thread.descriptor is None:
            return procfs.read_file(f"{self._folder}/{thread.tid}/{self._file_name}", 1024)
        try:
            return os.pread(thread.descriptor, 1024, 0)
        except OSError:  # it has ended
            thread.has_ended = True
            return b""

    def _choose_hot(self, now_ns: int) -> None:
        threshold_ns = _HOT_SHARE * (now_ns - self._scan_ns)
        self._scan_ns, self._scanned = now_ns, True
        self._hot_threads = []
        for thread in self._thread_by_tid.values():
            thread.is_hot = thread.cpu_ns - thread.scan_ns > threshold_ns
            thread.scan_ns = thread.cpu_ns
            if thread.is_hot:
                self._hot_threads.append(thread)

    def find_busiest(self, count: int, least_cores: float) -> list[SampledThread]:
        """Return up to ``count`` threads that used at least ``least_cores`` since the last call, the busiest first."""
        busy = []
        # Without a scan only the hot threads were read.
        for thread in self._thread_by_tid.values() if self._scanned else self._hot_threads:
            ran_ns, elapsed_ns = thread.cpu_ns - thread.row_ns, thread.read_at_ns - thread.row_at_ns
            thread.row_ns, thread.row_at_ns = thread.cpu_ns, thread.read_at_ns
            if ran_ns and ran_ns >= least_cores * elapsed_ns:
                cores = ran_ns / max(elapsed_ns, 1)
                busy.append(SampledThread(thread.tid, thread.cpu_ns, thread.wait_ns, ran_ns, cores))
        self._scanned = False
        return heapq.nlargest(count, busy, key=lambda thread: thread.cores)

    def close(self) -> None:
        for thread in self._thread_by_tid.values():
            self._budget.close(thread.descriptor)
        self._thread_by_tid.clear()
        self._hot_threads.clear()
