"""A change of pace measured over all steps of its two levels, and two changes that are parts of one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from zerotop.analysis.findings.support.causes.pace_shift import PaceShift, explain_change
from zerotop.analysis.findings.support.causes.step_change import StepChange
from zerotop.analysis.findings.support.evidence import Rows
from zerotop.analysis.findings.support.steps.onsets import find_onset
from zerotop.analysis.findings.support.thresholds import NEAR_STEPS, WARM_UP_STEPS
from zerotop.analysis.stats.change_points import LEVEL_STEPS, SHIFT_STEPS

# The most steps of a level: the last ones.
_MOST_STEPS = 2000


def measure_whole(shift: PaceShift, others: Collection[int], known_ns: int, until_step: int | None = None) -> PaceShift:
    """Return the change with all steps of both levels as known at a time; as it is where they show no change that way.

    Args:
        others: the first steps of other changes; those near this one are a part of it.
        until_step: the last step of the new level, if it has ended.
    """
    if shift.found_in or len(shift.change.after) < SHIFT_STEPS:
        return shift
    steps = shift.change.process.steps_until(known_ns)
    before, after = split_levels(steps, shift, others, until_step)
    before, after = (rows[~np.isnan(rows["iteration_s"])][-_MOST_STEPS:] for rows in (before, after))
    if len(before) < len(shift.change.before) or len(after) < len(shift.change.after):
        return shift
    whole = replace(shift, change=StepChange(shift.change.group, before, after, known_ns))
    return whole if whole.added_s * shift.added_s > 0 and whole.is_worse == shift.is_worse else shift


def split_levels(steps: Rows, shift: PaceShift, others: Collection[int], until_step: int | None = None) -> tuple[Rows, Rows]:
    """Return the steps before a change and after it, up to the next changes; without the first ones, if there are more."""
    step, numbers = shift.step, steps["step"]
    apart = [other for other in others if abs(other - step) > NEAR_STEPS]
    first = min(WARM_UP_STEPS, max(0, int(np.searchsorted(numbers, step)) - LEVEL_STEPS))
    begin = int(np.searchsorted(numbers, max((other for other in apart if other < step), default=numbers[first])))
    end = int(np.searchsorted(numbers, min((other for other in apart if other > step), default=numbers[-1] + 1)))
    if until_step is not None:
        end = min(end, int(np.searchsorted(numbers, until_step, "right")))
    middle = int(np.searchsorted(numbers, step))
    return steps[begin:middle], steps[middle:end]


def is_same(known: PaceShift, other: PaceShift) -> bool:
    """Whether another change is a part of a known one: near to it and in its direction, or more of the same load."""
    if other.added_s * known.added_s <= 0:
        return False
    loads = [one.cause.advice if one.cause is not None and one.cause.is_host else "" for one in (known, other)]
    return abs(other.step - known.step) <= NEAR_STEPS or (loads[0] == loads[1] != "")


def join_shifts(known: PaceShift, other: PaceShift, known_ns: int) -> PaceShift | None:
    """Return two near changes as one, from the step that separates the levels best; None if it needs no finding."""
    first, last = sorted((known, other), key=lambda one: one.step)
    steps = known.change.process.steps_until(known_ns)
    early, late = first.step - 1, min(last.step + LEVEL_STEPS // 2, int(steps["step"][-1]))
    middle = find_onset(steps, early, late)
    end = int(np.searchsorted(steps["step"], max(one.change.after["step"][-1] for one in (known, other)), "right"))
    before = steps[max(0, middle - max(LEVEL_STEPS, len(first.change.before))) : middle]
    after = steps[middle : max(end, middle + LEVEL_STEPS)]
    joined = explain_change(StepChange(known.change.group, before, after, known_ns))
    if joined is None:
        return None
    causes = [one.cause for one in (joined, other, known) if one.cause is not None]
    return replace(joined, cause=max(causes, key=lambda cause: cause.confidence, default=None))
