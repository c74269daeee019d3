"""A rank's finished steps, laid out to be searched: how long each took, and what it was made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerotop.analysis.steps.growable_array import Growing
from zerotop.analysis.steps.step_table import RankSteps
from zerotop.analysis.timeline.resample import Floats, Ints, Series, Table, coarser, nothing, together, totals
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
_EACH = 32


class StepTimes:
    """When one process's steps were and what they are made of. Grows with its steps."""

    def __init__(self, process: RankSteps) -> None:
        self._process = process
        self._borders = Growing(np.int64)  # begin of the first step, then the end of each
        self._upto = np.zeros((1, len(_COLUMNS)))  # seconds before every _EACH-th step

    def update(self) -> None:
        """Takes in steps finished since."""
        done = max(0, len(self._borders) - 1)
        rows = self._process.rows[done:]
        if not len(rows):
            return
        if not done:
            self._borders.add(1)[:] = rows["begin_unix_ns"][0]
        self._borders.add(len(rows))[:] = rows["end_unix_ns"]
        summed, whole = len(self._upto) - 1, len(self._process.rows) // _EACH
        if whole > summed:
            rows = self._process.rows[summed * _EACH : whole * _EACH]
            sums = np.stack([rows[column].reshape(-1, _EACH).sum(axis=1) for column in _COLUMNS.values()], axis=1)
            self._upto = np.concatenate((self._upto, self._upto[-1] + sums.cumsum(axis=0)))

    @property
    def borders(self) -> Ints:
        """The begin of the first step, then the end of each; empty before the first one is finished."""
        return self._borders.rows

    @property
    def numbers(self) -> Ints:
        """The steps' own numbers."""
        return np.asarray(self._process.rows["step"])

    def finished(self, begin_ns: int, end_ns: int) -> Floats:
        """Seconds that those iterations took that ended after the begin and up to the end (unix nanoseconds)."""
        low, high = np.searchsorted(self.borders[1:], (begin_ns, end_ns), "right")
        return np.array(self._process.rows["iteration_s"][low:high], np.float64)

    def begun(self, begin_ns: int, end_ns: int) -> tuple[Ints, Ints]:
        """(begins, numbers) of the steps that began between two moments, the one in progress too."""
        low, high = (int(place) for place in np.searchsorted(self.borders, (begin_ns, end_ns)))
        numbers = np.array(self._process.rows["step"][low:high], np.int64)
        if low < high == len(self.borders):
            numbers = np.append(numbers, self._process.rows["step"][-1] + 1)
        return self.borders[low:high], numbers

    def step_at(self, unix_ns: int) -> int | None:
        """The number of the step begun last, None before the first one."""
        place = int(np.searchsorted(self.borders, unix_ns, "right")) - 1
        if place < 0 or len(self.borders) < 2:
            return None
        numbers = self._process.rows["step"]
        return int(numbers[place]) if place < len(self.borders) - 1 else int(numbers[place - 1]) + 1

    def seconds(self, edges: Ints) -> Floats:
        """Seconds in each phase between each two edges (unix nanoseconds), shape (phases, columns)."""
        found = np.zeros((len(PHASES), len(edges) - 1))
        if len(self.borders) < 2:
            return found
        edges = np.clip(edges, self.borders[0], self.borders[-1])
        place = np.minimum(np.searchsorted(self.borders, edges, "right") - 1, len(self.borders) - 2)
        begin, end = self.borders[place], self.borders[place + 1]
        sums = np.diff(self._sums(place, (edges - begin) / np.maximum(1, end - begin)), axis=0).T
        found[_CODES] = np.maximum(0.0, sums)
        found[PHASE_CODE["other"]] = np.maximum(0.0, np.diff(edges) / 1e9 - found.sum(axis=0))
        return found

    def _sums(self, place: Ints, part: Floats) -> Floats:
        """Seconds in each of _COLUMNS before these steps and in a part of each."""
        near = (place // _EACH * _EACH)[:, None] + np.arange(_EACH)
        weights = np.where(near < place[:, None], 1.0, np.where(near == place[:, None], part[:, None], 0.0))
        rows = self._process.rows[np.minimum(near, len(self._process.rows) - 1)]
        added = [(rows[column] * weights).sum(axis=1) for column in _COLUMNS.values()]
        return np.asarray(self._upto[place // _EACH] + np.stack(added, axis=1))

    def series(self, begin_ns: int, end_ns: int) -> Series:
        """Seconds that each iteration took which lies at least partly in a piece of time."""
        low = max(0, int(np.searchsorted(self.borders, begin_ns, "right")) - 1)
        high = int(np.searchsorted(self.borders, end_ns, "left")) + 1
        borders = self.borders[low:high]
        rows = self._process.rows[low : low + max(0, len(borders) - 1)]
        return Series(borders[:-1], borders[1:], rows["iteration_s"][None, :].astype(np.float64))


class Iterations:
    """Tells how long iterations took, in seconds, in columns of time: see ``timeline_series.Table``."""

    names = ("iteration",)

    def __init__(self, steps: Sequence[StepTimes]) -> None:
        self._steps = steps

    def count(self) -> int:
        """See ``timeline_blocks.Teller``, as for all that follow."""
        return sum(len(times.borders) for times in self._steps)

    def final_ns(self) -> int:
        return max((int(times.borders[-1]) for times in self._steps if len(times.borders)), default=0)

    def base(self, column_ns: int) -> int:
        return column_ns

    def tell(self, edges: Ints) -> Table:
        table = self.blank(len(edges) - 1)
        for times in self._steps:
            if len(times.borders):
                table = together(table, totals(times.series(int(edges[0]), int(edges[-1])), edges))
        return table

    def join(self, table: Table, factor: int) -> Table:
        return coarser(table, factor)

    def blank(self, columns: int) -> Table:
        return nothing(1, columns)
