"""Memory that the job may use on a host: the control group's where its limit is below the host's memory.

And the part of a process's memory that the kernel cannot drop when memory is short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zerotop.recording.samples import Floats, Ints, Rows, read_column


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of a host at one sample."""

    unix_ns: int
    used_bytes: int
    limit_bytes: int


def read_host_memory(row: Any, unix_ns: int) -> HostMemory:
    """Return the memory in a record of HOSTS."""
    total, limit = int(row["memory_total_bytes"]), int(row["cgroup_limit_bytes"])
    is_confined = _is_confined(total, limit)
    used = int(row["cgroup_used_bytes"]) if is_confined else total - int(row["memory_available_bytes"])
    return HostMemory(unix_ns, max(0, used), limit if is_confined else total)


def measure_used_bytes(rows: Rows) -> Ints:
    """Return ``used_bytes`` of records of HOSTS."""
    total = rows["memory_total_bytes"]
    is_confined = _is_confined(total, rows["cgroup_limit_bytes"])
    return np.maximum(0, np.where(is_confined, rows["cgroup_used_bytes"], total - rows["memory_available_bytes"]))


def measure_unreclaimable_bytes(rows: Rows) -> Floats:
    """Return the part of ``used_bytes`` that the kernel cannot drop; NaN where an older recording does not tell.

    The memory that is available to a whole host leaves that out already.
    """
    cache = read_column(rows, "cgroup_cache_bytes")
    cache = np.where(_is_confined(rows["memory_total_bytes"], rows["cgroup_limit_bytes"]), cache, 0)
    return np.where(cache >= 0, measure_used_bytes(rows) - cache, np.nan)


def measure_limit_bytes(rows: Rows) -> Ints:
    """Return ``limit_bytes`` of records of HOSTS."""
    total, limit = rows["memory_total_bytes"], rows["cgroup_limit_bytes"]
    return np.where(_is_confined(total, limit), limit, total)


def _is_confined(total_bytes: Any, limit_bytes: Any) -> Any:
    return (limit_bytes > 0) & (limit_bytes < total_bytes)
