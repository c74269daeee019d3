"""A recording up to a cursor, as detectors read it. Nothing recorded later can be reached from here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from zerotop.analysis.annotations.support.rank_process import DetectorState, Process
from zerotop.analysis.annotations.support.record_window import Cursor, Ints, Records, Rows, Samples
from zerotop.analysis.keys import GpuKey
from zerotop.analysis.processes.ranks_and_hosts import find_gpu_by_allocator
from zerotop.analysis.steps.step_table import RankSteps, StepTable
from zerotop.session.reader import Event, Session, Source

__all__ = ["Evidence", "Group", "Ints", "Process", "Records", "Rows", "Samples"]

_WriterKey = tuple[str, int, int]  # host, pid, rank


class Group(DetectorState):
    """The processes of one attempt of the job, by rank; the first leads: what all do in step is read off it."""

    def __init__(self, processes: list[Process]) -> None:
        super().__init__()
        self.processes = processes

    @property
    def lead(self) -> Process:
        """The one of the lowest rank."""
        return self.processes[0]

    @property
    def hosts(self) -> list[str]:
        """The nodes they are on."""
        return sorted({process.source.host for process in self.processes})

    def ranks_at(self, known_ns: int) -> tuple[int, ...]:
        """Those there were at a moment."""
        return tuple(process.rank for process in self.processes if process.source.created_ns <= known_ns)


class Evidence(DetectorState):
    """A session up to a cursor that only moves on."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.cursor = Cursor()
        self.groups: list[Group] = []
        """The attempts of the job: where a rank appears again, it was started again."""
        self._step_table = StepTable(session)
        self._processes: dict[Source, Process] = {}
        self._records: dict[tuple[str, str, str, int], Records] = {}
        self._sources_by_host: dict[tuple[str, str], tuple[int, list[Source]]] = {}
        self._sources_by_process: dict[str, tuple[int, dict[_WriterKey, list[Source]]]] = {}
        self._gpu_by_allocator: dict[_WriterKey, GpuKey] = {}
        self._located_with: tuple[int, ...] = ()  # what was known when allocators were placed
        self._processes_by_gpu: tuple[object, dict[GpuKey, list[Process]]] = (None, {})
        self._known_events: list[Event] = []  # the session's events, of which so many were taken in
        self._indexed_count = 0
        self._events_by_name: dict[str, list[Event]] = {}
        self._events_by_process: dict[tuple[str, str, int], list[Event]] = {}

    @property
    def cursor_ns(self) -> int:
        """The cursor in unix nanoseconds."""
        return self.cursor.time_ns

    @property
    def processes(self) -> list[Process]:
        """All ranks' processes, in the order in which they made their engines."""
        return list(self._processes.values())

    def advance_cursor(self, cursor_ns: int) -> None:
        """Move the cursor on."""
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
        """Return the cursor at which about so many more phases have ended, of all ranks; ``end_ns`` if that is before."""
        most, done, longest = 0, 0, None
        sources = self.session.sources["spans"]
        for source in sources:
            known = source.count_until(self.cursor_ns)
            if len(source.array) - known > most:
                most, done, longest = len(source.array) - known, known, source
        each = max(1, span_count // max(1, len(sources)))
        if longest is None or most <= each:
            return end_ns
        return min(end_ns, int(longest.array["end_ns"][done + each - 1]) + longest.offset_ns)

    def _index_events(self) -> None:
        events = self.session.events
        if events is not self._known_events:
            # What is read late may have happened before what was taken in.
            self._known_events, self._indexed_count, self._events_by_name, self._events_by_process = events, 0, {}, {}
        end = bisect_right(events, self.cursor_ns, key=lambda event: event.unix_ns)
        for event in events[self._indexed_count : end]:
            self._events_by_name.setdefault(event.name, []).append(event)
            if event.role == "rank":
                self._events_by_process.setdefault((event.name, event.host, event.pid), []).append(event)
        self._indexed_count = max(self._indexed_count, end)

    def events_named(self, name: str) -> Sequence[Event]:
        """All events of a name, in order of time."""
        return self._events_by_name.get(name, ())

    def process_events(self, name: str, source: Source) -> Sequence[Event]:
        """Those that the rank's process that writes ``source`` has written."""
        return self._events_by_process.get((name, source.host, source.pid), ())

    def process_sources(self, table: str, source: Source) -> list[Source]:
        """The tables of a name that the process that writes ``source`` writes too."""
        sources = self.session.sources[table]
        count, found = self._sources_by_process.get(table, (-1, {}))
        if count != len(sources):
            found = {}
            for one in sources:
                found.setdefault((one.host, one.pid, one.rank), []).append(one)
            self._sources_by_process[table] = len(sources), found
        return found.get((source.host, source.pid, source.rank), [])

    def processes_on_gpu(self, gpu_key: GpuKey) -> list[Process]:
        """The processes whose allocators lie on a GPU, in the order in which they made their engines."""
        known = (len(self._processes), self._located_with)
        if self._processes_by_gpu[0] != known:
            found: dict[GpuKey, list[Process]] = {}
            for process in self.processes:
                if process.gpu_key is not None:
                    found.setdefault(process.gpu_key, []).append(process)
            self._processes_by_gpu = known, found
        return self._processes_by_gpu[1].get(gpu_key, [])

    def find_gpu(self, source: Source) -> GpuKey | None:
        """The GPU that the allocator of the process that writes ``source`` lies on."""
        return self._gpu_by_allocator.get((source.host, source.pid, source.rank))

    def _locate_allocators(self) -> None:
        mine = self.session.sources["allocator"]
        known = (sum(len(one.array) > 0 for one in mine), len(self.events_named("node")), len(self.events_named("engine")))
        if known != self._located_with:
            self._located_with = known
            places = find_gpu_by_allocator(self.session, self.events_named("node"), self.events_named("engine"))
            self._gpu_by_allocator = {(mine[at].host, mine[at].pid, mine[at].rank): key for at, key in places.items()}

    @property
    def sampled_hosts(self) -> tuple[str, ...]:
        """Nodes with a sampler."""
        return tuple(sorted({source.host for source in self.session.sources["hosts"]}))

    def count_cores(self, host: str) -> int | None:
        """Cores that the job may use on a node."""
        found = [event.facts.get("cores") for event in self.events_named("node") if event.host == host]
        return next((int(count) for count in found if isinstance(count, int) and count > 0), None)

    def get_records(self, name: str, host: str, column: str = "", value: int = 0) -> Records:
        """What samplers on a node wrote to a table, or of that where a column has a value."""
        key = (name, host, column, value)
        if key not in self._records:
            self._records[key] = Records(self.cursor, lambda: self._host_sources(name, host), column, value)
        return self._records[key]

    def _host_sources(self, name: str, host: str) -> list[Source]:
        sources = self.session.sources[name]
        count, found = self._sources_by_host.get((name, host), (-1, []))
        if count != len(sources):
            found = [source for source in sources if source.host == host]
            self._sources_by_host[name, host] = len(sources), found
        return found
