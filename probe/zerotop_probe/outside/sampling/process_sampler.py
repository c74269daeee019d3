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
from zerotop_probe.outside.sampling.affinity import AffinityWatcher
from zerotop_probe.outside.sampling.thread_sampler import TICK_NS, DescriptorBudget, ProcessThreads, has_schedstat
from zerotop_probe.recording.tables import PROCESSES, THREADS, UNKNOWN
from zerotop_probe.recording.writer import Identity, RecordWriter

# Thread rows are written every so many ticks. More rarely all threads are listed and read, not only the running ones: that
# is most of the cost, and meanwhile the process's clock tells when another one must have run.
_TICKS_PER_THREAD_ROWS = 5
_TICKS_PER_SCAN = 20
# As many as an optimizer on the CPU commonly has, and then some. Rows of threads that hardly run are not written.
_MAX_THREADS = 24
_MIN_CORE_SHARE = 0.005  # of a core; a thread below is not worth a row
# Kept free of thread files: recordings, NVML, libraries.
_RESERVED_DESCRIPTORS = 256

_MEMORY_FIELDS = (b"VmRSS:", b"RssShmem:", b"VmPin:", b"VmLck:", b"VmSwap:")


class SampledMember(NamedTuple):
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


class ProcessReader:
    """One process that is being sampled."""

    def __init__(self, member: SampledMember, budget: DescriptorBudget, on_affinity: OnAffinity, *, schedstat: bool) -> None:
        self.member = member
        pid = member.process.pid
        self._budget = budget
        self._status_descriptor = budget.open(f"/proc/{pid}/status")
        # The kernel's id of another process's processor clock: see CPUCLOCK_SCHED in
        # linux/posix-timers_types.h.
        self._clock_id = (~pid << 3) | 2
        self._has_clock = True
        self._time_ns = time.monotonic_ns()
        self._cpu_ns = self._read_cpu_ns()
        self.threads = ProcessThreads(pid, budget, schedstat=schedstat, now_ns=self._time_ns)
        self._affinity = AffinityWatcher(pid, on_affinity)

    def _read_cpu_ns(self) -> int:
        if self._has_clock:
            try:
                return time.clock_gettime_ns(self._clock_id)
            except OSError:  # gone, or a kernel that does not show other processes' clocks
                self._has_clock = False
        facts = procfs.read_stat(self.member.process.pid)
        return facts.cpu_ticks * TICK_NS if facts is not None else self._cpu_ns

    def read_row(self, time_ns: int, tick: int) -> tuple[object, ...] | None:
        """The next row of PROCESSES; None if the process has ended."""
        status = self._read_status()
        if b"\nVmRSS:" not in status:  # ended: a zombie has no memory
            return None
        memory = [_parse_bytes(status, name) for name in _MEMORY_FIELDS]
        count = _parse_number(status, b"\nThreads:")
        now_ns = time.monotonic_ns()
        if tick % _TICKS_PER_SCAN == 0 or count != len(self.threads):
            self.threads.list_threads(now_ns)
        elapsed_ns = max(now_ns - self._time_ns, 1)
        cpu_ns = self._read_cpu_ns()
        ran_ns = max(cpu_ns - self._cpu_ns, 0)
        everything = tick % _TICKS_PER_SCAN == 0 or not self._has_clock
        use = self.threads.update_counters(now_ns, elapsed_ns, ran_ns, everything=everything)
        self._time_ns, self._cpu_ns = now_ns, cpu_ns
        waiting = math.nan if use.waited_ns is None else use.waited_ns / elapsed_ns
        pid, rank = self.member.process.pid, self.member.rank
        return (time_ns, *memory, cpu_ns, ran_ns / elapsed_ns, waiting, count, use.busy_threads, pid, rank)

    def _read_status(self) -> bytes:
        if self._status_descriptor is None:
            return procfs.read_file(f"/proc/{self.member.process.pid}/status", 4096)
        try:
            return os.pread(self._status_descriptor, 4096, 0)
        except OSError:
            return b""

    def read_thread_rows(self, time_ns: int, tick: int) -> list[tuple[object, ...]]:
        """Rows of THREADS for the busiest since the last call."""
        pid = self.member.process.pid
        rows: list[tuple[object, ...]] = []
        busiest = self.threads.find_busiest(_MAX_THREADS, _MIN_CORE_SHARE)
        if tick % _TICKS_PER_SCAN == 0:
            self._affinity.check_threads(thread.tid for thread in busiest)
        for thread in busiest:
            # Read each time: a thread's name changes after its birth, the core it runs on all the time.
            facts = procfs.parse_stat(procfs.read_file(f"/proc/{pid}/task/{thread.tid}/stat", 1024))
            name, processor = (facts.name, facts.processor) if facts is not None else (b"", UNKNOWN)
            rows.append((time_ns, thread.cpu_ns, thread.wait_ns, thread.cores, pid, thread.tid, processor, name))
        return rows

    def close(self) -> None:
        """Gives all descriptors back."""
        self._budget.close(self._status_descriptor)
        self.threads.close()


def _parse_bytes(status: bytes, name: bytes) -> int:
    """A memory figure of ``/proc/PID/status`` in bytes; -1 if this kernel does not give it."""
    number = _parse_number(status, b"\n" + name)
    return UNKNOWN if number == UNKNOWN else number << 10


def _parse_number(status: bytes, name: bytes) -> int:
    at = status.find(name)
    return UNKNOWN if at < 0 else int(status[at + len(name) : status.index(b"\n", at + 1)].split()[0])


class ProcessSampler:
    """Writes PROCESSES at every tick and THREADS at every fifth."""

    def __init__(self, session: str, identity: Identity, on_affinity: OnAffinity) -> None:
        """``on_affinity`` is called when it is learnt which cores a process or one of its threads may run on."""
        self._on_affinity = on_affinity
        self._process_writer = RecordWriter(session, PROCESSES, identity)
        self._thread_writer = RecordWriter(session, THREADS, identity)
        self._budget = DescriptorBudget(raise_descriptor_limit() - _RESERVED_DESCRIPTORS)
        self._schedstat = has_schedstat()
        self._readers: dict[Process, ProcessReader] = {}

    @property
    def lost_records(self) -> int:
        """Records that could not be written."""
        return self._process_writer.lost + self._thread_writer.lost

    def take_sample(self, time_ns: int, tick: int, members: Sequence[SampledMember]) -> bool:
        """Records the processes followed so far, then follows ``members``; True if one of them has ended.

        So a process's first row comes one tick after it was found, when there is a time that its rates refer
        to.
        """
        ended = False
        for sampled in self._readers.values():
            row = sampled.read_row(time_ns, tick)
            if row is None:
                ended = True
                continue
            self._process_writer.write(*row)
            if tick % _TICKS_PER_THREAD_ROWS == 0:
                for thread in sampled.read_thread_rows(time_ns, tick):
                    self._thread_writer.write(*thread)
        self.follow_members(members)
        return ended

    def follow_members(self, members: Sequence[SampledMember]) -> None:
        """Samples these from now on, and no others."""
        wanted = {member.process: member for member in members}
        for process in [process for process in self._readers if process not in wanted]:
            self._readers.pop(process).close()
        for process, member in wanted.items():
            if process not in self._readers:
                self._readers[process] = ProcessReader(member, self._budget, self._on_affinity, schedstat=self._schedstat)
            # A launcher becomes a rank when an engine reports from it.
            self._readers[process].member = member

    def close(self) -> None:
        """Closes all files."""
        self.follow_members(())
        self._process_writer.close()
        self._thread_writer.close()
