"""A recording up to a cursor, as detectors read it. Nothing recorded later can be reached from here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Sequence

from zerotop.analysis.annotations.support.rank_process import Memory, Process
from zerotop.analysis.annotations.support.record_window import Cursor, Ints, Records, Rows, Samples
from zerotop.analysis.processes.ranks_and_hosts import RANKS, allocators
from zerotop.analysis.steps.step_table import RankSteps, StepTable
from zerotop.session.reader import Event, Session, Source, whole

__all__ = ["Facts", "Group", "Ints", "Process", "Records", "Rows", "Samples"]

Gpu = tuple[str, int]  # host, NVML index
_Who = tuple[str, int, int]  # host, pid, rank


class Group(Memory):
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

    def ranks(self, known_ns: int) -> tuple[int, ...]:
        """Those there were at a moment."""
        return tuple(process.rank for process in self.processes if process.source.born_ns <= known_ns)


class Facts(Memory):
    """A session up to a cursor that only moves on."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.cursor = Cursor()
        self.groups: list[Group] = []
        """The attempts of the job: where a rank appears again, it was started again."""
        self._table = StepTable(session)
        self._processes: dict[Source, Process] = {}
        self._tables: dict[tuple[str, str, str, int], Records] = {}
        self._of_host: dict[tuple[str, str], tuple[int, list[Source]]] = {}
        self._own: dict[str, tuple[int, dict[_Who, list[Source]]]] = {}
        self._lies_on: dict[_Who, Gpu] = {}
        self._placed: tuple[int, ...] = ()  # what was known when allocators were placed
        self._sharing: tuple[object, dict[Gpu, list[Process]]] = (None, {})
        self._read: list[Event] = []  # the session's events, of which so many were taken in
        self._taken = 0
        self._events: dict[str, list[Event]] = {}
        self._own_events: dict[tuple[str, str, int], list[Event]] = {}

    @property
    def cursor_ns(self) -> int:
        """The cursor in unix nanoseconds."""
        return self.cursor.ns

    @property
    def processes(self) -> list[Process]:
        """All ranks' processes, in the order in which they made their engines."""
        return list(self._processes.values())

    def advance(self, cursor_ns: int) -> None:
        """Moves the cursor on."""
        whole(self.advancing(cursor_ns))

    def advancing(self, cursor_ns: int) -> Generator[None, None, None]:
        """The same in pieces. Meanwhile no detector may look."""
        self.cursor.ns = max(cursor_ns, self.cursor.ns)
        self._take_events()
        self._place()
        yield
        yield from self._table.updating(self.cursor_ns)
        if self._table.count == len(self._processes):
            return
        for steps in self._table.processes:
            if steps.source not in self._processes and steps.source.born_ns <= self.cursor_ns:
                self._add(steps)

    def _add(self, steps: RankSteps) -> None:
        process = self._processes[steps.source] = Process(self, steps)
        last = self.groups[-1].processes if self.groups else None
        if last is None or any(process.rank == other.rank for other in last):
            self.groups.append(Group([process]))
        else:
            last.append(process)
            last.sort(key=lambda other: other.rank)

    def ahead(self, spans: int, end_ns: int) -> Generator[None, None, int]:
        """In pieces the cursor at which about so many more phases have ended, of all ranks; ``end_ns`` if that is before."""
        most, done, longest = 0, 0, None
        sources = self.session.sources["spans"]
        for number, source in enumerate(sources, 1):
            known = source.count_known(self.cursor_ns)
            if len(source.array) - known > most:
                most, done, longest = len(source.array) - known, known, source
            if not number % RANKS:
                yield
        each = max(1, spans // max(1, len(sources)))
        if longest is None or most <= each:
            return end_ns
        return min(end_ns, int(longest.array["end_ns"][done + each - 1]) + longest.offset_ns)

    def _take_events(self) -> None:
        events = self.session.events
        if events is not self._read:
            # What is read late may have happened before what was taken in.
            self._read, self._taken, self._events, self._own_events = events, 0, {}, {}
        end = bisect_right(events, self.cursor_ns, key=lambda event: event.unix_ns)
        for event in events[self._taken : end]:
            self._events.setdefault(event.name, []).append(event)
            if event.role == "rank":
                self._own_events.setdefault((event.name, event.host, event.pid), []).append(event)
        self._taken = max(self._taken, end)

    def events(self, name: str) -> Sequence[Event]:
        """All events of a name, in order of time."""
        return self._events.get(name, ())

    def own_events(self, name: str, source: Source) -> Sequence[Event]:
        """Those that the rank's process that writes ``source`` has written."""
        return self._own_events.get((name, source.host, source.pid), ())

    def own(self, table: str, source: Source) -> list[Source]:
        """The tables of a name that the process that writes ``source`` writes too."""
        sources = self.session.sources[table]
        count, found = self._own.get(table, (-1, {}))
        if count != len(sources):
            found = {}
            for one in sources:
                found.setdefault((one.host, one.pid, one.rank), []).append(one)
            self._own[table] = len(sources), found
        return found.get((source.host, source.pid, source.rank), [])

    def on_gpu(self, key: Gpu) -> list[Process]:
        """The processes whose allocators lie on a GPU, in the order in which they made their engines."""
        known = (len(self._processes), self._placed)
        if self._sharing[0] != known:
            found: dict[Gpu, list[Process]] = {}
            for process in self.processes:
                if process.gpu is not None:
                    found.setdefault(process.gpu, []).append(process)
            self._sharing = known, found
        return self._sharing[1].get(key, [])

    def gpu_of(self, source: Source) -> Gpu | None:
        """The GPU that the allocator of the process that writes ``source`` lies on."""
        return self._lies_on.get((source.host, source.pid, source.rank))

    def _place(self) -> None:
        mine = self.session.sources["allocator"]
        known = (sum(len(one.array) > 0 for one in mine), len(self.events("node")), len(self.events("engine")))
        if known != self._placed:
            self._placed = known
            places = allocators(self.session, self.events("node"), self.events("engine"))
            self._lies_on = {(mine[at].host, mine[at].pid, mine[at].rank): key for at, key in places.items()}

    @property
    def hosts(self) -> tuple[str, ...]:
        """Nodes with a sampler."""
        return tuple(sorted({source.host for source in self.session.sources["hosts"]}))

    def cores(self, host: str) -> int | None:
        """Cores that the job may use on a node."""
        found = [event.facts.get("cores") for event in self.events("node") if event.host == host]
        return next((int(count) for count in found if isinstance(count, int) and count > 0), None)

    def table(self, name: str, host: str, column: str = "", value: int = 0) -> Records:
        """What samplers on a node wrote to a table, or of that where a column has a value."""
        key = (name, host, column, value)
        if key not in self._tables:
            self._tables[key] = Records(self.cursor, lambda: self._sampled(name, host), column, value)
        return self._tables[key]

    def _sampled(self, name: str, host: str) -> list[Source]:
        sources = self.session.sources[name]
        count, found = self._of_host.get((name, host), (-1, []))
        if count != len(sources):
            found = [source for source in sources if source.host == host]
            self._of_host[name, host] = len(sources), found
        return found
