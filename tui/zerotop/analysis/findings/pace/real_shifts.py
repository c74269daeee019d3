"""Which changes of pace are more than the run's own wandering, and when that is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from zerotop.analysis.findings.pace.changes_of_pace import BETWEEN_PHASES, SIZE, PaceSearch, is_near, is_short
from zerotop.analysis.findings.support import Group, Process, SearchWindow
from zerotop.analysis.findings.support.causes.batch_causes import name_forward
from zerotop.analysis.findings.support.causes.gpu_causes import USE_NS, awaits_use
from zerotop.analysis.findings.support.causes.lasting_shift import find_lasting, grows_slowly
from zerotop.analysis.findings.support.causes.late_ranks import blame_rank
from zerotop.analysis.findings.support.causes.pace_shift import CERTAIN, PaceShift, explain_change
from zerotop.analysis.findings.support.causes.step_change import StepChange
from zerotop.analysis.findings.support.causes.thread_causes import awaits_threads
from zerotop.analysis.findings.support.causes.training_causes import check_training
from zerotop.analysis.findings.support.lines.stack_lines import find_deadline, find_new
from zerotop.analysis.findings.support.thresholds import NEAR_STEPS, WARM_UP_STEPS
from zerotop.analysis.stats.change_points import LEVEL_STEPS, SHIFT_STEPS
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.analysis.stats.wander import BLOCK, compute_levels, stands_out
from zerotop.recording.events.event_files import select_events
from zerotop.recording.samples import Floats, Rows
from zerotop_probe.recording.events import Stacks

# Lasting changes are searched again after this part of more steps, from that many on: the first are recorded in full.
_MORE_STEPS, _FIRST_STEPS = 16, 20
# Samples that were written so recently (ns) may show a new line, unless iterations rose by this part of the change since.
_RECENT_NS, _GROWN_SHARE = 5 * 10**9, 0.25
# Iterations that became shorter for no known reason are told after so many steps, or seconds, on each side, by this share.
_GAIN_STEPS, _GAIN_S, _GAIN_SHARE = 50, 60.0, 0.1
# Steps in which iterations that show a change do so with certainty.
_HELD_STEPS = LEVEL_STEPS
# Steps that show the range of a pace, and how many times as long iterations outside it are.
_ENOUGH_BEFORE, _LONGER_TIMES = 3 * BLOCK, 1.25


class RealShifts:
    """The real changes of an attempt up to now, with which each new one is compared."""

    def __init__(self) -> None:
        self.search = PaceSearch()
        self.shown: list[StepChange] = []
        """Those of the iterations themselves, each as it was known first."""
        self._explained: list[PaceShift] = []  # levels before them do not count any more
        self._lasting: list[PaceShift] = []  # those of them that were found in a wandering pace
        self._pending: list[PaceShift] = []  # changes that may be the run's own wandering

    def list_steps(self, until_ns: int) -> list[int]:
        """Return the first steps of changes that were known at a time."""
        return [one.step for one in self.shown if one.known_ns <= until_ns]

    def list_new(self, window: SearchWindow[Group]) -> Iterator[PaceShift]:
        """Yield new changes that are more than the run's own wandering, once that is known."""
        lead = window.subject.lead
        for change in self._list_shown(window):
            yield from self._list_later(window, change.known_ns)
            shift, steps = explain_change(change), lead.steps_until(change.known_ns)
            if shift is None or (change.found_in == BETWEEN_PHASES and grows_slowly(steps, shift)):
                continue
            if len(change.after) < SHIFT_STEPS:  # what follows two far outliers does not count against them
                steps = lead.steps_until(int(change.after["end_unix_ns"][-1]))
            steps, earlier = self._select_history(steps, shift)
            if shift.is_real(steps, known_ns=change.known_ns, earlier=earlier) and _is_lasting_gain(shift, steps):
                is_held = change.found_in and is_near(change, self.search.known, change.known_ns)  # its line may be missing
                if not is_held and (shift.has_own_part or shift.has_recorded_cause(None)):
                    self._explained.append(shift)
                if not change.found_in:
                    self.shown.append(change)
                yield shift
            else:
                self._pending.append(shift)
        yield from self._list_later(window, lead.at.cursor_ns)

    def _list_shown(self, window: SearchWindow[Group]) -> list[StepChange]:
        """Return changes in the order in which they became known."""
        fresh = self.search.list_changes(window.subject)
        known = window.await_each(fresh, partial(self._await_records, window.subject.lead), self._await_records)
        return sorted((one for _, shown in known for one in shown), key=lambda one: one.known_ns)

    def _await_records(self, lead: Process, change: StepChange) -> tuple[StepChange, ...] | None:
        """Return a change once all records that may explain it have come; None before that, and nothing if none shows it.

        A hidden one is known only after the next _HELD_STEPS, which may show it.
        """
        waits = awaits_use(change) or awaits_threads(change) or change.lacks_phases or is_short(change)
        known_ns = find_deadline(lead, change.known_ns, USE_NS) if waits else change.known_ns
        if known_ns > lead.at.cursor_ns:
            return None
        change, steps = replace(change, known_ns=known_ns), lead.steps
        if is_short(change) and check_training(change) is None:
            return ()
        if not change.found_in or not is_near(change, self.search.known, known_ns):
            return (change,)
        first, last = np.searchsorted(steps["step"], (change.step, change.after["step"][-1])).tolist()
        last += _HELD_STEPS
        if last >= len(steps):
            return None
        seconds = steps["iteration_s"][WARM_UP_STEPS : last + 1]
        is_shown = change.found_in == SIZE or _is_outside(seconds, first - WARM_UP_STEPS)
        return (replace(change, known_ns=max(known_ns, int(steps["end_unix_ns"][last]))),) if is_shown else ()

    def _list_later(self, window: SearchWindow[Group], until_ns: int) -> Iterator[PaceShift]:
        """Yield changes that have stayed, up to a time and in its order: of a wandering pace, and those that are pending."""
        steps = window.subject.lead.steps_until(until_ns)
        for due in window.extend(partial(_find_due, len(steps)), 0):
            known = steps[:due]
            yield from self._list_stayed(window, known)
            since = max([int(known["step"][0]) + _FIRST_STEPS, *self.list_steps(int(known["end_unix_ns"][-1]))])
            shift = find_lasting(window.subject, known[np.searchsorted(known["step"], since) :])
            if shift is not None and (shift.is_worse or shift.is_expected):
                self.shown.append(shift.change)
                self._lasting.append(shift)
                self._explained.append(shift)
                yield shift
        yield from self._list_stayed(window, steps)

    def _list_stayed(self, window: SearchWindow[Group], steps: Rows) -> Iterator[PaceShift]:
        """Yield pending changes that have stayed."""
        for shift in self._pending[:]:
            stayed = self._judge_again(window, steps, shift)
            if stayed is not None:
                self._pending.remove(shift)
                yield from stayed

    def _judge_again(self, window: SearchWindow[Group], steps: Rows, shift: PaceShift) -> tuple[PaceShift, ...] | None:
        """Judge a change after each BLOCK of steps, and return it once it has stayed; nothing if another has replaced it."""
        first, judged = int(np.searchsorted(steps["step"], shift.step)), len(shift.change.after)
        new = window.steps(steps[first:], of=shift)
        for count in range(judged + max(1, (new.start - judged) // BLOCK + 1) * BLOCK, new.stop + 1, BLOCK):
            known_ns = int(steps["end_unix_ns"][first + count - 1])
            if self._is_replaced(shift, known_ns):
                return ()
            if known_ns < shift.change.known_ns:
                continue
            told = explain_by_training(shift, known_ns)
            history, earlier = self._select_history(steps[: first + count], told)
            is_real = told.is_real(history, known_ns=known_ns, earlier=earlier, is_lasting=True)
            if (is_real or _has_new_line(told, history, known_ns)) and _is_lasting_gain(told, history):
                self.shown.append(replace(told.change, known_ns=known_ns))
                return (replace(told, change=self.shown[-1]),)
        return None

    def _is_replaced(self, shift: PaceShift, known_ns: int) -> bool:
        """Whether a later change became real by then, or the same one, in a wandering pace, since it was judged first."""
        return any(one.step > shift.step and one.change.known_ns <= known_ns for one in self._explained) or any(
            one.step - NEAR_STEPS <= shift.step and shift.change.known_ns < one.change.known_ns <= known_ns
            for one in self._lasting
        )

    def _select_history(self, steps: Rows, shift: PaceShift) -> tuple[Rows, PaceShift | None]:
        """Return the steps since the last real change before this one, without the very first step, and that change."""
        before = (one for one in self._explained if one.step < shift.step)
        earlier = max(before, key=lambda one: one.step, default=None)
        since = int(steps["step"][0]) + 1 if earlier is None else earlier.step
        return steps[np.searchsorted(steps["step"], since) :], earlier


def explain_by_training(shift: PaceShift, known_ns: int) -> PaceShift:
    """Return the change with a change of the training or a late rank as its cause, if it had none, or with its line."""
    change = replace(shift.change, known_ns=known_ns)
    if shift.cause is not None and shift.cause.confidence >= CERTAIN:
        named = name_forward(change, shift.cause)
        return shift if named is shift.cause else replace(shift, change=change, cause=named)
    cause = check_training(change)
    return blame_rank(shift, known_ns) if cause is None else replace(shift, change=change, cause=cause)


def _is_outside(seconds: Floats, middle: int) -> bool:
    """Whether iterations from an index on are notably outside the range of those before, if these are enough."""
    if middle < _ENOUGH_BEFORE:
        return False
    before, after = seconds[:middle], seconds[middle:]
    is_longer = compute_known_median(after) >= _LONGER_TIMES * compute_known_median(before)
    return is_longer and stands_out(before, after, times=0.0, floor=0.0)


def _find_due(count: int, last: int | None) -> int | None:
    """Return with how many steps lasting changes are searched next; None if there are fewer."""
    due = _FIRST_STEPS if last is None else last + max(2 * BLOCK, last // _MORE_STEPS)
    return due if due <= count else None


def _has_new_line(shift: PaceShift, steps: Rows, known_ns: int) -> bool:
    """Whether samples show a line that is new since a slowdown which still lasts, though the run wanders by as much."""
    process, last = shift.change.process, steps["iteration_s"][-LEVEL_STEPS:]
    is_sampled = select_events(process.events_of(Stacks), known_ns - _RECENT_NS, known_ns)
    if not shift.is_worse or not is_sampled or np.nanmedian(last) <= (shift.before_s + shift.after_s) / 2:
        return False
    levels = compute_levels(steps["iteration_s"][np.searchsorted(steps["step"], shift.step) :])
    if levels[-1] - levels[0] >= _GROWN_SHARE * shift.added_s:  # it goes on to rise, as a drift tells
        return False
    return find_new(shift.find_delay(), known_ns, is_alone=True) is not None


def _is_lasting_gain(shift: PaceShift, steps: Rows) -> bool:
    """Whether iterations that became shorter for no known reason did so by enough, after long enough, for long enough."""
    if shift.is_worse or shift.is_expected or shift.has_recorded_cause(None):
        return True
    middle = int(np.searchsorted(steps["step"], shift.step))
    sides = [part["iteration_s"][~np.isnan(part["iteration_s"])] for part in (steps[:middle], steps[middle:])]
    if any(len(side) < _GAIN_STEPS and side.sum() < _GAIN_S for side in sides):
        return False
    before, after = (float(np.median(side)) for side in sides)
    return before - after >= _GAIN_SHARE * before
