"""Other processes use the cores that the ranks need."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, in_each_node
from zerotop.analysis.findings.support.causes.host_causes import FEWER_WORKERS
from zerotop.analysis.findings.support.host_load import (
    CoreLoad,
    count_children,
    count_workers,
    find_longest_wait,
    measure_loads,
    measure_worker_cores,
)
from zerotop.analysis.findings.support.started_processes import STARTED, find_start_of_processes
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
        "In steps {step} to {last_step} the ranks on {host} get {ranks_cores:.1f} cores[, and the training thread of rank"
        " {waiting_rank} waits for one in {waiting_share:percent} of the time].[ The job's {workers:count DataLoader worker}"
        " use {workers_cores:.1f} more.][ The job's {children:count child process} use {children_cores:.1f} more.]"
        "[ It lasted to step {until_step:.0f}.]"
    ),
    advice="See which processes run beside the job.",
    fix="top -b -n 1 -o %CPU | head -20",
)
_BY_WORKERS = _KIND.with_changes(
    headline=(
        "Its {workers:count DataLoader worker} use {workers_cores:.1f} of {cores:count core}, and the ranks wait for"
        " {waiting_cores:.1f} more"
    ),
    details=(
        "In steps {step} to {last_step} the ranks on {host} get {ranks_cores:.1f} cores, other processes"
        " {others_cores:.1f}[, and the training thread of rank {waiting_rank} waits for one in {waiting_share:percent} of"
        " the time].[ It lasted to step {until_step:.0f}.]"
    ),
    advice=FEWER_WORKERS[0],
    fix=FEWER_WORKERS[1],
)
_BY_CHILDREN = _KIND.with_changes(
    headline=(
        "Its {children:count child process} use {children_cores:.1f} of {cores:count core}, and the ranks wait for"
        " {waiting_cores:.1f} more"
    ),
    details="The job has started them[ at {location}]. " + _BY_WORKERS.details,
    advice=STARTED,
)
# For how long (seconds) without a break.
TAKEN_SECONDS = 2.0
# A later one lasts for this part of the training before it, or so many seconds: short ones that return are told seldom.
_LATER_PART, _LATER_SECONDS = 0.03, 60.0
# Samples of a host further apart than this (ns) are not joined: the sampler was stopped.
_LONGEST_TICK_NS = 2_000_000_000
# A shortage is measured again after this part of more time, and TAKEN_SECONDS; without any in that time, it is over.
_MORE_PART = 8


class _Taken(NamedTuple):
    """A shortage of cores as known at a time; unix nanoseconds."""

    begin_ns: int
    end_ns: int
    known_ns: int
    loads: tuple[Floats, Floats, Floats]  # cores that others use, that the ranks wait for, and that they use
    is_over: bool = False

    @property
    def due_ns(self) -> int:
        """When to measure it again: without a shortage since its end, it is over then."""
        return self.end_ns + (self.end_ns - self.begin_ns) // _MORE_PART + int(TAKEN_SECONDS * 1e9)


@in_each_node(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each shortage of an attempt and node, after training has begun, and again as it goes on and ends."""
    cores = find_cores(window.recording.at, window.host)
    if cores is not None and len(window.subject.lead.steps):
        for taken in window.extend(partial(_find_next, window, cores), 0):
            yield _build_finding(window.subject, window.host, taken, cores)


def _find_next(window: SearchWindow[Group], cores: int, last: _Taken | None) -> _Taken | None:
    """Return the first shortage, the same once it has gone on or has ended, or the next one after its end."""
    if last is None or last.is_over:
        return _find_new(window, cores, last.due_ns if last is not None else 0)
    ends = window.subject.lead.steps["end_unix_ns"]
    if ends[-1] < last.due_ns:
        return None
    samples = window.recording.at.records("hosts", window.host).read_window(last.begin_ns, last.due_ns)
    edges = np.unique(np.append(last.begin_ns, samples.times))
    loads = measure_loads(window.recording, window.host, edges, samples.rows["cores_used"][1 - len(edges) :])
    if loads is None:
        return last._replace(is_over=True)
    end_ns = int(edges[1:][loads.is_starved].max(initial=last.end_ns))
    taken = slice(0, int(np.searchsorted(edges, end_ns)))
    known_ns = int(ends[np.searchsorted(ends, last.due_ns)])
    return _Taken(last.begin_ns, end_ns, known_ns, _select(loads, taken), is_over=end_ns == last.end_ns)


def _find_new(window: SearchWindow[Group], cores: int, since_ns: int) -> _Taken | None:
    """Return the first shortage since a time."""
    ends = window.subject.lead.steps["end_unix_ns"]
    new = window.steps(window.subject.lead.steps, of=since_ns)
    if new.start == new.stop:
        return None
    # Only between the first and the last finished step: at other times a shortage of cores does not matter.
    longest_s = _LATER_SECONDS if since_ns else TAKEN_SECONDS
    look_back_ns = int(longest_s * 1e9) + 2 * _LONGEST_TICK_NS
    begin_ns = max(int(ends[0]), int(ends[max(0, new.start - 1)]) - look_back_ns, since_ns)
    samples = window.recording.at.records("hosts", window.host).read_window(begin_ns, int(ends[-1]))
    if not len(samples) or not (samples.rows["cores_used"] >= TAKEN_BUSY_SHARE * cores).any():
        return None
    edges = samples.times if begin_ns > ends[0] else np.concatenate([ends[:1], samples.times])
    loads = measure_loads(window.recording, window.host, edges, samples.rows["cores_used"][1 - len(edges) :])
    if loads is None or len(edges) < 2:
        return None
    is_taken = loads.is_starved & (np.diff(edges) <= _LONGEST_TICK_NS)
    begins = edges[(runs := find_run_begins(is_taken))]
    least_ns = np.clip(_LATER_PART * (begins - ends[0]), TAKEN_SECONDS * 1e9, longest_s * 1e9)
    long = np.flatnonzero(is_taken & (edges[1:] - begins >= least_ns))
    if not len(long):
        return None
    taken = slice(int(runs[long[0]]), int(long[0]) + 1)
    begin_ns, end_ns = int(edges[taken.start]), int(edges[taken.stop])
    return _Taken(begin_ns, end_ns, int(ends[np.searchsorted(ends, end_ns)]), _select(loads, taken))


def _select(loads: CoreLoad, taken: slice) -> tuple[Floats, Floats, Floats]:
    return loads.others[taken], loads.waiting[taken], loads.ranks[taken]


def _build_finding(group: Group, host: str, taken: _Taken, cores: int) -> Finding:
    begin_ns, end_ns, known_ns = taken.begin_ns, taken.end_ns, taken.known_ns
    others, waiting, ranks = (float(np.nanmean(values)) for values in taken.loads)
    workers = count_workers(group.processes_on(host), begin_ns, end_ns)
    own = min(others, measure_worker_cores(group.processes_on(host), begin_ns, end_ns)) if workers else 0.0
    children, child_cores = count_children(group.processes_on(host), begin_ns, end_ns)
    child_cores = min(others - own, child_cores) if child_cores > 0 else 0.0
    kind = _BY_WORKERS if own > others / 2 else _BY_CHILDREN if child_cores > others / 2 else _KIND
    others -= own + child_cores
    evidence: dict[str, float | None] = {"others_cores": others, "ranks_cores": ranks, "waiting_cores": waiting}
    evidence |= {"workers_cores": own} if own else {}
    evidence |= {"children_cores": child_cores} if child_cores else {}
    slowest, share = find_longest_wait(group.processes_on(host), begin_ns, end_ns, known_ns=known_ns)
    evidence |= {"cores": cores, "until_step": group.step_at(end_ns) if taken.is_over else None}
    evidence |= {"waiting_share": share, "lost_s": share * (end_ns - begin_ns) / 1e9} if share else {}
    values: dict[str, Any] = {
        "host": host,
        "last_step": group.step_at(end_ns),
        "workers": workers or None,
        "workers_cores": own or None,
        "waiting_rank": slowest,
        "waiting_share": share,
    }
    if child_cores:
        step = group.step_at(begin_ns) or 0
        starts = (find_start_of_processes(process, step, known_ns) for process in group.processes_on(host))
        start = next((one for one in starts if one is not None), None)
        values |= {
            "children": children,
            "children_cores": child_cores,
            "location": start.place if start is not None else None,
        }
    ranks_on = group.ranks_on(host)
    return kind.at(group, begin_ns, end_ns, evidence, known_ns=known_ns, ranks=ranks_on, cost=share or 0.0, **values)
