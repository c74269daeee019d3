"""Values over time, each true from a begin to an end, and their maxima and integrals in columns of time.

Columns add up: those of two halves make that of the whole, to the last bit of a maximum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.samples import Floats, Ints

Table = NDArray[np.float64]
"""Shape (3, values, columns): the rows of the first axis are HIGHEST, SUM and TIME."""

HIGHEST = 0  # NaN where nothing was recorded
SUM, TIME = 1, 2  # value times seconds; seconds for which values are known

# Longer than this between two samples means that no sampler ran.
LONGEST_NS = 3_000_000_000


class Series(NamedTuple):
    """Intervals that do not overlap, in order, and the values in each."""

    begins: Ints  # unix nanoseconds, shape (n,)
    ends: Ints
    values: Floats  # shape (values, n); NaN where unknown


class LaneSeries(NamedTuple):
    """A series of some of a lane's values."""

    first_row: int  # row of the series' first value in the lane's table
    series: Series


class SeriesColumns(ABC):
    """Values in columns of time, computed from series: a :class:`.timeline_cache.ColumnSource` of tables."""

    names: ClassVar[tuple[str, ...]]
    """Names of the table's rows."""

    @abstractmethod
    def read_series(self, begin_ns: int, end_ns: int) -> Iterable[LaneSeries]:
        """Return the values from ``begin_ns`` to ``end_ns`` (unix time), and a little around."""

    @abstractmethod
    def count_records(self) -> int: ...

    @abstractmethod
    def find_final_ns(self) -> int: ...

    def choose_base(self, column_ns: int) -> int:
        return column_ns

    def read_columns(self, edges: Ints) -> Table:
        table = self.make_blank(len(edges) - 1)
        for first, series in self.read_series(int(edges[0]), int(edges[-1])):
            rows = slice(first, first + len(series.values))
            table[:, rows] = merge_tables(table[:, rows], compute_columns(series, edges))
        return table

    def read_moment(self, edges: Ints) -> Table:
        """Return columns of which the last is shown as the values at its end."""
        return self.read_columns(edges)

    def merge_columns(self, table: Table, factor: int) -> Table:
        return coarsen_table(table, factor)

    def make_blank(self, columns: int) -> Table:
        return make_blank_table(len(self.names), columns)


def make_series_before(times: Ints, values: Sequence[NDArray[Any]], *, longest_ns: int = LONGEST_NS) -> Series:
    """Return samples as the values since the sample before each; the first one is dropped."""
    begins = np.maximum(times[:-1], times[1:] - longest_ns)
    return Series(begins, times[1:], np.array([value[1:] for value in values], np.float64))


def make_series_after(
    times: Ints, values: Sequence[NDArray[Any]], until_ns: int, *, longest_ns: int | None = None
) -> Series:
    """Return samples as the values until the sample after each; the last one lasts until ``until_ns``."""
    ends = np.append(times[1:], max(until_ns, int(times[-1]))) if len(times) else times
    if longest_ns is not None:
        ends = np.minimum(ends, times + longest_ns)
    return Series(times, ends, np.array(values, np.float64).reshape(len(values), len(times)))


def sum_series(several: list[Series]) -> Series:
    """Sum series of the same quantities: at each moment, those that have a value."""
    if len(several) == 1:
        return several[0]
    borders = merge_times([times for series in several for times in (series.begins, series.ends)])
    total = np.full((len(several[0].values), max(0, len(borders) - 1)), np.nan)
    for series in several:
        if not len(series.begins):
            continue
        index = np.searchsorted(series.begins, borders[:-1], "right") - 1
        inside = (index >= 0) & (borders[:-1] < series.ends[index])
        values = np.where(inside, series.values[:, index], np.nan)
        total = np.where(np.isnan(total), values, total + np.nan_to_num(values))
    return Series(borders[:-1], borders[1:], total)


def merge_times(times: list[Ints]) -> Ints:
    """Return the distinct moments of sorted arrays, in order; faster than ``np.unique``, which sorts from scratch."""
    merged = np.concatenate(times)
    merged.sort(kind="stable")
    first = np.ones(len(merged), np.bool_)
    np.not_equal(merged[1:], merged[:-1], out=first[1:])
    return merged[first]


def make_blank_table(values: int, columns: int) -> Table:
    """Return a table without values."""
    table = np.zeros((3, values, columns))
    table[HIGHEST] = np.nan
    return table


def compute_columns(series: Series, edges: Ints) -> Table:
    """Return maxima, integrals and known seconds between each two neighbouring edges (unix nanoseconds, ascending)."""
    table = make_blank_table(len(series.values), len(edges) - 1)
    ended, begun = series.ends.searchsorted(edges, "right"), series.begins.searchsorted(edges[1:], "left")
    filled = (begun > ended[:-1]).nonzero()[0]
    if not len(filled):
        return table
    low, high = int(ended[filled[0]]), int(begun[filled[-1]])
    part = Series(series.begins[low:high], series.ends[low:high], series.values[:, low:high])
    borders = np.empty(2 * len(filled), np.intp)
    borders[::2], borders[1::2] = ended[filled] - low, begun[filled] - low
    padded = np.empty((len(part.values), high - low + 1))
    padded[:, :-1], padded[:, -1] = part.values, np.nan
    table[HIGHEST][:, filled] = np.fmax.reduceat(padded, borders, axis=1)[:, ::2]
    table[SUM:] = _integrate_values(part, edges, np.minimum(np.maximum(ended - low, 0), high - low))
    return table


def _integrate_values(series: Series, edges: Ints, ended: Ints) -> Floats:
    """Return the integrals of the values over seconds, and the seconds in which they are known, between each two edges.

    ``ended``: how many intervals have ended at each edge.
    """
    lengths = (series.ends - series.begins) / 1e9
    values = np.empty((2, *series.values.shape))
    np.equal(series.values, series.values, out=values[1])  # NaN is not equal to itself
    values[0] = np.where(values[1], series.values, 0.0)
    sums = np.zeros((*values.shape[:-1], len(lengths) + 1))
    np.cumsum(values * lengths, axis=-1, out=sums[..., 1:])
    begun = np.minimum(ended, len(lengths) - 1)
    part = np.where(ended < len(lengths), np.maximum(0, edges - series.begins[begun]) / 1e9, 0.0)
    passed = sums.take(ended, axis=-1) + values.take(begun, axis=-1) * part
    return np.asarray(passed[..., 1:] - passed[..., :-1])


def merge_tables(one: Table, other: Table) -> Table:
    """Merge two tables of the same columns, from different records."""
    return np.stack((np.fmax(one[HIGHEST], other[HIGHEST]), one[SUM] + other[SUM], one[TIME] + other[TIME]))


def coarsen_table(table: Table, factor: int) -> Table:
    """Merge each ``factor`` columns into one."""
    split = table.reshape(3, table.shape[1], -1, factor)
    return np.stack((np.fmax.reduce(split[HIGHEST], -1), split[SUM].sum(-1), split[TIME].sum(-1)))
