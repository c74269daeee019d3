"""Host memory runs short, of the node or of the job's control group, or pages move to swap.

Read from the node's samples. A control group is also charged for file cache, which the kernel drops: it does not count, and
where an older recording does not tell it, the ranks must use much of the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.findings.support.evidence import Evidence, Group, Ints, Samples
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.steps.runs import find_run_begins
from zerotop.analysis.formatting import MIB
from zerotop.recording.moments.host_memory import measure_limit_bytes, measure_unreclaimable_bytes, measure_used_bytes
from zerotop.recording.steps.step_memory import measure_held_bytes

_SHORT = FindingKind(
    name="host_memory_short",
    severity=Severity.WARNING,
    confidence=0.9,
    headline="Host memory is {share:percent} full: the kernel may soon kill a rank",
    details="{used_bytes:bytes} of {limit_name} of {limit_bytes:bytes} are in use, {ranks_bytes:bytes} by the ranks.",
    advice="Use less host memory: {less_host_memory}.",
    fix="{less_host_memory_fix}",
)
_SWAPPING = FindingKind(
    name="swapping",
    severity=Severity.WARNING,
    confidence=0.9,
    host_bytes="swapped_bytes",
    headline="{swapped_bytes:bytes} of host memory moved to swap since the ranks started",
    details="Access to memory in {host}'s swap is slow.",
    advice="Use less host memory: {less_host_memory}.",
    fix="{less_host_memory_fix}",
)
# The kernel may soon kill a rank if this share of the memory limit is in use for this long (seconds).
HOST_FULL_SHARE = 0.92
HOST_FULL_SECONDS = 1.0
# Share of a control group's limit that the ranks use: the rest may be file cache, which is reclaimed.
HOST_FULL_RANKS_SHARE = 0.5
# Growth of used swap since the job began. A few pages are always swapped.
SWAP_BYTES = 512 * MIB


@dataclass
class _State:
    full_since_ns: int | None = None
    lowest_swap: int | None = None


def detect(recording: Evidence) -> Iterator[Finding | None]:
    """Report each kind at most once for each attempt and node."""
    for group in recording.groups:
        for host in group.hosts:
            state, records = group.get_state(_State, host), recording.at.records("hosts", host)
            samples = group.read_new(records, f"{_SHORT.name} {host}")
            samples = samples.clip_window(group.lead.source.created_ns - 1, recording.cursor_ns)
            if not len(samples):
                continue
            yield _check_swap(group, host, state, samples)
            yield _check_full(group, host, state, samples)


def _check_full(group: Group, host: str, state: _State, samples: Samples) -> Finding | None:
    if (_SHORT.name, host) in group.reported:
        return None
    times, limits, used = samples.times, measure_limit_bytes(samples.rows), measure_used_bytes(samples.rows)
    is_confined = limits < samples.rows["memory_total_bytes"]
    kept = measure_unreclaimable_bytes(samples.rows)
    is_short = (limits > 0) & (np.where(np.isnan(kept), used, kept) >= HOST_FULL_SHARE * limits)
    by_ranks = _sum_rank_bytes(group, host, times) if is_short.any() else np.zeros(len(times), np.int64)
    is_short &= ~is_confined | ~np.isnan(kept) | (by_ranks >= HOST_FULL_RANKS_SHARE * limits)
    begins = find_run_begins(is_short)
    since = times[np.minimum(begins, len(times) - 1)]
    if state.full_since_ns is not None:
        since = np.where(begins == 0, state.full_since_ns, since)
    state.full_since_ns = int(since[-1]) if is_short[-1] else None
    found = np.flatnonzero(is_short & (times - since >= HOST_FULL_SECONDS * 1e9))
    if not len(found):
        return None
    group.reported.add((_SHORT.name, host))
    at = found[0]
    return _SHORT.at(
        group,
        int(since[at]),
        int(times[at]),
        {"used_bytes": used[at], "limit_bytes": limits[at], "ranks_bytes": by_ranks[at]},
        step=group.step_at(int(times[at])),
        ranks=group.ranks_on(host),
        limit_name="the control group's limit" if is_confined[at] else f"{host}'s memory",
        share=used[at] / limits[at],
    )


def _check_swap(group: Group, host: str, state: _State, samples: Samples) -> Finding | None:
    swapped = samples.rows["swap_used_bytes"]
    # Older pages may return from swap at the same time.
    lowest = np.minimum.accumulate(swapped if state.lowest_swap is None else np.minimum(swapped, state.lowest_swap))
    state.lowest_swap = int(lowest[-1])
    over = np.flatnonzero((lowest >= 0) & (swapped - lowest >= SWAP_BYTES))
    if (_SWAPPING.name, host) in group.reported or not len(over):
        return None
    group.reported.add((_SWAPPING.name, host))
    time_ns, evidence = int(samples.times[over[0]]), {"swapped_bytes": swapped[over[0]] - lowest[over[0]]}
    return _SWAPPING.at(group, time_ns, time_ns, evidence, ranks=group.ranks_on(host), host=host)


def _sum_rank_bytes(group: Group, host: str, times: Ints) -> Ints:
    """Return the memory of a node's ranks, without pages of files, at each time."""
    total = np.zeros(len(times), np.int64)
    for process in group.processes_on(host):
        before = process.host_samples.read_last(int(times[0]))
        samples = process.host_samples.read_window(int(times[0]), int(times[-1]))
        first = int(measure_held_bytes(before)) if before is not None else 0
        sizes = [[first], measure_held_bytes(samples.rows) if len(samples) else []]
        total += np.concatenate(sizes).astype(np.int64)[np.searchsorted(samples.times, times, "right")]
    return total
