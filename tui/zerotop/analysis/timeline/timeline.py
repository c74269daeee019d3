"""What happened in which order: a window of time in columns, for one rank, its GPU and its host.

Any window is told from what it needs of the recording: short columns from the records in them, long ones from shorter ones
that are kept. The highest values are exact however long the columns are: no spike is lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.keys import GpuKey
from zerotop.analysis.processes.ranks_and_hosts import find_gpu_by_allocator
from zerotop.analysis.steps.step_table import RankSteps
from zerotop.analysis.timeline.metrics import (
    AllocatorColumns,
    GpuColumns,
    GpuProcessColumns,
    HostColumns,
    ProcessColumns,
    SampleColumns,
)
from zerotop.analysis.timeline.phase_ribbon import RankPhases
from zerotop.analysis.timeline.resample import HIGHEST, SUM, TIME, Table
from zerotop.analysis.timeline.step_lane import IterationColumns, StepTimes
from zerotop.analysis.timeline.timeline_cache import ColumnCache
from zerotop.session.reader import Session, Source
from zerotop.session.samples import Floats, Ints

# So far back from its last record it is looked for what something has.
_CHECK_NS = 30_000_000_000
_TAIL = 4096
# After a window longer than this, what was read for it is given back.
_LONG_WINDOW_NS = 300_000_000_000


@dataclass(frozen=True, slots=True)
class Window:
    """``columns`` columns of ``column_ns`` each from the one numbered ``first`` on; column 0 begins with the session."""

    first: int
    column_ns: int
    columns: int


@dataclass(frozen=True, slots=True)
class Subject:
    """Of what is told: a rank (-1: nobody knows which processes are which), its host and its GPU."""

    rank: int
    host: str
    gpu: GpuKey | None


@dataclass(frozen=True, slots=True, eq=False)
class ColumnValues:
    """One thing in each column, shape (columns,); NaN where nothing was recorded."""

    highest: Floats
    mean: Floats  # over time


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A window of a recording.

    ``values`` by name. Of the GPU: utilization (0 to 1), power (W), device, process, allocated, reserved, peak (bytes; peak
    is the highest allocated since the sample before), sent, received (bytes per second over PCIe). Of the rank: iteration
    (s), cores, rss (bytes). Of all ranks on its host: all_cores, all_rss. Of the host: host_cores, host_memory. What the
    recording has nothing of is not there. ``phases`` by rank: seconds in each of PHASES, shape (phases, columns).
    """

    window: Window
    origin_ns: int
    values: dict[str, ColumnValues]
    phases: dict[int, Floats]
    is_complete: bool  # False: some of it could not be told in time and is blank; asked for again, there is more


class TimelineBuilder:
    """Tells windows of a session, which may grow."""

    def __init__(self, session: Session, read_processes: Callable[[], Iterable[RankSteps]]) -> None:
        """``processes``: the rank processes with their steps, up to date."""
        self._session, self._read_processes = session, read_processes
        self._times_by_process: dict[RankSteps, StepTimes] = {}
        self._times_by_rank: dict[int, list[StepTimes]] = {}
        self._lanes: dict[Subject, Lanes] = {}
        self._ribbons: dict[int, tuple[RankPhases, ColumnCache]] = {}
        self._probed_ranks: tuple[int, dict[int, str]] = (-1, {})
        self._gpu_by_allocator: tuple[tuple[int, int], dict[int, GpuKey]] = ((-1, -1), {})
        self._last: tuple[object, Timeline] | None = None

    @property
    def origin_ns(self) -> int:
        """Where column 0 begins, in unix time."""
        return self._session.begin_ns

    def find_rank_hosts(self) -> dict[int, str]:
        """The host of each rank there ever was; where no probe was awake, of those that sampled processes have."""
        return self.find_probed_ranks() or self._find_sampled_ranks()

    def find_probed_ranks(self) -> dict[int, str]:
        """The host of each rank in which the probe was awake: those that have phases."""
        begins = self._session.sources["begins"]
        if len(begins) != self._probed_ranks[0]:
            self._probed_ranks = len(begins), dict(sorted((source.rank, source.host) for source in begins))
        return self._probed_ranks[1]

    def _find_sampled_ranks(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for source in self._session.sources["processes"]:
            found |= dict.fromkeys(np.unique(source.array["rank"][-_TAIL:]).tolist(), source.host)
        named = {rank: host for rank, host in found.items() if rank >= 0}
        return dict(sorted((named or found).items()))

    def make_subject(self, rank: int) -> Subject:
        """A rank with its host and GPU."""
        samplers = (source.host for table in ("processes", "hosts", "gpus") for source in self._session.sources[table])
        host = self.find_rank_hosts().get(rank) or next(samplers, "")
        return Subject(rank, host, self.find_gpu_key(rank, host))

    def find_host_cores(self, host: str) -> int:
        """Cores that the job may run on there; 0 where nobody said."""
        last = [
            int(source.array["cores"][-1])
            for source in self._session.sources["hosts"]
            if source.host == host and len(source.array)
        ]
        return max(last, default=0)

    def find_gpu_key(self, rank: int, host: str) -> GpuKey | None:
        """The GPU that a rank's allocator tells of; where none does, the first of its host's that was sampled."""
        places = self._locate_allocators()
        for place, source in reversed(list(enumerate(self._session.sources["allocator"]))):
            if source.rank == rank and place in places:
                return places[place]
        sampled = [source.array["gpu"][:64] for source in self._session.sources["gpus"] if source.host == host]
        found = [int(numbers.min()) for numbers in sampled if len(numbers)]
        return (host, min(found)) if found else None

    def _locate_allocators(self) -> dict[int, GpuKey]:
        known = len(self._session.events), sum(len(source.array) > 0 for source in self._session.sources["allocator"])
        if known != self._gpu_by_allocator[0]:
            of = {name: [event for event in self._session.events if event.name == name] for name in ("node", "engine")}
            self._gpu_by_allocator = known, find_gpu_by_allocator(self._session, of["node"], of["engine"])
        return self._gpu_by_allocator[1]

    def build_timeline(
        self, window: Window, subject: Subject, ranks: Sequence[int], end_ns: int, *, budget_s: float = math.inf
    ) -> Timeline:
        """A window, with the phases of ``ranks``. Nothing is known after ``end_ns``.

        What cannot be told within about ``budget_s`` seconds is blank, and :attr:`Timeline.complete` False.
        """
        self.update({subject.rank, *ranks})
        lanes, ribbons = self.get_lanes(subject), [self._get_ribbon(rank) for rank in ranks]
        beyond = min((end_ns - self.origin_ns) // window.column_ns, window.first + window.columns)
        key = (
            window,
            subject,
            tuple(ranks),
            beyond,
            lanes.count_records(),
            sum(phases.count_records() for phases, _ in ribbons),
        )
        if self._last is not None and self._last[0] == key and self._last[1].is_complete:
            return self._last[1]
        until_s = time.perf_counter() + budget_s
        much = window.columns * window.column_ns > _LONG_WINDOW_NS
        seconds = {}
        for rank, (phases, blocks) in zip(ranks, ribbons, strict=True):
            seconds[rank] = blocks.get_columns(
                window.column_ns, window.first, window.columns, end_ns=end_ns, until_s=until_s
            )
            _release_memory(phases.list_sources() if much else ())
        values = lanes.read_values(window, end_ns, until_s, release=much)
        complete = lanes.is_complete and all(blocks.is_complete for _, blocks in ribbons)
        told = Timeline(window, self.origin_ns, values, seconds, complete)
        self._last = key, told
        return told

    def update(self, ranks: Collection[int]) -> None:
        """Takes in the steps that these have finished since."""
        for process in self._read_processes():
            if process not in self._times_by_process:
                self._times_by_process[process] = StepTimes(process)
                self.get_step_times(process.source.rank).append(self._times_by_process[process])
        for rank in ranks:
            for times in self.get_step_times(rank):
                times.update()

    def get_lanes(self, subject: Subject) -> Lanes:
        """What is told of a subject; the last few are kept."""
        lanes = self._lanes.pop(subject, None) or Lanes(
            self._session, subject, self._locate_allocators(), self.get_step_times(subject.rank)
        )
        self._lanes[subject] = lanes
        while len(self._lanes) > 4:
            del self._lanes[next(iter(self._lanes))]
        return lanes

    def get_step_times(self, rank: int) -> list[StepTimes]:
        """The steps of all processes that a rank was; the list grows."""
        return self._times_by_rank.setdefault(rank, [])

    def find_begun_steps(self, rank: int, begin_ns: int, end_ns: int) -> tuple[Ints, Ints]:
        """(begins, numbers) of the steps of a rank that began between two moments in unix time."""
        found = [times.find_begun(begin_ns, end_ns) for times in self.get_step_times(rank)]
        nothing = np.empty(0, np.int64)
        return np.concatenate([nothing, *(part[0] for part in found)]), np.concatenate(
            [nothing, *(part[1] for part in found)]
        )

    def find_step_at(self, rank: int, unix_ns: int) -> int | None:
        """The step that a rank had begun last, None before the first one."""
        found = [step for times in self.get_step_times(rank) if (step := times.find_step_at(unix_ns)) is not None]
        return found[-1] if found else None

    def get_rank_phases(self, rank: int) -> RankPhases:
        """The phases of a rank."""
        return self._get_ribbon(rank)[0]

    def _get_ribbon(self, rank: int) -> tuple[RankPhases, ColumnCache]:
        if rank not in self._ribbons:
            phases = RankPhases(self._session, rank, self.get_step_times(rank))
            self._ribbons[rank] = phases, ColumnCache(phases, self.origin_ns)
        return self._ribbons[rank]


class Lanes:
    """All values of one subject."""

    def __init__(
        self, session: Session, subject: Subject, gpu_by_allocator: dict[int, GpuKey], steps: Sequence[StepTimes]
    ) -> None:
        # The fastest to read first: the others may have to wait.
        recorded: list[SampleColumns] = [HostColumns(session, subject.host)]
        if subject.gpu is not None:
            recorded += [GpuColumns(session, *subject.gpu), GpuProcessColumns(session, *subject.gpu)]
        recorded.append(ProcessColumns(session, subject.host, subject.rank))
        if subject.gpu is not None:
            recorded.append(AllocatorColumns(session, subject.gpu, gpu_by_allocator))
        self.column_sources: list[SampleColumns | IterationColumns] = [IterationColumns(steps), *recorded]
        self.column_caches = [ColumnCache(teller, session.begin_ns) for teller in self.column_sources]
        self._recorded_names: set[str] = set()
        self._checked_counts = [0 for _ in self.column_sources]

    def count_records(self) -> int:
        """How much is recorded of it."""
        return sum(teller.count_records() for teller in self.column_sources)

    @property
    def is_complete(self) -> bool:
        """Whether all of it that was asked for last could be told in time."""
        return all(blocks.is_complete for blocks in self.column_caches)

    def read_values(self, window: Window, end_ns: int, until_s: float, *, release: bool) -> dict[str, ColumnValues]:
        """What was recorded, by name. ``release``: gives back the memory of what was read, table by table."""
        tables: list[Table] = []
        for place, (teller, blocks) in enumerate(zip(self.column_sources, self.column_caches, strict=True)):
            tables.append(blocks.get_columns(window.column_ns, window.first, window.columns, end_ns=end_ns, until_s=until_s))
            self._check_last_records(place)
            _release_memory(teller.list_sources() if release and isinstance(teller, SampleColumns) else ())
        names, table = [name for teller in self.column_sources for name in teller.names], np.concatenate(tables, axis=1)
        self._note_recorded(names, table)
        return {name: values for name, values in _split_values(names, table).items() if name in self._recorded_names}

    def find_recorded_names(self) -> frozenset[str]:
        """The names of what there is, as far as was seen in windows asked for and in the last records."""
        for place in range(len(self.column_sources)):
            self._check_last_records(place)
        return frozenset(self._recorded_names)

    def _check_last_records(self, index: int) -> None:
        """Looks at the last records: when there are any, and again when there are ten times as many."""
        teller = self.column_sources[index]
        if teller.count_records() > 10 * self._checked_counts[index]:
            self._checked_counts[index] = teller.count_records()
            end_ns = teller.find_final_ns()
            self._note_recorded(teller.names, teller.read_columns(np.array([end_ns - _CHECK_NS, end_ns + _CHECK_NS])))

    def _note_recorded(self, names: Sequence[str], table: Table) -> None:
        told = (table[TIME] > 0).any(axis=-1)
        self._recorded_names.update(name for name, there in zip(names, told.tolist(), strict=True) if there)


def _split_values(names: Sequence[str], table: Table) -> dict[str, ColumnValues]:
    mean = np.full(table.shape[1:], np.nan)
    np.divide(table[SUM], table[TIME], out=mean, where=table[TIME] > 0)
    return {name: ColumnValues(table[HIGHEST, place], mean[place]) for place, name in enumerate(names)}


def _release_memory(sources: Iterable[Source]) -> None:
    for source in sources:
        source.release_memory()
