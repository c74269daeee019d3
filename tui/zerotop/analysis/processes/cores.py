"""Sets of cores, and the lists in which the kernel writes them.

The cores that each process and thread may run on, and the NUMA nodes of cores, as recorded up to a cursor.
"""

from __future__ import annotations

from collections.abc import Iterable

from zerotop.recording.keys import ProcessKey
from zerotop.recording.reader import Recording
from zerotop_probe.recording.events import Affinity, Node


class Affinities:
    """Affinities in a recording's events, indexed again when there are more."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._count = -1
        self._affinity_events: dict[ProcessKey, list[Affinity]] = {}
        self._nodes: dict[str, dict[int, int]] = {}

    def _update_events(self) -> None:
        events = self._recording.events
        if len(events) == self._count:
            return
        self._count = len(events)
        self._affinity_events, self._nodes = {}, {}
        for event in events:
            host = event.writer.host
            if isinstance(event, Affinity):
                self._affinity_events.setdefault((host, event.pid or 0), []).append(event)
            elif isinstance(event, Node):
                for node in event.numa or ():
                    self._nodes.setdefault(host, {}).update(dict.fromkeys(parse_cores(node.cpus), node.node))

    def find_process_cores(self, host: str, pid: int, cursor_ns: int) -> Cores:
        """Return the cores that a process may run on; none where not recorded."""
        self._update_events()
        known = [event for event in self._affinity_events.get((host, pid), ()) if event.unix_ns <= cursor_ns]
        return parse_cores(known[-1].cpus or "") if known else NO_CORES

    def find_thread_cores(self, host: str, pid: int, cursor_ns: int) -> dict[int, Cores]:
        """Return by tid the cores of a process's threads whose affinity differs from the process's."""
        self._update_events()
        cores_by_tid: dict[int, Cores] = {}
        for event in self._affinity_events.get((host, pid), ()):
            if event.unix_ns <= cursor_ns:
                for tid, cores in (event.threads or {}).items():
                    cores_by_tid[tid] = parse_cores(cores)
        return cores_by_tid

    def find_nodes(self, host: str, cores: Iterable[int]) -> tuple[int, ...]:
        """Return the NUMA nodes of these cores; none where not recorded."""
        self._update_events()
        node_by_core = self._nodes.get(host, {})
        return tuple(sorted({node_by_core[core] for core in cores if core in node_by_core}))

    def count_nodes(self, host: str) -> int:
        """Return how many NUMA nodes with cores a host has; 0 where not recorded."""
        self._update_events()
        return len(set(self._nodes.get(host, {}).values()))


Cores = frozenset[int]
NO_CORES: Cores = frozenset()
_MAX_CORE = 1 << 16  # no machine has more; a damaged recording may say so


def parse_cores(text: str) -> Cores:
    """Parse ``0-3,8`` as {0, 1, 2, 3, 8}; skip invalid parts."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            cores.update(range(int(first), min(int(last or first), _MAX_CORE) + 1))
    return frozenset(cores)
