"""Sampled values of a recording as counters over time, thinned where nobody could see the difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.steps.logged_values import NO_VALUES, read_logged
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Floats, Ints, Rows, read_column
from zerotop_probe.recording.metrics import PERCENT, SHARE, Metric
from zerotop_probe.recording.tables import LOGGED, TABLES, UNKNOWN

# Of longer counters each piece keeps its highest value: a screen has a few thousand columns.
_MOST_POINTS = 40_000

_KEYS = {"allocator": "", "gpus": "gpu", "processes": "rank", "hosts": ""}
"""The tables, and the column that divides each."""


class Owner(NamedTuple):
    """Whose value it is: of a rank's process, of a GPU, or (rank and GPU are None) of a host."""

    host: str
    rank: int | None = None
    gpu: int | None = None


class Counter(NamedTuple):
    """One value over time."""

    owner: Owner
    name: str
    unit: str
    times_ns: Ints  # unix time
    values: Floats


def read_counters(recording: Recording) -> Iterator[Counter]:
    """Yield the counters of ranks, GPUs and hosts that have values."""
    for table, key in _KEYS.items():
        metrics = [metric for metric in TABLES[table].metrics if metric.trace]
        for source in recording.sources[table]:
            for value, rows in _split_rows(source, key):
                owner = Owner(source.host, rank=value if key != "gpu" else None, gpu=value if key == "gpu" else None)
                for metric in metrics:
                    yield from _make_counter(source, rows, owner, metric)
            source.release_memory()
    lowest = min(recording.sources["begins"], key=lambda source: source.rank, default=None)
    for metric in LOGGED.metrics:
        times, values, *_ = read_logged(recording).get(metric.name, NO_VALUES)
        known = np.isfinite(values)
        if known.any() and lowest is not None:
            yield Counter(Owner(lowest.host, lowest.rank), metric.name, metric.unit, times[known], values[known])


def _split_rows(source: Source, key: str) -> Iterator[tuple[int | None, Rows]]:
    if not key:
        yield (source.rank if source.rank >= 0 else None), source.array
        return
    for index in np.unique(source.array[key]).tolist():
        if index >= 0:
            yield index, source.array[source.array[key] == index]


def _make_counter(source: Source, rows: Rows, owner: Owner, metric: Metric) -> Iterator[Counter]:
    values = read_column(rows, metric.column)
    known = np.isfinite(values) & (values != UNKNOWN)
    if known.any():
        times = source.unix_times(rows)[known]
        kept = thin_values(values[known])
        unit = PERCENT if metric.unit == SHARE else metric.unit
        yield Counter(owner, metric.trace, unit, times[kept], values[known][kept])


def thin_values(values: Floats) -> NDArray[np.int64]:
    """Return the indices to keep: those where the value changes, at most ``_MOST_POINTS``, and all high values."""
    changed = np.ones(len(values), np.bool_)
    changed[1:] = values[1:] != values[:-1]
    index = np.flatnonzero(changed)
    if len(index) <= _MOST_POINTS:
        return index
    begins = np.linspace(0, len(index), _MOST_POINTS, endpoint=False).astype(int)
    highest = np.maximum.reduceat(values[index], begins)
    pieces = np.repeat(np.arange(_MOST_POINTS), np.diff(np.append(begins, len(index))))
    is_highest = np.flatnonzero(values[index] == highest[pieces])
    first = np.unique(pieces[is_highest], return_index=True)[1]
    return index[is_highest[first]]
