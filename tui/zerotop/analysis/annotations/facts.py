"""A recording up to a cursor, as detectors read it. Nothing recorded later can be reached from here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.places import allocators
from zerotop.analysis.steps import StepTable
from zerotop.session.reader import Event, Session, Source
from zerotop_probe.recording.tables import PHASE_CODE

Rows = NDArray[Any]
Ints = NDArray[np.int64]


@dataclass(eq=False)
class Samples:
    """Some records of a table and their times in unix nanoseconds, in order."""

    times: Ints
    rows: Rows

    def within(self, begin_ns: int, end_ns: int) -> Samples:
        """Those after the begin and up to the end."""
        low, high = np.searchsorted(self.times, (begin_ns, end_ns), "right")
        return Samples(self.times[low:high], self.rows[low:high])

    def where(self, chosen: NDArray[np.bool_]) -> Samples:
        """Those chosen."""
        return Samples(self.times[chosen], self.rows[chosen])

    def __len__(self) -> int:
        return len(self.times)


@dataclass(eq=False)
class Process:
    """A rank's process: what it wrote, and what samplers saw of it. Steps are finished ones, in order."""

    facts: Facts = field(repr=False)
    source: Source  # its spans
    steps: Rows  # STEP_DTYPE

    @property
    def rank(self) -> int:
        """Its global rank."""
        return self.source.rank

    def is_by(self, event: Event) -> bool:
        """Whether this process wrote it."""
        return (event.host, event.pid) == (self.source.host, self.source.pid) and event.role == "rank"

    def events(self, name: str) -> list[Event]:
        """Its own events of a name."""
        return [event for event in self.facts.events(name) if self.is_by(event)]

    @cached_property
    def engine(self) -> dict[str, Any]:
        """The facts of its first engine; empty where it has not told them."""
        found = [event.facts for event in self.events("engine") if not event.facts.get("engine")]
        return found[0] if found else {}

    @cached_property
    def environment(self) -> dict[str, str]:
        """The variables it was started with that steer memory and threads."""
        found = [event.facts.get("environment") for event in self.events("hello")]
        return {str(k): str(v) for k, v in found[0].items()} if found and isinstance(found[0], dict) else {}

    @property
    def allocator_settings(self) -> str:
        """What the environment tells PyTorch's allocator, in small letters."""
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        return " ".join(self.environment.get(name, "") for name in names).lower()

    def step_at(self, time_ns: int) -> int | None:
        """The step that was in progress; None before any has been finished, of which the first is known."""
        finished = int(np.searchsorted(self.steps["end_unix_ns"], time_ns, "right"))
        if not len(self.steps):
            return None
        return int(self.steps["step"][finished - 1]) + 1 if finished else int(self.steps["step"][0])

    @property
    def on_gpu(self) -> bool:
        """Whether it trains on a CUDA device, by what its engine says."""
        return str(self.engine.get("device") or "").startswith("cuda")

    @cached_property
    def device_bytes(self) -> int | None:
        """What its device has in all."""
        sizes = [device.get("total_bytes") for device in self.engine.get("devices") or []]
        return next((int(size) for size in sizes if isinstance(size, int) and size > 0), None)

    @cached_property
    def spans(self) -> Samples:
        """Its phases that have ended, by their ends."""
        known = self.source.array[: self.source.count_known(self.facts.cursor_ns)]
        return Samples(known["end_ns"] + self.source.offset_ns, known)

    def phase(self, *names: str) -> Samples:
        """Its phases of these names that have ended, by their ends."""
        return self.spans.where(np.isin(self.spans.rows["phase"], [PHASE_CODE[name] for name in names]))

    def begins_ns(self, spans: Samples) -> Ints:
        """When phases of this process began, in unix time."""
        begins: Ints = spans.rows["begin_ns"] + self.source.offset_ns
        return begins

    @cached_property
    def allocator(self) -> Samples:
        """What its allocator said."""
        for source in self.facts.session.sources["allocator"]:
            if (source.host, source.pid, source.rank) == (self.source.host, self.source.pid, self.rank):
                return self.facts.samples([source])
        return self.facts.samples([])

    @cached_property
    def exact_peaks(self) -> bool:
        """Whether the allocator's peaks are each phase's own."""
        return any(
            source.header.get("peaks") == "window"
            for source in self.facts.session.sources["allocator"]
            if (source.host, source.pid, source.rank) == (self.source.host, self.source.pid, self.rank)
        )

    @cached_property
    def gpu(self) -> tuple[str, int] | None:
        """Host and index of the GPU that its allocator lies on."""
        for place, key in self.facts.lies_on.items():
            source = self.facts.session.sources["allocator"][place]
            if (source.host, source.pid, source.rank) == (self.source.host, self.source.pid, self.rank):
                return key
        return None

    @cached_property
    def gpu_samples(self) -> Samples:
        """What NVML said of its GPU."""
        key = self.gpu
        if key is None:
            return self.facts.samples([])
        found = self.facts.table("gpus", key[0])
        return found.where(found.rows["gpu"] == key[1]) if len(found) else found

    def sampled(self, table: str) -> Samples:
        """What samplers said of it in ``processes`` or ``gpu_processes``."""
        found = self.facts.table(table, self.source.host)
        return found.where(found.rows["pid"] == self.source.pid) if len(found) else found

    @cached_property
    def host_samples(self) -> Samples:
        """What a sampler said of it as a process."""
        return self.sampled("processes")


@dataclass(eq=False)
class Group:
    """The processes of one attempt of the job, by rank; the first leads: what all do in step is read off it."""

    processes: list[Process]

    @property
    def lead(self) -> Process:
        """The one of the lowest rank."""
        return self.processes[0]

    def ranks(self, known_ns: int) -> tuple[int, ...]:
        """Those there were at a moment."""
        return tuple(process.rank for process in self.processes if process.source.born_ns <= known_ns)


class Facts:
    """A session up to a cursor (unix nanoseconds)."""

    def __init__(self, session: Session, cursor_ns: int, steps: StepTable | None = None) -> None:
        """``steps``: the session's, up to date, where the caller has them already."""
        self.session = session
        self.cursor_ns = cursor_ns
        if steps is None:
            steps = StepTable(session)
            steps.update()
        self.processes = [
            Process(self, process.source, _upto(process.rows, cursor_ns))
            for process in steps.processes
            if process.source.born_ns <= cursor_ns
        ]
        self._tables: dict[tuple[str, str], Samples] = {}
        self._events: dict[str, list[Event]] = {}
        for event in session.events:
            if event.unix_ns <= cursor_ns:
                self._events.setdefault(event.name, []).append(event)

    def events(self, name: str) -> Sequence[Event]:
        """All events of a name, in order of time."""
        return self._events.get(name, ())

    @cached_property
    def groups(self) -> list[Group]:
        """The attempts of the job: where a rank appears again, it was started again."""
        found: list[list[Process]] = []
        for process in self.processes:
            if not found or any(process.rank == other.rank for other in found[-1]):
                found.append([])
            found[-1].append(process)
        return [Group(sorted(processes, key=lambda process: process.rank)) for processes in found]

    @cached_property
    def lies_on(self) -> dict[int, tuple[str, int]]:
        """Place of an allocator's table in the session -> (host, index) of its GPU."""
        return allocators(self.session, self.events("node"), self.events("engine"))

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Nodes with a sampler."""
        return tuple(sorted({source.host for source in self.session.sources["hosts"]}))

    def cores(self, host: str) -> int | None:
        """Cores that the job may use on a node."""
        found = [event.facts.get("cores") for event in self.events("node") if event.host == host]
        return next((int(count) for count in found if isinstance(count, int) and count > 0), None)

    def table(self, name: str, host: str) -> Samples:
        """All records of a table that samplers on a node wrote."""
        if (name, host) not in self._tables:
            sources = [source for source in self.session.sources[name] if source.host == host]
            self._tables[name, host] = self.samples(sources)
        return self._tables[name, host]

    def samples(self, sources: Iterable[Source]) -> Samples:
        """All records of some tables up to the cursor, in order of time."""
        parts = [(source, source.array[: source.count_known(self.cursor_ns)]) for source in sources]
        if not parts:
            return Samples(np.empty(0, np.int64), np.empty(0, np.int64))
        times = np.concatenate([rows["time_ns"] + source.offset_ns for source, rows in parts])
        rows = parts[0][1] if len(parts) == 1 else np.concatenate([rows for _, rows in parts])
        if len(parts) > 1:
            order = np.argsort(times, kind="stable")
            times, rows = times[order], rows[order]
        return Samples(times, rows)


def _upto(rows: Rows, cursor_ns: int) -> Rows:
    return rows[: int(np.searchsorted(rows["end_unix_ns"], cursor_ns, "right"))]
