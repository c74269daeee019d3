"""Changes of pace that were told: they are told again with newer levels, with their line or cause, and with their end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.pace.changes_of_pace import (
    follows_level,
    is_same,
    join_shifts,
    list_training_steps,
    measure_whole,
)
from zerotop.analysis.findings.pace.real_shifts import RealShifts, explain_by_training
from zerotop.analysis.findings.support import Process
from zerotop.analysis.findings.support.causes.pace_shift import PaceShift
from zerotop.analysis.findings.support.causes.step_change import StepChange
from zerotop.analysis.findings.support.causes.training_causes import check_training
from zerotop.analysis.findings.support.lines import line_findings
from zerotop.analysis.findings.support.lines.stack_lines import FoundLine, StackLine, find_line
from zerotop.analysis.findings.support.steps.runs import find_run_begins
from zerotop.analysis.findings.support.thresholds import MORE_STEPS, NEAR_STEPS, SHOWN_SHARE
from zerotop.analysis.stats.change_points import LEVEL_STEPS, SHIFT_STEPS
from zerotop.analysis.stats.wander import BLOCK
from zerotop.recording.samples import Rows

# A level this near to the one before a change, as a share, counts as the same.
_BACK_SHARE = 0.1
# A slowdown goes on where iterations stay longer by this share of the level before, and by this part of it, though they were
# longer at first, as while caches fill.
_LEFT_SHARE, _LEFT_PART = 0.5, 1 / 3
# For so long (ns) the line of a change is looked for with each event that has samples; then with the levels only.
_SAMPLED_NS = 60 * 10**9
# A change has passed after as many blocks of steps at the level before as it lasted; at least, and at most, so many.
_PASSED_BLOCKS = 2, 10


class ToldShift(NamedTuple):
    """A change of pace as it is known at a time."""

    shift: PaceShift  # by its first steps
    whole: PaceShift  # by all steps of its levels
    found: FoundLine  # its line, and the time
    until_step: int | None  # the last step with the change, if it has ended


@dataclass(eq=False)
class _Followed:
    """A change that was told and is not known to have ended."""

    shift: PaceShift
    found: FoundLine
    steps: int  # since it began, with which its levels were looked at last
    levels: tuple[float, float]  # that were shown last, in seconds
    blocks: int = 0  # of steps since it began, in which it has not ended

    @property
    def lacks_line(self) -> bool:
        """Whether no line is known that explains the change: one that only waits may be."""
        return not is_line_named(self.shift, self.found.line)


class FollowedShifts:
    """The changes of an attempt that were told: a new one may be a part of one of them, or its end."""

    def __init__(self) -> None:
        self.real = RealShifts()
        self.by_cause: list[StepChange] = []
        """Those that were told without the iterations' own change."""
        self.unexplained: list[PaceShift] = []
        """Those that the iterations do not show, and for which no line was found yet."""
        self._open: list[_Followed] = []
        self._apart: set[int] = set()  # the first steps of near changes that are no parts of one

    def measure(self, shift: PaceShift, found: FoundLine, until_step: int | None = None) -> ToldShift:
        """Return a change as known at a time, with its levels up to the next changes."""
        far = [other for other in self.real.list_steps(found.known_ns) if abs(other - shift.step) > NEAR_STEPS]
        apart = (other for other in self._apart if other != shift.step)
        others = [*far, *apart, *list_training_steps(shift, found.known_ns)]
        return ToldShift(shift, measure_whole(shift, others, found.known_ns, until_step), found, until_step)

    def follow(self, told: ToldShift) -> None:
        """Follow a change from now on."""
        steps = told.shift.change.process.steps_until(told.found.known_ns)
        count = len(steps) - int(np.searchsorted(steps["step"], told.shift.step))
        self._open.append(_Followed(told.shift, told.found, count, (told.whole.before_s, told.whole.after_s)))

    def tell_until(self, lead: Process, until_ns: int) -> Iterator[ToldShift]:
        """Yield changes again as the levels become known from more steps, and the ends of slowdowns that have passed."""
        steps = lead.steps_until(until_ns)
        for one in [one for one in self._open if len(one.shift.change.after) >= SHIFT_STEPS]:
            passed = _find_passed(one, steps) if one.shift.is_worse else None
            known_ns = max(passed[1], one.found.known_ns) if passed is not None else until_ns
            yield from self._tell_levels(one, lead.steps_until(until_ns if passed is None else known_ns - 1))
            if passed is not None:
                yield self._end(one, known_ns, passed[0])

    def tell_level(self, shift: PaceShift, found: FoundLine) -> Iterator[ToldShift]:
        """Yield the end of a change if a new one, near to it, is no part of it: its level was held up to that one."""
        for earlier in reversed(self._open):
            if is_same(earlier.shift, shift) and follows_level(earlier.shift, shift, found.known_ns):
                self._apart |= {earlier.shift.step, shift.step}
                if earlier.found.line is not None:  # it may be that of samples from after its end
                    earlier.found = earlier.found._replace(line=_find_line_before(shift, earlier.shift, found.known_ns))
                yield self._end(earlier, found.known_ns, shift.step - 1)
                return

    def tell_known(self, shift: PaceShift, found: FoundLine) -> list[ToldShift] | None:
        """Return the end of the change that a new one takes back, or that of which it is a part; None if it is neither."""
        for earlier in reversed(self._open):
            if _is_back(earlier.shift, shift):
                return [self._end(earlier, found.known_ns, shift.step - 1)]
            if is_same(earlier.shift, shift):
                return self._join(earlier, shift, found)
        return None

    def tell_explained(self, known_ns: int) -> Iterator[ToldShift]:
        """Yield changes again for which a change of the training, a late rank, or a line is known by now."""
        for one in self._open:
            shift, found = explain(one.shift, one.found._replace(known_ns=max(one.found.known_ns, known_ns)))
            lacks_line = not is_line_named(shift, found.line)
            is_sought = lacks_line and one.shift.begin_ns + _SAMPLED_NS >= known_ns >= one.found.known_ns
            line = _find_later_line(shift, known_ns) if is_sought else None
            if shift is not one.shift or line is not None:
                one.shift, one.found = shift, found._replace(line=line or found.line)
                yield self.measure(one.shift, one.found)

    def list_explained(self, lead: Process, known_ns: int) -> Iterator[tuple[PaceShift, FoundLine]]:
        """Yield lasting changes that the iterations did not show, and of which samples written at a time show the line."""
        for shift in self.unexplained[:]:
            if not shift.change.known_ns < known_ns <= shift.begin_ns + _SAMPLED_NS:
                continue
            present = _measure_present(shift, lead.steps_until(known_ns), known_ns)
            line = _find_later_line(shift, known_ns) if present is not None else None
            if present is not None and line is not None:
                self.unexplained.remove(shift)
                self.real.shown.append(present.change)
                yield present, FoundLine(line, known_ns)

    def tell_far_ends(self, lead: Process) -> Iterator[ToldShift]:
        """Yield the ends of changes that were told with two far outliers, if the next BLOCK of steps are none."""
        steps = lead.steps
        for one in [one for one in self._open if len(one.shift.change.after) < SHIFT_STEPS]:
            shift, last = one.shift, one.shift.change.after[-1]
            later = steps[np.searchsorted(steps["step"], last["step"], "right") :][:BLOCK]
            known_ns = max(int(later["end_unix_ns"].max(initial=0)), one.found.known_ns)
            yield from self._tell_far_levels(one, lead)
            if len(later) < BLOCK or known_ns > lead.at.cursor_ns:
                continue
            if np.median(later["iteration_s"]) < (shift.before_s + shift.after_s) / 2:
                yield self._end(one, known_ns, int(last["step"]))
            else:  # followed from now on as other changes are
                after = steps[slice(*np.searchsorted(steps["step"], (shift.step, later["step"][-1])))]
                change = StepChange(shift.change.group, shift.change.before, after, known_ns)
                self._open.remove(one)
                self.follow(self.measure(replace(shift, change=change), one.found._replace(known_ns=known_ns)))

    def _tell_far_levels(self, one: _Followed, lead: Process) -> Iterator[ToldShift]:
        """Yield such a change again with twice the steps, where they last and their level is not the one shown."""
        steps, known = lead.steps, one.shift.change
        later = steps[slice(*np.searchsorted(steps["step"], (one.shift.step, known.after["step"][-1] + BLOCK)))]
        while len(later) >= (due := 2 * one.steps) and (known_ns := int(later["end_unix_ns"][due - 1])) <= lead.at.cursor_ns:
            shift = replace(one.shift, change=StepChange(known.group, known.before, later[:due], known_ns))
            lasts = np.median(later["iteration_s"][due // 2 : due]) >= (one.shift.before_s + one.shift.after_s) / 2
            is_other = abs(shift.after_s / one.levels[1] - 1) > SHOWN_SHARE
            one.steps = due
            if lasts and is_other and known_ns > one.found.known_ns:
                one.levels = one.levels[0], shift.after_s
                yield ToldShift(one.shift, shift, one.found._replace(known_ns=known_ns), None)

    def _tell_levels(self, one: _Followed, steps: Rows) -> Iterator[ToldShift]:
        """Yield a change again where its levels, after each quarter of more steps, or its line are not those shown."""
        shift, later = one.shift, steps[np.searchsorted(steps["step"], one.shift.step) :]
        while not shift.change.found_in and len(later) >= (due := one.steps + max(BLOCK, one.steps // MORE_STEPS)):
            known_ns = int(later["end_unix_ns"][due - 1])
            is_later = known_ns > one.found.known_ns
            line = _find_later_line(shift, known_ns) if one.lacks_line and is_later else None
            if line is not None:
                one.found = FoundLine(line, known_ns)
            shift, found = explain(one.shift, one.found._replace(known_ns=known_ns))
            is_explained = shift is not one.shift and is_later
            if is_explained:
                one.shift, one.found = shift, found
            told = self.measure(shift, found)
            present = told.whole.before_s, told.whole.after_s
            is_other = max(abs(now / then - 1) for now, then in zip(present, one.levels, strict=True)) > SHOWN_SHARE
            if line is not None or is_explained or (is_other and is_later):
                yield told
            one.steps, one.levels = due, present if is_other else one.levels

    def _end(self, one: _Followed, known_ns: int, until_step: int) -> ToldShift:
        """Return a change with its end, and follow it no further. The end is told after the change."""
        self._open.remove(one)
        known_ns = max(known_ns, one.found.known_ns + 1)
        shift = replace(one.shift, cause=None) if _outlasts(one.shift, until_step, known_ns) else one.shift
        return self.measure(shift, one.found._replace(known_ns=known_ns), until_step)

    def _join(self, earlier: _Followed, shift: PaceShift, found: FoundLine) -> list[ToldShift]:
        """Join a change with an earlier one that it continues: the levels of the earlier one then show both."""
        is_part = abs(shift.step - earlier.shift.step) <= NEAR_STEPS
        joined = join_shifts(earlier.shift, shift, found.known_ns) if is_part else None
        if joined is None or joined.added_s * shift.added_s <= 0:
            return []
        line = found.line if found.line is not None else earlier.found.line
        told = self.measure(*explain(joined, FoundLine(line, found.known_ns)))
        self._open.remove(earlier)
        self.follow(told)
        return [told]


def explain(shift: PaceShift, found: FoundLine) -> tuple[PaceShift, FoundLine]:
    """Return a change as :func:`explain_by_training` knows it by the time of its line, and its line there."""
    explained = explain_by_training(shift, found.known_ns)
    if _find_culprit(explained) is _find_culprit(shift):
        return explained, found
    line = find_line(explained.find_delay()._replace(end_ns=found.known_ns, known_ns=found.known_ns))
    return explained, found._replace(line=line)  # the line was another rank's


def _find_culprit(shift: PaceShift) -> Process | None:
    return shift.cause.culprit if shift.cause is not None else None


def is_line_named(shift: PaceShift, line: StackLine | None) -> bool:
    """Whether a line explains the change."""
    if line is None or (shift.is_uncertain and line.known_call is None and not line.is_new):
        return False
    return line_findings.is_cause(line, shift.find_delay())


def _find_later_line(shift: PaceShift, known_ns: int) -> StackLine | None:
    """Return the line that takes the time, from samples that came after the change had been told without one."""
    delay = shift.find_delay()
    if not shift.is_worse or not delay.where:
        return None
    line = find_line(delay._replace(end_ns=known_ns, known_ns=known_ns))
    return line if is_line_named(shift, line) else None


def _find_line_before(shift: PaceShift, earlier: PaceShift, known_ns: int) -> StackLine | None:
    """Return the line that took the time of an earlier change, from samples of the time before the next one."""
    until_ns = shift.begin_ns
    line = find_line(earlier.find_delay()._replace(end_ns=until_ns, slow_until_ns=until_ns, known_ns=known_ns))
    return line if is_line_named(earlier, line) else None


def _measure_present(shift: PaceShift, steps: Rows, known_ns: int) -> PaceShift | None:
    """Return a change found in steps with phases with all steps around it; None if iterations are not slower any more."""
    change, first = shift.change, int(np.searchsorted(steps["step"], shift.step))
    before, after = steps[max(0, first - LEVEL_STEPS) : first], steps[first:]
    shown_by = change.before, change.after
    whole = replace(shift, change=StepChange(change.group, before, after, known_ns, shown_by=shown_by))
    last_s = float(np.nanmedian(after["iteration_s"][-LEVEL_STEPS:]))
    return whole if whole.is_worse and last_s > (whole.before_s + whole.after_s) / 2 else None


def _find_passed(one: _Followed, steps: Rows) -> tuple[int, int] | None:
    """Return the last step of a change, and when that was known.

    The level before has lasted as long as the change, or levels that are near to it for very long.
    """
    shift, later = one.shift, steps[np.searchsorted(steps["step"], one.shift.step) :]
    (least, most), found = _PASSED_BLOCKS, len(shift.change.after) // BLOCK
    begin, count = max(0, one.blocks - most), len(later) // BLOCK
    levels = np.median(later["iteration_s"][begin * BLOCK : count * BLOCK].reshape(-1, BLOCK), axis=1)
    one.blocks, ends = count, np.arange(begin, count) + 1
    nearer_s = (shift.before_s + shift.after_s) / 2
    left_s = shift.before_s + max(_LEFT_SHARE * shift.before_s, _LEFT_PART * shift.added_s)
    firsts, backs = (
        begin + find_run_begins(levels < most_s)  # false for NaN
        for most_s in (min(nearer_s, left_s), min(nearer_s, (1 + _BACK_SHARE) * shift.before_s))
    )
    is_back = (backs >= found) & (ends - backs >= np.clip(backs, least, most))
    passed = np.flatnonzero(is_back | (ends - firsts >= most))
    if not len(passed):
        return None
    at = int(passed[0])
    slow = max(int((backs if is_back[at] else firsts)[at]) * BLOCK, SHIFT_STEPS)
    return int(later["step"][slow - 1]), int(later["end_unix_ns"][int(ends[at]) * BLOCK - 1])


def _outlasts(shift: PaceShift, until_step: int, known_ns: int) -> bool:
    """Whether a change of the training, which seemed the cause, was not taken back when iterations became shorter again."""
    change, process = replace(shift.change, known_ns=known_ns), shift.change.process
    if shift.cause is None or shift.cause.is_code or check_training(change) != shift.cause:
        return False
    steps = process.steps_until(known_ns)
    end_ns = int(steps["end_unix_ns"][np.searchsorted(steps["step"], until_step)])
    off_ns = round(BLOCK * 1e9 * shift.after_s)  # the end is known by blocks
    # A change that two looks far apart enclose may have been made at either time, and is not its own end.
    made = process.find_changes(shift.begin_ns - off_ns, shift.begin_ns + off_ns, known_ns)
    return all(one in made for one in process.find_changes(end_ns - off_ns, end_ns + off_ns, known_ns))


def _is_back(earlier: PaceShift, later: PaceShift) -> bool:
    """Whether a change leads back to the level before an earlier one."""
    is_alike = abs(later.after_s - earlier.before_s) < _BACK_SHARE * max(abs(earlier.added_s), earlier.before_s)
    return is_alike and later.step > earlier.step and later.added_s * earlier.added_s < 0
