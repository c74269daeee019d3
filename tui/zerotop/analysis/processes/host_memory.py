"""Memory that the job may use on a host: the control group's where its limit is below the host's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of a host at one sample."""

    unix_ns: int
    used_bytes: int
    limit_bytes: int
    is_confined: bool  # whether limit and use are the control group's


def read_host_memory(row: Any, unix_ns: int) -> HostMemory:
    """Return the memory in a record of HOSTS."""
    used, limit, is_confined = measure_host_memory(row)
    return HostMemory(unix_ns, int(used), int(limit), bool(is_confined))


def measure_host_memory(rows: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return (bytes in use, their limit, whether both are the control group's) of records of HOSTS."""
    total, limit = rows["memory_total_bytes"], rows["cgroup_limit_bytes"]
    confined = (limit > 0) & (limit < total)
    used = np.where(confined, rows["cgroup_used_bytes"], total - rows["memory_available_bytes"])
    return np.maximum(used, 0), np.where(confined, limit, total), confined
