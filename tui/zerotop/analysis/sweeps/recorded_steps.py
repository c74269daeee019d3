"""The steps of a recording that stand for its setting: memory and times of one stretch, in which neither the pace changed
lastingly nor the memory of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zerotop.analysis.stats.change_points import ShiftFinder
from zerotop.analysis.steps.job_pace import measure_mean
from zerotop.recording.samples import Rows
from zerotop.recording.steps.step_table import RankSteps

_MOST_STEPS = 8  # that stand for a setting
_MOST_VARYING, _MOST_LENGTHS = 64, 3  # steps that are searched for the longest, if the last ones have more lengths
_NEW_PACE = 1.2  # times as long, or as short: more than runs of one setting differ by
_SAME_PEAK = 0.05  # of allocated memory, by which steps of one moment differ at most


class SteadySteps(NamedTuple):
    """Steps without a lasting change of pace, until another one begins."""

    begin: float
    end: float

    def measure_mean(self, process: RankSteps) -> float:
        """Return the mean seconds of a rank's iterations but the first, pauses included; NaN without any."""
        rows = process.step_rows[1:]
        return measure_mean(rows[(rows["step"] >= self.begin) & (rows["step"] < self.end) & (rows["steps"] == 1)])


class ChosenSteps(NamedTuple):
    """Steps that stand for a setting, and the stretch that they are of."""

    rows: Rows  # whose memory counts
    timed: Rows  # whose times count: more, where only the memory changed
    stretch: SteadySteps

    @property
    def pace_change(self) -> int | None:
        """The step at which the pace changed before these, else the one at which it changed after them."""
        step = self.stretch.begin or self.stretch.end
        return int(step) if step < np.inf else None


def list_steady_steps(process: RankSteps) -> list[SteadySteps]:
    """Return the stretches of a rank's steps, the oldest first."""
    rows = process.step_rows
    rows = rows[np.isfinite(rows["iteration_s"]) & (rows["steps"] == 1)]
    begins: list[float] = [0]
    level = None
    for shift in ShiftFinder().find_shifts(rows["iteration_s"]):
        before, after = (
            float(np.median(rows["iteration_s"][part])) for part in (shift.before, slice(shift.first, shift.last + 1))
        )
        level = before if level is None else level
        if max(after / level, level / after) > _NEW_PACE:
            begins.append(int(rows["step"][shift.first]))
            level = after
    return [SteadySteps(*ends) for ends in pairwise([*begins, np.inf])]


def choose_steps(process: RankSteps, stretches: Sequence[SteadySteps], until_step: int | None) -> ChosenSteps:
    """Return the steps of the last setting whose phases were recorded, of the latest stretch that has some."""
    rows: Rows = process.phased_steps
    if until_step is not None:
        rows = rows[rows["step"] < until_step]
    rows = rows[~rows["light"] & ~rows["skipped"] & (rows["steps"] == 1) & (rows["micro_steps"] > 0)]
    if len(rows) > 2:
        rows = rows[1:]  # the first update makes the optimizer's state
    for stretch in reversed(stretches):
        own = rows[(rows["step"] >= stretch.begin) & (rows["step"] < stretch.end)]
        if len(own):
            timed = _choose_setting(process, own, stretch)
            if len(timed) == 1 and not _is_usual(process, timed, stretch):
                timed = timed[:0]
            return ChosenSteps(_choose_peak(timed if len(timed) else own[-1:]), timed, stretch)
    return ChosenSteps(rows[:0], rows[:0], stretches[0])


def _is_usual(process: RankSteps, row: Rows, stretch: SteadySteps) -> bool:
    """Return whether a step took as long as those around it, most of which may lack phases."""
    others = process.step_rows
    others = others[(others["step"] >= stretch.begin) & (others["step"] < stretch.end)]
    ratio = float(row["iteration_s"][0] / np.nanmedian(others["iteration_s"]))
    return 1 / _NEW_PACE <= ratio <= _NEW_PACE


def _choose_setting(process: RankSteps, rows: Rows, stretch: SteadySteps) -> Rows:
    """Return the last steps of one setting: before the first evaluation, if there is one."""
    last = rows[-1]
    recent = rows[-_MOST_VARYING:]
    if len(np.unique(recent["tokens"][-_MOST_STEPS:])) > _MOST_LENGTHS:  # lengths vary: the longest decides
        last = recent[recent["tokens"].argmax()]
    same = np.ones(len(rows), bool)
    for column in ("micro_steps", "rows", "tokens"):
        same &= rows[column] == last[column]
    rows = rows[same]
    evaluated = process.step_rows["step"][process.step_rows["eval_s"] > 0]
    evaluated = evaluated[evaluated >= stretch.begin]
    before: Rows = rows[rows["step"] < evaluated[0]] if len(evaluated) else rows
    chosen: Rows = (before if len(before) > 1 else rows)[-_MOST_STEPS:]
    return chosen


def _choose_peak(rows: Rows) -> Rows:
    """Return the last steps whose memory had one peak."""
    peaks = rows["allocated_peak_bytes"].astype(float)
    others = np.flatnonzero(np.abs(peaks - peaks[-1]) > _SAME_PEAK * peaks[-1])
    return rows[others[-1] + 1 :] if len(others) else rows
