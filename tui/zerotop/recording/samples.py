"""Samples over time: the records of a window, by process or GPU, and their values in bins and windows.

Times are unix nanoseconds. A window holds the samples after its begin and up to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.table_files import Source
from zerotop_probe.recording.tables import UNKNOWN

if TYPE_CHECKING:
    import polars

Rows = NDArray[Any]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(eq=False, slots=True)
class Samples:
    """Records of a table and their times in unix nanoseconds, both of shape (n,), in order of time."""

    times: Ints
    rows: Rows

    def clip_window(self, begin_ns: int, end_ns: int) -> Samples:
        """Return the records after ``begin_ns`` and up to ``end_ns``."""
        low, high = np.searchsorted(self.times, (begin_ns, end_ns), "right")
        return Samples(self.times[low:high], self.rows[low:high])

    def skip(self, count: int) -> Samples:
        """Return the records after the first ``count``."""
        return Samples(self.times[count:], self.rows[count:])

    def last(self, count: int) -> Samples:
        """Return the last ``count`` records, or all if there are fewer."""
        return self.skip(max(0, len(self) - count))

    def select(self, chosen: NDArray[np.bool_]) -> Samples:
        return Samples(self.times[chosen], self.rows.compress(chosen))  # five times faster than by index

    @property
    def frame(self) -> polars.DataFrame:
        """The records as a data frame, with their times as ``unix_ns``."""
        import polars

        columns = {name: self.rows[name] for name in self.rows.dtype.names or () if name != "pad"}
        texts = {
            name: np.strings.decode(column, "utf-8", "replace")
            for name, column in columns.items()
            if column.dtype.kind == "S"
        }
        return polars.DataFrame({"unix_ns": self.times, **columns, **texts})

    def __len__(self) -> int:
        return len(self.times)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over ``times`` and ``rows``."""
        return iter((self.times, self.rows))


def read_column(rows: Rows, name: str) -> Floats:
    """Return a column as floats; NaN if the recording is older than the column."""
    return rows[name].astype(np.float64) if name in (rows.dtype.names or ()) else np.full(len(rows), np.nan)


def iter_samples(
    sources: Iterable[Source], begin_ns: int, end_ns: int, key: str = "", value: int = 0, *, rows_before: int = 0
) -> Iterator[Samples]:
    """Yield the samples of each source in a window; with ``key``, only those in which that column has ``value``.

    ``rows_before``: how many earlier records to include.
    """
    for source in sources:
        rows = source.between(begin_ns, end_ns, rows_before=rows_before)
        if key:
            rows = rows.compress(rows[key] == value)
        yield Samples(source.unix_times(rows), rows)


def split_samples(samples: Samples, key: str) -> Iterator[tuple[int, Samples]]:
    """Yield each value of the column ``key``, ascending, and the samples that have it."""
    order = np.argsort(samples.rows[key], kind="stable")
    times, rows = samples.times[order], samples.rows[order]
    keys = rows[key]
    edges = [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist(), len(keys)]
    for begin, end in pairwise(edges):
        if end > begin:
            yield int(keys[begin]), Samples(times[begin:end], rows[begin:end])


def merge_columns(parts: Sequence[Samples], columns: Sequence[str]) -> tuple[Ints, dict[str, NDArray[Any]]]:
    """Return the times of several sources' samples, in order, and these columns of them."""
    if len(parts) == 1:
        return parts[0].times, {name: parts[0].rows[name] for name in columns}
    times = np.concatenate([np.empty(0, np.int64), *(part.times for part in parts)])
    order = np.argsort(times, kind="stable")
    values = {name: [part.rows[name] for part in parts] or [np.empty(0)] for name in columns}
    return times[order], {name: np.concatenate(values[name])[order] for name in columns}


def sum_ticks(times: Ints, columns: Sequence[NDArray[Any]]) -> tuple[Ints, list[Floats]]:
    """Sum each column over the records of each sampler tick, which share a time; return (times of ticks, sums)."""
    begins = np.ones(len(times), np.bool_)
    np.not_equal(times[1:], times[:-1], out=begins[1:])
    values = [column.astype(np.float64) for column in columns]
    if begins.all():
        return times, values
    first = begins.nonzero()[0]
    return times[first], [np.add.reduceat(value, first) for value in values]


def bin_means(bins: NDArray[np.int64], values: NDArray[Any], count: int) -> Floats:
    """Return the mean of the values in each of ``count`` bins, NaN in empty ones. ``bins`` is each value's bin."""
    number = np.bincount(bins, minlength=count)
    means = np.full(count, np.nan)
    np.divide(np.bincount(bins, values, count), number, out=means, where=number > 0)
    return means


def bin_maxima(bins: NDArray[np.int64], values: NDArray[Any], count: int) -> Floats:
    """Return the highest value in each bin, NaN in empty ones."""
    maxima = np.full(count, np.nan)
    np.fmax.at(maxima, bins, values.astype(np.float64))
    return maxima


class Windows:
    """Windows that follow one another (m,) over samples at ``times`` (n,), ascending."""

    def __init__(self, times: Ints, begins: Ints, ends: Ints, *, max_age_ns: int | None = None) -> None:
        """``max_age_ns``: how old a sample before a window may be to stand for it; None is any age."""
        self.first_samples = np.searchsorted(times, begins, "right")  # first sample after the begin
        self.end_samples = np.searchsorted(times, ends, "right")  # first sample after the end
        self.has_samples = self.first_samples < self.end_samples
        last = np.maximum(self.end_samples - 1, 0)
        fresh = self.end_samples > 0
        if max_age_ns is not None and len(times):
            fresh &= ends - times[last] < max_age_ns
        self.has_value = self.has_samples | fresh
        # An even place begins a window that the next odd place ends; one without samples has the last before.
        self._edges = np.stack([np.minimum(self.first_samples, last), self.end_samples], axis=1).ravel()

    def find_highest(self, values: Ints) -> Ints:
        """Return the highest value (..., m) in each window; without samples the last one before, or UNKNOWN.

        ``values``: shape (..., n).
        """
        padded = np.concatenate((values, np.full((*values.shape[:-1], 1), UNKNOWN)), axis=-1)
        return np.where(self.has_value, np.maximum.reduceat(padded, self._edges, axis=-1)[..., ::2], UNKNOWN)
