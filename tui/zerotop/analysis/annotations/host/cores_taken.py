"""Other processes have the cores that the ranks want."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.host_load import CoreLoad, measure_loads
from zerotop.analysis.annotations.support.thresholds import TAKEN_BUSY_SHARE, TAKEN_SECONDS

# Samples of a host further apart than this (ns) are not joined: the sampler was away.
_LONGEST_TICK_NS = 2_000_000_000


@dataclass
class _State:
    """How far a node's samples were read, and those in a row in which its cores were taken."""

    last_ns: int = 0
    since_ns: int | None = None
    loads: list[CoreLoad] = field(default_factory=list)
    is_reported: bool = False


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """At most one finding for each attempt and node, once training has begun."""
    for group in facts.groups:
        if not len(group.lead.steps):
            continue
        for host in group.hosts:
            yield PAUSE
            seen = group.get_state(_State, host)
            if not seen.is_reported:
                yield from _check_host(facts, group, host, seen)


def _check_host(facts: Evidence, group: Group, host: str, state: _State) -> Iterator[Annotation]:
    ends, cores = group.lead.steps["end_unix_ns"], facts.count_cores(host)
    # Only while steps are finished: before the first and after the last nobody waits for cores.
    state.last_ns = state.last_ns or int(ends[0])
    samples = facts.get_records("hosts", host).read_window(state.last_ns, int(ends[-1]))
    if cores is None or not len(samples):
        return
    whole, edges = samples.rows["cores_used"], np.concatenate([[state.last_ns], samples.times])
    state.last_ns = int(edges[-1])
    if not (whole >= TAKEN_BUSY_SHARE * cores).any():
        state.since_ns, state.loads = None, []
        return
    for place, load in enumerate(measure_loads(facts, host, edges, whole)):
        begin_ns, end_ns = int(edges[place]), int(edges[place + 1])
        if load is None or not load.is_starved or end_ns - begin_ns > _LONGEST_TICK_NS:
            state.since_ns, state.loads = None, []
            continue
        state.since_ns = begin_ns if state.since_ns is None else state.since_ns
        state.loads.append(load)
        if end_ns - state.since_ns >= TAKEN_SECONDS * 1e9:
            state.is_reported = True
            known_ns = int(ends[int(np.searchsorted(ends, end_ns))])
            yield _build_finding(group, host, (state.since_ns, end_ns, known_ns), state.loads)
            return


def _build_finding(group: Group, host: str, when: tuple[int, int, int], loads: list[CoreLoad]) -> Annotation:
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
