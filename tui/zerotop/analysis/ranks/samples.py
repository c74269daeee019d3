"""What was sampled of ranks in each of their steps: memory and cores, for the steps of a rank matrix."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.keys import GpuKey, ProcessKey
from zerotop.analysis.processes.ranks_and_hosts import FRESH_NS, locate_allocators
from zerotop.analysis.ranks.matrix import Matrix, Metric, RankMatrix
from zerotop.analysis.steps.step_memory import add_allocator
from zerotop.analysis.steps.step_table import MEMORY_COLUMNS
from zerotop.session.reader import Session, Source, run_to_end
from zerotop.session.samples import Ints, Samples, Windows, iter_samples, split_samples
from zerotop_probe.recording.tables import UNKNOWN

METRIC_TABLES = {Metric.PEAK: "allocator", Metric.FREE: "gpus", Metric.CORES: "processes"}
# Around the steps that are asked about: a sample before the first and after the last.
_AROUND_NS = 3_000_000_000
# The newest steps, of which samples may yet be written.
_FRESH_STEPS = 4
# Done in one go: rows, and tables.
_ROWS_AT_ONCE, _TABLES_AT_ONCE = 16, 4

Pieces = Generator[None, None, None]


class RankSamples:
    """Computes a metric that is sampled; the same array as before for the same matrix."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last: dict[Metric, tuple[RankMatrix, Matrix]] = {}

    def is_recorded(self, metric: Metric) -> bool:
        """Whether there is anything of it in the recording."""
        return metric not in METRIC_TABLES or any(
            len(source.array) for source in self._session.sources[METRIC_TABLES[metric]]
        )

    def read_metric(self, metric: Metric, matrix: RankMatrix) -> Matrix:
        """Ranks x steps, NaN where nothing is known."""
        return run_to_end(self.iter_metric(metric, matrix))

    def iter_metric(self, metric: Metric, matrix: RankMatrix) -> Generator[None, None, Matrix]:
        """The same in pieces of milliseconds; in one where it was told before."""
        before = self._last.get(metric)
        if before is None or before[0] is not matrix:
            known = before if before is not None and before[0].processes == matrix.processes else None
            before = matrix, (yield from self._iter_measure(metric, matrix, known))
            self._last[metric] = before
        return before[1]

    def _iter_measure(
        self, metric: Metric, matrix: RankMatrix, before: tuple[RankMatrix, Matrix] | None
    ) -> Generator[None, None, Matrix]:
        found = np.full(matrix.ends.shape, np.nan, np.float32)
        missing = matrix.ends > 0
        if before is not None and len(before[0].steps) and len(matrix.steps):
            _copy_known(matrix, before, found, missing)
        rows = np.flatnonzero(missing.any(axis=1)).tolist()
        tell = {Metric.PEAK: self._measure_peaks, Metric.FREE: self._measure_free, Metric.CORES: self._measure_cores}[metric]
        if rows:
            yield from tell(matrix, rows, missing, found)
        return found

    def _measure_peaks(self, matrix: RankMatrix, rows: Sequence[int], missing: NDArray[np.bool_], found: Matrix) -> Pieces:
        by_process: dict[tuple[str, int, int], list[Source]] = {}
        for source in self._session.sources["allocator"]:
            by_process.setdefault((source.host, source.pid, source.rank), []).append(source)
        for number, row in enumerate(rows, 1):
            if not number % _ROWS_AT_ONCE:
                yield
            process = matrix.processes[row].source
            steps = np.zeros(int(missing[row].sum()), matrix.processes[row].step_rows.dtype)
            steps["begin_unix_ns"], steps["end_unix_ns"] = matrix.begins[row, missing[row]], matrix.ends[row, missing[row]]
            for column in MEMORY_COLUMNS:
                steps[column] = UNKNOWN
            for source in by_process.get((process.host, process.pid, process.rank), ()):
                add_allocator(steps, source)
            found[row, missing[row]] = _mask_unknown(steps["allocated_peak_bytes"])

    def _measure_free(self, matrix: RankMatrix, rows: Sequence[int], missing: NDArray[np.bool_], found: Matrix) -> Pieces:
        nodes, engines = self._session.events_named("node"), self._session.events_named("engine")
        located = yield from locate_allocators(self._session, nodes, engines)
        allocators = self._session.sources["allocator"]
        lies_on = {(allocators[place].host, allocators[place].pid): gpu for place, gpu in located.items()}
        yield
        samples = yield from self._read_samples("gpus", "gpu", matrix, missing)
        for number, row in enumerate(rows, 1):
            if not number % _ROWS_AT_ONCE:
                yield
            source = matrix.processes[row].source
            gpu = lies_on.get((source.host, source.pid))
            if gpu is not None and gpu in samples:
                times, records = samples[gpu]
                begins, ends = matrix.begins[row, missing[row]], matrix.ends[row, missing[row]]
                used = _mask_unknown(Windows(times, begins, ends, max_age_ns=FRESH_NS).find_highest(records["used_bytes"]))
                found[row, missing[row]] = (np.float32(records["total_bytes"][-1]) - used).astype(np.float32)

    def _measure_cores(self, matrix: RankMatrix, rows: Sequence[int], missing: NDArray[np.bool_], found: Matrix) -> Pieces:
        """From processor time so far at the begin and the end of each step: steps may be shorter than a tick."""
        samples = yield from self._read_samples("processes", "pid", matrix, missing)
        for number, row in enumerate(rows, 1):
            if not number % _ROWS_AT_ONCE:
                yield
            source = matrix.processes[row].source
            if (source.host, source.pid) not in samples:
                continue
            times, records = samples[source.host, source.pid]
            begins, ends = matrix.begins[row, missing[row]], matrix.ends[row, missing[row]]
            cpu_ns = records["cpu_ns"].astype(np.float64)
            since = times[0]
            used = [np.interp(at - since, times - since, cpu_ns, left=np.nan, right=np.nan) for at in (begins, ends)]
            found[row, missing[row]] = ((used[1] - used[0]) / np.maximum(1, ends - begins)).astype(np.float32)

    def _read_samples(
        self, table: str, key: str, matrix: RankMatrix, missing: NDArray[np.bool_]
    ) -> Generator[None, None, dict[GpuKey | ProcessKey, Samples]]:
        """By host and ``key`` the times and records around the steps that are missing."""
        begin, end = int(matrix.begins[missing].min()) - _AROUND_NS, int(matrix.ends[missing].max()) + _AROUND_NS
        found: dict[GpuKey | ProcessKey, Samples] = {}
        for number, source in enumerate(self._session.sources[table], 1):
            if not number % _TABLES_AT_ONCE:
                yield
            for value, samples in split_samples(next(iter_samples([source], begin, end)), key):
                found.setdefault((source.host, value), samples)
                # Of several samplers of a node the one that saw more is believed.
                if len(samples.times) > len(found[source.host, value].times):
                    found[source.host, value] = samples
        return found


def _copy_known(matrix: RankMatrix, before: tuple[RankMatrix, Matrix], found: Matrix, missing: NDArray[np.bool_]) -> None:
    """Takes over what was told of the same steps before; what is not known of the newest may yet be written."""
    shift = int(matrix.steps[0] - before[0].steps[0])
    low, high = max(0, shift), min(len(before[0].steps), shift + len(matrix.steps))
    if low >= high:
        return
    there = slice(low - shift, high - shift)
    final = ~np.isnan(before[1][:, low:high])
    final[:, : max(0, len(before[0].steps) - _FRESH_STEPS - low)] = True
    same = (before[0].ends[:, low:high] == matrix.ends[:, there]) & final
    found[:, there] = np.where(same, before[1][:, low:high], np.nan)
    missing[:, there] &= ~same


def _mask_unknown(values: Ints) -> Matrix:
    return np.where(values >= 0, values, np.nan).astype(np.float32)
