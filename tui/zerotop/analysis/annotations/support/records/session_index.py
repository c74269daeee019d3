"""Events and tables of a session up to a cursor, by name, process and node."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from zerotop.analysis.annotations.support.records.detector_state import DetectorState
from zerotop.analysis.annotations.support.records.record_window import Cursor, Records
from zerotop.analysis.processes.ranks_and_hosts import locate_allocators
from zerotop.session.events.event_files import E
from zerotop.session.keys import GpuKey, ProcessKey, RankProcess, identify_process
from zerotop.session.reader import Event, Session, Source
from zerotop_probe.recording.events import Node, RankGone

_WriterKey = tuple[str, int, int]  # host, pid, rank


class SessionIndex(DetectorState):
    """A session up to a cursor that only moves forward."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.cursor = Cursor()
        self.located_with: dict[Source, GpuKey] = {}
        """The GPU of each allocator's table."""
        self._records: dict[tuple[str, str, str, int], Records] = {}
        self._sources_by_host: dict[tuple[str, str], tuple[int, list[Source]]] = {}
        self._sources_by_process: dict[str, tuple[int, dict[_WriterKey, list[Source]]]] = {}
        self._gpu_by_allocator: dict[RankProcess, GpuKey] = {}
        self._events: list[Event] = []  # the session's events, of which _indexed_count are indexed by kind and process
        self._indexed_count = 0
        self._events_by_kind: dict[type[Event], list[Any]] = {}
        self._events_by_process: dict[tuple[type[Event], str, int], list[Any]] = {}
        self.gone_ns: dict[ProcessKey, int] = {}
        """When a sampler found a rank's process gone, by host and pid."""

    @property
    def cursor_ns(self) -> int:
        """The cursor in unix nanoseconds."""
        return self.cursor.time_ns

    def _advance_index(self, cursor_ns: int) -> None:
        self.cursor.time_ns = max(cursor_ns, self.cursor.time_ns)
        self._index_events()
        self._locate_allocators()

    def _index_events(self) -> None:
        events = self.session.events
        if events is not self._events:
            # Events that were read late may be older than those already indexed.
            self._events, self._indexed_count, self._events_by_kind, self._events_by_process = events, 0, {}, {}
            self.gone_ns = {}
        end = bisect_right(events, self.cursor_ns, key=lambda event: event.unix_ns)
        for event in events[self._indexed_count : end]:
            kind, writer = type(event), event.writer
            self._events_by_kind.setdefault(kind, []).append(event)
            if writer.role == "rank":
                self._events_by_process.setdefault((kind, writer.host, writer.pid), []).append(event)
            if isinstance(event, RankGone) and event.pid is not None:
                self.gone_ns[writer.host, event.pid] = event.unix_ns
        self._indexed_count = max(self._indexed_count, end)

    def events_of(self, kind: type[E]) -> Sequence[E]:
        """Return all events of this kind, in order of time."""
        return self._events_by_kind.get(kind, ())

    def process_events(self, kind: type[E], source: Source) -> Sequence[E]:
        """Return the events of this kind from the process that writes ``source``."""
        return self._events_by_process.get((kind, source.host, source.pid), ())

    def process_sources(self, table: str, source: Source) -> list[Source]:
        """Return the tables with this name from the process that writes ``source``."""
        sources = self.session.sources[table]
        count, by_process = self._sources_by_process.get(table, (-1, {}))
        if count != len(sources):
            by_process = {}
            for one in sources:
                by_process.setdefault((one.host, one.pid, one.rank), []).append(one)
            self._sources_by_process[table] = len(sources), by_process
        return by_process.get((source.host, source.pid, source.rank), [])

    def find_gpu(self, source: Source) -> GpuKey | None:
        """Return the GPU on which the process that writes ``source`` allocates."""
        return self._gpu_by_allocator.get(identify_process(source))

    def _locate_allocators(self) -> None:
        located = locate_allocators(self.session.at(self.cursor_ns))
        if located is not self.located_with:
            self.located_with = located
            self._gpu_by_allocator = {identify_process(source): key for source, key in located.items()}

    @property
    def sampled_hosts(self) -> tuple[str, ...]:
        """Nodes with a sampler."""
        return tuple(sorted({source.host for source in self.session.sources["hosts"]}))

    def count_cores(self, host: str) -> int | None:
        """Return how many cores of a node the job may use."""
        counts = [event.cores for event in self.events_of(Node) if event.writer.host == host]
        return next((int(count) for count in counts if isinstance(count, int) and count > 0), None)

    def get_records(self, name: str, host: str, column: str = "", value: int = 0) -> Records:
        """Return a table of a node's samplers, or only its records with ``value`` in ``column``."""
        key = (name, host, column, value)
        if key not in self._records:
            self._records[key] = Records(self.cursor, lambda: self._host_sources(name, host), column, value)
        return self._records[key]

    def _host_sources(self, name: str, host: str) -> list[Source]:
        sources = self.session.sources[name]
        count, matches = self._sources_by_host.get((name, host), (-1, []))
        if count != len(sources):
            matches = [source for source in sources if source.host == host]
            self._sources_by_host[name, host] = len(sources), matches
        return matches
