"""The time in which a rank's training thread computed, and in which it waited for a core.

While the thread waits for other ranks in a gloo collective, it does neither. So both times tell a slow rank from those that
wait for it, even if the collectives are within the forward.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Group, Process, Samples

# The longest distance (ns) from a time to its nearest samples: one each half second, a few of which may be late.
SAMPLED_NS = 1_500_000_000
# A slow rank computes this many times as long as the second: clean ones differ by up to 1.25 if others take cores.
SLOW_TIMES = 1.3


class ThreadUse(NamedTuple):
    """The seconds in which a thread computed, and in which it was ready to run but had no core."""

    computed: float
    waited: float


def hides_slow_cores(group: Group) -> bool:
    """Whether ranks on CPUs wait for each other within forward and backward."""
    return group.gathers_parameters and not any(process.is_on_gpu for process in group.processes)


def measure_thread_use(process: Process, begin_ns: int, end_ns: int, *, known_ns: int | None = None) -> ThreadUse | None:
    """Return the use of a process's first thread from ``begin_ns`` to ``end_ns`` (unix nanoseconds).

    With ``known_ns`` only samples up to then are used, and scaled from the time that they cover to the whole time. None if
    it was not sampled long enough: the sampler leaves out threads that hardly run.
    """
    last_ns = end_ns + SAMPLED_NS if known_ns is None else min(known_ns, end_ns + SAMPLED_NS)
    begin, end = (_read_near(process, edge_ns, last_ns) for edge_ns in (begin_ns, end_ns))
    if not len(begin) or not len(end) or begin.times[0] > begin_ns:
        return None
    until_ns = min(end_ns, int(end.times[-1]))
    if until_ns < (end_ns if known_ns is None else (begin_ns + end_ns) // 2):
        return None
    scale = (end_ns - begin_ns) / (until_ns - begin_ns) / 1e9
    computed, waited = (
        (_interpolate(end, name, until_ns) - _interpolate(begin, name, begin_ns)) * scale for name in ("cpu_ns", "wait_ns")
    )
    return ThreadUse(computed, waited)


def _read_near(process: Process, time_ns: int, last_ns: int) -> Samples:
    """Return the samples of the first thread around a time, and up to ``last_ns``."""
    records = process.at.records("threads", process.host, "tid", process.source.pid)
    return records.read_window(time_ns - SAMPLED_NS, min(time_ns + SAMPLED_NS, last_ns))


def _interpolate(samples: Samples, name: str, time_ns: int) -> float:
    # Small differences of large numbers, which floats would round.
    base, values = int(samples.rows[name][0]), samples.rows[name] - samples.rows[name][0]
    return base + float(np.interp(time_ns - int(samples.times[0]), samples.times - samples.times[0], values))
