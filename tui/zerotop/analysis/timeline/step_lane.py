"""A rank's finished steps, indexed by time: how long each took, and its phases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from zerotop.analysis.timeline.resample import LaneSeries, Series, SeriesColumns
from zerotop.recording.samples import Floats, Ints, Rows
from zerotop.recording.steps.growable_array import GrowingArray
from zerotop.recording.steps.missing_steps import find_recorded
from zerotop.recording.steps.step_table import RankSteps
from zerotop_probe.recording.tables import PHASE_CODE, PHASES

_COLUMNS = {
    "data": "data_s",
    "forward": "forward_s",
    "backward": "backward_s",
    "step": "step_s",
    "eval": "eval_s",
    "checkpoint_save": "checkpoint_s",
}
_CODES = [PHASE_CODE[name] for name in _COLUMNS]
# Steps between two cached sums.
_STEPS_PER_SUM = 32


class StepTimes:
    """Times and phases of one process's steps; grows with them."""

    def __init__(self, process: RankSteps) -> None:
        self._process = process
        self._borders = GrowingArray(np.int64)  # begin of the first step, then the end of each
        self._sums_until = np.zeros((1, len(_COLUMNS) + 1))  # seconds before every _STEPS_PER_SUM-th step

    def update(self) -> None:
        """Read the steps finished since the last call."""
        done = max(0, len(self._borders) - 1)
        rows = self._process.step_rows[done:]
        if not len(rows):
            return
        if not done:
            self._borders.add_rows(1)[:] = rows["begin_unix_ns"][0]
        self._borders.add_rows(len(rows))[:] = rows["end_unix_ns"]
        summed, whole = len(self._sums_until) - 1, len(self._process.step_rows) // _STEPS_PER_SUM
        if whole > summed:
            rows = self._process.step_rows[summed * _STEPS_PER_SUM : whole * _STEPS_PER_SUM]
            sums = _measure_columns(rows).reshape(-1, _STEPS_PER_SUM, len(_COLUMNS) + 1).sum(axis=1)
            self._sums_until = np.concatenate((self._sums_until, self._sums_until[-1] + sums.cumsum(axis=0)))

    @property
    def step_borders(self) -> Ints:
        """Begin of the first step, then the end of each (unix nanoseconds); empty before the first step is finished."""
        return self._borders.rows

    def read_finished_seconds(self, begin_ns: int, end_ns: int) -> Floats:
        """Return the seconds of each recorded iteration that ended in (begin, end] (unix nanoseconds)."""
        low, high = np.searchsorted(self.step_borders[1:], (begin_ns, end_ns), "right")
        rows = self._process.step_rows[low:high]
        return np.array(rows["iteration_s"][find_recorded(rows)], np.float64)

    def find_begun(self, begin_ns: int, end_ns: int) -> tuple[Ints, Ints]:
        """Return (begins, numbers) of the steps that began between two moments, including the one in progress."""
        low, high = (int(index) for index in np.searchsorted(self.step_borders, (begin_ns, end_ns)))
        numbers = np.array(self._process.step_rows["step"][low:high], np.int64)
        if low < high == len(self.step_borders):
            numbers = np.append(numbers, self._process.step_rows["step"][-1] + 1)
        return self.step_borders[low:high], numbers

    def find_step_at(self, unix_ns: int) -> int | None:
        """Return the number of the step in progress at a moment, None before the first one."""
        index = int(np.searchsorted(self.step_borders, unix_ns, "right")) - 1
        if index < 0 or len(self.step_borders) < 2:
            return None
        numbers = self._process.step_rows["step"]
        return int(numbers[index]) if index < len(self.step_borders) - 1 else int(numbers[index - 1]) + 1

    def measure_phases(self, edges: Ints) -> Floats:
        """Return the seconds in each phase between each two edges (unix nanoseconds), shape (phases, columns).

        Steps that were not recorded are in no phase, counted ones only in evaluations and checkpoints.
        """
        seconds = np.zeros((len(PHASES), len(edges) - 1))
        if len(self.step_borders) < 2:
            return seconds
        edges = np.clip(edges, self.step_borders[0], self.step_borders[-1])
        # Of a damaged recording the first step may begin after its end.
        index = np.clip(np.searchsorted(self.step_borders, edges, "right") - 1, 0, len(self.step_borders) - 2)
        begin, end = self.step_borders[index], self.step_borders[index + 1]
        *sums, recorded_s = np.diff(self._sum_until(index, (edges - begin) / np.maximum(1, end - begin)), axis=0).T
        seconds[_CODES] = np.maximum(0.0, sums)
        seconds[PHASE_CODE["other"]] = np.maximum(0.0, recorded_s - seconds.sum(axis=0))
        return seconds

    def find_gaps(self, begin_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """Return the begin and end of each time in a window in which steps were not recorded (unix nanoseconds)."""
        low, high = np.searchsorted(self.step_borders[1:], (begin_ns, end_ns), "right")
        rows = self._process.step_rows[low : high + 1]
        rows = rows[~find_recorded(rows)]
        return sorted(set(zip(rows["begin_unix_ns"].tolist(), rows["end_unix_ns"].tolist(), strict=True)))

    def _sum_until(self, index: Ints, part: Floats) -> Floats:
        """Return the sums of _measure_columns() before these steps, plus a share ``part`` of each step itself."""
        near = (index // _STEPS_PER_SUM * _STEPS_PER_SUM)[:, None] + np.arange(_STEPS_PER_SUM)
        weights = np.where(near < index[:, None], 1.0, np.where(near == index[:, None], part[:, None], 0.0))
        rows = self._process.step_rows[np.minimum(near, len(self._process.step_rows) - 1)]
        added = (_measure_columns(rows) * weights[..., None]).sum(axis=1)
        return np.asarray(self._sums_until[index // _STEPS_PER_SUM] + added)

    def make_series(self, begin_ns: int, end_ns: int) -> Series:
        """Return the seconds of each iteration that overlaps a window."""
        low = max(0, int(np.searchsorted(self.step_borders, begin_ns, "right")) - 1)
        high = int(np.searchsorted(self.step_borders, end_ns, "left")) + 1
        borders = self.step_borders[low:high]
        rows = self._process.step_rows[low : low + max(0, len(borders) - 1)]
        return Series(borders[:-1], borders[1:], rows["iteration_s"][None, :].astype(np.float64))


def _measure_columns(rows: Rows) -> Floats:
    """Return the seconds of each step in each of _COLUMNS, and in all; 0 where these are unknown. Adds a last axis."""
    whole = (rows["end_unix_ns"] - rows["begin_unix_ns"]) / 1e9
    whole = np.where(rows["counted"], rows["eval_s"] + rows["checkpoint_s"], whole)
    columns = [*(rows[column] for column in _COLUMNS.values()), np.where(find_recorded(rows), whole, 0.0)]
    return np.asarray(np.nan_to_num(np.stack(columns, axis=-1)), np.float64)


class IterationColumns(SeriesColumns):
    """Seconds that iterations took, in columns of time."""

    names = ("iteration",)

    def __init__(self, steps: Sequence[StepTimes]) -> None:
        self._steps = steps

    def read_series(self, begin_ns: int, end_ns: int) -> Iterable[LaneSeries]:
        return (LaneSeries(0, times.make_series(begin_ns, end_ns)) for times in self._steps if len(times.step_borders))

    def count_records(self) -> int:
        return sum(len(times.step_borders) for times in self._steps)

    def find_final_ns(self) -> int:
        return max((int(times.step_borders[-1]) for times in self._steps if len(times.step_borders)), default=0)
