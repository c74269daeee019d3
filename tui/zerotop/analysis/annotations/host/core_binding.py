"""Ranks are bound to cores so that some share theirs, cross NUMA nodes for nothing, or leave a node's cores and memory idle.

Read from the cores that each rank's process may run on, and which NUMA node those belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Facts, Process
from zerotop.analysis.formatting import of_ranks, plural

_ADVICE = "Start with deepspeed --bind_cores_to_rank, which gives each rank its own cores; --bind_core_list says which."


@dataclass
class _Told:
    """The nodes of an attempt that were looked at."""

    hosts: set[str] = field(default_factory=set)


def detect(facts: Facts) -> Iterator[Annotation | None]:
    """At most one finding for each attempt and node, once each of its ranks has finished a step."""
    for group in facts.groups:
        told = group.kept(_Told).hosts
        for host in sorted({*group.hosts} - told):
            yield PAUSE
            mine = [process for process in group.processes if process.source.host == host]
            if all(len(process.steps) for process in mine):
                told.add(host)
                yield from _of_host(facts, host, mine)


def _of_host(facts: Facts, host: str, mine: list[Process]) -> Iterator[Annotation]:
    known_ns = max(int(process.steps["end_unix_ns"][0]) for process in mine)
    bound = {process.rank: cpus for process in mine if (cpus := _cpus(facts, process, known_ns))}
    cores, nodes = facts.cores(host), _nodes(facts, host)
    # A rank that may run everywhere is not bound.
    if cores is None or len(bound) < len(mine) or any(len(cpus) >= cores for cpus in bound.values()):
        return
    text = _shared(bound, cores) or _crossing(bound, nodes) or _idle(bound, nodes)
    if text:
        yield Annotation(
            name="core_binding",
            begin_ns=int(mine[0].steps["begin_unix_ns"][0]),
            end_ns=known_ns,
            known_ns=known_ns,
            step=int(mine[0].steps["step"][0]),
            ranks=tuple(sorted(bound)),
            severity=Severity.WARNING,
            confidence=0.8,
            sentence=text + ".",
            advice=_ADVICE,
            evidence={"bound_cores": float(len(set().union(*bound.values()))), "cores": float(cores)},
        )


def _shared(bound: dict[int, frozenset[int]], cores: int) -> str:
    """Ranks that are bound to the same cores although there are others."""
    for cpus in dict.fromkeys(bound.values()):
        ranks = sorted(rank for rank, other in bound.items() if other == cpus)
        left = cores - len(set().union(*bound.values()))
        if len(ranks) > 1 and left >= len(cpus):
            return f"{_who(ranks)} are bound to the same {plural(len(cpus), 'core')} while {left} of {cores} have no rank"
    return ""


def _crossing(bound: dict[int, frozenset[int]], nodes: dict[int, frozenset[int]]) -> str:
    """Ranks whose cores would fit in one NUMA node and lie in several: memory is far from half of them."""
    ranks = [
        rank
        for rank, cpus in sorted(bound.items())
        if nodes and len(cpus) <= max(map(len, nodes.values())) and sum(bool(cpus & node) for node in nodes.values()) > 1
    ]
    if not ranks:
        return ""
    verb = "is" if len(ranks) == 1 else "are each"
    return f"{_who(ranks)} {verb} bound to cores of several NUMA nodes, though one has enough: memory is far from some"


def _who(ranks: list[int]) -> str:
    text = of_ranks(ranks)
    return text[0].upper() + text[1:]


def _idle(bound: dict[int, frozenset[int]], nodes: dict[int, frozenset[int]]) -> str:
    """NUMA nodes without a rank where there are ranks enough for all."""
    used = set().union(*bound.values())
    empty = [number for number, cpus in sorted(nodes.items()) if not cpus & used]
    if not empty or len(bound) < len(nodes):
        return ""
    names = " and ".join(map(str, empty))
    return f"None of {plural(len(bound), 'rank')} is bound to cores of NUMA node {names}: those and their memory idle"


def _cpus(facts: Facts, process: Process, time_ns: int) -> frozenset[int]:
    """The cores that it may run on; empty where that was not recorded."""
    told = [
        event.facts.get("cpus")
        for event in facts.events("affinity")
        if (event.host, event.facts.get("pid")) == process.key and event.unix_ns <= time_ns
    ]
    return numbers(str(told[-1])) if told else frozenset()


def _nodes(facts: Facts, host: str) -> dict[int, frozenset[int]]:
    told = [event.facts.get("numa") or [] for event in facts.events("node") if event.host == host]
    return {int(node["node"]): numbers(str(node["cpus"])) for node in told[-1]} if told else {}


def numbers(text: str) -> frozenset[int]:
    """``0-3,8`` as a set; what is no number is left out."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last.isdecimal() or not last):
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
