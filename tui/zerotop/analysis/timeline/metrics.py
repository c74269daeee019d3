"""Values of one GPU, one rank and its host, from samplers and allocators, in columns of time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.processes.thinned import find_thinned_times, mask_moments
from zerotop.analysis.steps.logged_values import NAMES, NO_VALUES, read_logged
from zerotop.analysis.timeline import resample
from zerotop.recording.keys import GpuKey
from zerotop.recording.moments.devices import FASTEST_LINK, locate_allocators
from zerotop.recording.moments.host_memory import measure_used_bytes
from zerotop.recording.moments.process_exits import read_exits
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Floats, Ints, Rows, iter_samples, sum_ticks
from zerotop_probe.recording.metrics import BYTES_PER_S, Metric
from zerotop_probe.recording.tables import GPUS, HOSTS, UNKNOWN

# The sampler reads PCIe counters at least this often while nothing moves.
_INSTANT_NS = 1000
_COUNTER_READ_NS = 550_000_000
FOREVER_NS = 1 << 62
_S = 1_000_000_000
# (shortest column, base): columns of at least this length that are multiples of the base are merged from base columns.
_BASES = ((60 * _S, 10 * _S), (2 * _S, _S))
# Where most samples were thinned out, more time holds few enough records to read at once.
LONGEST_BASE_NS = 600 * _S
_SPARSE_BASES = ((LONGEST_BASE_NS, LONGEST_BASE_NS), (360 * _S, 60 * _S), *_BASES)
_SPARSE_RATE = 2.0  # records per second, on average over the recording


class SampleColumns(resample.SeriesColumns):
    """Sampled values in columns of time."""

    _recording: Recording

    @abstractmethod
    def list_sources(self) -> Sequence[Source]:
        """Return the tables that hold the samples."""

    def count_records(self) -> int:
        return sum(len(source.array) for source in self.list_sources())

    def find_final_ns(self) -> int:
        last = [source.last_ns or 0 for source in self.list_sources()]
        # One writer writes in order, except that a PCIe reading covers the time since the reading before it.
        return max(last, default=0) - (2 * _COUNTER_READ_NS if len(last) == 1 else resample.LONGEST_NS)

    def choose_base(self, column_ns: int) -> int:
        is_sparse = self.count_records() < _SPARSE_RATE * (self.find_final_ns() - self._recording.begin_ns) / _S
        bases = _SPARSE_BASES if is_sparse else _BASES
        return next((base for least, base in bases if column_ns >= least and column_ns % base == 0), column_ns)


class HostTableColumns(SampleColumns):
    """Values that the samplers of a host wrote to one table, for one GPU or for the whole host."""

    table: ClassVar[str]
    held: ClassVar[tuple[str, ...]] = ()
    """Names of amounts, which a sample reads at its own time."""

    def __init__(self, recording: Recording, host: str, gpu: int | None = None) -> None:
        self._recording, self._host = recording, host
        self._selection = ("", 0) if gpu is None else ("gpu", gpu)

    def list_sources(self) -> Sequence[Source]:
        return self._recording.host_sources(self.table, self._host)

    def read_series(self, begin_ns: int, end_ns: int) -> Iterable[resample.LaneSeries]:
        for source in self.list_sources():
            longest_ns = resample.LONGEST_NS + source.period_ns
            window = begin_ns - longest_ns - 1, end_ns + longest_ns
            for samples in iter_samples([source], *window, *self._selection):
                yield from self._make_series(samples.times, samples.rows, longest_ns)

    def read_moment(self, edges: Ints) -> resample.Table:
        """Return at the end the amounts as last sampled, as on other screens: a column has those of the sample after it."""
        table, end_ns = super().read_moment(edges), int(edges[-1])
        held = [self.names.index(name) for name in self.held]
        for first, series in self.read_series(int(edges[0]), end_ns) if held else ():
            last = int(np.searchsorted(series.ends, end_ns, "right")) - 1
            if last < 0 or series.ends[last] <= edges[0]:
                continue
            for row in set(held) & set(range(first, first + len(series.values))):
                if not np.isnan(value := series.values[row - first, last]):
                    table[[resample.HIGHEST, resample.SUM, resample.TIME], row, -1] = value, value, 1.0
        return table

    @abstractmethod
    def _make_series(self, times: Ints, rows: Rows, longest_ns: int) -> Iterable[resample.LaneSeries]:
        """Return the series of the samples of one table; each stands for the time before it, at most ``longest_ns``."""


def _read_column(rows: Rows, metric: Metric) -> NDArray[Any]:
    """Return the column of a metric, UNKNOWN in older recordings that lack it."""
    return rows[metric.column] if metric.column in (rows.dtype.names or ()) else np.full(len(rows), UNKNOWN)


def _read_gauges(rows: Rows, metrics: Sequence[Metric]) -> list[NDArray[Any]]:
    columns = ((_read_column(rows, metric), metric.scale) for metric in metrics)
    return [np.where(column == UNKNOWN, np.nan, column / scale) for column, scale in columns]


class GpuColumns(HostTableColumns):
    """NVML's figures for one GPU."""

    _rates = tuple(metric for metric in GPUS.metrics if metric.unit == BYTES_PER_S)
    _gauges = tuple(metric for metric in GPUS.metrics if metric.unit != BYTES_PER_S)
    names = tuple(metric.name for metric in (*_gauges, *_rates))
    table = "gpus"
    held = ("device",)

    def _make_series(self, times: Ints, rows: Rows, longest_ns: int) -> Iterable[resample.LaneSeries]:
        yield resample.LaneSeries(
            0, resample.make_series_before(times, _read_gauges(rows, self._gauges), longest_ns=longest_ns)
        )
        counters = np.stack([_read_column(rows, metric) for metric in self._rates])
        yield resample.LaneSeries(len(self._gauges), _compute_rates(times, counters, longest_ns))


def _compute_rates(times: Ints, counters: Ints, longest_ns: int) -> resample.Series:
    """Return bytes per second between readings of the counters, which samples in between repeat."""
    changed = np.flatnonzero((counters[:, 1:] != counters[:, :-1]).any(axis=0)) + 1
    # After a pause, a change covers the time since the last reading; the current reading is not known yet.
    quiet = np.searchsorted(times, np.append(times[changed], times[-1:]) - _COUNTER_READ_NS, "right") - 1
    quiet = quiet[quiet > np.append(0, changed)[: len(quiet)]]
    readings = resample.merge_times([np.arange(min(1, len(times))), changed, quiet])
    seconds = np.diff(times[readings]) / 1e9
    moved = np.diff(counters[:, readings], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = moved / seconds
    rates[(counters[:, readings[:-1]] < 0) | (moved < 0) | ~(rates < FASTEST_LINK)] = np.nan
    return resample.Series(np.maximum(times[readings[:-1]], times[readings[1:]] - longest_ns), times[readings[1:]], rates)


class GpuProcessColumns(HostTableColumns):
    """NVML's memory of the job's ranks on one GPU, summed."""

    names = ("process",)
    table = "gpu_processes"

    def _make_series(self, times: Ints, rows: Rows, longest_ns: int) -> Iterable[resample.LaneSeries]:
        pids = [source.pid for source in self._recording.host_sources("begins", self._host)]
        chosen = rows["used_bytes"] != UNKNOWN
        chosen[chosen] = _mask_known(rows["pid"][chosen], pids)
        times, used = sum_ticks(times[chosen], [rows["used_bytes"][chosen]])
        until_ns = int(times[-1]) + longest_ns if len(times) else 0
        yield resample.LaneSeries(0, resample.make_series_after(times, used, until_ns, longest_ns=longest_ns))


def _mask_known(values: NDArray[Any], known: Sequence[int]) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = values == values[:1]
    if len(values) and same.all():  # usual where each rank has its own GPU; np.isin takes far longer
        return same if int(values[0]) in known else ~same
    return np.isin(values, known)


class AllocatorColumns(SampleColumns):
    """Memory that PyTorch's allocators hold on one GPU, summed over its ranks."""

    names = ("allocated", "reserved", "peak")

    def __init__(self, recording: Recording, gpu_key: GpuKey) -> None:
        self._recording = recording
        self._sources = [source for source, key in locate_allocators(recording.at()).items() if key == gpu_key]

    def list_sources(self) -> Sequence[Source]:
        return self._sources

    def read_series(self, begin_ns: int, end_ns: int) -> Iterable[resample.LaneSeries]:
        """Return sums over allocators. Each holds its last sample's memory until its process exits."""
        exits, held, peaks = read_exits(self._recording.at()), [], []
        for source in self._sources:
            rows = source.between(begin_ns, end_ns, rows_before=1, rows_after=1)
            if len(rows):
                times, exit_ns = source.unix_times(rows), exits.reported_until(source) or FOREVER_NS
                values = [rows["allocated_bytes"].astype(np.float64), rows["reserved_bytes"].astype(np.float64)]
                held.append(resample.make_series_after(*self._end_before_gaps(source, times, values), exit_ns))
                peak = _compute_peak(source, rows)
                if source.count_until(begin_ns) <= 1:  # the first record's peak covers all the time before it
                    times, peak = np.append(min(source.created_ns, times[0] - 1), times), np.append(peak[:1], peak)
                times, peak = self._add_folded_peaks(source, times, peak)
                peaks.append(resample.make_series_before(times, [peak], longest_ns=FOREVER_NS))
        if held:
            yield resample.LaneSeries(0, resample.sum_series(held))
            yield resample.LaneSeries(2, resample.sum_series(peaks))

    def read_moment(self, edges: Ints) -> resample.Table:
        """Return at the end what is held at that moment, as on other screens: it goes up and down within a column."""
        table, end = self.read_columns(edges), self.read_columns(edges[-1] + np.array([-_INSTANT_NS, 0]))
        is_held = end[resample.TIME, :2] > 0  # the peak is that of a while
        table[:, :2, -1:] = np.where(is_held, end[:, :2], table[:, :2, -1:])
        return table

    def _end_before_gaps(self, source: Source, times: Ints, values: list[Floats]) -> tuple[Ints, list[Floats]]:
        """Add an unknown value where samples were deleted, so that the previous one does not stand for them."""
        gaps = find_thinned_times(self._recording, source)[:, 0]
        gaps = gaps[(times[0] < gaps) & (gaps < times[-1])]
        places = times.searchsorted(gaps)
        return np.insert(times, places, gaps), [np.insert(value, places, np.nan) for value in values]

    def _add_folded_peaks(self, source: Source, times: Ints, peaks: NDArray[Any]) -> tuple[Ints, NDArray[Any]]:
        """Add the peaks of steps whose samples were deleted."""
        folded, spans = (self._recording.find_sibling(name, source) for name in ("folded", "spans"))
        if folded is None or spans is None or not len(find_thinned_times(self._recording, source)):
            return times, peaks
        rows = folded.between(int(times[0]), int(times[-1]))
        rows = rows[mask_moments(self._recording, source, folded.unix_times(rows) - 1)]
        added = folded.unix_times(rows)
        places = times.searchsorted(added)
        return np.insert(times, places, added), np.insert(peaks, places, rows["allocated_peak_bytes"])


def _compute_peak(source: Source, rows: Rows) -> NDArray[Any]:
    """Return the highest allocated since the record before: exact where the probe resets the allocator's peak."""
    now = rows["allocated_bytes"]
    highest: NDArray[Any] = np.maximum(now, np.append(now[:1], now[:-1]))
    return np.maximum(highest, rows["allocated_peak_bytes"]) if source.header.get("peaks") == "window" else highest


class LoggedColumns(resample.SeriesColumns):
    """What the training logged, from each value to the next; NaN and infinite values count as none."""

    names = NAMES

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def read_series(self, begin_ns: int, end_ns: int) -> Iterable[resample.LaneSeries]:
        for row, name in enumerate(self.names):
            times, values, *_ = read_logged(self._recording).get(name, NO_VALUES)
            first, last = max(0, int(times.searchsorted(begin_ns)) - 1), int(times.searchsorted(end_ns, "right")) + 1
            known = np.where(np.isfinite(values[first:last]), values[first:last], np.nan)
            yield resample.LaneSeries(row, resample.make_series_after(times[first:last], [known], FOREVER_NS))

    def count_records(self) -> int:
        return sum(len(series.times) for series in read_logged(self._recording).values())

    def find_final_ns(self) -> int:
        last = (int(series.times[-1]) for series in read_logged(self._recording).values())
        return max(last, default=resample.LONGEST_NS) - resample.LONGEST_NS


class ProcessColumns(HostTableColumns):
    """Cores in use and resident memory of one rank, and of all ranks of its host."""

    names = ("cores", "rss", "all_cores", "all_rss")
    table = "processes"
    held = ("rss", "all_rss")

    def __init__(self, recording: Recording, host: str, rank: int) -> None:
        """``rank``: -1 for processes whose rank is unknown."""
        super().__init__(recording, host)
        self._rank = rank

    def _make_series(self, times: Ints, rows: Rows, longest_ns: int) -> Iterable[resample.LaneSeries]:
        ranks = rows["rank"]
        for first_row, chosen in ((0, ranks == self._rank), (2, ranks >= min(0, self._rank))):
            columns = [rows[name][chosen] for name in ("cores_used", "rss_bytes")]
            yield resample.LaneSeries(
                first_row, resample.make_series_before(*sum_ticks(times[chosen], columns), longest_ns=longest_ns)
            )


class HostColumns(HostTableColumns):
    """Cores and memory in use of a host, or of the control group that limits the job."""

    _gauges = tuple(metric for metric in HOSTS.metrics if metric.lane and metric.column)
    names = (*(metric.name for metric in _gauges), "host_memory")
    table = "hosts"
    held = ("host_memory",)

    def _make_series(self, times: Ints, rows: Rows, longest_ns: int) -> Iterable[resample.LaneSeries]:
        columns = [*_read_gauges(rows, self._gauges), measure_used_bytes(rows)]
        yield resample.LaneSeries(0, resample.make_series_before(times, columns, longest_ns=longest_ns))
