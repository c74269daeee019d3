"""Sampled values of a recording as counters over time, thinned where nobody could see the difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.session.reader import Session, Source
from zerotop.session.samples import Floats, Ints, Rows
from zerotop_probe.recording.tables import UNKNOWN

# Of longer counters each piece keeps its highest value: a screen has a few thousand columns.
_MOST_POINTS = 40_000

BYTES, PERCENT, WATTS, CORES = "bytes", "%", "W", "cores"


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


def read_counters(session: Session) -> Iterator[Counter]:
    """Yield the counters of ranks, GPUs and hosts that have values."""
    for source in session.sources["allocator"]:
        owner = Owner(source.host, rank=source.rank)
        for name in ("allocated", "reserved"):
            yield from _make_counter(source, source.array, owner, f"{name} bytes", BYTES, f"{name}_bytes")
        source.release_memory()
    for source in session.sources["gpus"]:
        for index, rows in _split_rows(source.array, "gpu"):
            owner = Owner(source.host, gpu=index)
            yield from _make_counter(source, rows, owner, "device memory used", BYTES, "used_bytes")
            yield from _make_counter(source, rows, owner, "utilization", PERCENT, "utilization_percent")
            yield from _make_counter(source, rows, owner, "power", WATTS, "power_w")
        source.release_memory()
    for source in session.sources["processes"]:
        for index, rows in _split_rows(source.array[source.array["rank"] >= 0], "rank"):
            owner = Owner(source.host, rank=index)
            yield from _make_counter(source, rows, owner, "resident memory", BYTES, "rss_bytes")
            yield from _make_counter(source, rows, owner, "cores in use", CORES, "cores_used")
        source.release_memory()
    for source in session.sources["hosts"]:
        owner = Owner(source.host)
        yield from _make_counter(source, source.array, owner, "cores in use", CORES, "cores_used")
        yield from _make_counter(source, source.array, owner, "available memory", BYTES, "memory_available_bytes")


def _split_rows(rows: Rows, column: str) -> Iterator[tuple[int, Rows]]:
    for index in np.unique(rows[column]).tolist():
        yield index, rows[rows[column] == index]


def _make_counter(source: Source, rows: Rows, owner: Owner, name: str, unit: str, column: str) -> Iterator[Counter]:
    values = rows[column].astype(np.float64)
    known = np.isfinite(values) & (values != UNKNOWN)
    if known.any():
        times = source.unix_times(rows)[known]
        kept = thin_values(values[known])
        yield Counter(owner, name, unit, times[kept], values[known][kept])


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
