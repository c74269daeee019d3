"""``zerotop fit``: for each series the largest sequence length or micro-batch that fits, with few real runs.

A search that was interrupted starts again with the existing results, which lead it to the same point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from zerotop.analysis.sweeps.baseline import NoBaselineError, read_baseline
from zerotop.analysis.sweeps.search import LargestResult, LargestSearch, SearchShortage
from zerotop.commands.sweeping.fit_start import Knowledge, find_start
from zerotop.commands.sweeping.point_run import Interrupted, run_point
from zerotop.commands.sweeping.point_runner import PointRunner
from zerotop.recording.reader import Recording, RecordingError
from zerotop.recording.sweeps import OK, OUT_OF_MEMORY, Point, Result, Sweep, Value, find_point_recording, write_sweep

# What a process takes besides PyTorch's memory, until one has been measured: CUDA's context and libraries.
_OTHER_BYTES = 1 << 30


class FitRunner(PointRunner):
    """Searches series one after another. Points are added to the sweep as they are tried."""

    def __init__(
        self,
        sweep: Sweep,
        series: Sequence[Point],
        searched: str,
        *,
        most_runs: int,
        gpu_bytes: int | None,
        known: Knowledge,
        on_result: Callable[[Point], None] = lambda point: None,
    ) -> None:
        """``series``: the combinations of the other settings, impossible ones with a result; ``searched``: the setting to
        maximize; ``gpu_bytes``: memory of one GPU, None without one.
        """
        super().__init__(sweep)
        self.searched = searched
        self.most_runs = most_runs
        self.runs = 0
        self.results: tuple[LargestResult, ...] = ()  # one for each series so far, the one that is searched now included
        self.series_count = len(series)
        self._series = series
        self._gpu_bytes = gpu_bytes
        self._other_bytes = _OTHER_BYTES
        self._knowledge = known
        self._on_result = on_result
        self._known = {
            self._make_key(point.settings): point.result
            for point in sweep.points
            if point.result is not None and point.result.outcome in (OK, OUT_OF_MEMORY)
        }

    def estimate_left_s(self) -> float | None:
        """Return None: how many runs a search takes is known at its end."""
        return None

    def _run_points(self) -> None:
        for series in self._series:
            if series.result is not None:
                impossible = LargestResult(series.settings, None, None, True, None, None, 0, series.result.reason)
                self.results = (*self.results, impossible)
            else:
                self._find_largest(series.settings)

    def _find_largest(self, settings: Mapping[str, Value]) -> None:
        """Search one series. Raises Interrupted, and OSError if nothing can be written."""
        values = sorted({int(value) for value in self.sweep.plan.settings[self.searched]})
        limit = None if self._gpu_bytes is None else float(self._gpu_bytes - self._other_bytes)
        search = LargestSearch(values, limit)
        self._find_start(search, settings)
        before, done = self.results, self.runs
        result = LargestResult(settings, None, None, False, search.predict_largest(), None, 0)
        try:
            while not result.problem and (value := search.choose_next()) is not None:
                result = _add_knowledge(result, search)
                self.results = (*before, result)
                if self.runs >= self.most_runs:
                    result = replace(result, problem=f"the limit of {self.most_runs} runs is reached")
                else:
                    result = self._try_value(search, result, value)
                result = replace(result, runs=self.runs - done)
        except Interrupted:
            result = replace(result, problem="interrupted")
            raise
        finally:
            result = _add_knowledge(result, search)
            self.results = (*before, result)

    def _try_value(self, search: LargestSearch, result: LargestResult, value: int) -> LargestResult:
        """Run one value; return the updated result of the series."""
        tried = self._run({**result.settings, self.searched: value})
        if tried.outcome == OUT_OF_MEMORY:
            shortage = (
                None if tried.needed_bytes is None else SearchShortage(tried.needed_bytes, tried.unusable_bytes or 0.0)
            )
            search.note_failing(value, shortage)
            if value != search.values[search.smallest_failing]:
                return result
            return replace(result, failing=value, fragmented_bytes=self._find_fragmented(tried))
        if tried.outcome != OK:
            return replace(result, problem=f"{self.searched.replace('_', '-')} {value} {tried.outcome}: {tried.reason}")
        search.note_fitting(value, tried.allocated_peak_bytes)
        if self._gpu_bytes is not None and tried.nvml_peak_bytes and tried.reserved_peak_bytes:
            self._other_bytes = max(0, tried.nvml_peak_bytes - tried.reserved_peak_bytes)
            search.limit_bytes = float(self._gpu_bytes - self._other_bytes)
        self._learn(tried)
        self._find_start(search, result.settings)
        is_largest = value == search.values[search.largest_fitting]
        return replace(result, largest=value, allocated_bytes=tried.allocated_peak_bytes) if is_largest else result

    def _run(self, settings: Mapping[str, Value]) -> Result:
        """Run one value unless it has a result; its attempts count as runs."""
        known = self._known.get(self._make_key(settings))
        if known is not None:
            self.runs += known.attempts
            return known
        before = self.sweep
        point = Point(len(before.points), {name: settings[name] for name in before.plan.settings})
        self.sweep = replace(before, points=(*before.points, point))
        plan = replace(before.plan, retries=min(before.plan.retries, self.most_runs - self.runs - 1))
        try:
            result = run_point(before.path, plan, point, is_stopping=self.is_stopping, on_attempt=self.note_attempt)
        except Interrupted:
            self.sweep = before
            raise
        self.forget_attempt(point.number)
        self.runs += result.attempts
        self.sweep = self.sweep.with_result(point.number, result)
        write_sweep(self.sweep)
        self._on_result(self.sweep.points[point.number])
        return result

    def _make_key(self, settings: Mapping[str, Value]) -> tuple[Value, ...]:
        return tuple(settings[name] for name in self.sweep.plan.settings)

    def _find_fragmented(self, tried: Result) -> int | None:
        """Return the bytes in blocks too small for the request of a run that would have fit with them; None otherwise."""
        if tried.needed_bytes is None or not tried.unusable_bytes or self._gpu_bytes is None:
            return None
        would_fit = tried.needed_bytes <= self._gpu_bytes - self._other_bytes
        return tried.unusable_bytes if would_fit else None

    def _find_start(self, search: LargestSearch, settings: Mapping[str, Value]) -> None:
        """Predict memory by what-if from the last run or the given recording; without one by the formulas."""
        predict = self._knowledge.predict
        start = find_start(predict, settings, self.searched, search.values, search.limit_bytes) if predict else None
        if start is not None:
            search.formula, search.unusable_slope = start

    def _learn(self, result: Result) -> None:
        """Start what-if from a run, if its recording tells enough."""
        path = find_point_recording(self.sweep.path, result)
        try:
            if path is not None:
                self._knowledge = self._knowledge._replace(base=read_baseline(Recording.open(path)))
        except (NoBaselineError, RecordingError):
            return  # what was known before stays


def _add_knowledge(result: LargestResult, search: LargestSearch) -> LargestResult:
    """Return a result with the search's predictions from the runs so far."""
    return replace(
        result,
        is_final=search.is_over,
        expected=search.predict_largest(),
        line=search.line,
        limit_bytes=search.limit_bytes,
    )
