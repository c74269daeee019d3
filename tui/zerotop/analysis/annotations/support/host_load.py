"""A node's memory and cores, as samplers saw them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.support.evidence import Evidence, Ints
from zerotop.analysis.annotations.support.thresholds import TAKEN_BUSY_SHARE, TAKEN_SHARE
from zerotop.analysis.processes.host_memory import HostMemory, read_host_memory

Floats = NDArray[np.float64]


def read_memory(facts: Evidence, host: str, time_ns: int) -> HostMemory | None:
    """As known at a moment; None where nobody sampled."""
    row = facts.get_records("hosts", host).read_last(time_ns)
    return read_host_memory(row, time_ns) if row is not None and row["memory_total_bytes"] > 0 else None


class CoreLoad(NamedTuple):
    """Cores of a node in a while, on average."""

    ranks: float  # that the job's ranks used
    waiting: float  # that their threads waited for
    others: float  # that all other processes used; data-loader workers are among them
    cores: int

    @property
    def is_starved(self) -> bool:
        """Whether ranks wait because others have the cores."""
        full = self.ranks + self.others >= TAKEN_BUSY_SHARE * self.cores
        return full and self.others >= TAKEN_SHARE * self.cores and self.waiting >= TAKEN_SHARE * self.cores


def measure_load(facts: Evidence, host: str, begin_ns: int, end_ns: int) -> CoreLoad | None:
    """Of a node in a while; None where nobody sampled."""
    row, seen = (
        facts.get_records("hosts", host).read_last(end_ns),
        facts.get_records("hosts", host).read_window(begin_ns, end_ns).rows,
    )
    whole = seen["cores_used"] if len(seen) else np.array([] if row is None else [row["cores_used"]])
    whole = whole[~np.isnan(whole)]
    if not len(whole):
        return None
    return measure_loads(facts, host, np.array([begin_ns, end_ns]), np.array([whole.mean()]))[0]


def measure_loads(facts: Evidence, host: str, edges: Ints, cores_used: Floats) -> list[CoreLoad | None]:
    """Of a node between each two of some moments, in which all its processes used ``whole`` cores; None where not known."""
    cores, sampled = facts.count_cores(host), facts.get_records("processes", host).read_window(int(edges[0]), int(edges[-1]))
    if cores is None or not len(sampled):
        return [None] * len(cores_used)
    places = np.searchsorted(sampled.times, edges, "right")
    ticks = np.concatenate([[0], np.cumsum(np.diff(sampled.times, prepend=-1) != 0)])[places]
    count = np.diff(ticks)
    columns = (np.nan_to_num(sampled.rows[name]).astype(np.float64) for name in ("cores_used", "waiting_cores"))
    used, waiting = (
        np.diff(np.concatenate([[0.0], np.cumsum(column)])[places]) / np.maximum(count, 1) for column in columns
    )
    # More than all cores: the job may run on some of the machine's only, and what others do on those is not known.
    known = (count > 0) & (cores_used <= 1.1 * cores)
    return [
        CoreLoad(float(used[at]), float(waiting[at]), max(0.0, float(cores_used[at] - used[at])), cores)
        if known[at]
        else None
        for at in range(len(cores_used))
    ]
