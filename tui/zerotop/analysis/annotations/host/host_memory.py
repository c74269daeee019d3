"""Host memory runs short: it, or the control group's limit, is nearly all in use; or pages move to swap.

Read from the node's samples. A control group is charged for file cache too, so there the ranks must use much of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Rows, Samples
from zerotop.analysis.formatting import MIB
from zerotop.analysis.processes.host_memory import read_host_memory

_SHORT = FindingKind(
    name="host_memory_short",
    severity=Severity.WARNING,
    confidence=0.9,
    sentence=(
        "{used_bytes:bytes} of {limit_name} of {limit_bytes:bytes} are in use ({share:percent}), {ranks_bytes:bytes} by the"
        " ranks: the kernel may kill one."
    ),
    advice="Lower host memory: {lower_host}.",
)
_SWAPPING = FindingKind(
    name="swapping",
    severity=Severity.WARNING,
    confidence=0.9,
    sentence="{swapped_bytes:bytes} of {host}'s memory moved to swap since the ranks started: access to it is slow.",
    advice="Lower host memory: {nvme_or_workers}.",
)
# Share of the limit of host memory from which on the kernel may soon kill, and for how long (seconds).
HOST_FULL_SHARE = 0.92
HOST_FULL_SECONDS = 1.0
# Share of a control group's limit that the ranks use: the rest may be file cache, which is reclaimed.
HOST_FULL_RANKS_SHARE = 0.5
# Swap that was taken since the job began: a few pages always are.
SWAP_BYTES = 512 * MIB


@dataclass
class _State:
    full_since_ns: int | None = None
    lowest_swap: int | None = None


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report each kind at most once for each attempt and node."""
    for group in recording.groups:
        for host in group.hosts:
            state, records = group.get_state(_State, host), recording.get_records("hosts", host)
            samples = group.read_new(records, f"{_SHORT.name} {host}")
            samples = samples.clip_window(group.lead.source.created_ns - 1, recording.cursor_ns)
            if not len(samples):
                continue
            yield _check_swap(group, host, state, samples)
            if not _flag_full(samples.rows).any():
                state.full_since_ns = None
                continue
            for time_ns, row in zip(samples.times.tolist(), samples.rows, strict=True):
                yield _check_full(group, host, state, time_ns, row)


def _flag_full(rows: Rows) -> NDArray[np.bool_]:
    """Whether the node's memory or its control group's is nearly all in use."""
    node = rows["memory_available_bytes"] <= (1 - HOST_FULL_SHARE) * rows["memory_total_bytes"]
    group = (rows["cgroup_limit_bytes"] > 0) & (rows["cgroup_used_bytes"] >= HOST_FULL_SHARE * rows["cgroup_limit_bytes"])
    full: NDArray[np.bool_] = node | group
    return full


def _check_full(group: Group, host: str, state: _State, time_ns: int, row: Any) -> Annotation | None:
    memory = read_host_memory(row, time_ns)
    used, limit = memory.used_bytes, memory.limit_bytes
    is_short = limit > 0 and used >= HOST_FULL_SHARE * limit
    by_ranks = _sum_rank_bytes(group, host, time_ns) if is_short else 0
    if not is_short or (memory.is_confined and by_ranks < HOST_FULL_RANKS_SHARE * limit):
        state.full_since_ns = None
        return None
    state.full_since_ns = time_ns if state.full_since_ns is None else state.full_since_ns
    if (_SHORT.name, host) in group.reported or time_ns - state.full_since_ns < HOST_FULL_SECONDS * 1e9:
        return None
    group.reported.add((_SHORT.name, host))
    return _SHORT.at(
        group,
        state.full_since_ns,
        time_ns,
        {"used_bytes": used, "limit_bytes": limit, "ranks_bytes": by_ranks},
        step=group.step_at(time_ns),
        ranks=group.ranks_on(host),
        limit_name="the control group's limit" if memory.is_confined else f"{host}'s memory",
        share=used / limit,
    )


def _check_swap(group: Group, host: str, state: _State, samples: Samples) -> Annotation | None:
    swapped = samples.rows["swap_used_bytes"]
    # Pages that were swapped before may return meanwhile.
    lowest = np.minimum.accumulate(swapped if state.lowest_swap is None else np.minimum(swapped, state.lowest_swap))
    state.lowest_swap = int(lowest[-1])
    over = np.flatnonzero((lowest >= 0) & (swapped - lowest >= SWAP_BYTES))
    if (_SWAPPING.name, host) in group.reported or not len(over):
        return None
    group.reported.add((_SWAPPING.name, host))
    time_ns, evidence = int(samples.times[over[0]]), {"swapped_bytes": swapped[over[0]] - lowest[over[0]]}
    return _SWAPPING.at(group, time_ns, time_ns, evidence, ranks=group.ranks_on(host), host=host)


def _sum_rank_bytes(group: Group, host: str, time_ns: int) -> int:
    rows = [process.host_samples.read_last(time_ns) for process in group.processes_on(host)]
    return sum(int(row["rss_bytes"]) for row in rows if row is not None)
