"""Sampling a rank's DataLoader workers: their private memory, their use of cores, and whether they wait for a disk.

Of the other processes that it has started, only their number and their use of cores.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from typing import NamedTuple

from zerotop_probe.outside import procfs
from zerotop_probe.outside.sampling.private_memory import estimate_private_bytes
from zerotop_probe.outside.sampling.thread_sampler import TICK_NS
from zerotop_probe.recording.tables import UNKNOWN

# PyTorch names its workers since version 2.6. Before, they have the name of every process that has loaded it.
_WORKER_NAME, _OLD_NAME = b"pt_data_worker", b"pt_main_thread"
# Time after which the private memory of a worker is measured again.
_PRIVATE_NS = 5_000_000_000


def list_workers(pid: int) -> list[int]:
    """Return the process ids of a rank's DataLoader workers; none where the kernel or PyTorch does not tell."""
    children = map(int, procfs.read_file(f"/proc/{pid}/task/{pid}/children").split())
    return [child for child in children if (stat := procfs.read_stat(child)) is not None and stat.name == _WORKER_NAME]


class LoaderUse(NamedTuple):
    """The workers and other children of a rank between two looks; the fields of PROCESSES in their order."""

    workers: int = UNKNOWN
    cores: float = math.nan
    waiting_cores: float = math.nan
    blocked: float = math.nan
    private_bytes: int = UNKNOWN
    children: int = UNKNOWN
    child_cores: float = math.nan


class _Counters(NamedTuple):
    cpu_ns: int
    wait_ns: int


class LoaderWorkers:
    """The DataLoader workers among the children of a rank."""

    def __init__(self, pid: int) -> None:
        self._path = f"/proc/{pid}/task/{pid}/children"
        self._is_supported = os.path.exists(self._path)
        self._before: dict[int, _Counters] = {}
        self._children: dict[int, int] = {}  # processor time (ns) of those that are no workers, by pid
        self._before_ns = 0
        self._private: dict[int, tuple[int, int]] = {}  # when it was measured, and bytes, by pid; longest ago first

    def measure_use(self, now_ns: int) -> LoaderUse:
        """Return the children's use of cores since the last call.

        Unknown if the kernel does not list children; that of workers also if PyTorch does not name them.
        """
        if not self._is_supported:
            return LoaderUse()
        counters: dict[int, _Counters] = {}
        children: dict[int, int] = {}
        blocked, may_be_workers = 0, False
        for pid in map(int, procfs.read_file(self._path).split()):
            stat = procfs.read_stat(pid)
            may_be_workers |= stat is not None and stat.name == _OLD_NAME
            if stat is not None and stat.name == _WORKER_NAME:
                fields = procfs.read_file(f"/proc/{pid}/schedstat", 100).split()
                counters[pid] = _Counters(stat.cpu_ticks * TICK_NS, int(fields[1]) if len(fields) > 1 else 0)
                blocked += stat.state == "D"
            elif stat is not None:
                children[pid] = stat.cpu_ticks * TICK_NS
        elapsed_ns, self._before_ns = now_ns - self._before_ns, now_ns
        known = LoaderUse(children=len(children), child_cores=self._measure_children(children, elapsed_ns))
        if may_be_workers and not counters:
            return known
        before, self._before = self._before, counters
        both = [(counters[pid], before[pid]) for pid in counters if pid in before]
        known = known._replace(workers=len(counters), private_bytes=self._measure_private(counters, now_ns))
        if not both or elapsed_ns <= 0:
            return known
        ran_ns = sum(now.cpu_ns - then.cpu_ns for now, then in both)
        # A worker waits for one core at a time. A few kernels add days if the clocks of two cores differ.
        waited_ns = sum(min(now.wait_ns - then.wait_ns, elapsed_ns) for now, then in both)
        return known._replace(cores=ran_ns / elapsed_ns, waiting_cores=waited_ns / elapsed_ns, blocked=float(blocked))

    def _measure_children(self, children: dict[int, int], elapsed_ns: int) -> float:
        before, self._children = self._children, children
        both = [(children[pid], before[pid]) for pid in children if pid in before]
        return sum(now - then for now, then in both) / elapsed_ns if both and elapsed_ns > 0 else math.nan

    def _measure_private(self, workers: Collection[int], now_ns: int) -> int:
        """Measure one worker if due, and return the private memory of all; those not measured yet count as the others."""
        self._private = {pid: measured for pid, measured in self._private.items() if pid in workers}
        new = next((pid for pid in workers if pid not in self._private), None)
        oldest = next(iter(self._private), None)
        due = new if new is not None else oldest
        if due is not None and (due == new or now_ns - self._private[due][0] >= _PRIVATE_NS):
            size = estimate_private_bytes(due)
            self._private.pop(due, None)
            if size is not None:
                self._private[due] = now_ns, size
        sizes = [size for _, size in self._private.values()]
        return round(sum(sizes) / len(sizes) * len(workers)) if sizes else UNKNOWN
