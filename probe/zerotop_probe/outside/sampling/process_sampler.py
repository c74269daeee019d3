"""Sampling the rank processes: memory and processor time of each, and its busiest threads."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zerotop_probe.outside import procfs
from zerotop_probe.outside.procfs import Process
from zerotop_probe.outside.sampling.affinity import Affinity
from zerotop_probe.outside.sampling.thread_sampler import TICK_NS, Budget, Threads, has_schedstat
from zerotop_probe.recording.tables import PROCESSES, THREADS, UNKNOWN
from zerotop_probe.recording.writer import Identity, RecordWriter

# Thread rows are written every so many ticks. More rarely all threads are listed and read, not only the running ones: that
# is most of the cost, and meanwhile the process's clock tells when another one must have run.
_TICKS_PER_THREAD_ROWS = 5
_TICKS_PER_SCAN = 20
# As many as an optimizer on the CPU commonly has, and then some. Rows of threads that hardly run are not written.
_BUSIEST = 24
_LEAST_SHARE = 0.005  # of a core; a thread below is not worth a row
# Kept free of thread files: recordings, NVML, libraries.
_RESERVED_DESCRIPTORS = 256

_MEMORY = (b"VmRSS:", b"RssShmem:", b"VmPin:", b"VmLck:", b"VmSwap:")


class Member(NamedTuple):
    """A process to be sampled; ``rank`` is -1 for a launcher."""

    process: Process
    rank: int


def raise_descriptor_limit() -> int:
    """Lets us open as many files as we may; returns how many. To be called after the job was started."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):
        return soft
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


# Gets a pid, its cores, and those of threads that have others: see AFFINITY among the events.
OnAffinity = Callable[[int, str, "dict[str, str]"], None]


class Sampled:
    """One process that is being sampled."""

    def __init__(self, member: Member, budget: Budget, on_affinity: OnAffinity, *, schedstat: bool) -> None:
        self.member = member
        pid = member.process.pid
        self._budget = budget
        self._status = budget.open(f"/proc/{pid}/status")
        # The kernel's id of another process's processor clock: see CPUCLOCK_SCHED in
        # linux/posix-timers_types.h.
        self._clock = (~pid << 3) | 2
        self._has_clock = True
        self._time_ns = time.monotonic_ns()
        self._cpu_ns = self._read_cpu()
        self.threads = Threads(pid, budget, schedstat=schedstat, now_ns=self._time_ns)
        self._affinity = Affinity(pid, on_affinity)

    def _read_cpu(self) -> int:
        if self._has_clock:
            try:
                return time.clock_gettime_ns(self._clock)
            except OSError:  # gone, or a kernel that does not show other processes' clocks
                self._has_clock = False
        facts = procfs.stat(self.member.process.pid)
        return facts.cpu_ticks * TICK_NS if facts is not None else self._cpu_ns

    def row(self, time_ns: int, tick: int) -> tuple[object, ...] | None:
        """The next row of PROCESSES; None if the process has ended."""
        status = self._read_status()
        if b"\nVmRSS:" not in status:  # ended: a zombie has no memory
            return None
        memory = [_kibibytes(status, name) for name in _MEMORY]
        count = _number(status, b"\nThreads:")
        now_ns = time.monotonic_ns()
        if tick % _TICKS_PER_SCAN == 0 or count != len(self.threads):
            self.threads.list_again(now_ns)
        elapsed_ns = max(now_ns - self._time_ns, 1)
        cpu_ns = self._read_cpu()
        ran_ns = max(cpu_ns - self._cpu_ns, 0)
        everything = tick % _TICKS_PER_SCAN == 0 or not self._has_clock
        use = self.threads.sample(now_ns, elapsed_ns, ran_ns, everything=everything)
        self._time_ns, self._cpu_ns = now_ns, cpu_ns
        waiting = math.nan if use.waited_ns is None else use.waited_ns / elapsed_ns
        pid, rank = self.member.process.pid, self.member.rank
        return (time_ns, *memory, cpu_ns, ran_ns / elapsed_ns, waiting, count, use.busy, pid, rank)

    def _read_status(self) -> bytes:
        if self._status is None:
            return procfs.read(f"/proc/{self.member.process.pid}/status", 4096)
        try:
            return os.pread(self._status, 4096, 0)
        except OSError:
            return b""

    def thread_rows(self, time_ns: int, tick: int) -> list[tuple[object, ...]]:
        """Rows of THREADS for the busiest since the last call."""
        pid = self.member.process.pid
        rows: list[tuple[object, ...]] = []
        busiest = self.threads.busiest(_BUSIEST, _LEAST_SHARE)
        if tick % _TICKS_PER_SCAN == 0:
            self._affinity.look(thread.tid for thread in busiest)
        for thread in busiest:
            # Read each time: a thread's name changes after its birth, the core it runs on all the time.
            facts = procfs.parse_stat(procfs.read(f"/proc/{pid}/task/{thread.tid}/stat", 1024))
            name, processor = (facts.name, facts.processor) if facts is not None else (b"", UNKNOWN)
            rows.append((time_ns, thread.cpu_ns, thread.wait_ns, thread.cores, pid, thread.tid, processor, name))
        return rows

    def close(self) -> None:
        """Gives all descriptors back."""
        self._budget.close(self._status)
        self.threads.close()


def _kibibytes(status: bytes, name: bytes) -> int:
    """A memory figure of ``/proc/PID/status`` in bytes; -1 if this kernel does not give it."""
    number = _number(status, b"\n" + name)
    return UNKNOWN if number == UNKNOWN else number << 10


def _number(status: bytes, name: bytes) -> int:
    at = status.find(name)
    return UNKNOWN if at < 0 else int(status[at + len(name) : status.index(b"\n", at + 1)].split()[0])


class ProcessSampler:
    """Writes PROCESSES at every tick and THREADS at every fifth."""

    def __init__(self, session: str, identity: Identity, on_affinity: OnAffinity) -> None:
        """``on_affinity`` is called when it is learnt which cores a process or one of its threads may run on."""
        self._on_affinity = on_affinity
        self._processes = RecordWriter(session, PROCESSES, identity)
        self._threads = RecordWriter(session, THREADS, identity)
        self._budget = Budget(raise_descriptor_limit() - _RESERVED_DESCRIPTORS)
        self._schedstat = has_schedstat()
        self._sampled: dict[Process, Sampled] = {}

    @property
    def lost_records(self) -> int:
        """Records that could not be written."""
        return self._processes.lost + self._threads.lost

    def sample(self, time_ns: int, tick: int, members: Sequence[Member]) -> bool:
        """Records the processes followed so far, then follows ``members``; True if one of them has ended.

        So a process's first row comes one tick after it was found, when there is a time that its rates refer
        to.
        """
        ended = False
        for sampled in self._sampled.values():
            row = sampled.row(time_ns, tick)
            if row is None:
                ended = True
                continue
            self._processes.write(*row)
            if tick % _TICKS_PER_THREAD_ROWS == 0:
                for thread in sampled.thread_rows(time_ns, tick):
                    self._threads.write(*thread)
        self.follow(members)
        return ended

    def follow(self, members: Sequence[Member]) -> None:
        """Samples these from now on, and no others."""
        wanted = {member.process: member for member in members}
        for process in [process for process in self._sampled if process not in wanted]:
            self._sampled.pop(process).close()
        for process, member in wanted.items():
            if process not in self._sampled:
                self._sampled[process] = Sampled(member, self._budget, self._on_affinity, schedstat=self._schedstat)
            # A launcher becomes a rank when an engine reports from it.
            self._sampled[process].member = member

    def close(self) -> None:
        """Closes all files."""
        self.follow(())
        self._processes.close()
        self._threads.close()
