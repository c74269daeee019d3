"""The memory of steps: the highest that was sampled of a process between the begin and the end of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.processes.ranks_and_hosts import FRESH_NS
from zerotop.session.reader import Session, Source
from zerotop_probe.recording.tables import BEGIN, UNKNOWN

Rows = NDArray[Any]
Ints = NDArray[np.int64]

# Samples before a step's first that are looked at, so that a step shorter than a tick has the one before.
_EARLIER_ROWS = 512
# (table, its column, the steps' column) of what samplers beside a process say of it.
_SAMPLED_COLUMNS = (
    ("processes", "rss_bytes", "host_rss_bytes"),
    ("gpu_processes", "used_bytes", "nvml_process_bytes"),
)


class StepWindows:
    """Samples at ``times`` (n,), sorted, seen through windows (begin, end] that follow one another (m,). Nanoseconds."""

    def __init__(self, times: Ints, begins: Ints, ends: Ints) -> None:
        self.first_samples = np.searchsorted(times, begins, "right")  # sample after the begin
        self.end_samples = np.searchsorted(times, ends, "right")  # sample after the end
        self.has_samples = self.first_samples < self.end_samples
        last = np.maximum(self.end_samples - 1, 0)
        fresh = (ends - times[last] < FRESH_NS) if len(times) else self.has_samples
        self._has_value = self.has_samples | (self.end_samples > 0) & fresh
        # An even place begins a window that the next odd place ends; one without samples has the last before.
        self._edges = np.stack([np.minimum(self.first_samples, last), self.end_samples], axis=1).ravel()

    def find_highest(self, values: Ints) -> Ints:
        """The highest value (n,) in each window, the last one before if it is fresh and none lies within, or UNKNOWN."""
        found = np.maximum.reduceat(np.append(values, UNKNOWN), self._edges)[::2]
        return np.where(self._has_value, found, UNKNOWN)


def add_memory(session: Session, process: Source, rows: Rows) -> None:
    """Fills in the columns of bytes; ``rows`` are steps in order of the process that wrote ``process``."""
    begins, ends = rows["begin_unix_ns"], rows["end_unix_ns"]
    for kind in ("allocated", "reserved"):
        rows[f"{kind}_peak_bytes"] = UNKNOWN
    for source in session.process_sources("allocator", process.host, process.pid):
        if source.rank == process.rank:
            add_allocator(rows, source)
    for table, column, into in _SAMPLED_COLUMNS:
        times, values = _read_samples(session.host_sources(table, process.host), process, column, rows)
        rows[into] = StepWindows(times, begins, ends).find_highest(values)


def add_allocator(rows: Rows, source: Source) -> None:
    """Raises the columns of allocated and reserved peaks to what this allocator's samples say of them."""
    samples = _read_between(source, rows)
    windows = StepWindows(samples["time_ns"] + source.offset_ns, rows["begin_unix_ns"], rows["end_unix_ns"])
    exact = _find_window_peaks if source.header.get("peaks") == "window" else _find_raised_peaks
    # The first reading's peak, at the begin of a phase, is that of all the process's life before: of making the engine, or,
    # where it was entered late, of nobody knows what.
    before = len(samples) and samples["time_ns"][0] == source.array["time_ns"][0] and samples["edge"][0] == BEGIN
    for kind in ("allocated", "reserved"):
        column = f"{kind}_peak_bytes"
        sampled, peaks = windows.find_highest(samples[f"{kind}_bytes"]), samples[column].astype(np.int64)
        if before and exact is _find_window_peaks:
            peaks[0] = samples[f"{kind}_bytes"][0]
        rows[column] = np.maximum.reduce([rows[column], sampled, exact(windows, peaks)])


def _find_window_peaks(windows: StepWindows, peaks: Ints) -> Ints:
    """Where a peak is that since the last boundary: the highest of the step's own."""
    return np.where(windows.has_samples, windows.find_highest(peaks), UNKNOWN)


def _find_raised_peaks(windows: StepWindows, peaks: Ints) -> Ints:
    """Where a peak is the process's: known of a step that raised it."""
    padded = np.append(peaks, UNKNOWN)  # place -1: before the first sample nothing is known
    before, after = padded[windows.first_samples - 1], padded[windows.end_samples - 1]
    return np.where(after > before, after, UNKNOWN)


def _read_samples(sources: Sequence[Source], process: Source, column: str, rows: Rows) -> tuple[Ints, Ints]:
    """Times and values of a process's samples that can bear on these steps, whichever samplers took them."""
    times, values = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for source in sources:
        samples = _read_between(source, rows)
        mine = np.flatnonzero(samples["pid"] == process.pid)
        times.append(samples["time_ns"][mine] + source.offset_ns)
        values.append(samples[column][mine])
    joined = np.concatenate(times)
    order = np.argsort(joined, kind="stable")
    return joined[order], np.concatenate(values)[order]


def _read_between(source: Source, rows: Rows) -> Rows:
    low = max(0, source.count_until(int(rows["begin_unix_ns"][0])) - _EARLIER_ROWS)
    return source.array[low : source.count_until(int(rows["end_unix_ns"][-1]))]
