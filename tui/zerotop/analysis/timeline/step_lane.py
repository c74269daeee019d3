"""A rank's finished steps, laid out to be searched: how long each took, and what it was made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from zerotop.analysis.steps.growable_array import GrowingArray
from zerotop.analysis.steps.step_table import RankSteps
from zerotop.analysis.timeline.resample import LaneSeries, Series, SeriesColumns
from zerotop.session.samples import Floats, Ints
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
# Sums are kept of every so many steps.
_STEPS_PER_SUM = 32


class StepTimes:
    """When one process's steps were and what they are made of. Grows with its steps."""

    def __init__(self, process: RankSteps) -> None:
        self._process = process
        self._borders = GrowingArray(np.int64)  # begin of the first step, then the end of each
        self._sums_until = np.zeros((1, len(_COLUMNS)))  # seconds before every _EACH-th step

    def update(self) -> None:
        """Takes in steps finished since."""
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
            sums = np.stack([rows[column].reshape(-1, _STEPS_PER_SUM).sum(axis=1) for column in _COLUMNS.values()], axis=1)
            self._sums_until = np.concatenate((self._sums_until, self._sums_until[-1] + sums.cumsum(axis=0)))

    @property
    def step_borders(self) -> Ints:
        """The begin of the first step, then the end of each; empty before the first one is finished."""
        return self._borders.rows

    @property
    def step_numbers(self) -> Ints:
        """The steps' own numbers."""
        return np.asarray(self._process.step_rows["step"])

    def read_finished_seconds(self, begin_ns: int, end_ns: int) -> Floats:
        """Seconds that those iterations took that ended after the begin and up to the end (unix nanoseconds)."""
        low, high = np.searchsorted(self.step_borders[1:], (begin_ns, end_ns), "right")
        return np.array(self._process.step_rows["iteration_s"][low:high], np.float64)

    def find_begun(self, begin_ns: int, end_ns: int) -> tuple[Ints, Ints]:
        """(begins, numbers) of the steps that began between two moments, the one in progress too."""
        low, high = (int(place) for place in np.searchsorted(self.step_borders, (begin_ns, end_ns)))
        numbers = np.array(self._process.step_rows["step"][low:high], np.int64)
        if low < high == len(self.step_borders):
            numbers = np.append(numbers, self._process.step_rows["step"][-1] + 1)
        return self.step_borders[low:high], numbers

    def find_step_at(self, unix_ns: int) -> int | None:
        """The number of the step begun last, None before the first one."""
        place = int(np.searchsorted(self.step_borders, unix_ns, "right")) - 1
        if place < 0 or len(self.step_borders) < 2:
            return None
        numbers = self._process.step_rows["step"]
        return int(numbers[place]) if place < len(self.step_borders) - 1 else int(numbers[place - 1]) + 1

    def measure_phases(self, edges: Ints) -> Floats:
        """Seconds in each phase between each two edges (unix nanoseconds), shape (phases, columns)."""
        found = np.zeros((len(PHASES), len(edges) - 1))
        if len(self.step_borders) < 2:
            return found
        edges = np.clip(edges, self.step_borders[0], self.step_borders[-1])
        place = np.minimum(np.searchsorted(self.step_borders, edges, "right") - 1, len(self.step_borders) - 2)
        begin, end = self.step_borders[place], self.step_borders[place + 1]
        sums = np.diff(self._sum_until(place, (edges - begin) / np.maximum(1, end - begin)), axis=0).T
        found[_CODES] = np.maximum(0.0, sums)
        found[PHASE_CODE["other"]] = np.maximum(0.0, np.diff(edges) / 1e9 - found.sum(axis=0))
        return found

    def _sum_until(self, index: Ints, part: Floats) -> Floats:
        """Seconds in each of _COLUMNS before these steps and in a part of each."""
        near = (index // _STEPS_PER_SUM * _STEPS_PER_SUM)[:, None] + np.arange(_STEPS_PER_SUM)
        weights = np.where(near < index[:, None], 1.0, np.where(near == index[:, None], part[:, None], 0.0))
        rows = self._process.step_rows[np.minimum(near, len(self._process.step_rows) - 1)]
        added = [(rows[column] * weights).sum(axis=1) for column in _COLUMNS.values()]
        return np.asarray(self._sums_until[index // _STEPS_PER_SUM] + np.stack(added, axis=1))

    def make_series(self, begin_ns: int, end_ns: int) -> Series:
        """Seconds that each iteration took which lies at least partly in a piece of time."""
        low = max(0, int(np.searchsorted(self.step_borders, begin_ns, "right")) - 1)
        high = int(np.searchsorted(self.step_borders, end_ns, "left")) + 1
        borders = self.step_borders[low:high]
        rows = self._process.step_rows[low : low + max(0, len(borders) - 1)]
        return Series(borders[:-1], borders[1:], rows["iteration_s"][None, :].astype(np.float64))


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
