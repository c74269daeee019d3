"""Ranks by steps: the time of each rank in each of the last steps before a cursor.

Steps are matched by number, so that ranks that were entered late, or are behind, are in the right column.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.findings.support.thresholds import RECENT_STEPS
from zerotop.analysis.ranks.delays import RankDelay
from zerotop.analysis.steps.attempts import split_attempts
from zerotop.analysis.steps.sampled_parts import ALIKE_TIMES
from zerotop.recording.samples import Ints
from zerotop.recording.steps.missing_steps import find_recorded
from zerotop.recording.steps.step_table import RankSteps
from zerotop_probe.recording.metrics import BYTES, CORES, SECONDS, Metric
from zerotop_probe.recording.tables import UNKNOWN

Matrix = NDArray[np.floating[Any]]  # ranks x steps, NaN where nothing is known
_SKIPPING_RUN = 3  # steps that fp16 skips one after the other, before which figures do not look back
_ESTIMATED_RANKS = 256  # ranks of which phases are estimated together: each takes a table of steps by steps
_FEWEST_DELAYED = 5  # steps since a rank began to delay the others; figures then cover only these


class RankMetric(Enum):
    """A metric of each step: seconds of host time, or a sampled value; in the order in which they are offered."""

    ITERATION = Metric("iteration", SECONDS, "iteration_s", label="iteration")
    WAIT = Metric("wait", SECONDS, label="delays others")  # how long the median rank waited for this one to communicate
    PEAK = Metric("peak", BYTES, label="peak allocated")
    FREE = Metric("free", BYTES, label="least free")  # of the GPU
    CORES = Metric("cores", CORES, label="CPU cores")  # mean
    DATA = Metric("data", SECONDS, "data_s", label="data", style="phase-data")
    FORWARD = Metric("forward", SECONDS, "forward_s", label="forward", style="phase-forward")
    BACKWARD = Metric("backward", SECONDS, "backward_s", label="backward", style="phase-backward")
    STEP = Metric("step", SECONDS, "step_s", label="step", style="phase-step")
    OTHER = Metric("other", SECONDS, label="between phases", style="phase-other")
    APART = Metric("apart", SECONDS, label="saving, eval", style="phase-eval")  # no part of the iteration


METRIC_TABLES = {RankMetric.PEAK: "allocator", RankMetric.FREE: "gpus", RankMetric.CORES: "processes"}
"""The tables of sampled metrics."""
_EXTREMES = {RankMetric.PEAK: np.fmax, RankMetric.FREE: np.fmin}  # which leave out NaN
_PHASES = (RankMetric.DATA, RankMetric.FORWARD, RankMetric.BACKWARD, RankMetric.STEP, RankMetric.OTHER)
_RECORDED_METRICS = tuple(metric for metric in RankMetric if metric.value.column)


@dataclass(frozen=True, eq=False)
class RankMatrix:
    """The last steps of the ranks that train together at a cursor; a row per rank, a column per step."""

    processes: tuple[RankSteps, ...]
    counts: tuple[int, ...]  # finished steps of each process at the cursor
    steps: Ints  # number of each column's step, ascending by one
    begins: Ints  # ranks x steps, unix ns; 0 where the rank has not finished the step
    ends: Ints
    counted: NDArray[np.bool_]  # ranks x steps: only the end was recorded
    skipped: NDArray[np.bool_]  # of each step: fp16 overflowed, and a rank made no update
    times: dict[RankMetric, Matrix]
    recent_count: int = 0  # number of newest steps that belong together; figures are of them
    is_delayed: bool = False  # they are the steps since a rank began to delay the others
    meets_in_forward: bool = False  # ranks wait for each other in the forward, too
    delays: tuple[RankDelay, ...] = ()  # known at the cursor

    @property
    def recent_steps(self) -> Ints:
        """Numbers of the steps that figures are of."""
        return self.steps[len(self.steps) - self.recent_count :]

    def cut_recent(self, values: Matrix) -> Matrix:
        """Return the columns of the steps that figures are of; ``values`` ends with the newest step."""
        return values[:, max(0, values.shape[1] - self.recent_count) :]

    @cached_property
    def rank_numbers(self) -> Ints:
        return np.array([process.source.rank for process in self.processes], np.int64)

    @cached_property
    def host_names(self) -> tuple[str, ...]:
        return tuple(process.source.host for process in self.processes)

    @cached_property
    def usual_times(self) -> dict[RankMetric, Matrix]:
        """The usual time of each rank in its recent steps, (ranks,): see :func:`compute_usual`."""
        return {metric: compute_usual(metric, self.find_figured(metric, values)) for metric, values in self.times.items()}

    def find_figured(self, metric: RankMetric, values: Matrix) -> Matrix:
        """Return the values from which figures are made, ranks x steps; ``values`` are those of the metric."""
        return self.figured_times[metric] if metric in self.times and self.has_phases else self.cut_recent(values)

    @cached_property
    def figured_times(self) -> dict[RankMetric, Matrix]:
        """The times of the recent steps, ranks x steps, with estimates for steps that were only counted.

        Their phases are those of the rank's step that took most nearly as long, in proportion. NaN where none did, for
        iterations too, so that phases add up to them. Ranks are compared only where two of them are known.
        """
        times = {metric: self.cut_recent(values) for metric, values in self.times.items()}
        if not times:
            return times
        is_unknown = np.isnan(times[RankMetric.OTHER])
        # Those of a step that is not finished are unknown, too, and are not estimated.
        counted = np.flatnonzero((is_unknown & ~np.isnan(times[RankMetric.ITERATION])).any(axis=1))
        if not len(counted):
            return times
        times |= {metric: times[metric].copy() for metric in (RankMetric.ITERATION, *_PHASES)}
        for begin in range(0, len(counted), _ESTIMATED_RANKS):
            _estimate_phases(times, counted[begin : begin + _ESTIMATED_RANKS])
        times[RankMetric.WAIT] = _compute_waits(times, self.meets_in_forward)
        return times

    @cached_property
    def estimated_metrics(self) -> frozenset[RankMetric]:
        """The metrics whose figures are not only of recorded values: see :attr:`figured_times`."""
        if not self.times or not self.has_phases:
            return frozenset()
        pairs = ((metric, self.cut_recent(self.times[metric]), values) for metric, values in self.figured_times.items())
        return frozenset(metric for metric, own, values in pairs if not np.array_equal(own, values, equal_nan=True))

    @property
    def has_phases(self) -> bool:
        """Whether the phases of any recent step are known."""
        return not np.isnan(self.cut_recent(self.times[RankMetric.OTHER])).all()

    def find_usual(self, metric: RankMetric, values: Matrix) -> Matrix:
        """Return the usual value of each rank in its recent steps, (ranks,); ``values`` are those of the metric."""
        return self.usual_times[metric] if metric in self.times else compute_usual(metric, self.cut_recent(values))

    @property
    def figured_steps(self) -> int:
        """The most steps of a rank whose phases are known; those of others are estimated from them."""
        phased = ~np.isnan(self.cut_recent(self.times[RankMetric.OTHER])) if self.times else np.empty((0, 0))
        return int(phased.sum(axis=1).max(initial=0)) or self.recent_count

    def cut_to(self, steps: int) -> RankMatrix:
        """Return the matrix with figures of its last ``steps`` steps only."""
        return self if steps == self.recent_count else replace(self, recent_count=steps)


EMPTY_MATRIX = RankMatrix(
    (),
    (),
    np.empty(0, np.int64),
    np.empty((0, 0), np.int64),
    np.empty((0, 0), np.int64),
    np.empty((0, 0), np.bool_),
    np.empty(0, np.bool_),
    {},
)


class RankMatrices:
    """The matrix at any cursor; the same object until a rank finishes another step."""

    def __init__(self) -> None:
        self._last = EMPTY_MATRIX
        self._last_request: tuple[object, ...] = ()

    def matrix_at(
        self,
        processes: Sequence[RankSteps],
        cursor_ns: int,
        columns: int,
        *,
        meets_in_forward: bool,
        delays: tuple[RankDelay, ...] = (),
    ) -> RankMatrix:
        """Return the matrix of the last ``columns`` steps.

        ``processes``: all rank processes of the recording, oldest first. ``meets_in_forward``: ranks wait for each other in
        the forward too (ZeRO-3), not only from the backward on. ``delays``: those known at the cursor. While one lasts,
        figures cover the steps since it began.
        """
        attempt = _find_attempt(processes, cursor_ns)
        counts = tuple(_count_until(process, cursor_ns) for process in attempt)
        request = (attempt, counts, columns, meets_in_forward, delays)
        if request != self._last_request:
            self._last_request = request
            matrix = _build_matrix(attempt, counts, max(1, columns), meets_in_forward)
            delayed = next((count for delay in reversed(delays) if (count := _count_delayed(matrix, delay))), None)
            recent = min(delayed or RECENT_STEPS, _count_after_skipping(matrix.skipped), _count_after_start(matrix))
            self._last = replace(matrix, recent_count=recent, is_delayed=delayed is not None, delays=delays)
        return self._last


def _count_delayed(matrix: RankMatrix, delay: RankDelay) -> int:
    """Return the number of steps since a delay began; 0 where it is over, too new, or as old as figures look back."""
    rows = np.flatnonzero(matrix.rank_numbers == delay.rank)
    if not len(rows) or not matrix.times:
        return 0
    row = int(rows[0])
    count = int(np.count_nonzero(np.maximum.accumulate(matrix.ends[row] > delay.begin_ns)))
    if not _FEWEST_DELAYED <= count < min(RECENT_STEPS, len(matrix.steps)):
        return 0
    waits = matrix.times[RankMetric.WAIT][row, -count:]
    usual, last = (float(compute_median(part[None, :], 1)[0]) for part in (waits, waits[-_FEWEST_DELAYED:]))
    return count if usual > 0 and last >= usual / 2 else 0


def _count_after_start(matrix: RankMatrix) -> int:
    """Return the number of steps without the first one of the processes, if there are enough: it starts up and compiles."""
    steps = len(matrix.steps)
    return steps - 1 if steps > _FEWEST_DELAYED and max(matrix.counts) <= steps else steps


def _count_after_skipping(skipped: NDArray[np.bool_]) -> int:
    """Return the number of steps since fp16 stopped skipping them one after the other; of all if it still does.

    Steps without the optimizer must not be mixed with others. A single skipped step does not matter to a median.
    """
    if len(skipped) < _SKIPPING_RUN:
        return len(skipped)
    runs = np.flatnonzero(np.convolve(skipped, np.ones(_SKIPPING_RUN), "valid") == _SKIPPING_RUN)
    since = len(skipped) - (int(runs[-1]) + _SKIPPING_RUN) if len(runs) else 0
    return since or len(skipped)


def _find_attempt(processes: Sequence[RankSteps], cursor_ns: int) -> tuple[RankSteps, ...]:
    """Return the processes that train together at the cursor, by rank."""
    attempts = split_attempts(process for process in processes if process.source.created_ns <= cursor_ns)
    return tuple(sorted(attempts[-1], key=lambda process: process.source.rank)) if attempts else ()


def _count_until(process: RankSteps, cursor_ns: int) -> int:
    rows = process.step_rows
    if len(rows) and rows["end_unix_ns"][-1] <= cursor_ns:
        return len(rows)
    return bisect_right(rows["end_unix_ns"], cursor_ns)


def _build_matrix(
    processes: tuple[RankSteps, ...], counts: tuple[int, ...], columns: int, meets_in_forward: bool
) -> RankMatrix:
    known = [(process, count) for process, count in zip(processes, counts, strict=True) if count]
    if not known:
        return replace(EMPTY_MATRIX, processes=processes, counts=counts)
    last = max(int(process.step_rows["step"][count - 1]) for process, count in known)
    first = max(last - columns + 1, min(int(process.step_rows["step"][max(0, count - columns)]) for process, count in known))
    first = min(first, last)  # in a damaged recording the last step may not have the highest number
    shape = (len(processes), last - first + 1)
    times = {metric: np.full(shape, np.nan, np.float32) for metric in (*_RECORDED_METRICS, RankMetric.APART)}
    begins, ends, counted = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    skipped = np.zeros(shape[1], np.bool_)
    for row, (process, count) in enumerate(zip(processes, counts, strict=True)):
        tail = process.step_rows[max(0, count - shape[1]) : count]
        if not (recorded := find_recorded(tail)).all():
            tail = tail[recorded]
        column = tail["step"] - first
        if not (shown := (column >= 0) & (column < shape[1])).all():
            tail, column = tail[shown], column[shown]
        if not len(column):
            continue
        # Steps are consecutive, except after loading a checkpoint and where some were not recorded.
        is_run = int(column[-1] - column[0]) + 1 == len(column)
        cells = slice(int(column[0]), int(column[-1]) + 1) if is_run else column
        begins[row, cells], ends[row, cells] = tail["begin_unix_ns"], tail["end_unix_ns"]
        counted[row, cells] = tail["counted"]
        skipped[cells] |= tail["skipped"]
        for metric in _RECORDED_METRICS:
            values = tail[metric.value.column]
            times[metric][row, cells] = values if values.dtype.kind == "f" else np.where(values == UNKNOWN, np.nan, values)
        times[RankMetric.APART][row, cells] = np.nan_to_num(tail["eval_s"] + tail["checkpoint_s"])
    _derive_times(times, meets_in_forward)
    steps = np.arange(first, last + 1)
    return RankMatrix(processes, counts, steps, begins, ends, counted, skipped, times, meets_in_forward=meets_in_forward)


def _derive_times(times: dict[RankMetric, Matrix], meets_in_forward: bool) -> None:
    """Add the metrics that follow from the recorded ones."""
    met = times[RankMetric.BACKWARD] + times[RankMetric.STEP]
    known = met + times[RankMetric.FORWARD] + times[RankMetric.DATA]
    times[RankMetric.OTHER] = np.maximum(0, times[RankMetric.ITERATION] - known)
    times[RankMetric.WAIT] = _compute_waits(times, meets_in_forward)


def _compute_waits(times: dict[RankMetric, Matrix], meets_in_forward: bool) -> Matrix:
    """Return how long the median rank waits for each one: the longer, the longer it takes before it communicates."""
    alone = times[RankMetric.ITERATION] + times[RankMetric.APART] - times[RankMetric.BACKWARD] - times[RankMetric.STEP]
    if meets_in_forward:
        alone = alone - times[RankMetric.FORWARD]
    is_comparable = np.count_nonzero(~np.isnan(alone), axis=0) >= min(2, len(alone))
    waits: Matrix = np.where(is_comparable, np.maximum(0, alone - compute_median(alone, 0)[None, :]), np.nan)
    return waits.astype(np.float32)


def _estimate_phases(times: dict[RankMetric, Matrix], ranks: NDArray[np.intp]) -> None:
    """Fill in the phases of some ranks' steps that were only counted, see ``figured_times``."""
    seconds, is_unknown = times[RankMetric.ITERATION][ranks], np.isnan(times[RankMetric.OTHER][ranks])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = seconds[:, :, None] / np.where(is_unknown, np.nan, seconds)[:, None, :]  # ranks x steps x like which step
        distance = np.nan_to_num(np.abs(np.log(ratio)), nan=np.inf)
    like = distance.argmin(axis=2)
    rows = np.arange(len(seconds))[:, None]
    is_like = is_unknown & (distance.min(axis=2, initial=np.inf) <= np.log(ALIKE_TIMES))
    for metric in _PHASES:
        own = times[metric][ranks]
        times[metric][ranks] = np.where(is_like, own[rows, like] * ratio[rows, np.arange(seconds.shape[1]), like], own)
    times[RankMetric.ITERATION][ranks] = np.where(is_unknown & ~is_like, np.nan, seconds)


def compute_usual(metric: RankMetric, values: Matrix) -> Matrix:
    """Return the figure of each rank, (ranks,): the mean of times, the highest peak, the least free memory, median cores.

    Means of phases add up, and others wait for each pause of a rank, however rare they are.
    """
    if metric in _EXTREMES:
        return np.asarray(_EXTREMES[metric].reduce(values, axis=1, initial=np.nan), np.float32)
    if metric in METRIC_TABLES:
        return compute_median(values, 1)
    known = ~np.isnan(values)
    count = known.sum(axis=1)
    mean: Matrix = np.where(count > 0, np.where(known, values, 0).sum(axis=1) / np.maximum(1, count), np.nan)
    return mean.astype(np.float32)


def compute_median(values: Matrix, axis: int) -> Matrix:
    """Return the median along an axis without NaN, the lower of two in the middle; NaN where all are."""
    if not values.size:
        return np.full(values.shape[1 - axis], np.nan, np.float32)
    ordered = np.sort(values, axis=axis)  # NaN comes last
    known = np.count_nonzero(~np.isnan(values), axis=axis)
    indices = np.expand_dims(np.maximum(known - 1, 0) // 2, axis)
    median: Matrix = np.take_along_axis(ordered, indices, axis).squeeze(axis)
    return median
