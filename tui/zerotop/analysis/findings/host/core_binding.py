"""Ranks are bound to cores so that some share theirs, span NUMA nodes needlessly, or leave a node's cores and memory idle.

Read from the cores that each rank's process may run on, and the NUMA nodes of those cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, Group, Process, SearchWindow, in_each_node
from zerotop.analysis.processes.cores import Cores, parse_cores
from zerotop.recording.moments.at import find_cores
from zerotop_probe.recording.events import Affinity

_KIND = FindingKind(
    name="core_binding",
    confidence=0.8,
    headline="",
    advice="Give each rank cores of its own.",
    fix="{own_cores_fix}",
)
_SHARED = _KIND.with_changes(
    headline="{sharers:Ranks} share {shared:count core} while {free} have no rank",
    details="They are bound to the same cores, of {cores:.0f} on the node.",
)
_CROSSING = _KIND.with_changes(
    headline="{crossing:Ranks} {verb} bound to cores of several NUMA nodes",
    details="One node has enough cores for a rank; with several, some memory accesses are remote.",
)
_IDLE = _KIND.with_changes(
    headline="No rank is bound to NUMA node {empty}: its cores and memory are idle",
    details="The ranks on this node ({count}) are bound to other cores.",
)

_CoresByNumber = dict[int, Cores]  # by rank or by NUMA node
_Match = tuple[FindingKind, dict[str, Any]]  # and the values of its templates


@in_each_node()
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report at most once for each attempt and node, when each of its ranks has finished a step."""
    if all(len(process.steps) for process in window.subject.processes_on(window.host)):
        window.is_closed = True
        yield _check_host(window.recording, window.subject, window.host)


def _check_host(recording: Evidence, group: Group, host: str) -> Finding | None:
    processes = group.processes_on(host)
    known_ns = max(int(process.steps["end_unix_ns"][0]) for process in processes)
    bound = {process.rank: cpus for process in processes if (cpus := _find_cpus(recording, process, known_ns))}
    cores, nodes = find_cores(recording.at, host), _find_numa_nodes(recording, host)
    # A rank is not bound if it may run on all cores.
    if cores is None or len(bound) < len(processes) or any(len(cpus) >= cores for cpus in bound.values()):
        return None
    used = {cpu for cpus in bound.values() for cpu in cpus}
    match = _check_shared(bound, cores - len(used)) or _check_crossing(bound, nodes) or _check_idle(bound, nodes, used)
    if match is None:
        return None
    kind, values = match
    rows, evidence = processes[0].steps[:1], {"bound_cores": len(used), "cores": cores}
    return kind.at_steps(group, rows, evidence, known_ns=known_ns, ranks=sorted(bound), **values)


def _check_shared(bound: _CoresByNumber, free: int) -> _Match | None:
    """Ranks that are bound to the same cores although others are free."""
    for cpus in dict.fromkeys(bound.values()):
        ranks = sorted(rank for rank, other in bound.items() if other == cpus)
        if len(ranks) > 1 and free >= len(cpus):
            return _SHARED, {"sharers": ranks, "shared": len(cpus), "free": free}
    return None


def _check_crossing(bound: _CoresByNumber, nodes: _CoresByNumber) -> _Match | None:
    """Ranks whose cores would fit in one NUMA node and are in several."""
    ranks = [
        rank
        for rank, cpus in sorted(bound.items())
        if nodes and len(cpus) <= max(map(len, nodes.values())) and sum(bool(cpus & node) for node in nodes.values()) > 1
    ]
    return (_CROSSING, {"crossing": ranks, "verb": "is" if len(ranks) == 1 else "are each"}) if ranks else None


def _check_idle(bound: _CoresByNumber, nodes: _CoresByNumber, used: set[int]) -> _Match | None:
    """NUMA nodes without a rank where there are enough ranks for all nodes."""
    empty = [number for number, cpus in sorted(nodes.items()) if not cpus & used]
    if not empty or len(bound) < len(nodes):
        return None
    return _IDLE, {"count": len(bound), "empty": " and ".join(map(str, empty))}


def _find_cpus(recording: Evidence, process: Process, time_ns: int) -> Cores:
    """The cores that the process may run on; empty if they were not recorded."""
    lists = [
        event.cpus
        for event in recording.events_of(Affinity)
        if event.process_key == process.key and event.unix_ns <= time_ns
    ]
    return parse_cores(lists[-1] or "") if lists else frozenset()


def _find_numa_nodes(recording: Evidence, host: str) -> _CoresByNumber:
    known = recording.at.nodes.get(host)
    return {node.node: parse_cores(node.cpus) for node in (known.report.numa or () if known is not None else ())}
