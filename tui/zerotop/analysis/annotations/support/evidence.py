"""A recording up to a cursor, as detectors read it. Nothing recorded later can be reached from here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from zerotop.analysis.annotations.support.rank_process import DetectorState, Process
from zerotop.analysis.annotations.support.record_window import Cursor, Records, Samples
from zerotop.analysis.keys import GpuKey
from zerotop.analysis.processes.ranks_and_hosts import find_gpu_by_allocator
from zerotop.analysis.steps.step_table import RankSteps, StepTable
from zerotop.session.reader import Event, Session, Source
from zerotop.session.samples import Floats, Ints, Rows

__all__ = ["Evidence", "Floats", "Group", "Ints", "Process", "Records", "Rows", "Samples"]

_WriterKey = tuple[str, int, int]  # host, pid, rank


class Group(DetectorState):
    """The processes of one attempt of the job, by rank. The first one leads: steps of all ranks are read off it."""

    def __init__(self, processes: list[Process]) -> None:
        super().__init__()
        self.processes = processes

    @property
    def lead(self) -> Process:
        """The process of the lowest rank."""
        return self.processes[0]

    @property
    def hosts(self) -> list[str]:
        """The nodes of the processes."""
        return sorted({process.host for process in self.processes})

    def processes_on(self, host: str) -> list[Process]:
        """Return the processes on a node, by rank."""
        return [process for process in self.processes if process.host == host]

    def ranks_on(self, host: str) -> tuple[int, ...]:
        """Return the ranks on a node."""
        return tuple(process.rank for process in self.processes_on(host))

    def step_at(self, time_ns: int) -> int | None:
        """Return the lead's step in progress at a time; None before the first step has finished."""
        return self.lead.step_at(time_ns)

    def ranks_at(self, known_ns: int) -> tuple[int, ...]:
        """Return the ranks that had started at a time."""
        return tuple(process.rank for process in self.processes if process.source.created_ns <= known_ns)


class Evidence(DetectorState):
    """A session up to a cursor that only moves forward."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.cursor = Cursor()
        self.groups: list[Group] = []
        """The attempts of the job: a rank that appears again was restarted."""
        self._step_table = StepTable(session)
        self._processes: dict[Source, Process] = {}
        self._records: dict[tuple[str, str, str, int], Records] = {}
        self._sources_by_host: dict[tuple[str, str], tuple[int, list[Source]]] = {}
        self._sources_by_process: dict[str, tuple[int, dict[_WriterKey, list[Source]]]] = {}
        self._gpu_by_allocator: dict[_WriterKey, GpuKey] = {}
        self._located_with: tuple[int, ...] = ()  # the counts of facts that _gpu_by_allocator was computed from
        self._processes_by_gpu: tuple[object, dict[GpuKey, list[Process]]] = (None, {})
        self._events: list[Event] = []  # the session's events, of which _indexed_count are indexed by name and process
        self._indexed_count = 0
        self._events_by_name: dict[str, list[Event]] = {}
        self._events_by_process: dict[tuple[str, str, int], list[Event]] = {}

    @property
    def cursor_ns(self) -> int:
        """The cursor in unix nanoseconds."""
        return self.cursor.time_ns

    @property
    def processes(self) -> list[Process]:
        """All ranks' processes, in the order in which they created their engines."""
        return list(self._processes.values())

    def advance_cursor(self, cursor_ns: int) -> None:
        """Move the cursor forward."""
        self.cursor.time_ns = max(cursor_ns, self.cursor.time_ns)
        self._index_events()
        self._locate_allocators()
        self._step_table.update(self.cursor_ns)
        if self._step_table.process_count == len(self._processes):
            return
        for steps in self._step_table.rank_steps:
            if steps.source not in self._processes and steps.source.created_ns <= self.cursor_ns:
                self._add_process(steps)

    def _add_process(self, steps: RankSteps) -> None:
        process = self._processes[steps.source] = Process(self, steps)
        last = self.groups[-1].processes if self.groups else None
        if last is None or any(process.rank == other.rank for other in last):
            self.groups.append(Group([process]))
        else:
            last.append(process)
            last.sort(key=lambda other: other.rank)

    def find_next_cursor(self, span_count: int, end_ns: int) -> int:
        """Return the cursor at which about ``span_count`` more phases of all ranks have ended; at most ``end_ns``."""
        most, done, longest = 0, 0, None
        sources = self.session.sources["spans"]
        for source in sources:
            count = source.count_until(self.cursor_ns)
            if len(source.array) - count > most:
                most, done, longest = len(source.array) - count, count, source
        each = max(1, span_count // max(1, len(sources)))
        if longest is None or most <= each:
            return end_ns
        return min(end_ns, int(longest.array["end_ns"][done + each - 1]) + longest.offset_ns)

    def _index_events(self) -> None:
        events = self.session.events
        if events is not self._events:
            # Events that were read late may be older than those already indexed.
            self._events, self._indexed_count, self._events_by_name, self._events_by_process = events, 0, {}, {}
        end = bisect_right(events, self.cursor_ns, key=lambda event: event.unix_ns)
        for event in events[self._indexed_count : end]:
            self._events_by_name.setdefault(event.name, []).append(event)
            if event.role == "rank":
                self._events_by_process.setdefault((event.name, event.host, event.pid), []).append(event)
        self._indexed_count = max(self._indexed_count, end)

    def events_named(self, name: str) -> Sequence[Event]:
        """Return all events of a name, in order of time."""
        return self._events_by_name.get(name, ())

    def process_events(self, name: str, source: Source) -> Sequence[Event]:
        """Return the events of a name that were written by the process that writes ``source``."""
        return self._events_by_process.get((name, source.host, source.pid), ())

    def process_sources(self, table: str, source: Source) -> list[Source]:
        """Return the tables of a name that are written by the process that writes ``source``."""
        sources = self.session.sources[table]
        count, by_process = self._sources_by_process.get(table, (-1, {}))
        if count != len(sources):
            by_process = {}
            for one in sources:
                by_process.setdefault((one.host, one.pid, one.rank), []).append(one)
            self._sources_by_process[table] = len(sources), by_process
        return by_process.get((source.host, source.pid, source.rank), [])

    def processes_on_gpu(self, gpu_key: GpuKey) -> list[Process]:
        """Return the processes that allocate on a GPU, in the order in which they created their engines."""
        version = (len(self._processes), self._located_with)
        if self._processes_by_gpu[0] != version:
            by_gpu: dict[GpuKey, list[Process]] = {}
            for process in self.processes:
                if process.gpu_key is not None:
                    by_gpu.setdefault(process.gpu_key, []).append(process)
            self._processes_by_gpu = version, by_gpu
        return self._processes_by_gpu[1].get(gpu_key, [])

    def find_gpu(self, source: Source) -> GpuKey | None:
        """Return the GPU on which the process that writes ``source`` allocates."""
        return self._gpu_by_allocator.get((source.host, source.pid, source.rank))

    def _locate_allocators(self) -> None:
        sources, nodes, engines = self.session.sources["allocator"], self.events_named("node"), self.events_named("engine")
        counts = (sum(len(one.array) > 0 for one in sources), len(nodes), len(engines))
        if counts != self._located_with:
            self._located_with = counts
            keys = find_gpu_by_allocator(self.session, nodes, engines)
            self._gpu_by_allocator = {(sources[at].host, sources[at].pid, sources[at].rank): key for at, key in keys.items()}

    @property
    def sampled_hosts(self) -> tuple[str, ...]:
        """Nodes with a sampler."""
        return tuple(sorted({source.host for source in self.session.sources["hosts"]}))

    def find_first_creations(self) -> dict[str, int]:
        """Return when the first rank on each node created its engine (unix nanoseconds), by host."""
        first: dict[str, int] = {}
        for process in self._processes.values():
            first[process.host] = min(process.source.created_ns, first.get(process.host, process.source.created_ns))
        return first

    def count_cores(self, host: str) -> int | None:
        """Return how many cores of a node the job may use."""
        counts = [event.facts.get("cores") for event in self.events_named("node") if event.host == host]
        return next((int(count) for count in counts if isinstance(count, int) and count > 0), None)

    def get_records(self, name: str, host: str, column: str = "", value: int = 0) -> Records:
        """Return a table of a node's samplers; with ``column`` only the records with ``value`` in it."""
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
