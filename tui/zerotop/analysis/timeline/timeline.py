"""The timeline: a window of time in columns, for one rank, its GPU and its host.

Short columns are computed from records, long ones from cached shorter ones. Maxima are exact for columns of any length: no
spike is lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.timeline import metrics
from zerotop.analysis.timeline.phase_ribbon import RankPhases
from zerotop.analysis.timeline.resample import HIGHEST, SUM, TIME, SeriesColumns, Table
from zerotop.analysis.timeline.step_lane import IterationColumns, StepTimes
from zerotop.analysis.timeline.timeline_cache import ColumnCache
from zerotop.recording.keys import GpuKey
from zerotop.recording.moments.devices import locate_allocators
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Floats, Ints
from zerotop.recording.steps.step_table import RankSteps

# A value stays valid for so long after its sample. At a moment it is the mean of one such column.
FRESH_NS = 3_000_000_000
MOMENT_NS = 100_000_000
# How far back from the last record to look for values.
_CHECK_NS = 30_000_000_000
_TAIL = 4096
# After reading a longer window, memory is released.
_LONG_WINDOW_NS = 300_000_000_000


@dataclass(frozen=True, slots=True)
class Window:
    """A time window of ``columns`` columns, ``column_ns`` each, from number ``first`` on; 0 begins with the recording."""

    first: int
    column_ns: int
    columns: int


@dataclass(frozen=True, slots=True)
class LaneSubject:
    """A rank, its host and its GPU."""

    rank: int  # -1 where no probe tells which process is which rank
    host: str
    gpu: GpuKey | None


@dataclass(frozen=True, slots=True, eq=False)
class ColumnValues:
    """One quantity in each column, shape (columns,); NaN where nothing was recorded."""

    highest: Floats
    mean: Floats  # weighted by time


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A window of a recording.

    ``values`` by name, see METRICS: of the GPU, the rank and its host ("all_" is of all its ranks). What was never recorded
    is missing. ``phases`` by rank: seconds in each of PHASES, shape (phases, columns).
    """

    window: Window
    origin_ns: int
    values: dict[str, ColumnValues]
    phases: dict[int, Floats]
    is_complete: bool  # False: some columns are still blank for want of time; ask again for more


class TimelineBuilder:
    """Builds timelines of a recording, which may grow."""

    def __init__(self, recording: Recording, read_processes: Callable[[], Iterable[RankSteps]]) -> None:
        """``read_processes``: returns the rank processes with their steps, up to date."""
        self._recording, self._read_processes = recording, read_processes
        self._times_by_process: dict[RankSteps, StepTimes] = {}
        self._times_by_rank: dict[int, list[StepTimes]] = {}
        self._lanes: dict[LaneSubject, Lanes] = {}
        self._ribbons: dict[int, tuple[RankPhases, ColumnCache]] = {}
        self._probed_ranks: tuple[int, dict[int, str]] = (-1, {})
        self._last: tuple[object, Timeline] | None = None

    @property
    def origin_ns(self) -> int:
        """Unix time at which column 0 begins."""
        return self._recording.begin_ns

    def find_rank_hosts(self) -> dict[int, str]:
        """Return the host of each rank with a probe; without any, of each rank among the sampled processes."""
        return self.find_probed_ranks() or self._find_sampled_ranks()

    def find_probed_ranks(self) -> dict[int, str]:
        """Return the host of each rank with a probe, which records phases."""
        # Begins are left out of some recordings, as they only complete the spans.
        begun = [*self._recording.sources["begins"], *self._recording.sources["spans"]]
        if len(begun) != self._probed_ranks[0]:
            self._probed_ranks = len(begun), dict(sorted((source.rank, source.host) for source in begun))
        return self._probed_ranks[1]

    def _find_sampled_ranks(self) -> dict[int, str]:
        hosts: dict[int, str] = {}
        for source in self._recording.sources["processes"]:
            hosts |= dict.fromkeys(np.unique(source.array["rank"][-_TAIL:]).tolist(), source.host)
        known = {rank: host for rank, host in hosts.items() if rank >= 0}
        return dict(sorted((known or hosts).items()))

    def make_subject(self, rank: int) -> LaneSubject:
        """Return a rank with its host and GPU."""
        samplers = (source.host for table in ("processes", "hosts", "gpus") for source in self._recording.sources[table])
        host = self.find_rank_hosts().get(rank) or next(samplers, "")
        return LaneSubject(rank, host, self.find_gpu_key(rank, host))

    def find_gpu_key(self, rank: int, host: str) -> GpuKey | None:
        """Return the GPU of a rank's allocator; if it has none, the first GPU sampled on its host."""
        located = [key for source, key in locate_allocators(self._recording.at()).items() if source.rank == rank]
        if located:
            return located[-1]
        sampled = [source.array["gpu"][:64] for source in self._recording.host_sources("gpus", host)]
        lowest = [int(gpus.min()) for gpus in sampled if len(gpus)]
        return (host, min(lowest)) if lowest else None

    def build_timeline(
        self, window: Window, subject: LaneSubject, ranks: Sequence[int], end_ns: int, *, budget_s: float = math.inf
    ) -> Timeline:
        """Return a window up to ``end_ns`` (unix time), with the phases of ``ranks``.

        Columns that cannot be read within about ``budget_s`` seconds are blank; then ``is_complete`` is False.
        """
        self.update({subject.rank, *ranks})
        lanes, ribbons = self.get_lanes(subject), [self.get_ribbon(rank) for rank in ranks]
        end = min((end_ns - self.origin_ns) // window.column_ns, window.first + window.columns)
        key = (
            window,
            subject,
            tuple(ranks),
            end,
            lanes.count_records(),
            sum(phases.count_records() for phases, _ in ribbons),
        )
        if self._last is not None and self._last[0] == key and self._last[1].is_complete:
            return self._last[1]
        until_s = time.perf_counter() + budget_s
        release = window.columns * window.column_ns > _LONG_WINDOW_NS
        seconds = {}
        for rank, (phases, cache) in zip(ranks, ribbons, strict=True):
            seconds[rank] = cache.get_columns(window.column_ns, window.first, window.columns, end_ns=end_ns, until_s=until_s)
            _release_memory(phases.list_sources() if release else ())
        values = lanes.read_values(window, end_ns, until_s, release=release)
        complete = lanes.is_complete and all(cache.is_complete for _, cache in ribbons)
        timeline = Timeline(window, self.origin_ns, values, seconds, complete)
        self._last = key, timeline
        return timeline

    def update(self, ranks: Collection[int]) -> None:
        """Read the steps that these ranks have finished since the last call."""
        for process in self._read_processes():
            if process not in self._times_by_process:
                self._times_by_process[process] = StepTimes(process)
                self.get_step_times(process.source.rank).append(self._times_by_process[process])
        for rank in ranks:
            for times in self.get_step_times(rank):
                times.update()

    def get_lanes(self, subject: LaneSubject) -> Lanes:
        """Return a subject's lanes; the last few are cached."""
        lanes = self._lanes.pop(subject, None) or Lanes(self._recording, subject, self.get_step_times(subject.rank))
        self._lanes[subject] = lanes
        while len(self._lanes) > 4:
            del self._lanes[next(iter(self._lanes))]
        return lanes

    def get_step_times(self, rank: int) -> list[StepTimes]:
        """Return the steps of each of a rank's processes, in a list that grows."""
        return self._times_by_rank.setdefault(rank, [])

    def find_begun_steps(self, rank: int, begin_ns: int, end_ns: int) -> tuple[Ints, Ints]:
        """Return (begins, numbers) of a rank's steps that began between two moments in unix time."""
        empty = np.empty(0, np.int64)
        parts = [(empty, empty), *(times.find_begun(begin_ns, end_ns) for times in self.get_step_times(rank))]
        begins, numbers = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return begins, numbers

    def find_step_at(self, rank: int, unix_ns: int) -> int | None:
        """Return the number of a rank's latest step at a moment, None before its first."""
        steps = [step for times in self.get_step_times(rank) if (step := times.find_step_at(unix_ns)) is not None]
        return steps[-1] if steps else None

    def get_ribbon(self, rank: int) -> tuple[RankPhases, ColumnCache]:
        """Return a rank's phases, and their columns that were read."""
        if rank not in self._ribbons:
            phases = RankPhases(self._recording, rank, self.get_step_times(rank))
            self._ribbons[rank] = phases, ColumnCache(phases, self.origin_ns)
        return self._ribbons[rank]


class Lanes:
    """The values of one subject."""

    def __init__(self, recording: Recording, subject: LaneSubject, steps: Sequence[StepTimes]) -> None:
        # The fastest first: the time for others may run out.
        recorded: list[metrics.SampleColumns] = [metrics.HostColumns(recording, subject.host)]
        if subject.gpu is not None:
            recorded += [metrics.GpuColumns(recording, *subject.gpu), metrics.GpuProcessColumns(recording, *subject.gpu)]
        recorded.append(metrics.ProcessColumns(recording, subject.host, subject.rank))
        if subject.gpu is not None:
            recorded.append(metrics.AllocatorColumns(recording, subject.gpu))
        self.column_sources: list[SeriesColumns] = [IterationColumns(steps), metrics.LoggedColumns(recording), *recorded]
        self._names = [name for source in self.column_sources for name in source.names]
        self.column_caches = [ColumnCache(source, recording.begin_ns) for source in self.column_sources]
        self._recorded_names: set[str] = set()
        self._moment: tuple[object, dict[str, ColumnValues]] = None, {}  # that was read last
        self._checked_counts = [0 for _ in self.column_sources]

    def count_records(self) -> int:
        """Return how many records hold its values."""
        return sum(source.count_records() for source in self.column_sources)

    @property
    def is_complete(self) -> bool:
        """Whether all columns of the last window could be read in time."""
        return all(cache.is_complete for cache in self.column_caches)

    def read_values(self, window: Window, end_ns: int, until_s: float, *, release: bool) -> dict[str, ColumnValues]:
        """Return the values by name. ``release``: release memory after each table."""
        tables: list[Table] = []
        for index, (source, cache) in enumerate(zip(self.column_sources, self.column_caches, strict=True)):
            tables.append(cache.get_columns(window.column_ns, window.first, window.columns, end_ns=end_ns, until_s=until_s))
            self._check_last_records(index)
            _release_memory(source.list_sources() if release and isinstance(source, metrics.SampleColumns) else ())
        table = np.concatenate(tables, axis=1)
        self._note_recorded(self._names, table)
        return {name: values for name, values in _split_values(self._names, table).items() if name in self._recorded_names}

    def read_moment(self, unix_ns: int) -> dict[str, ColumnValues]:
        """Return the values in the columns of MOMENT_NS that cover FRESH_NS before a moment."""
        key = unix_ns, self.count_records()
        if self._moment[0] != key:
            edges = unix_ns + np.arange(-FRESH_NS, 1, MOMENT_NS)
            tables = [one.read_moment(edges) for one in self.column_sources]
            self._moment = key, _split_values(self._names, np.concatenate(tables, axis=1))
        return self._moment[1]

    def find_recorded_names(self) -> frozenset[str]:
        """Return the names of the values in the windows and the last records read so far."""
        for index in range(len(self.column_sources)):
            self._check_last_records(index)
        return frozenset(self._recorded_names)

    def _check_last_records(self, index: int) -> None:
        """Read the last records, and again once there are ten times as many."""
        source = self.column_sources[index]
        if source.count_records() > 10 * self._checked_counts[index]:
            self._checked_counts[index] = source.count_records()
            end_ns = source.find_final_ns()
            self._note_recorded(source.names, source.read_columns(np.array([end_ns - _CHECK_NS, end_ns + _CHECK_NS])))

    def _note_recorded(self, names: Sequence[str], table: Table) -> None:
        recorded = (table[TIME] > 0).any(axis=-1)
        self._recorded_names.update(name for name, is_recorded in zip(names, recorded.tolist(), strict=True) if is_recorded)


def _split_values(names: Sequence[str], table: Table) -> dict[str, ColumnValues]:
    mean = np.full(table.shape[1:], np.nan)
    np.divide(table[SUM], table[TIME], out=mean, where=table[TIME] > 0)
    return {name: ColumnValues(table[HIGHEST, row], mean[row]) for row, name in enumerate(names)}


def _release_memory(sources: Iterable[Source]) -> None:
    for source in sources:
        source.release_memory()
