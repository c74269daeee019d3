"""Other processes use the cores that the ranks need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.host_load import count_workers, measure_loads
from zerotop.analysis.annotations.support.steps.runs import find_run_begins
from zerotop.analysis.annotations.support.thresholds import TAKEN_BUSY_SHARE
from zerotop.session.moments.at import find_cores

_KIND = FindingKind(
    name="cores_taken",
    severity=Severity.WARNING,
    confidence=0.85,
    headline="Other processes use {others_cores:.1f} of {cores:.0f} cores, and the ranks wait for {waiting_cores:.1f} more",
    details="The ranks on {host} get {ranks_cores:.1f} cores, and compute more slowly.",
    advice=(
        "See which processes run beside the job[. If they are the job's own {workers:count DataLoader worker}, lower"
        " {worker_count}]."
    ),
    fix="top -b -n 1 -o %CPU | head -20",
)
# For how long (seconds) without a break.
TAKEN_SECONDS = 2.0
# Samples of a host further apart than this (ns) are not joined: the sampler was stopped.
_LONGEST_TICK_NS = 2_000_000_000


@dataclass
class _State:
    last_ns: int = 0  # a node's samples were read up to here
    since_ns: int | None = None  # its cores are taken since then
    loads: list[list[float]] = field(default_factory=list)  # of others, waited for, of ranks: in each interval since then


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report at most once for each attempt and node, after training has begun."""
    for group in recording.groups:
        for host in group.hosts if len(group.lead.steps) else ():
            if (_KIND.name, host) not in group.reported:
                yield _check_host(recording, group, host, group.get_state(_State, host))


def _check_host(recording: Evidence, group: Group, host: str, state: _State) -> Annotation | None:
    ends, cores = group.lead.steps["end_unix_ns"], find_cores(recording.at, host)
    # Only between the first and the last finished step: at other times a shortage of cores does not matter.
    state.last_ns = state.last_ns or int(ends[0])
    samples = recording.at.records("hosts", host).read_window(state.last_ns, int(ends[-1]))
    if cores is None or not len(samples):
        return None
    used, edges = samples.rows["cores_used"], np.concatenate([[state.last_ns], samples.times])
    state.last_ns = int(edges[-1])
    is_busy = (used >= TAKEN_BUSY_SHARE * cores).any()
    loads = measure_loads(recording, host, edges, used) if is_busy else None
    if loads is None:
        state.since_ns, state.loads = None, []
        return None
    is_taken = loads.is_starved & (np.diff(edges) <= _LONGEST_TICK_NS)
    begins = find_run_begins(is_taken)
    since = edges[begins]
    if state.since_ns is not None:
        since[begins == 0] = state.since_ns
    long = np.flatnonzero(is_taken & (edges[1:] - since >= TAKEN_SECONDS * 1e9))
    last = int(long[0]) if len(long) else len(used) - 1
    fresh = np.stack([loads.others, loads.waiting, loads.ranks], axis=1)[begins[last] : last + 1]
    state.loads = (state.loads if begins[last] == 0 else []) + fresh.tolist()
    state.since_ns = int(since[last]) if is_taken[last] else None
    if not len(long):
        return None
    end_ns = int(edges[last + 1])
    group.reported.add((_KIND.name, host))
    known_ns = int(ends[int(np.searchsorted(ends, end_ns))])
    return _build_finding(group, host, (int(since[last]), end_ns, known_ns), state.loads, cores)


def _build_finding(group: Group, host: str, when: tuple[int, int, int], loads: list[list[float]], cores: int) -> Annotation:
    others, waiting, ranks = (sum(values) / len(loads) for values in zip(*loads, strict=True))
    evidence = {"others_cores": others, "ranks_cores": ranks, "waiting_cores": waiting, "cores": cores}
    workers = count_workers(group.processes_on(host), *when[:2])
    return _KIND.at(
        group, *when[:2], evidence, known_ns=when[2], ranks=group.ranks_on(host), host=host, workers=workers or None
    )
