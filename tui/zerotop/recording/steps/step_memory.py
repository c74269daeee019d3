"""The memory of steps: the highest sample of a process between the begin and end of each."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.samples import Ints, Rows, Windows, iter_samples
from zerotop.recording.table_files import Source
from zerotop_probe.recording.tables import BEGIN, FRESH_NS, TICK, UNKNOWN

# Records read before the first step, so that a step shorter than a tick has the sample before.
_EARLIER_ROWS = 512


def measure_held_bytes(rows: Rows, prefix: str = "") -> Ints:
    """Return the anonymous and shared memory in records of PROCESSES or FOLDED; all resident memory where it is unknown.

    Pages of files are left out: the kernel reads them again after it has dropped them. ``prefix``: of the columns' names.
    """
    resident: Ints = rows[f"{prefix}rss_bytes"]
    held = rows[f"{prefix}held_bytes"] if f"{prefix}held_bytes" in (rows.dtype.names or ()) else 0
    return np.where(held > 0, held, resident)


# The steps' columns of values sampled from outside the process, by table, and how to read each from its records.
_SAMPLED_COLUMNS: dict[str, dict[str, Callable[[Rows], Ints]]] = {
    "processes": {"host_rss_bytes": itemgetter("rss_bytes"), "host_held_bytes": measure_held_bytes},
    "gpu_processes": {"nvml_process_bytes": itemgetter("used_bytes")},
}

if TYPE_CHECKING:
    from zerotop.recording.reader import Recording


def add_memory(recording: Recording, process: Source, rows: Rows) -> None:
    """Fill in the columns of bytes; ``rows`` are steps, in order, of the process that wrote the table ``process``."""
    begins, ends = rows["begin_unix_ns"], rows["end_unix_ns"]
    for kind in ("allocated", "reserved"):
        rows[f"{kind}_peak_bytes"] = UNKNOWN
    for source in recording.process_sources("allocator", process.host, process.pid):
        if source.rank == process.rank:
            add_allocator(rows, source)
    for table, columns in _SAMPLED_COLUMNS.items():
        sources = recording.host_sources(table, process.host)
        window = int(begins[0]), int(ends[-1])
        parts = list(iter_samples(sources, *window, "pid", process.pid, rows_before=_EARLIER_ROWS))
        times = np.concatenate([np.empty(0, np.int64), *(part.times for part in parts)])
        order = np.argsort(times, kind="stable")
        windows = Windows(times[order], begins, ends, max_age_ns=FRESH_NS)
        for step_column, measure in columns.items():
            values = np.concatenate([np.empty(0, np.int64), *(measure(part.rows) for part in parts)])
            rows[step_column] = windows.find_highest(values[order])


def add_allocator(rows: Rows, source: Source) -> None:
    """Raise the columns of allocated and reserved peaks to the peaks of this allocator's samples."""
    begins, ends = rows["begin_unix_ns"], rows["end_unix_ns"]
    samples = source.between(int(begins[0]), int(ends[-1]), rows_before=_EARLIER_ROWS)
    windows = Windows(source.unix_times(samples), begins, ends, max_age_ns=FRESH_NS)
    exact = _find_window_peaks if source.header.get("peaks") == "window" else _find_raised_peaks
    # After counted steps the peak of all of them is read at the end of the last one.
    is_read = ~rows["counted"] | _has_readings(samples, source, begins, ends)
    # The first reading's peak, at the begin of a phase, covers all the process's life before.
    is_first = len(samples) and samples["time_ns"][0] == source.array["time_ns"][0] and samples["edge"][0] == BEGIN
    for kind in ("allocated", "reserved"):
        column = f"{kind}_peak_bytes"
        sampled, peaks = windows.find_highest(samples[f"{kind}_bytes"]), samples[column].astype(np.int64)
        if is_first and exact is _find_window_peaks:
            peaks[0] = samples[f"{kind}_bytes"][0]
        highest = np.maximum.reduce([rows[column], sampled, exact(windows, peaks)])
        rows[column] = np.where(is_read, highest, rows[column])


def _has_readings(samples: Rows, source: Source, begins: Ints, ends: Ints) -> NDArray[np.bool_]:
    """Return whether the allocator was read in each step for its peak, and not only by the ticker."""
    times = source.unix_times(samples[samples["edge"] != TICK])
    read: NDArray[np.bool_] = np.searchsorted(times, ends, "right") > np.searchsorted(times, begins, "right")
    return read


def _find_window_peaks(windows: Windows, peaks: Ints) -> Ints:
    """Return the highest of each step's own peaks, where each covers the time since the last boundary."""
    return np.where(windows.has_samples, windows.find_highest(peaks), UNKNOWN)


def _find_raised_peaks(windows: Windows, peaks: Ints) -> Ints:
    """Return the peak of each step that raised it, where peaks cover the process's life."""
    padded = np.append(peaks, UNKNOWN)  # index -1: before the first sample
    before, after = padded[windows.first_samples - 1], padded[windows.end_samples - 1]
    return np.where(after > before, after, UNKNOWN)
