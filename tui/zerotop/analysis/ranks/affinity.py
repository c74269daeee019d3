"""Which cores each process and thread may run on, and to which NUMA node a core belongs, as recorded up to a cursor."""

from __future__ import annotations

from collections.abc import Iterable

from zerotop.analysis.keys import ProcessKey
from zerotop.session.reader import Event, Session

Cores = frozenset[int]
NO_CORES: Cores = frozenset()
_MAX_CORE = 1 << 16  # no machine has more; a damaged recording may say so


def parse_cores(text: str) -> Cores:
    """``0-3,8`` -> {0, 1, 2, 3, 8}; what makes no sense is left out."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last or first).isdigit():
            found.update(range(int(first), min(int(last or first), _MAX_CORE) + 1))
    return frozenset(found)


def format_cores(cores: Iterable[int]) -> str:
    """{0, 1, 2, 3, 8} -> ``0-3,8``."""
    parts: list[tuple[int, int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], core)
        else:
            parts.append((core, core))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


class Affinities:
    """Looks the events through once, and again when there are more."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._count = -1
        self._affinity_events: dict[ProcessKey, list[Event]] = {}
        self._nodes: dict[str, dict[int, int]] = {}

    def _update_events(self) -> None:
        events = self._session.events
        if len(events) == self._count:
            return
        self._count = len(events)
        self._affinity_events, self._nodes = {}, {}
        for event in events:
            if event.name == "affinity":
                self._affinity_events.setdefault((event.host, int(event.facts.get("pid") or 0)), []).append(event)
            elif event.name == "node":
                for node in event.facts.get("numa") or ():
                    cores = parse_cores(str(node.get("cpus") or ""))
                    self._nodes.setdefault(event.host, {}).update(dict.fromkeys(cores, int(node.get("node") or 0)))

    def find_process_cores(self, host: str, pid: int, cursor_ns: int) -> Cores:
        """The cores that a process may run on; none where that was not recorded."""
        self._update_events()
        known = [event for event in self._affinity_events.get((host, pid), ()) if event.unix_ns <= cursor_ns]
        return parse_cores(str(known[-1].facts.get("cpus") or "")) if known else NO_CORES

    def find_thread_cores(self, host: str, pid: int, cursor_ns: int) -> dict[int, Cores]:
        """By tid the cores of those threads of a process that have others than the process had."""
        self._update_events()
        found: dict[int, Cores] = {}
        for event in self._affinity_events.get((host, pid), ()):
            if event.unix_ns <= cursor_ns:
                for tid, cores in (event.facts.get("threads") or {}).items():
                    found[int(tid)] = parse_cores(str(cores))
        return found

    def find_nodes(self, host: str, cores: Iterable[int]) -> tuple[int, ...]:
        """The NUMA nodes of these cores; none where that was not recorded."""
        self._update_events()
        node_of = self._nodes.get(host, {})
        return tuple(sorted({node_of[core] for core in cores if core in node_of}))

    def count_nodes(self, host: str) -> int:
        """How many NUMA nodes with cores a host has; 0 where that was not recorded."""
        self._update_events()
        return len(set(self._nodes.get(host, {}).values()))
