"""Other processes have the cores that the ranks want."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Facts, Group
from zerotop.analysis.annotations.support.host_load import Load, loads_of
from zerotop.analysis.annotations.support.thresholds import TAKEN_FULL, TAKEN_SECONDS

# Samples of a host further apart than this (ns) are not joined: the sampler was away.
_LONGEST_TICK_NS = 2_000_000_000


@dataclass
class _Seen:
    """How far a node's samples were read, and those in a row in which its cores were taken."""

    last_ns: int = 0
    since_ns: int | None = None
    loads: list[Load] = field(default_factory=list)
    told: bool = False


def detect(facts: Facts) -> Iterator[Annotation | None]:
    """At most one finding for each attempt and node, once training has begun."""
    for group in facts.groups:
        if not len(group.lead.steps):
            continue
        for host in group.hosts:
            yield PAUSE
            seen = group.kept(_Seen, host)
            if not seen.told:
                yield from _of_host(facts, group, host, seen)


def _of_host(facts: Facts, group: Group, host: str, seen: _Seen) -> Iterator[Annotation]:
    ends, cores = group.lead.steps["end_unix_ns"], facts.cores(host)
    # Only while steps are finished: before the first and after the last nobody waits for cores.
    seen.last_ns = seen.last_ns or int(ends[0])
    samples = facts.table("hosts", host).within(seen.last_ns, int(ends[-1]))
    if cores is None or not len(samples):
        return
    whole, edges = samples.rows["cores_used"], np.concatenate([[seen.last_ns], samples.times])
    seen.last_ns = int(edges[-1])
    if not (whole >= TAKEN_FULL * cores).any():
        seen.since_ns, seen.loads = None, []
        return
    for place, load in enumerate(loads_of(facts, host, edges, whole)):
        begin_ns, end_ns = int(edges[place]), int(edges[place + 1])
        if load is None or not load.taken or end_ns - begin_ns > _LONGEST_TICK_NS:
            seen.since_ns, seen.loads = None, []
            continue
        seen.since_ns = begin_ns if seen.since_ns is None else seen.since_ns
        seen.loads.append(load)
        if end_ns - seen.since_ns >= TAKEN_SECONDS * 1e9:
            seen.told = True
            known_ns = int(ends[int(np.searchsorted(ends, end_ns))])
            yield _annotation(group, host, (seen.since_ns, end_ns, known_ns), seen.loads)
            return


def _annotation(group: Group, host: str, when: tuple[int, int, int], loads: list[Load]) -> Annotation:
    others, waiting, ranks = (
        sum(getattr(load, name) for load in loads) / len(loads) for name in ("others", "waiting", "ranks")
    )
    cores = loads[0].cores
    return Annotation(
        name="cores_taken",
        begin_ns=when[0],
        end_ns=when[1],
        known_ns=when[2],
        step=group.lead.step_at(when[0]),
        ranks=tuple(process.rank for process in group.processes if process.source.host == host),
        severity=Severity.WARNING,
        confidence=0.85,
        sentence=(
            f"Other processes use {others:.1f} of {host}'s {cores} cores while the ranks use {ranks:.1f} and wait for"
            f" {waiting:.1f} more: iterations take as long as those let them."
        ),
        advice="Look in top for what runs beside the job; data-loader workers count too: lower dataloader_num_workers.",
        evidence={"others_cores": others, "ranks_cores": ranks, "waiting_cores": waiting, "cores": float(cores)},
    )
