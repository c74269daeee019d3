"""Host memory runs short, of the node or of the job's control group, or pages move to swap.

Read from the node's samples. A control group is also charged for file cache, which the kernel drops: it does not count, and
where an older recording does not tell it, the ranks must use much of the limit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, in_each_node
from zerotop.analysis.findings.support.host_load import name_savings
from zerotop.analysis.findings.support.links import Kinds, begins_before
from zerotop.analysis.findings.support.steps.runs import find_run_begins
from zerotop.analysis.formatting import MIB
from zerotop.recording.moments.host_memory import measure_limit_bytes, measure_unreclaimable_bytes, measure_used_bytes
from zerotop.recording.samples import Ints, Samples
from zerotop.recording.steps.step_memory import measure_held_bytes

_SHORT = FindingKind(
    name="host_memory_short",
    confidence=0.9,
    headline="Host memory is {share:percent} full: the kernel may soon kill a rank",
    details="{used_bytes:bytes} of {limit_name} of {limit_bytes:bytes} are in use, {ranks_bytes:bytes} by the ranks.",
    advice="[Use less host memory: {less_host_memory}.]",
    fix="{less_host_memory_fix}",
    explained_by=(Kinds(begins_before, "host_growth", "loader_growth"),),
)
_SWAPPING = FindingKind(
    name="swapping",
    confidence=0.9,
    host_bytes="swapped_bytes",
    headline="{swapped_bytes:bytes} of host memory moved to swap since the ranks started",
    details="Access to memory in {host}'s swap is slow.",
    advice="[Use less host memory: {less_host_memory}.]",
    fix="{less_host_memory_fix}",
    lasts=True,
    explained_by=(Kinds(begins_before, "host_memory_short", "host_growth", "loader_growth"),),
)
# The kernel may soon kill a rank if this share of the memory limit is in use for this long (seconds).
HOST_FULL_SHARE = 0.92
HOST_FULL_SECONDS = 1.0
# Share of a control group's limit that the ranks use: the rest may be file cache, which is reclaimed.
HOST_FULL_RANKS_SHARE = 0.5
# Growth of used swap since the job began. A few pages are always swapped.
SWAP_BYTES = 512 * MIB
# Samples from this long before new ones show since when the memory has been full.
_LOOK_BACK_NS = 10 * 10**9


@in_each_node(kinds=2)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report each kind at most once for each attempt and node."""
    records, created_ns = window.recording.at.records("hosts", window.host), window.subject.lead.source.created_ns
    samples = window.records(records).clip_window(created_ns - 1, window.recording.cursor_ns)
    if len(samples):
        yield _check_swap(window, samples)
        begin_ns = max(created_ns - 1, int(samples.times[0]) - _LOOK_BACK_NS)
        yield _check_full(window.subject, window.host, records.read_window(begin_ns, int(samples.times[-1])))


def _check_full(group: Group, host: str, samples: Samples) -> Finding | None:
    times, limits, used = samples.times, measure_limit_bytes(samples.rows), measure_used_bytes(samples.rows)
    is_confined = limits < samples.rows["memory_total_bytes"]
    kept = measure_unreclaimable_bytes(samples.rows)
    is_short = (limits > 0) & (np.where(np.isnan(kept), used, kept) >= HOST_FULL_SHARE * limits)
    by_ranks = _sum_rank_bytes(group, host, times) if is_short.any() else np.zeros(len(times), np.int64)
    is_short &= ~is_confined | ~np.isnan(kept) | (by_ranks >= HOST_FULL_RANKS_SHARE * limits)
    begins = find_run_begins(is_short)
    since = times[np.minimum(begins, len(times) - 1)]
    found = np.flatnonzero(is_short & (times - since >= HOST_FULL_SECONDS * 1e9))
    if not len(found):
        return None
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
        **name_savings(group.processes_on(host), int(times[at])),
    )


def _check_swap(window: SearchWindow[Group], samples: Samples) -> Finding | None:
    swapped = samples.rows["swap_used_bytes"]
    # Older pages may return from swap at the same time.
    *before, _ = window.results([int(swapped.min())], None)
    lowest = np.minimum.accumulate(np.minimum(swapped, min(before, default=swapped[0])))
    over = np.flatnonzero((lowest >= 0) & (swapped - lowest >= SWAP_BYTES))
    if not len(over):
        return None
    time_ns, evidence = int(samples.times[over[0]]), {"swapped_bytes": swapped[over[0]] - lowest[over[0]]}
    ranks, savings = window.subject.ranks_on(window.host), name_savings(window.subject.processes_on(window.host), time_ns)
    return _SWAPPING.at(window.subject, time_ns, time_ns, evidence, ranks=ranks, host=window.host, **savings)


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
