"""Means over one short window before a cursor: processes, threads and hosts are averaged over the same time.

The window ends with the host's last sample, because hosts are sampled less often than processes. So their figures add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from zerotop.recording.moments.at import At
from zerotop.recording.reader import Source

WINDOW_NS = 1_000_000_000
_JITTER_NS = 50_000_000  # a sample so little after the window's begin covers the time before it


class RecentWindow(NamedTuple):
    """A window of time in unix nanoseconds: samples after ``begin_ns``, up to ``end_ns``."""

    begin_ns: int
    end_ns: int


def find_window(at: At, host: str) -> RecentWindow:
    """Return the window before a cursor on one host; without a recent sample of the host it ends at the cursor."""
    times = []
    for source in at.host_sources("hosts", host):
        tick = source.read_last_tick(at.cursor_ns, at.cursor_ns - WINDOW_NS)
        times += [int(tick["time_ns"][-1]) + source.offset_ns] if len(tick) else []
    end_ns = max(times, default=at.cursor_ns)
    return RecentWindow(end_ns - WINDOW_NS + _JITTER_NS, end_ns)


def compute_process_means(source: Source, window: RecentWindow) -> Mapping[int, tuple[float, float]]:
    """Return by process id the mean of (cores used, threads waiting for a core) of the processes sampled in a window."""
    rows = source.between(*window)
    if not len(rows):
        return {}
    pids, index, counts = np.unique(rows["pid"], return_inverse=True, return_counts=True)
    used, waiting = (np.bincount(index, rows[name]) / counts for name in ("cores_used", "waiting_cores"))
    return dict(zip(pids.tolist(), zip(used.tolist(), waiting.tolist(), strict=True), strict=True))
