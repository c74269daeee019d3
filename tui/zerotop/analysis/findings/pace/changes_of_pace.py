"""Where the pace of a job may have changed for good: in the level of its iterations, or only in a cause of it.

A change of pace measured over all steps of its two levels, and two changes that are parts of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

import numpy as np

from zerotop.analysis.findings.support import thresholds
from zerotop.analysis.findings.support.causes.batch_causes import check_batch, is_by_plan
from zerotop.analysis.findings.support.causes.pace_shift import PaceShift, explain_change
from zerotop.analysis.findings.support.causes.step_change import StepChange
from zerotop.analysis.findings.support.evidence import Floats, Group, Rows
from zerotop.analysis.findings.support.lines.line_findings import measure_between
from zerotop.analysis.findings.support.steps.growing_batches import get_batch_sizes
from zerotop.analysis.findings.support.steps.lost_time import Level, await_notable
from zerotop.analysis.findings.support.steps.onsets import find_onset, select_from_onset
from zerotop.analysis.findings.support.steps.step_values import StepValues
from zerotop.analysis.stats.change_points import (
    AGREE_SHARE,
    LEVEL_STEPS,
    SETTLED_STEPS,
    SHIFT_AGREE_SHARE,
    SHIFT_SHARE,
    SHIFT_STEPS,
    ShiftFinder,
    Values,
)
from zerotop.analysis.stats.wander import find_last_level

# The most steps of a level: the last ones.
_MOST_STEPS = 2000
# The share of the level before by which two near levels are no parts of one change.
_APART_SHARE = 0.25
# The training changes in stages a few times; what changes more often, as with each evaluation, is a part of its pace.
_MOST_CHANGES = 5


def measure_whole(shift: PaceShift, others: Collection[int], known_ns: int, until_step: int | None = None) -> PaceShift:
    """Return the change with all steps of both levels as known at a time; as it is where they show no change that way.

    Args:
        others: the first steps of other changes. Their levels are others.
        until_step: the last step of the new level, if it has ended.
    """
    change = shift.change
    if len(change.after) < SHIFT_STEPS:
        return shift
    steps = change.process.steps_until(known_ns)
    if change.found_in:  # its steps with phases show its levels, with those between them
        steps = steps[np.searchsorted(steps["step"], change.before["step"][0]) :]
    before, after = split_levels(steps, int(find_begin(change, known_ns)["step"][0]), others, until_step)
    before, after = (rows[~np.isnan(rows["iteration_s"])][-_MOST_STEPS:] for rows in (before, after))
    if len(before) < len(change.before) or len(after) < len(change.after):
        return shift
    shown_by = change.phased if change.found_in else change.shown_by
    whole = StepChange(change.group, before, after, known_ns, change.found_in, shown_by)
    level = replace(whole, before=before[find_last_level(before["iteration_s"], SHIFT_SHARE) :])
    if not level.measure_levels():  # phases were recorded in the steps of an earlier level only
        level = replace(level, shown_by=whole.phased)
    told = replace(shift, change=level)
    return told if told.added_s * shift.added_s > 0 and told.is_worse == shift.is_worse else shift


def list_training_steps(shift: PaceShift, known_ns: int) -> Iterator[int]:
    """Yield the steps far from a change in which the training itself changed, unless it did so often."""
    process, near = shift.change.process, range(shift.step - thresholds.NEAR_STEPS, shift.step + thresholds.NEAR_STEPS + 1)
    made = [one for one in process.find_changes(0, known_ns, known_ns) if one.effect_on_time]
    counts = Counter(one.name for one in made)
    for one in made:
        first, last = process.step_at(one.begin_ns), process.step_at(one.end_ns)
        if first is None or last is None or counts[one.name] > _MOST_CHANGES:
            continue
        if last < near.start or first >= near.stop:
            yield from (first, last)


def find_begin(change: StepChange, known_ns: int) -> Rows:
    """Return the steps from the one with which a change began: counted steps may precede the first one that shows it."""
    if not change.found_in:
        return change.after
    return select_from_onset(change.process.steps_until(known_ns), int(change.before["step"][-1]), change.after)


def split_levels(steps: Rows, step: int, others: Collection[int], until_step: int | None = None) -> tuple[Rows, Rows]:
    """Return the steps before a change and after it, up to the next changes; without the first ones, if there are more."""
    numbers = steps["step"]
    first = min(thresholds.WARM_UP_STEPS, max(0, int(np.searchsorted(numbers, step)) - LEVEL_STEPS))
    begin = int(np.searchsorted(numbers, max((other for other in others if other < step), default=numbers[first])))
    end = int(np.searchsorted(numbers, min((other for other in others if other > step), default=numbers[-1] + 1)))
    if until_step is not None:
        end = min(end, int(np.searchsorted(numbers, until_step, "right")))
    middle = int(np.searchsorted(numbers, step))
    return steps[begin:middle], steps[middle:end]


def is_same(known: PaceShift, other: PaceShift) -> bool:
    """Whether another change is a part of a known one: near to it and in its direction, or more of the same load."""
    if other.added_s * known.added_s <= 0 or is_by_plan(known.change, known.cause) != is_by_plan(other.change, other.cause):
        return False
    loads = [one.cause.advice if one.cause is not None and one.cause.is_host else "" for one in (known, other)]
    return abs(other.step - known.step) <= thresholds.NEAR_STEPS or (loads[0] == loads[1] != "")


def follows_level(known: PaceShift, other: PaceShift, known_ns: int) -> bool:
    """Whether a slowdown comes after one by less, whose level the iterations have held in between."""
    steps = known.change.process.steps_until(known_ns)
    held = steps[slice(*np.searchsorted(steps["step"], (known.step, other.step)))]["iteration_s"]
    if len(held) < LEVEL_STEPS // 2 or not known.is_worse:
        return False
    level = float(np.nanmedian(held))
    least_s = max(_APART_SHARE * known.before_s, AGREE_SHARE * level)
    is_held = np.mean(np.abs(held - level) <= AGREE_SHARE * level) >= SHIFT_AGREE_SHARE
    return bool(is_held and least_s <= level - known.before_s <= other.after_s - level)


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


BETWEEN_PHASES, STEP_PHASE, SIZE = "between phases", "step phase", "size"
"""Values that may show a change where the iterations do not."""
# A part of an iteration that is notable, where its own change is searched.
_NOTABLE_SHARE = 0.10
# Changes that begin within this many steps of each other are the same.
_SAME_STEPS = 3
# The most steps after which iterations become shorter by themselves.
_WARM_UP_STEPS = 10
# Steps in a row that each take this many times as long as those before, and this long (seconds): two are a change as soon as
# they have taken most of the job's time, SHIFT_STEPS in any case. If one of them takes far less than another, that is a
# pause. SHIFT_STEPS of them may be shorter (seconds), but for the first steps of a job.
_FAR_TIMES, _FAR_S, _SEVERAL_S, _ALIKE_SHARE = 10.0, 1.0, 0.1, 0.25


class PaceSearch:
    """Searches the steps of a group's lead for changes, as they come."""

    def __init__(self) -> None:
        self._levels, self._between, self._updates, self._sizes = (ShiftFinder() for _ in range(4))
        self._far_from = SETTLED_STEPS  # steps that were not yet examined for far outliers
        self._waiting: list[StepChange] = []  # changes that have not cost enough yet
        self.known: list[StepChange] = []
        """Changes that the iterations themselves show."""

    def list_changes(self, group: Group) -> Iterator[StepChange]:
        """Yield the new changes."""
        yield from self._list_far(group)
        steps, levels = group.lead.steps, self._list_levels(group)
        for change, known_ns in await_notable(self._waiting, steps, levels, _measure_level):
            if not _is_warm_up(change):
                yield replace(change, known_ns=known_ns)
        yield from self._list_hidden(group)

    def _list_far(self, group: Group) -> Iterator[StepChange]:
        """Yield a change with the second of far steps that take most of the job's time, or with SHIFT_STEPS of them."""
        steps = group.lead.steps
        seconds = steps["iteration_s"]
        for last in range(self._far_from, len(steps)):
            self._far_from = last + 1
            first = last
            while first > 1 and last - first < SHIFT_STEPS and seconds[first - 1] >= _ALIKE_SHARE * seconds[last]:
                first -= 1
            before, after = steps[max(0, first - LEVEL_STEPS) : first], steps[first : last + 1]
            far = after["iteration_s"]
            least_s = _SEVERAL_S if len(far) == SHIFT_STEPS and first >= thresholds.WARM_UP_STEPS else _FAR_S
            if not 1 < len(far) <= SHIFT_STEPS or not far.min() >= max(least_s, _ALIKE_SHARE * far.max()):
                continue
            is_far = bool(far.min() >= _FAR_TIMES * np.nanmedian(before["iteration_s"]))
            if is_far and (len(far) == SHIFT_STEPS or far.sum() >= thresholds.FAR_SHARE * np.nansum(seconds[: last + 1])):
                change = StepChange(group, before, after, int(after["end_unix_ns"][-1]))
                if not is_near(change, self.known, change.known_ns):
                    self.known.append(change)
                    yield change

    def _list_levels(self, group: Group) -> Iterator[StepChange]:
        rows = group.lead.steps
        for change in _find_changes(group, self._levels, rows, rows["iteration_s"]):
            if not _is_by_probe(change):
                is_new = not is_near(change, self.known, change.known_ns)
                self.known.append(change)
                if is_new:
                    yield change

    def _list_hidden(self, group: Group) -> Iterator[StepChange]:
        """Yield changes of a cause, such as the time between phases, that the iteration time itself may not show.

        If the phases vary much, for example because other processes use the cores, a change may only show in its cause.
        """
        rows = group.lead.phased_steps
        for change in _find_changes(group, self._between, rows, _list_notable(rows, measure_between)):
            if _is_longer_between(change):
                yield replace(change, found_in=BETWEEN_PHASES)
        for change in _find_changes(group, self._updates, rows, _list_notable(rows, lambda some: some["step_s"])):
            yield replace(_widen_change(change), found_in=STEP_PHASE)
        for change in _find_changes(group, self._sizes, rows, StepValues(rows, get_batch_sizes)):
            if _is_notable(change) and not _is_warm_up(change) and check_batch(change) is not None:
                yield replace(change, found_in=SIZE)


def _find_changes(group: Group, finder: ShiftFinder, steps: Rows, values: Values) -> Iterator[StepChange]:
    for shift in finder.find_shifts(values):
        after = steps[shift.first : shift.last + 1]
        yield StepChange(group, steps[shift.before], after, int(after["end_unix_ns"][-1]))


def is_near(change: StepChange, others: Iterable[StepChange], known_ns: int) -> bool:
    """Whether a change begins near one already known. It may have begun in a counted step before its first step."""
    first, last = int(change.before["step"][-1]) + 1 - _SAME_STEPS, change.step + _SAME_STEPS
    return any(first <= other.step <= last for other in others if other.known_ns <= known_ns)


def is_short(change: StepChange) -> bool:
    """Whether iterations are so short that they only count where the training itself was changed."""
    return bool(max(change.before["iteration_s"].max(), change.after["iteration_s"][0]) < thresholds.SHORTEST_ITERATION_S)


def _is_by_probe(change: StepChange) -> bool:
    """Whether short steps became shorter when the probe no longer recorded each of them in full."""
    before, after = ((rows["counted"] | rows["light"]).mean() for rows in (change.before, change.after))
    return bool(change.added_s < 0 and before < 1 / 2 < after)


def _is_warm_up(change: StepChange) -> bool:
    """Whether iterations became shorter only after the first ones, which also allocate, compile and load."""
    return change.added_s < 0 and change.step <= _WARM_UP_STEPS


def _measure_level(change: StepChange) -> Level:
    return Level(change.step, int(change.after["step"][-1]), change.before_s, change.after_s)


def _list_notable(steps: Rows, measure: Callable[[Rows], Floats]) -> Values:
    """Return the seconds of a part of each step, at least a notable part of the first iterations.

    Smaller values are raised to that part, so that their noise is no change. Empty before there are enough steps.
    """
    if len(steps) < LEVEL_STEPS:
        return np.empty(0)
    iteration = float(np.median(steps["iteration_s"][:LEVEL_STEPS]))
    least = max(_NOTABLE_SHARE * iteration, thresholds.BETWEEN_SECONDS if measure is measure_between else 0.0)
    return StepValues(steps, lambda rows: np.maximum(measure(rows), least))


def _widen_change(change: StepChange) -> StepChange:
    """Return a change between steps with phases with all recorded steps around it."""
    steps = change.process.steps_until(change.known_ns)
    first = int(np.searchsorted(steps["step"], change.step))
    before, after = steps[max(0, first - LEVEL_STEPS) : first], steps[first : first + LEVEL_STEPS]
    return replace(change, before=before, after=after)


def _is_longer_between(change: StepChange) -> bool:
    """Whether the time between the phases grew by a notable part of the iteration."""
    added = change.measure_parts().get("other_s", 0.0)
    return added >= max(thresholds.BETWEEN_SECONDS, _NOTABLE_SHARE * change.after_s)


def _is_notable(change: StepChange) -> bool:
    """Whether iterations take notably another time."""
    longest = max(change.before_s, change.after_s)
    return abs(change.added_s) >= _NOTABLE_SHARE * change.before_s and longest >= thresholds.SHORTEST_ITERATION_S
