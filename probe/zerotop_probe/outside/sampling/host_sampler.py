"""Sampling the node's memory and CPU use, and the memory of the job's cgroup."""

from __future__ import annotations

import glob
import math
import os
import time

from zerotop_probe.outside import procfs
from zerotop_probe.outside.sampling.cgroup import ControlGroup, count_usable_cores
from zerotop_probe.outside.sampling.thread_sampler import TICK_NS
from zerotop_probe.recording.tables import HOSTS, UNKNOWN
from zerotop_probe.recording.writer import Identity, RecordWriter

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Cores whose clock is read, and samples between two readings.
_MOST_CLOCKS, _SAMPLES_PER_CLOCK = 8, 10


def read_meminfo() -> dict[bytes, int]:
    """Return the fields of ``/proc/meminfo`` in bytes, by name."""
    lines = (line.partition(b":") for line in procfs.read_file("/proc/meminfo").splitlines())
    return {name: int(value.split()[0]) << 10 for name, _, value in lines if value.split()[:1]}


def read_shared_memory_size() -> int | None:
    """Return the size of /dev/shm in bytes; None without one."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def read_processor_name() -> str | None:
    """Return the processor's model name; None if the kernel does not report it (many Arm machines)."""
    for line in procfs.read_file("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(b":")
        if name.strip() == b"model name":
            return value.strip().decode(errors="replace")
    return None


def _read_busy_ns() -> int:
    """Return the CPU time used on this machine since boot."""
    fields = [int(field) for field in procfs.read_file("/proc/stat", 512).split(b"\n")[0].split()[1:9]]
    # user nice system idle iowait irq softirq steal: idle and iowait are not busy, steal belongs to other guests.
    return sum(fields[index] for index in (0, 1, 2, 5, 6)) * TICK_NS if len(fields) > 6 else 0


def _read_swapped_bytes() -> tuple[int, int]:
    """Return the bytes read from swap and written to it since boot; -1 if the kernel does not count them."""
    counters = dict(line.split()[:2] for line in procfs.read_file("/proc/vmstat").splitlines() if line.startswith(b"pswp"))
    pages = (int(counters.get(name, UNKNOWN)) for name in (b"pswpin", b"pswpout"))
    read, written = (count * _PAGE_BYTES if count != UNKNOWN else UNKNOWN for count in pages)
    return read, written


def _choose_least(*sizes: int) -> int:
    """Return the least of the known sizes; -1 if none is known."""
    return min((size for size in sizes if size != UNKNOWN), default=UNKNOWN)


class CoreClocks:
    """The clocks of a few cores, evenly spread: reading all of them would take a notable time on a large machine."""

    def __init__(self) -> None:
        paths = sorted(glob.glob("/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"))
        self._paths = paths[:: max(1, len(paths) // _MOST_CLOCKS)][:_MOST_CLOCKS]

    def read_mhz(self) -> float:
        """Return their mean; NaN where the kernel shows none, as in most virtual machines."""
        texts = [procfs.read_file(path, 32).strip() for path in self._paths]
        clocks = [int(text) / 1000 for text in texts if text.isdigit()]
        return sum(clocks) / len(clocks) if clocks else math.nan


class HostSampler:
    """Writes one row of HOSTS per sample."""

    def __init__(self, recording: str, identity: Identity, group: ControlGroup) -> None:
        self._writer = RecordWriter(recording, HOSTS, identity)
        self._group = group
        self._cores = count_usable_cores()
        self._last_busy: tuple[int, int] | None = None
        self._clocks = CoreClocks()
        self._samples = 0
        self._mhz = math.nan

    @property
    def lost_records(self) -> int:
        """Records that could not be written."""
        return self._writer.lost

    def take_sample(self, time_ns: int, rank_pid: int | None = None) -> None:
        """Record the node's current state; ``rank_pid``: a rank, whose cgroup counts."""
        memory = read_meminfo()
        if rank_pid is not None:
            self._group.follow(rank_pid)
        if self._samples % _SAMPLES_PER_CLOCK == 0:
            self._mhz = self._clocks.read_mhz()
        group = self._group.read_memory()
        self._samples += 1
        swap = memory.get(b"SwapTotal", 0) - memory.get(b"SwapFree", 0)
        self._writer.write(
            time_ns,
            memory.get(b"MemTotal", UNKNOWN),
            memory.get(b"MemAvailable", UNKNOWN),
            swap,
            group.used_bytes,
            group.limit_bytes,
            self._measure_cores(),
            os.getloadavg()[0],
            self._cores,
            self._group.count_oom_kills(),
            *_read_swapped_bytes(),
            self._mhz,
            0,
            memory.get(b"Shmem", UNKNOWN),
            group.cache_bytes,
            _choose_least(memory.get(b"SwapFree", UNKNOWN), group.swap_left_bytes),
        )

    def _measure_cores(self) -> float:
        now, before = (time.monotonic_ns(), _read_busy_ns()), self._last_busy
        self._last_busy = now
        return math.nan if before is None else (now[1] - before[1]) / max(now[0] - before[0], 1)

    def close(self) -> None:
        self._writer.close()
