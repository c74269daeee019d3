"""Host memory runs short: nearly all of it, or of the control group's limit, is in use; or pages go to swap.

Read from the node's samples. What a control group is charged holds the file cache too, so there the ranks' own has to be
much of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Rows, Samples
from zerotop.analysis.annotations.support.thresholds import (
    HOST_FULL_RANKS_SHARE,
    HOST_FULL_SECONDS,
    HOST_FULL_SHARE,
    SWAP_BYTES,
)
from zerotop.analysis.formatting import format_bytes, format_percent
from zerotop.analysis.processes.host_memory import read_host_memory
from zerotop.session.reader import Source


@dataclass
class _State:
    """How far a node's samples were read: since when memory is short, what was swapped at first, and what was told."""

    counts: dict[Source, int] = field(default_factory=dict)
    full_since_ns: int | None = None
    lowest_swap: int | None = None
    reported: set[str] = field(default_factory=set)


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """At most one finding of each of the two for each attempt and node."""
    for group in facts.groups:
        for host in group.hosts:
            yield PAUSE
            seen = group.get_state(_State, host)
            samples = (
                facts.get_records("hosts", host)
                .read_new(seen.counts)
                .clip_window(group.lead.source.created_ns - 1, facts.cursor_ns)
            )
            if not len(samples):
                continue
            yield from _check_swap(group, host, seen, samples)
            if not _flag_full(samples.rows).any():
                seen.full_since_ns = None
                continue
            for time_ns, row in zip(samples.times.tolist(), samples.rows, strict=True):
                yield from _check_full(group, host, seen, (time_ns, row))


def _flag_full(rows: Rows) -> NDArray[np.bool_]:
    """Where the node's memory or its control group's is nearly all in use, whichever counts."""
    node = rows["memory_available_bytes"] <= (1 - HOST_FULL_SHARE) * rows["memory_total_bytes"]
    group = (rows["cgroup_limit_bytes"] > 0) & (rows["cgroup_used_bytes"] >= HOST_FULL_SHARE * rows["cgroup_limit_bytes"])
    full: NDArray[np.bool_] = node | group
    return full


def _check_full(group: Group, host: str, state: _State, sample: tuple[int, Any]) -> Iterator[Annotation]:
    time_ns, held = sample[0], read_host_memory(sample[1], sample[0])
    short = held.limit_bytes > 0 and held.used_bytes >= HOST_FULL_SHARE * held.limit_bytes
    own = _sum_rank_bytes(group, host, time_ns) if short else 0
    if not short or (held.is_confined and own < HOST_FULL_RANKS_SHARE * held.limit_bytes):
        state.full_since_ns = None
        return
    state.full_since_ns = time_ns if state.full_since_ns is None else state.full_since_ns
    if "full" in state.reported or time_ns - state.full_since_ns < HOST_FULL_SECONDS * 1e9:
        return
    state.reported.add("full")
    what = "the control group's limit" if held.is_confined else f"{host}'s memory"
    yield _build_finding(
        group,
        host,
        "host_memory_short",
        (state.full_since_ns, time_ns),
        f"{format_bytes(held.used_bytes)} of {what} of {format_bytes(held.limit_bytes)} are in use"
        f" ({format_percent(held.used_bytes / held.limit_bytes)}), {format_bytes(own)} of them by the ranks: the kernel may kill one.",
        'Lower host memory: "offload_optimizer.pin_memory": false, fewer dataloader_num_workers, or'
        ' "offload_optimizer.device": "nvme".',
        {"used_bytes": float(held.used_bytes), "limit_bytes": float(held.limit_bytes), "ranks_bytes": float(own)},
    )


def _check_swap(group: Group, host: str, state: _State, samples: Samples) -> Iterator[Annotation]:
    known = samples.rows["swap_used_bytes"]
    # What was there before may go back meanwhile.
    lowest = np.minimum.accumulate(known if state.lowest_swap is None else np.minimum(known, state.lowest_swap))
    state.lowest_swap = int(lowest[-1])
    over = np.flatnonzero((lowest >= 0) & (known - lowest >= SWAP_BYTES))
    if "swap" in state.reported or not len(over):
        return
    state.reported.add("swap")
    time_ns, swapped = int(samples.times[over[0]]), int(known[over[0]] - lowest[over[0]])
    yield _build_finding(
        group,
        host,
        "swapping",
        (time_ns, time_ns),
        f"{format_bytes(swapped)} of {host}'s memory went to swap since the ranks began: what is there is slow.",
        'Lower host memory: "offload_optimizer.device": "nvme" is made for it; or fewer dataloader_num_workers.',
        {"swapped_bytes": float(swapped)},
    )


def _sum_rank_bytes(group: Group, host: str, time_ns: int) -> int:
    rows = [process.host_samples.read_last(time_ns) for process in group.processes if process.source.host == host]
    return sum(int(row["rss_bytes"]) for row in rows if row is not None)


def _build_finding(
    group: Group, host: str, name: str, when: tuple[int, int], sentence: str, advice: str, evidence: dict[str, float]
) -> Annotation:
    return Annotation(
        name=name,
        begin_ns=when[0],
        end_ns=when[1],
        known_ns=when[1],
        step=group.lead.step_at(when[1]),
        ranks=tuple(process.rank for process in group.processes if process.source.host == host),
        severity=Severity.WARNING,
        confidence=0.9,
        sentence=sentence,
        advice=advice,
        evidence=evidence,
    )
