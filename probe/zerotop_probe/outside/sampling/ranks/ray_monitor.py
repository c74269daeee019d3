"""Ray's memory monitor: the raylet of a node kills workers before the kernel has to, at a share of the node's memory.

Its settings are variables of the raylet, see Ray's "Out-Of-Memory Prevention". Ray looks at the smaller of the node's memory
and the control group's limit, without pages of files and without swap.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from zerotop_probe.outside import procfs

_NAME = b"raylet"
_SHARE, _PERIOD, _FREE = "RAY_memory_usage_threshold", "RAY_memory_monitor_refresh_ms", "RAY_min_memory_free_bytes"
_DEFAULT_SHARE = "0.95"


class MonitorLimit(NamedTuple):
    """The limit from which on a raylet kills: ``share`` of the memory, or all but ``free_bytes`` if that is more."""

    pid: int
    share: float
    free_bytes: int | None


def find_raylet(pid: int) -> int | None:
    """Return the raylet that has started a process, or None."""
    for ancestor in procfs.list_ancestors(pid)[1:]:
        stat = procfs.read_stat(ancestor)
        if stat is not None and stat.name == _NAME:
            return ancestor
    return None


def read_monitor(raylet: int) -> MonitorLimit | None:
    """Return the memory monitor of a raylet; None if it is switched off, or its settings cannot be read."""
    limit = parse_limit(procfs.read_environment(raylet))
    return MonitorLimit(raylet, *limit) if limit is not None else None


def parse_limit(environment: Mapping[str, str]) -> tuple[float, int | None] | None:
    """Return the share and the free bytes that the environment of a raylet sets; None if the monitor is off."""
    with suppress(ValueError):
        share, period = float(environment.get(_SHARE, _DEFAULT_SHARE)), int(environment.get(_PERIOD, "1"))
        free = int(environment.get(_FREE, "-1"))
        if environment and period != 0 and 0 < share <= 1:
            return share, free if free >= 0 else None
    return None
