"""Sampling a rank's DataLoader workers: whether they have enough cores, and whether they wait for a disk."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from zerotop_probe.outside import procfs
from zerotop_probe.outside.sampling.thread_sampler import TICK_NS
from zerotop_probe.recording.tables import UNKNOWN

# PyTorch names its workers since version 2.6. Before, they have the name of every process that has loaded it.
_WORKER_NAME, _OLD_NAME = b"pt_data_worker", b"pt_main_thread"


def list_workers(pid: int) -> list[int]:
    """Return the process ids of a rank's DataLoader workers; none where the kernel or PyTorch does not tell."""
    children = map(int, procfs.read_file(f"/proc/{pid}/task/{pid}/children").split())
    return [child for child in children if (stat := procfs.read_stat(child)) is not None and stat.name == _WORKER_NAME]


class LoaderUse(NamedTuple):
    """The workers of a rank between two looks; the fields of PROCESSES in their order."""

    workers: int = UNKNOWN
    cores: float = math.nan
    waiting_cores: float = math.nan
    blocked: float = math.nan


class _Counters(NamedTuple):
    cpu_ns: int
    wait_ns: int


class LoaderWorkers:
    """The DataLoader workers among the children of a rank."""

    def __init__(self, pid: int) -> None:
        self._path = f"/proc/{pid}/task/{pid}/children"
        self._is_supported = os.path.exists(self._path)
        self._before: dict[int, _Counters] = {}
        self._before_ns = 0

    def measure_use(self, now_ns: int) -> LoaderUse:
        """Return the workers' use of cores since the last call.

        Unknown if the kernel does not list children, or PyTorch does not name its workers.
        """
        if not self._is_supported:
            return LoaderUse()
        counters: dict[int, _Counters] = {}
        blocked, may_be_workers = 0, False
        for pid in map(int, procfs.read_file(self._path).split()):
            stat = procfs.read_stat(pid)
            may_be_workers |= stat is not None and stat.name == _OLD_NAME
            if stat is not None and stat.name == _WORKER_NAME:
                fields = procfs.read_file(f"/proc/{pid}/schedstat", 100).split()
                counters[pid] = _Counters(stat.cpu_ticks * TICK_NS, int(fields[1]) if len(fields) > 1 else 0)
                blocked += stat.state == "D"
        if may_be_workers and not counters:
            return LoaderUse()
        before, elapsed_ns = self._before, now_ns - self._before_ns
        self._before, self._before_ns = counters, now_ns
        both = [(counters[pid], before[pid]) for pid in counters if pid in before]
        if not both or elapsed_ns <= 0:
            return LoaderUse(len(counters))
        ran_ns = sum(now.cpu_ns - then.cpu_ns for now, then in both)
        # A worker waits for one core at a time. A few kernels add days if the clocks of two cores differ.
        waited_ns = sum(min(now.wait_ns - then.wait_ns, elapsed_ns) for now, then in both)
        return LoaderUse(len(counters), ran_ns / elapsed_ns, waited_ns / elapsed_ns, float(blocked))
