"""The memory of steps: the highest that was sampled of a process between the begin and the end of each."""

from __future__ import annotations

import numpy as np

from zerotop.analysis.processes.ranks_and_hosts import FRESH_NS
from zerotop.session.reader import Session, Source
from zerotop.session.samples import Ints, Rows, Windows, iter_samples, merge_columns
from zerotop_probe.recording.tables import BEGIN, UNKNOWN

# Samples before a step's first that are looked at, so that a step shorter than a tick has the one before.
_EARLIER_ROWS = 512
# (table, its column, the steps' column) of what samplers beside a process say of it.
_SAMPLED_COLUMNS = (
    ("processes", "rss_bytes", "host_rss_bytes"),
    ("gpu_processes", "used_bytes", "nvml_process_bytes"),
)


def add_memory(session: Session, process: Source, rows: Rows) -> None:
    """Fills in the columns of bytes; ``rows`` are steps in order of the process that wrote ``process``."""
    begins, ends = rows["begin_unix_ns"], rows["end_unix_ns"]
    for kind in ("allocated", "reserved"):
        rows[f"{kind}_peak_bytes"] = UNKNOWN
    for source in session.process_sources("allocator", process.host, process.pid):
        if source.rank == process.rank:
            add_allocator(rows, source)
    for table, column, into in _SAMPLED_COLUMNS:
        sources = session.host_sources(table, process.host)
        window = int(begins[0]), int(ends[-1])
        parts = list(iter_samples(sources, *window, "pid", process.pid, rows_before=_EARLIER_ROWS))
        times, columns = merge_columns(parts, (column,))
        rows[into] = Windows(times, begins, ends, max_age_ns=FRESH_NS).find_highest(columns[column])


def add_allocator(rows: Rows, source: Source) -> None:
    """Raises the columns of allocated and reserved peaks to what this allocator's samples say of them."""
    begins, ends = rows["begin_unix_ns"], rows["end_unix_ns"]
    samples = source.between(int(begins[0]), int(ends[-1]), rows_before=_EARLIER_ROWS)
    windows = Windows(source.unix_times(samples), begins, ends, max_age_ns=FRESH_NS)
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


def _find_window_peaks(windows: Windows, peaks: Ints) -> Ints:
    """Where a peak is that since the last boundary: the highest of the step's own."""
    return np.where(windows.has_samples, windows.find_highest(peaks), UNKNOWN)


def _find_raised_peaks(windows: Windows, peaks: Ints) -> Ints:
    """Where a peak is the process's: known of a step that raised it."""
    padded = np.append(peaks, UNKNOWN)  # place -1: before the first sample nothing is known
    before, after = padded[windows.first_samples - 1], padded[windows.end_samples - 1]
    return np.where(after > before, after, UNKNOWN)
