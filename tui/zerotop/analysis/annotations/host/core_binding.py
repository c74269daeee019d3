"""Ranks are bound to cores so that some share theirs, cross NUMA nodes for nothing, or leave a node's cores and memory idle.

Read from the cores that each rank's process may run on, and which NUMA node those belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Process
from zerotop.analysis.formatting import format_count, format_ranks

_ADVICE = "Start with deepspeed --bind_cores_to_rank, which gives each rank its own cores; --bind_core_list says which."


@dataclass
class _State:
    """The nodes of an attempt that were looked at."""

    checked_hosts: set[str] = field(default_factory=set)


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """At most one finding for each attempt and node, once each of its ranks has finished a step."""
    for group in facts.groups:
        told = group.get_state(_State).checked_hosts
        for host in sorted({*group.hosts} - told):
            yield PAUSE
            mine = [process for process in group.processes if process.source.host == host]
            if all(len(process.steps) for process in mine):
                told.add(host)
                yield from _check_host(facts, host, mine)


def _check_host(facts: Evidence, host: str, processes: list[Process]) -> Iterator[Annotation]:
    known_ns = max(int(process.steps["end_unix_ns"][0]) for process in processes)
    bound = {process.rank: cpus for process in processes if (cpus := _find_cpus(facts, process, known_ns))}
    cores, nodes = facts.count_cores(host), _find_numa_nodes(facts, host)
    # A rank that may run everywhere is not bound.
    if cores is None or len(bound) < len(processes) or any(len(cpus) >= cores for cpus in bound.values()):
        return
    text = _describe_shared(bound, cores) or _describe_crossing(bound, nodes) or _describe_idle(bound, nodes)
    if text:
        yield Annotation(
            name="core_binding",
            begin_ns=int(processes[0].steps["begin_unix_ns"][0]),
            end_ns=known_ns,
            known_ns=known_ns,
            step=int(processes[0].steps["step"][0]),
            ranks=tuple(sorted(bound)),
            severity=Severity.WARNING,
            confidence=0.8,
            sentence=text + ".",
            advice=_ADVICE,
            evidence={"bound_cores": float(len(set().union(*bound.values()))), "cores": float(cores)},
        )


def _describe_shared(bound: dict[int, frozenset[int]], cores: int) -> str:
    """Ranks that are bound to the same cores although there are others."""
    for cpus in dict.fromkeys(bound.values()):
        ranks = sorted(rank for rank, other in bound.items() if other == cpus)
        left = cores - len(set().union(*bound.values()))
        if len(ranks) > 1 and left >= len(cpus):
            return f"{_capitalize_ranks(ranks)} are bound to the same {format_count(len(cpus), 'core')} while {left} of {cores} have no rank"
    return ""


def _describe_crossing(bound: dict[int, frozenset[int]], nodes: dict[int, frozenset[int]]) -> str:
    """Ranks whose cores would fit in one NUMA node and lie in several: memory is far from half of them."""
    ranks = [
        rank
        for rank, cpus in sorted(bound.items())
        if nodes and len(cpus) <= max(map(len, nodes.values())) and sum(bool(cpus & node) for node in nodes.values()) > 1
    ]
    if not ranks:
        return ""
    verb = "is" if len(ranks) == 1 else "are each"
    return f"{_capitalize_ranks(ranks)} {verb} bound to cores of several NUMA nodes, though one has enough: memory is far from some"


def _capitalize_ranks(ranks: list[int]) -> str:
    text = format_ranks(ranks)
    return text[0].upper() + text[1:]


def _describe_idle(bound: dict[int, frozenset[int]], nodes: dict[int, frozenset[int]]) -> str:
    """NUMA nodes without a rank where there are ranks enough for all."""
    used = set().union(*bound.values())
    empty = [number for number, cpus in sorted(nodes.items()) if not cpus & used]
    if not empty or len(bound) < len(nodes):
        return ""
    names = " and ".join(map(str, empty))
    return f"None of {format_count(len(bound), 'rank')} is bound to cores of NUMA node {names}: those and their memory idle"


def _find_cpus(facts: Evidence, process: Process, time_ns: int) -> frozenset[int]:
    """The cores that it may run on; empty where that was not recorded."""
    told = [
        event.facts.get("cpus")
        for event in facts.events_named("affinity")
        if (event.host, event.facts.get("pid")) == process.key and event.unix_ns <= time_ns
    ]
    return parse_cpu_list(str(told[-1])) if told else frozenset()


def _find_numa_nodes(facts: Evidence, host: str) -> dict[int, frozenset[int]]:
    told = [event.facts.get("numa") or [] for event in facts.events_named("node") if event.host == host]
    return {int(node["node"]): parse_cpu_list(str(node["cpus"])) for node in told[-1]} if told else {}


def parse_cpu_list(text: str) -> frozenset[int]:
    """``0-3,8`` as a set; what is no number is left out."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last.isdecimal() or not last):
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
