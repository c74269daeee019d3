"""Sampling the rank processes: memory and CPU time of each, and its busiest threads."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zerotop_probe.outside import procfs
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.outside.sampling.affinity import AffinityWatcher
from zerotop_probe.outside.sampling.loader_workers import LoaderUse, LoaderWorkers
from zerotop_probe.outside.sampling.thread_libraries import ThreadLibraries
from zerotop_probe.outside.sampling.thread_sampler import TICK_NS, DescriptorBudget, ProcessThreads, has_schedstat
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import PROCESSES, THREADS, UNKNOWN
from zerotop_probe.recording.writer import Identity, RecordWriter

# Ticks between thread rows, and between scans that list and read all threads. Scans cost most; between them the process's
# CPU clock reveals when a thread that was not read must have run.
_TICKS_PER_THREAD_ROWS = 5
_TICKS_PER_SCAN = 60
_TICKS_PER_AFFINITY = 20
# Ticks between looks at page faults and DataLoader workers, in other ticks than scans.
_TICKS_PER_LOOK, _LOOK_TICK = 10, 5
_TICKS_PER_LAUNCHER = 5
# With more processes than this (four ranks and their launchers), they are read only at even ticks and at the ticks of thread
# rows. On a node with 8 GPUs all samplers together then take about 2 % of a core.
_FEW_PROCESSES = 6
# Resident memory alone costs a fourth of the whole status, which is read this often, and when resident memory has changed by
# this much.
_TICKS_PER_STATUS = 5
_CHANGED_BYTES = 8 << 20
# More than a CPU optimizer commonly uses. Threads that hardly run get no row.
_MAX_THREADS = 24
_MIN_CORE_SHARE = 0.005
# Descriptors kept free for recordings, NVML and libraries.
_RESERVED_DESCRIPTORS = 256

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MEMORY_FIELDS = (b"VmRSS:", b"RssShmem:", b"VmPin:", b"VmLck:", b"VmSwap:")
_SHARED = _MEMORY_FIELDS.index(b"RssShmem:")


class SampledMember(NamedTuple):
    """A process to sample; ``rank`` is -1 for a launcher."""

    process: ProcessHandle
    rank: int


def raise_descriptor_limit() -> int:
    """Raise our limit of open files to the maximum and return it. Call this after the job was started."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):
        return soft
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


class ProcessReader:
    """One process that is being sampled."""

    def __init__(
        self,
        member: SampledMember,
        budget: DescriptorBudget,
        write_event: Callable[..., object],
        *,
        schedstat: bool,
    ) -> None:
        self.member = member
        pid = member.process.pid
        self._budget = budget
        self._status_descriptor = budget.open(f"/proc/{pid}/status")
        self._statm_descriptor = budget.open(f"/proc/{pid}/statm")
        self._memory = [UNKNOWN] * len(_MEMORY_FIELDS)  # as last read
        self._anonymous_bytes = UNKNOWN
        self._thread_count = UNKNOWN
        # The kernel's id of another process's CPU clock: see CPUCLOCK_SCHED in linux/posix-timers_types.h.
        self._clock_id = (~pid << 3) | 2
        self._has_clock = True
        self._time_ns = time.monotonic_ns()
        self._cpu_ns = self._read_cpu_ns()
        self.threads = ProcessThreads(pid, budget, schedstat=schedstat, now_ns=self._time_ns)
        self._affinity = AffinityWatcher(pid, write_event)
        self._libraries = ThreadLibraries(pid, write_event)
        self._workers = LoaderWorkers(pid)
        self._major_faults, self._loader_use = UNKNOWN, LoaderUse()
        self.is_stopped = False  # by a signal, at the last sample

    def _read_cpu_ns(self) -> int:
        if self._has_clock:
            try:
                return time.clock_gettime_ns(self._clock_id)
            except OSError:  # gone, or a kernel that hides other processes' clocks
                self._has_clock = False
        stat = procfs.read_stat(self.member.process.pid)
        return stat.cpu_ticks * TICK_NS if stat is not None else self._cpu_ns

    def read_row(self, time_ns: int, tick: int) -> tuple[object, ...] | None:
        """Return the next row of PROCESSES; None if the process has ended."""
        if not self._update_memory(tick):
            return None
        now_ns = time.monotonic_ns()
        if tick % _TICKS_PER_SCAN == 0 or self._thread_count != len(self.threads):
            self.threads.list_threads(now_ns)
        elapsed_ns = max(now_ns - self._time_ns, 1)
        cpu_ns = self._read_cpu_ns()
        ran_ns = max(cpu_ns - self._cpu_ns, 0)
        scan = tick % _TICKS_PER_SCAN == 0 or not self._has_clock
        use = self.threads.update_counters(now_ns, elapsed_ns, ran_ns, everything=scan)
        self._time_ns, self._cpu_ns = now_ns, cpu_ns
        waiting = math.nan if use.waited_ns is None else use.waited_ns / elapsed_ns
        pid, rank = self.member.process.pid, self.member.rank
        if tick % _TICKS_PER_LOOK == _LOOK_TICK and rank >= 0:
            stat = procfs.read_stat(pid)
            self._major_faults = stat.major_faults if stat is not None else UNKNOWN
            self._loader_use = self._workers.measure_use(now_ns)
        *loader_use, private_bytes, children, child_cores = self._loader_use
        held_bytes = self._anonymous_bytes + self._memory[_SHARED] if self._anonymous_bytes != UNKNOWN else UNKNOWN
        slow = self._major_faults, *loader_use, held_bytes, private_bytes, children, child_cores
        measured = (cpu_ns, ran_ns / elapsed_ns, waiting, self._thread_count, use.busy_threads)
        return (time_ns, *self._memory, *measured, pid, rank, *slow)

    def _update_memory(self, tick: int) -> bool:
        """Read the memory, the number of threads and the state if due; return whether the process still exists."""
        if tick % _TICKS_PER_STATUS:
            resident, of_files_or_shared = self._read_sizes()
            if resident and abs(resident - self._memory[0]) < _CHANGED_BYTES:
                self._memory[0] = resident
                if self._anonymous_bytes != UNKNOWN:
                    self._anonymous_bytes = resident - of_files_or_shared
                return True
        status = self._read_status()
        if b"\nVmRSS:" not in status:  # ended: a zombie has no memory
            return False
        self.is_stopped = b"\nState:\tT" in status
        self._memory = [_parse_bytes(status, name) for name in _MEMORY_FIELDS]
        self._anonymous_bytes = _parse_bytes(status, b"RssAnon:")
        self._thread_count = _parse_number(status, b"\nThreads:")
        return True

    def _read_sizes(self) -> tuple[int, int]:
        """Return the resident bytes, and those of files and shared memory among them; 0 where they cannot be read."""
        if self._statm_descriptor is None:
            return 0, 0
        try:
            _, resident, of_files_or_shared = map(int, os.pread(self._statm_descriptor, 256, 0).split()[:3])
        except (OSError, ValueError):
            return 0, 0
        return resident * _PAGE_BYTES, of_files_or_shared * _PAGE_BYTES

    def _read_status(self) -> bytes:
        if self._status_descriptor is None:
            return procfs.read_file(f"/proc/{self.member.process.pid}/status", 4096)
        try:
            return os.pread(self._status_descriptor, 4096, 0)
        except OSError:
            return b""

    def read_thread_rows(self, time_ns: int, tick: int) -> list[tuple[object, ...]]:
        """Return rows of THREADS for the busiest threads since the last call."""
        pid = self.member.process.pid
        rows: list[tuple[object, ...]] = []
        names: dict[int, bytes] = {}
        busiest = self.threads.find_busiest(_MAX_THREADS, _MIN_CORE_SHARE)
        if tick % _TICKS_PER_AFFINITY == 0:
            self._affinity.check_threads(thread.tid for thread in busiest)
        for thread in busiest:
            # Read each time: a thread is named after it starts, and moves between cores.
            stat = procfs.parse_stat(procfs.read_file(f"/proc/{pid}/task/{thread.tid}/stat", 1024))
            name, processor = (stat.name, stat.processor) if stat is not None else (b"", UNKNOWN)
            rows.append((time_ns, thread.cpu_ns, thread.wait_ns, thread.cores, pid, thread.tid, processor, name))
            names[thread.tid] = name
        if self.member.rank >= 0:
            self._libraries.check_threads(names)
        return rows

    def close(self) -> None:
        self._budget.close(self._status_descriptor)
        self._budget.close(self._statm_descriptor)
        self.threads.close()


def _parse_bytes(status: bytes, name: bytes) -> int:
    """Return a memory field of ``/proc/PID/status`` in bytes; -1 if this kernel lacks it."""
    number = _parse_number(status, b"\n" + name)
    return UNKNOWN if number == UNKNOWN else number << 10


def _parse_number(status: bytes, name: bytes) -> int:
    begin = status.find(name)
    return UNKNOWN if begin < 0 else int(status[begin + len(name) : status.index(b"\n", begin + 1)].split()[0])


class ProcessSampler:
    """Writes PROCESSES at every tick that is due, launchers at every fifth tick, and THREADS at every fifth."""

    def __init__(self, recording: str, identity: Identity, write_event: Callable[..., object]) -> None:
        """``write_event`` takes the time, the class of an event, and its fields."""
        self._write_event = write_event
        self._process_writer = RecordWriter(recording, PROCESSES, identity)
        self._thread_writer = RecordWriter(recording, THREADS, identity)
        self._budget = DescriptorBudget(raise_descriptor_limit() - _RESERVED_DESCRIPTORS)
        self._schedstat = has_schedstat()
        self._readers: dict[ProcessHandle, ProcessReader] = {}

    @property
    def lost_records(self) -> int:
        """Records that could not be written."""
        return self._process_writer.lost + self._thread_writer.lost

    def is_due(self, tick: int) -> bool:
        """Whether a sample is due. Any thread may ask."""
        return len(self._readers) <= _FEW_PROCESSES or tick % 2 == 0 or tick % _TICKS_PER_THREAD_ROWS == 0

    def take_sample(self, time_ns: int, tick: int, members: Sequence[SampledMember]) -> bool:
        """Record the followed processes, then follow ``members``; return whether a process has ended.

        So the first row of a process comes one tick after it was found, when there is an interval for its rates.
        """
        has_ended = False
        has_ranks = any(reader.member.rank >= 0 for reader in self._readers.values())
        for reader in self._readers.values():
            if has_ranks and reader.member.rank < 0 and tick % _TICKS_PER_LAUNCHER:
                continue
            was_stopped = reader.is_stopped
            row = reader.read_row(time_ns, tick)
            if row is None:
                has_ended = True
                continue
            if reader.is_stopped != was_stopped:
                process, rank = reader.member
                self._write_event(
                    time.monotonic_ns(),
                    events.RankStopped if reader.is_stopped else events.RankContinued,
                    rank=rank,
                    pid=process.pid,
                    start=process.start,
                )
            self._process_writer.write(*row)
            if tick % _TICKS_PER_THREAD_ROWS == 0:
                for thread in reader.read_thread_rows(time_ns, tick):
                    self._thread_writer.write(*thread)
        self.follow_members(members)
        return has_ended

    def follow_members(self, members: Sequence[SampledMember]) -> None:
        """Sample only these from now on."""
        member_by_process = {member.process: member for member in members}
        for process in [process for process in self._readers if process not in member_by_process]:
            self._readers.pop(process).close()
        for process, member in member_by_process.items():
            if process not in self._readers:
                self._readers[process] = ProcessReader(member, self._budget, self._write_event, schedstat=self._schedstat)
            # A launcher becomes a rank when an engine reports from it.
            self._readers[process].member = member

    def close(self) -> None:
        self.follow_members(())
        self._process_writer.close()
        self._thread_writer.close()
