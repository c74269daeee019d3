"""What samplers and allocators recorded of one GPU, one rank and its host, as series over any piece of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.processes.process_exits import read_exits
from zerotop.analysis.timeline.resample import (
    LONGEST_NS,
    Ints,
    Series,
    Table,
    coarsen_table,
    compute_columns,
    make_blank_table,
    make_series_after,
    make_series_before,
    merge_tables,
    merge_times,
    sum_series,
)
from zerotop.session.reader import Session, Source
from zerotop_probe.recording.tables import UNKNOWN

Rows = NDArray[Any]
GpuKey = tuple[str, int]  # host, NVML index

# PCIe counters move only when the sampler looks at them, at least this often.
_COUNTER_READ_NS = 550_000_000
# No link is faster; counters jump when a GPU is reset.
_FASTEST_LINK = 1e12
FOREVER_NS = 1 << 62
_S = 1_000_000_000
# Columns at least as long as the first figure are made of columns as long as the second, of which they are multiples.
_BASES = ((60 * _S, 10 * _S), (2 * _S, _S))


class LaneSeries(NamedTuple):
    """A series and of which of its lane's values it tells: the first one's place."""

    first_row: int
    series: Series


class SeriesSource(Protocol):
    """Values of one thing, from tables of records."""

    @property
    def names(self) -> tuple[str, ...]:
        """What it is called, in the order of :attr:`Part.place`."""

    @property
    def table_sources(self) -> Sequence[Source]:
        """The tables."""

    def read_series(self, begin_ns: int, end_ns: int) -> Iterable[LaneSeries]:
        """What lies within a piece of time (unix nanoseconds), and a little around it."""


class SampleColumns:
    """Tells values in columns of time: see ``timeline_series.Table``."""

    def __init__(self, recorded: SeriesSource) -> None:
        self._recorded = recorded
        self.names = recorded.names

    @property
    def table_sources(self) -> Sequence[Source]:
        """The tables."""
        return self._recorded.table_sources

    def count_records(self) -> int:
        """See ``timeline_blocks.Teller``, as for all that follow."""
        return sum(len(source.array) for source in self._recorded.table_sources)

    def find_final_ns(self) -> int:
        last = [source.last_ns or 0 for source in self._recorded.table_sources]
        # What one writer wrote is in order; only a look at PCIe counters tells of the time before the look before it.
        return max(last, default=0) - (2 * _COUNTER_READ_NS if len(last) == 1 else LONGEST_NS)

    def choose_base(self, column_ns: int) -> int:
        return next((base for least, base in _BASES if column_ns >= least and column_ns % base == 0), column_ns)

    def read_columns(self, edges: Ints) -> Table:
        table, told = self.make_blank(len(edges) - 1), set[int]()
        for place, series in self._recorded.read_series(int(edges[0]), int(edges[-1])):
            rows, found = slice(place, place + len(series.values)), compute_columns(series, edges)
            table[:, rows] = merge_tables(table[:, rows], found) if place in told else found
            told.add(place)
        return table

    def merge_columns(self, table: Table, factor: int) -> Table:
        return coarsen_table(table, factor)

    def make_blank(self, columns: int) -> Table:
        return make_blank_table(len(self.names), columns)


class GpuSeries:
    """One GPU, as NVML says."""

    names = ("utilization", "power", "device", "sent", "received")

    def __init__(self, session: Session, gpu_key: GpuKey) -> None:
        self._session, self._host, self._index = session, *gpu_key

    @property
    def table_sources(self) -> list[Source]:
        """Where that is recorded."""
        return [source for source in self._session.sources["gpus"] if source.host == self._host]

    def read_series(self, begin_ns: int, end_ns: int) -> Iterable[LaneSeries]:
        """What lies within a piece of time (unix nanoseconds), and a little around it."""
        for source in self.table_sources:
            rows = read_around(source, begin_ns, end_ns)
            rows = rows[rows["gpu"] == self._index]
            times = rows["time_ns"] + source.offset_ns
            used = np.where(rows["used_bytes"] == UNKNOWN, np.nan, rows["used_bytes"])
            yield LaneSeries(0, make_series_before(times, [rows["utilization_percent"] / 100, rows["power_w"], used]))
            yield LaneSeries(3, _compute_rates(times, rows))


def _compute_rates(times: Ints, rows: Rows) -> Series:
    """PCIe bytes per second each way, between looks at the counters: samples in between repeat what was seen before."""
    counters = np.stack([rows["pcie_tx_bytes"], rows["pcie_rx_bytes"]]) if len(rows) else np.empty((2, 0), np.int64)
    changed = np.flatnonzero((counters[:, 1:] != counters[:, :-1]).any(axis=0)) + 1
    # What is seen after a while without traffic was moved since the last look; whether there is some now is not yet seen.
    quiet = np.searchsorted(times, np.append(times[changed], times[-1:]) - _COUNTER_READ_NS, "right") - 1
    quiet = quiet[quiet > np.append(0, changed)[: len(quiet)]]
    kept = merge_times([np.arange(min(1, len(times))), changed, quiet])
    seconds = np.diff(times[kept]) / 1e9
    moved = np.diff(counters[:, kept], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = moved / seconds
    rates[(counters[:, kept[:-1]] < 0) | (moved < 0) | ~(rates < _FASTEST_LINK)] = np.nan
    return Series(np.maximum(times[kept[:-1]], times[kept[1:]] - LONGEST_NS), times[kept[1:]], rates)


class GpuProcessSeries:
    """What NVML says that the job's ranks use of one GPU, all together."""

    names = ("process",)

    def __init__(self, session: Session, gpu_key: GpuKey) -> None:
        self._session, self._host, self._index = session, *gpu_key

    @property
    def table_sources(self) -> list[Source]:
        """Where that is recorded."""
        return [source for source in self._session.sources["gpu_processes"] if source.host == self._host]

    def read_series(self, begin_ns: int, end_ns: int) -> Iterable[LaneSeries]:
        """See :meth:`Gpu.parts`."""
        ranks = [source.pid for source in self._session.sources["begins"] if source.host == self._host]
        for source in self.table_sources:
            rows = read_around(source, begin_ns, end_ns)
            rows = rows[(rows["gpu"] == self._index) & (rows["used_bytes"] != UNKNOWN)]
            rows = rows[_mask_known(rows["pid"], ranks)]
            times, used = _sum_ticks(np.ascontiguousarray(rows["time_ns"]), [rows["used_bytes"]])
            until_ns = int(times[-1]) + source.offset_ns + LONGEST_NS if len(times) else 0
            yield LaneSeries(0, make_series_after(times + source.offset_ns, used, until_ns, longest_ns=LONGEST_NS))


def _mask_known(values: NDArray[Any], known: Sequence[int]) -> NDArray[np.bool_]:
    """Where a value is one of those that are known."""
    same: NDArray[np.bool_] = values == values[:1]
    if len(values) and same.all():  # as where each rank has a GPU: looking through them takes far longer
        return same if int(values[0]) in known else ~same
    return np.isin(values, known)


class AllocatorSeries:
    """What PyTorch's allocators hold of one GPU, all ranks on it together."""

    names = ("allocated", "reserved", "peak")

    def __init__(self, session: Session, gpu_key: GpuKey, gpu_by_allocator: Mapping[int, GpuKey]) -> None:
        """``lies_on`` is from :func:`zerotop.analysis.processes.ranks_and_hosts.allocators`."""
        self._session = session
        self.table_sources = [
            session.sources["allocator"][place] for place, where in gpu_by_allocator.items() if where == gpu_key
        ]

    def read_series(self, begin_ns: int, end_ns: int) -> Iterable[LaneSeries]:
        """See :meth:`Gpu.parts`. An allocator holds what it held last until nothing more is told of it."""
        ends, held, peaks = read_exits(self._session), [], []
        for source in self.table_sources:
            first = max(0, source.count_until(begin_ns) - 1)
            rows = source.array[first : source.count_until(end_ns) + 1]
            if len(rows):
                times, over_ns = rows["time_ns"] + source.offset_ns, ends.reported_until(source) or FOREVER_NS
                values = [rows["allocated_bytes"], rows["reserved_bytes"]]
                held.append(make_series_after(times, [value.astype(np.float64) for value in values], over_ns))
                peak = _compute_peak(source, rows)
                if not first:  # the first record's peak is that of all the time before
                    times, peak = np.append(min(source.created_ns, times[0] - 1), times), np.append(peak[:1], peak)
                peaks.append(make_series_before(times, [peak], longest_ns=FOREVER_NS))
        if held:
            yield LaneSeries(0, sum_series(held))
            yield LaneSeries(2, sum_series(peaks))


def _compute_peak(source: Source, rows: Rows) -> NDArray[Any]:
    """The highest allocated since the record before, exact where its writer reset the allocator's peak in between."""
    now = rows["allocated_bytes"]
    held: NDArray[Any] = np.maximum(now, np.append(now[:1], now[:-1]))
    return np.maximum(held, rows["allocated_peak_bytes"]) if source.header.get("peaks") == "window" else held


class ProcessSeries:
    """Cores in use and resident memory of one rank, and of all ranks of its host together."""

    names = ("cores", "rss", "all_cores", "all_rss")

    def __init__(self, session: Session, host: str, rank: int) -> None:
        """``rank``: -1 for a process of which nobody knows which rank it is."""
        self._session, self._host, self._rank = session, host, rank

    @property
    def table_sources(self) -> list[Source]:
        """Where that is recorded."""
        return [source for source in self._session.sources["processes"] if source.host == self._host]

    def read_series(self, begin_ns: int, end_ns: int) -> Iterable[LaneSeries]:
        """See :meth:`Gpu.parts`."""
        for source in self.table_sources:
            rows = read_around(source, begin_ns, end_ns)
            ranks = rows["rank"]
            for place, chosen in ((0, ranks == self._rank), (2, ranks >= min(0, self._rank))):
                times, values = _sum_ticks(
                    rows["time_ns"][chosen], [rows[name][chosen] for name in ("cores_used", "rss_bytes")]
                )
                yield LaneSeries(place, make_series_before(times + source.offset_ns, values))


class HostSeries:
    """Cores in use and memory in use of a host, or of the part of it that the job may use."""

    names = ("host_cores", "host_memory")

    def __init__(self, session: Session, host: str) -> None:
        self._session, self._host = session, host

    @property
    def table_sources(self) -> list[Source]:
        """Where that is recorded."""
        return [source for source in self._session.sources["hosts"] if source.host == self._host]

    def read_series(self, begin_ns: int, end_ns: int) -> Iterable[LaneSeries]:
        """See :meth:`Gpu.parts`."""
        for source in self.table_sources:
            rows = read_around(source, begin_ns, end_ns)
            total, limit = rows["memory_total_bytes"], rows["cgroup_limit_bytes"]
            used = np.where((limit > 0) & (limit < total), rows["cgroup_used_bytes"], total - rows["memory_available_bytes"])
            yield LaneSeries(0, make_series_before(rows["time_ns"] + source.offset_ns, [rows["cores_used"], used]))


def read_around(source: Source, begin_ns: int, end_ns: int) -> Rows:
    """The records of a piece of time and those of a sample's length before and after it."""
    return source.array[source.count_until(begin_ns - LONGEST_NS - 1) : source.count_until(end_ns + LONGEST_NS)]


def _sum_ticks(times: Ints, columns: Sequence[NDArray[Any]]) -> tuple[Ints, list[NDArray[Any]]]:
    """(ticks, the sum of each column's values in each) of records with these times."""
    begins = np.ones(len(times), np.bool_)
    np.not_equal(times[1:], times[:-1], out=begins[1:])
    values = [column.astype(np.float64) for column in columns]
    if begins.all():
        return times, values
    first = begins.nonzero()[0]
    return times[first], [np.add.reduceat(value, first) for value in values]
