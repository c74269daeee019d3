"""A node's memory and cores, as samplers saw them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.support.evidence import Facts, Ints
from zerotop.analysis.annotations.support.thresholds import TAKEN_FULL, TAKEN_SHARE

Floats = NDArray[np.float64]


class HostMemory(NamedTuple):
    """What is used of a node's memory, of the control group's where that has a limit below it."""

    used_bytes: int
    limit_bytes: int
    confined: bool  # whether the limit is the control group's


def memory(row: Any) -> HostMemory:
    """From a record of HOSTS."""
    total, limit = int(row["memory_total_bytes"]), int(row["cgroup_limit_bytes"])
    confined = 0 < limit < total
    used = int(row["cgroup_used_bytes"]) if confined else total - int(row["memory_available_bytes"])
    return HostMemory(used, limit if confined else total, confined)


def memory_of(facts: Facts, host: str, time_ns: int) -> HostMemory | None:
    """As known at a moment; None where nobody sampled."""
    row = facts.table("hosts", host).last(time_ns)
    return memory(row) if row is not None and row["memory_total_bytes"] > 0 else None


class Load(NamedTuple):
    """Cores of a node in a while, on average."""

    ranks: float  # that the job's ranks used
    waiting: float  # that their threads waited for
    others: float  # that all other processes used; data-loader workers are among them
    cores: int

    @property
    def taken(self) -> bool:
        """Whether ranks wait because others have the cores."""
        full = self.ranks + self.others >= TAKEN_FULL * self.cores
        return full and self.others >= TAKEN_SHARE * self.cores and self.waiting >= TAKEN_SHARE * self.cores


def load_of(facts: Facts, host: str, begin_ns: int, end_ns: int) -> Load | None:
    """Of a node in a while; None where nobody sampled."""
    row, seen = facts.table("hosts", host).last(end_ns), facts.table("hosts", host).within(begin_ns, end_ns).rows
    whole = seen["cores_used"] if len(seen) else np.array([] if row is None else [row["cores_used"]])
    whole = whole[~np.isnan(whole)]
    if not len(whole):
        return None
    return loads_of(facts, host, np.array([begin_ns, end_ns]), np.array([whole.mean()]))[0]


def loads_of(facts: Facts, host: str, edges: Ints, whole: Floats) -> list[Load | None]:
    """Of a node between each two of some moments, in which all its processes used ``whole`` cores; None where not known."""
    cores, sampled = facts.cores(host), facts.table("processes", host).within(int(edges[0]), int(edges[-1]))
    if cores is None or not len(sampled):
        return [None] * len(whole)
    places = np.searchsorted(sampled.times, edges, "right")
    ticks = np.concatenate([[0], np.cumsum(np.diff(sampled.times, prepend=-1) != 0)])[places]
    count = np.diff(ticks)
    columns = (np.nan_to_num(sampled.rows[name]).astype(np.float64) for name in ("cores_used", "waiting_cores"))
    used, waiting = (
        np.diff(np.concatenate([[0.0], np.cumsum(column)])[places]) / np.maximum(count, 1) for column in columns
    )
    # More than all cores: the job may run on some of the machine's only, and what others do on those is not known.
    known = (count > 0) & (whole <= 1.1 * cores)
    return [
        Load(float(used[at]), float(waiting[at]), max(0.0, float(whole[at] - used[at])), cores) if known[at] else None
        for at in range(len(whole))
    ]
