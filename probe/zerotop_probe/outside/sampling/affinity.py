"""The CPU affinity of threads, and the cores of each NUMA node."""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Callable, Iterable

from zerotop_probe.outside import procfs
from zerotop_probe.recording import events
from zerotop_probe.recording.event_values import format_numbers

_NODES_FOLDER = "/sys/devices/system/node"


def read_numa_nodes(folder: str = _NODES_FOLDER) -> list[dict[str, object]]:
    """Return ``[{"node": 0, "cpus": "0-31,64-95"}]``, without memory-only nodes; empty if the kernel reports none."""
    nodes: list[dict[str, object]] = []
    for path in glob.glob(os.path.join(glob.escape(folder), "node*")):
        number = re.fullmatch(r"node(\d+)", os.path.basename(path))
        cpus = procfs.read_file(os.path.join(path, "cpulist"), 1 << 16).decode("ascii", "replace").strip()
        if number and cpus:
            nodes.append({"node": int(number[1]), "cpus": cpus})
    return sorted(nodes, key=lambda node: int(str(node["node"])))


def read_allowed_cores(tid: int) -> str:
    """Return the cores that a thread may run on; empty if it is gone."""
    try:
        return format_numbers(os.sched_getaffinity(tid))
    except OSError:
        return ""


class AffinityWatcher:
    """Records changes in the affinity of one process and its threads."""

    def __init__(self, pid: int, write: Callable[..., object]) -> None:
        """``write`` takes the time, the class of an event, and its fields."""
        self._pid = pid
        self._write = write
        self._process_cores = ""
        self._thread_cores: dict[int, str] = {}  # of threads that differ from the process

    def check_threads(self, tids: Iterable[int]) -> None:
        """Check the process and these of its threads."""
        process = read_allowed_cores(self._pid)
        if not process:
            return
        changed: dict[str, str] = {}
        for tid in tids:
            cpus = read_allowed_cores(tid)
            if cpus and cpus != self._thread_cores.get(tid, process):
                self._thread_cores[tid] = cpus
                changed[str(tid)] = cpus
        if changed or process != self._process_cores:
            self._process_cores = process
            self._write(time.monotonic_ns(), events.Affinity, pid=self._pid, cpus=process, threads=changed)
