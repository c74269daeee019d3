"""Sampled metrics of ranks in each step of a rank matrix: memory and cores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.ranks.matrix import METRIC_TABLES, Matrix, RankMatrix, RankMetric
from zerotop.recording.keys import GpuKey, ProcessKey
from zerotop.recording.moments.devices import locate_allocators
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Ints, Samples, Windows, iter_samples, split_samples
from zerotop.recording.steps.step_dtype import MEMORY_COLUMNS
from zerotop.recording.steps.step_memory import add_allocator
from zerotop_probe.recording.tables import FRESH_NS, UNKNOWN

# Read this much before and after the steps, for a sample before the first and after the last.
_AROUND_NS = 3_000_000_000
# The newest steps: their samples may not all be written yet.
_FRESH_STEPS = 4


class RankSamples:
    """Computes sampled metrics; the same array for the same matrix."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._last: dict[RankMetric, tuple[RankMatrix, Matrix]] = {}

    def is_recorded(self, metric: RankMetric) -> bool:
        """Whether the recording has samples of a metric."""
        return metric not in METRIC_TABLES or any(
            len(source.array) for source in self._recording.sources[METRIC_TABLES[metric]]
        )

    def read_metric(self, metric: RankMetric, matrix: RankMatrix) -> Matrix:
        """Return a metric, ranks x steps, NaN where unknown."""
        before = self._last.get(metric)
        if before is None or before[0] is not matrix:
            known = before if before is not None and before[0].processes == matrix.processes else None
            before = matrix, self._measure_metric(metric, matrix, known)
            self._last[metric] = before
        return before[1]

    def _measure_metric(self, metric: RankMetric, matrix: RankMatrix, before: tuple[RankMatrix, Matrix] | None) -> Matrix:
        values = np.full(matrix.ends.shape, np.nan, np.float32)
        missing = matrix.ends > 0
        if before is not None and len(before[0].steps) and len(matrix.steps):
            _copy_known(matrix, before, values, missing)
        rows = np.flatnonzero(missing.any(axis=1)).tolist()
        measures = {
            RankMetric.PEAK: self._measure_peaks,
            RankMetric.FREE: self._measure_free,
            RankMetric.CORES: self._measure_cores,
        }
        if rows:
            measures[metric](matrix, rows, missing, values)
        return values

    def _measure_peaks(self, matrix: RankMatrix, rows: Sequence[int], missing: NDArray[np.bool_], values: Matrix) -> None:
        by_process: dict[tuple[str, int, int], list[Source]] = {}
        for source in self._recording.sources["allocator"]:
            by_process.setdefault((source.host, source.pid, source.rank), []).append(source)
        for row in rows:
            process = matrix.processes[row].source
            steps = np.zeros(int(missing[row].sum()), matrix.processes[row].step_rows.dtype)
            steps["begin_unix_ns"], steps["end_unix_ns"] = matrix.begins[row, missing[row]], matrix.ends[row, missing[row]]
            steps["counted"] = matrix.counted[row, missing[row]]
            for column in MEMORY_COLUMNS:
                steps[column] = UNKNOWN
            for source in by_process.get((process.host, process.pid, process.rank), ()):
                add_allocator(steps, source)
            values[row, missing[row]] = _mask_unknown(steps["allocated_peak_bytes"])

    def _measure_free(self, matrix: RankMatrix, rows: Sequence[int], missing: NDArray[np.bool_], values: Matrix) -> None:
        located = locate_allocators(self._recording.at())
        gpu_by_process = {(source.host, source.pid): gpu for source, gpu in located.items()}
        samples = self._read_samples("gpus", "gpu", matrix, missing)
        for row in rows:
            source = matrix.processes[row].source
            gpu = gpu_by_process.get((source.host, source.pid))
            if gpu is not None and gpu in samples:
                times, records = samples[gpu]
                begins, ends = matrix.begins[row, missing[row]], matrix.ends[row, missing[row]]
                used = _mask_unknown(Windows(times, begins, ends, max_age_ns=FRESH_NS).find_highest(records["used_bytes"]))
                values[row, missing[row]] = (np.float32(records["total_bytes"][-1]) - used).astype(np.float32)

    def _measure_cores(self, matrix: RankMatrix, rows: Sequence[int], missing: NDArray[np.bool_], values: Matrix) -> None:
        """Interpolate processor time at the begin and end of each step: steps may be shorter than a tick."""
        samples = self._read_samples("processes", "pid", matrix, missing)
        for row in rows:
            source = matrix.processes[row].source
            if (source.host, source.pid) not in samples:
                continue
            times, records = samples[source.host, source.pid]
            begins, ends = matrix.begins[row, missing[row]], matrix.ends[row, missing[row]]
            cpu_ns = records["cpu_ns"].astype(np.float64)
            first = times[0]
            used = [np.interp(at - first, times - first, cpu_ns, left=np.nan, right=np.nan) for at in (begins, ends)]
            values[row, missing[row]] = ((used[1] - used[0]) / np.maximum(1, ends - begins)).astype(np.float32)

    def _read_samples(
        self, table: str, key: str, matrix: RankMatrix, missing: NDArray[np.bool_]
    ) -> dict[GpuKey | ProcessKey, Samples]:
        """Read the samples around the missing steps, by host and the column ``key``."""
        begin, end = int(matrix.begins[missing].min()) - _AROUND_NS, int(matrix.ends[missing].max()) + _AROUND_NS
        samples_by_key: dict[GpuKey | ProcessKey, Samples] = {}
        sources = self._recording.sources[table]
        for source, all_samples in zip(sources, iter_samples(sources, begin, end), strict=True):
            for value, samples in split_samples(all_samples, key):
                longest = samples_by_key.setdefault((source.host, value), samples)
                if len(samples.times) > len(longest.times):  # of several samplers of a node
                    samples_by_key[source.host, value] = samples
        return samples_by_key


def _copy_known(matrix: RankMatrix, before: tuple[RankMatrix, Matrix], values: Matrix, missing: NDArray[np.bool_]) -> None:
    """Copy the values of the same steps from the matrix before, except unknown ones of the newest steps."""
    shift = int(matrix.steps[0] - before[0].steps[0])
    low, high = max(0, shift), min(len(before[0].steps), shift + len(matrix.steps))
    if low >= high:
        return
    columns = slice(low - shift, high - shift)
    final = ~np.isnan(before[1][:, low:high])
    final[:, : max(0, len(before[0].steps) - _FRESH_STEPS - low)] = True
    same = (before[0].ends[:, low:high] == matrix.ends[:, columns]) & final
    values[:, columns] = np.where(same, before[1][:, low:high], np.nan)
    missing[:, columns] &= ~same


def _mask_unknown(values: Ints) -> Matrix:
    return np.where(values >= 0, values, np.nan).astype(np.float32)
