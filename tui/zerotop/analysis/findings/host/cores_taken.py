"""Other processes use the cores that the ranks need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, in_each_node
from zerotop.analysis.findings.support.host_load import count_workers, find_longest_wait, measure_loads
from zerotop.analysis.findings.support.steps.runs import find_run_begins
from zerotop.analysis.findings.support.thresholds import TAKEN_BUSY_SHARE
from zerotop.recording.moments.at import find_cores
from zerotop.recording.samples import Floats

_KIND = FindingKind(
    name="cores_taken",
    confidence=0.85,
    lost_once="lost_s",
    headline="Other processes use {others_cores:.1f} of {cores:count core}, and the ranks wait for {waiting_cores:.1f} more",
    details=(
        "The ranks on {host} get {ranks_cores:.1f} cores[, and the training thread of rank {waiting_rank} waits for one in"
        " {waiting_share:percent} of the time]."
    ),
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
_LOOK_BACK_NS = int(TAKEN_SECONDS * 1e9) + 2 * _LONGEST_TICK_NS


@in_each_node()
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report at most once for each attempt and node, after training has begun."""
    ends, cores = window.subject.lead.steps["end_unix_ns"], find_cores(window.recording.at, window.host)
    new = window.steps(window.subject.lead.steps)
    if cores is None or new.start == new.stop:
        return
    # Only between the first and the last finished step: at other times a shortage of cores does not matter.
    begin_ns = max(int(ends[0]), int(ends[max(0, new.start - 1)]) - _LOOK_BACK_NS)
    samples = window.recording.at.records("hosts", window.host).read_window(begin_ns, int(ends[-1]))
    if not len(samples) or not (samples.rows["cores_used"] >= TAKEN_BUSY_SHARE * cores).any():
        return
    edges = samples.times if begin_ns > ends[0] else np.concatenate([ends[:1], samples.times])
    loads = measure_loads(window.recording, window.host, edges, samples.rows["cores_used"][1 - len(edges) :])
    if loads is None or len(edges) < 2:
        return
    is_taken = loads.is_starved & (np.diff(edges) <= _LONGEST_TICK_NS)
    begins = find_run_begins(is_taken)
    long = np.flatnonzero(is_taken & (edges[1:] - edges[begins] >= TAKEN_SECONDS * 1e9))
    if len(long):
        taken = slice(int(begins[long[0]]), int(long[0]) + 1)
        known_ns = int(ends[np.searchsorted(ends, edges[taken.stop])])
        when = int(edges[taken.start]), int(edges[taken.stop]), known_ns
        yield _build_finding(
            window.subject, window.host, when, [loads.others[taken], loads.waiting[taken], loads.ranks[taken]], cores
        )


def _build_finding(group: Group, host: str, when: tuple[int, int, int], loads: list[Floats], cores: int) -> Finding:
    others, waiting, ranks = (sum(values.tolist()) / len(values) for values in loads)
    evidence = {"others_cores": others, "ranks_cores": ranks, "waiting_cores": waiting, "cores": cores}
    slowest, share = find_longest_wait(group.processes_on(host), *when[:2], known_ns=when[2])
    # What it costs later is not measured.
    evidence |= {"waiting_share": share, "lost_s": share * (when[1] - when[0]) / 1e9} if share else {}
    workers = count_workers(group.processes_on(host), *when[:2])
    values: dict[str, Any] = {"host": host, "workers": workers or None, "waiting_rank": slowest, "waiting_share": share}
    return _KIND.at(group, *when[:2], evidence, known_ns=when[2], ranks=group.ranks_on(host), cost=share or 0.0, **values)
