"""Iteration time changes permanently: the phase that changed, and what else changed at that moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.findings.pace.changes_of_pace import (
    BETWEEN_PHASES,
    SIZE,
    STEP_PHASE,
    KnownChange,
    PaceSearch,
    is_near,
    is_short,
)
from zerotop.analysis.findings.support.causes.gpu_causes import USE_NS, awaits_use
from zerotop.analysis.findings.support.causes.lasting_shift import find_lasting, grows_slowly
from zerotop.analysis.findings.support.causes.pace_shift import CERTAIN, PaceShift, explain_change
from zerotop.analysis.findings.support.causes.step_change import StepChange, name_part
from zerotop.analysis.findings.support.causes.thread_causes import awaits_threads
from zerotop.analysis.findings.support.causes.training_causes import check_training
from zerotop.analysis.findings.support.causes.whole_levels import is_same, join_shifts, measure_whole
from zerotop.analysis.findings.support.evidence import Evidence, Floats, Group, Rows
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.gpu_use import BUSY_SHARE
from zerotop.analysis.findings.support.lines.line_findings import (
    await_lines,
    is_cause,
    is_wait,
    line_values,
    name_line,
    note_named_line,
)
from zerotop.analysis.findings.support.lines.stack_lines import FoundLine, StackLine, find_deadline, find_line
from zerotop.analysis.findings.support.steps.onsets import find_onset
from zerotop.analysis.findings.support.thresholds import NEAR_STEPS, WARM_UP_STEPS
from zerotop.analysis.formatting import Text, format_seconds
from zerotop.analysis.stats.change_points import LEVEL_STEPS, SHIFT_STEPS
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.analysis.stats.wander import BLOCK, stands_out
from zerotop_probe.recording.events import TrainingChanged

_KIND = FindingKind(
    name="iteration_shift",
    severity=Severity.WARNING,
    confidence=0.5,
    headline="Iterations {take} {after_s:seconds} instead of {before_s:seconds} ({change_share:change})"
    " from step {step} {until}",
    details="{carried:seconds} of it {part}[, {most} of that at {line}][; {cause}[: {cause_line}]].",
    advice="{breakdown}",
    fix="{breakdown_fix}",
)
_LINE_HEADLINE = "Iterations {take} {after_s:seconds} instead of {before_s:seconds} from step {step} {until}"
_UNPHASED_DETAILS = "The phases of these steps were not recorded[; {cause}[: {cause_line}]]."
_SPREAD_DETAILS = "No single phase carries most of it[; {cause}[: {cause_line}]]."
_BUSY_DETAILS = "The GPU is busy in {busy_after:percent} of the time instead of {busy_before:percent}[; {cause}]."
_BETWEEN = _KIND.with_changes(
    advice="See where the time goes between the phases: in the training loop, the data or a callback.",
    fix="py-spy dump --pid {pid}",
)
_BY_GPU = _KIND.with_changes(details="The GPU works {carried:seconds} {longer}: {part}[; {cause}].")
# A level that is as near to the one before a change is the same.
_BACK_SHARE = 0.1
# Lasting changes are searched again after this part of more steps, from that many on: the first are recorded in full.
_MORE_STEPS, _FIRST_STEPS = 16, 20
# The levels of a change are looked at after this part of more steps, and shown again if one of them differs by this share.
_MORE_SHOWN, _SHOWN_SHARE = 4, 0.02
# Blocks of steps in a row that are nearer to the level before: the change has passed.
_PASSED_BLOCKS = 10
# Iterations that became shorter for no known reason are told after so many steps, or seconds, on each side, by this share.
_GAIN_STEPS, _GAIN_S, _GAIN_SHARE = 50, 60.0, 0.1
# Steps in which iterations that show a change do so with certainty.
_HELD_STEPS = LEVEL_STEPS
# Steps that show the range of a pace, and how many times as long iterations outside it are.
_ENOUGH_BEFORE, _LONGER_TIMES = 3 * BLOCK, 1.25
# A part of the GPU's work is named from this share of the change on.
_PART_SHARE = 0.2


class _Pending(NamedTuple):
    """A change that is told if it lasts, and the number of its steps with which it was judged last."""

    shift: PaceShift
    judged: int


class _Shown(NamedTuple):
    """How many steps since a change were looked at, and its levels when they were shown last, in seconds."""

    steps: int
    levels: tuple[float, float]


class _State:
    """The changes of an attempt that may still be explained, confirmed or ended by steps of any later window."""

    def __init__(self) -> None:
        self.search = PaceSearch()
        self.waiting: list[tuple[StepChange, str]] = []  # for records that explain them
        self.held: list[tuple[StepChange, str]] = []  # of a cause alone, until the iterations might have shown them
        self.pending: list[_Pending] = []
        self.real: list[tuple[KnownChange, PaceShift]] = []  # explained changes: levels before them do not count any more
        self.told: list[KnownChange] = []  # real changes of the iterations themselves
        self.lasting_steps = _FIRST_STEPS  # with which lasting changes are searched next
        self.by_cause: list[KnownChange] = []  # reported without the iterations' own change
        self.open: list[tuple[PaceShift, FoundLine]] = []  # reported, and not known to have ended
        self.blocks_seen: dict[int, int] = {}  # by the first step of a change: blocks of steps since then without its end
        self.shown: dict[int, _Shown] = {}  # by the first step of a change: what was shown of its levels

    def list_others(self, until_ns: int) -> list[int]:
        """Return the first steps of changes that were known at a time."""
        return [one.step for one in self.told if one.known_ns <= until_ns]


def detect(recording: Evidence) -> Iterator[Finding]:
    """Report each change of level of the iterations, including changes that show only in their cause, and their ends."""
    for group in recording.groups:
        state = group.get_state(_State, _KIND.name)
        known = await_lines(group, _KIND.name, _list_real(group, state), PaceShift.find_delay)
        for shift, found in sorted(known, key=lambda one: one[1].known_ns):
            yield from _follow_open(group, state, found.known_ns)
            if not shift.found_in:
                if not is_near(shift.change, state.by_cause, found.known_ns):
                    yield from _report(group, state, shift, found)
            elif is_near(shift.change, state.told, found.known_ns):
                continue  # the iterations showed it while its line was searched
            elif _is_explained(shift, found.line):
                state.by_cause.append(KnownChange(shift.step, found.known_ns))
                is_shown = is_near(shift.change, state.search.known, found.known_ns)
                yield from _report(group, state, _place_in_iterations(shift, found) if is_shown else shift, found)
        yield from _explain_again(group, state)
        yield from _end_far(group, state)
        yield from _follow_open(group, state, group.lead.at.cursor_ns)


def _follow_open(group: Group, state: _State, until_ns: int) -> Iterator[Finding]:
    """Yield changes again as the levels become known from more steps, and the ends of slowdowns that have passed."""
    steps = group.lead.steps_until(until_ns)
    for one in [one for one in state.open if len(one[0].change.after) >= SHIFT_STEPS]:
        shift, found = one
        passed = _find_passed(state, shift, steps) if shift.is_worse else None
        known_ns = max(passed[1], found.known_ns) if passed is not None else until_ns
        yield from _show_levels(state, *one, steps[: np.searchsorted(steps["end_unix_ns"], known_ns, "right")])
        if passed is not None:
            last = next(other for other in state.open if other[0] is shift)
            state.open.remove(last)
            yield _build_finding(state, shift, last[1]._replace(known_ns=known_ns), until_step=passed[0])


def _find_passed(state: _State, shift: PaceShift, steps: Rows) -> tuple[int, int] | None:
    """Return the last step of a change, and when that was known: after _PASSED_BLOCKS in a row nearer to the old level."""
    later = steps[np.searchsorted(steps["step"], shift.step) :]
    count = len(later) // BLOCK
    begin = max(0, state.blocks_seen.get(shift.step, 0) - _PASSED_BLOCKS)
    seconds = later["iteration_s"][begin * BLOCK : count * BLOCK].reshape(-1, BLOCK)
    is_back = np.median(seconds, axis=1) < (shift.before_s + shift.after_s) / 2  # false for NaN
    runs = np.convolve(is_back, np.ones(_PASSED_BLOCKS), "valid") if len(is_back) >= _PASSED_BLOCKS else np.zeros(0)
    passed = np.flatnonzero(runs == _PASSED_BLOCKS)
    state.blocks_seen[shift.step] = count
    if not len(passed):
        return None
    first = (begin + int(passed[0])) * BLOCK
    return int(later["step"][max(first - 1, 0)]), int(later["end_unix_ns"][first + _PASSED_BLOCKS * BLOCK - 1])


def _show_levels(state: _State, shift: PaceShift, found: FoundLine, steps: Rows) -> Iterator[Finding]:
    """Yield a change again where its levels, looked at after each quarter of more steps, or its line are not those shown."""
    if shift.found_in:
        return
    later = steps[np.searchsorted(steps["step"], shift.step) :]
    while len(later) >= (due := _count_due(state.shown[shift.step].steps)):
        known_ns, (_, levels) = int(later["end_unix_ns"][due - 1]), state.shown[shift.step]
        line = _find_later_line(shift, known_ns) if found.line is None and known_ns > found.known_ns else None
        if line is not None:
            one = state.open.index((shift, found))
            found = FoundLine(line, known_ns)
            state.open[one] = shift, found
        told = _build_finding(state, _explain_by_training(shift, known_ns), found._replace(known_ns=known_ns))
        present = told.evidence["before_s"], told.evidence["after_s"]
        is_other = max(abs(now / then - 1) for now, then in zip(present, levels, strict=True)) > _SHOWN_SHARE
        if line is not None or (is_other and known_ns > found.known_ns):
            yield told
        state.shown[shift.step] = _Shown(due, present if is_other else levels)


def _find_later_line(shift: PaceShift, known_ns: int) -> StackLine | None:
    """Return the line that takes the time, from samples that came after the change had been told without one."""
    delay = shift.find_delay()
    if not shift.is_worse or not delay.where:
        return None
    line = find_line(delay._replace(end_ns=known_ns, known_ns=known_ns))
    return line if _is_line_named(shift, line) else None


def _count_due(shown: int) -> int:
    return shown + max(BLOCK, shown // _MORE_SHOWN)


def _explain_again(group: Group, state: _State) -> Iterator[Finding]:
    """Yield changes again for which a change of the training is known by now: the probe looks for these now and then."""
    for event in group.lead.read_new_items(group.lead.events_of(TrainingChanged), _KIND.name):
        for number, (shift, found) in enumerate(state.open):
            told = _explain_by_training(shift, event.unix_ns)
            if told is not shift:
                state.open[number] = told, found._replace(known_ns=max(found.known_ns, event.unix_ns))
                yield _build_finding(state, *state.open[number])


def _explain_by_training(shift: PaceShift, known_ns: int) -> PaceShift:
    """Return the change with a change of the training as its cause, if it had none that is certain."""
    if shift.cause is not None and shift.cause.confidence >= CERTAIN:
        return shift
    change = replace(shift.change, known_ns=known_ns)
    cause = check_training(change)
    return shift if cause is None else replace(shift, change=change, cause=cause)


def _end_far(group: Group, state: _State) -> Iterator[Finding]:
    """Yield the ends of changes that were told with two far outliers, if the next BLOCK of steps are none."""
    steps = group.lead.steps
    for one in [one for one in state.open if len(one[0].change.after) < SHIFT_STEPS]:
        shift, last = one[0], one[0].change.after[-1]
        later = steps[np.searchsorted(steps["step"], last["step"], "right") :][:BLOCK]
        if len(later) == BLOCK:
            known_ns = max(int(later["end_unix_ns"][-1]), one[1].known_ns)
            if known_ns > group.lead.at.cursor_ns:
                continue
            state.open.remove(one)
            if np.median(later["iteration_s"]) < (shift.before_s + shift.after_s) / 2:
                yield _build_finding(state, shift, one[1]._replace(known_ns=known_ns), until_step=int(last["step"]))
            else:  # followed from now on as other changes are
                after = steps[np.searchsorted(steps["step"], shift.step) : np.searchsorted(steps["step"], later["step"][-1])]
                change = StepChange(group, shift.change.before, after, known_ns)
                _open(state, replace(shift, change=change), one[1]._replace(known_ns=known_ns))


def _report(group: Group, state: _State, shift: PaceShift, found: FoundLine) -> Iterator[Finding]:
    """Yield the change, the end of the earlier one that it takes back, or that of which it is a part."""
    for earlier in reversed(state.open):
        if _is_back(earlier[0], shift):
            state.open.remove(earlier)
            yield _build_finding(state, earlier[0], earlier[1]._replace(known_ns=found.known_ns), until_step=shift.step - 1)
            return
        if is_same(earlier[0], shift):
            yield from _tell_joined(state, earlier, shift, found)
            return
    if group.count_report(_KIND.name):
        shift = _explain_by_training(shift, found.known_ns)
        _open(state, shift, found)
        yield _build_finding(state, shift, found)


def _tell_joined(
    state: _State, earlier: tuple[PaceShift, FoundLine], shift: PaceShift, found: FoundLine
) -> Iterator[Finding]:
    """Yield an earlier change and its near part as one; more of the same load shows in the levels of the earlier one."""
    if abs(shift.step - earlier[0].step) > NEAR_STEPS:
        return
    joined = join_shifts(earlier[0], shift, found.known_ns)
    if joined is None or joined.added_s * shift.added_s <= 0:
        return
    joined = _explain_by_training(joined, found.known_ns)
    found = FoundLine(found.line if found.line is not None else earlier[1].line, found.known_ns)
    state.open.remove(earlier)
    _open(state, joined, found)
    yield _build_finding(state, joined, found)


def _open(state: _State, shift: PaceShift, found: FoundLine) -> None:
    """Follow a change from now on."""
    steps = shift.change.process.steps_until(found.known_ns)
    count = len(steps) - int(np.searchsorted(steps["step"], shift.step))
    whole = measure_whole(shift, state.list_others(found.known_ns), found.known_ns)
    state.shown[shift.step] = _Shown(count, (whole.before_s, whole.after_s))
    state.open.append((shift, found))


def _is_back(earlier: PaceShift, later: PaceShift) -> bool:
    """Whether a change leads back to the level before an earlier one."""
    is_alike = abs(later.after_s - earlier.before_s) < _BACK_SHARE * max(abs(earlier.added_s), earlier.before_s)
    return is_alike and later.step > earlier.step and later.added_s * earlier.added_s < 0


def _list_real(group: Group, state: _State) -> Iterator[PaceShift]:
    """Yield the changes that are more than the run's own wandering, once that is known."""
    lead = group.lead
    for change, found_in in _hold_hidden(group, state, _list_ready(group, state)):
        yield from _follow_up(group, state, change.known_ns)
        shift = explain_change(change, found_in)
        if shift is None or (found_in == BETWEEN_PHASES and grows_slowly(lead.steps_until(change.known_ns), shift)):
            continue
        # What follows two far outliers does not count against them.
        until_ns = change.known_ns if len(change.after) >= SHIFT_STEPS else int(change.after["end_unix_ns"][-1])
        steps, earlier = _select_history(lead.steps_until(until_ns), state, shift)
        if shift.is_real(steps, known_ns=change.known_ns, earlier=earlier) and _is_lasting_gain(shift, steps):
            is_held = found_in and is_near(change, state.search.known, change.known_ns)  # its line may be missing
            if not is_held and (shift.has_own_part or shift.has_recorded_cause(None)):
                state.real.append((KnownChange(shift.step, change.known_ns), shift))
            if not found_in:
                state.told.append(KnownChange(shift.step, change.known_ns))
            yield shift
        else:
            state.pending.append(_Pending(shift, len(change.after)))
    yield from _follow_up(group, state, lead.at.cursor_ns)


def _hold_hidden(group: Group, state: _State, ready: list[tuple[StepChange, str]]) -> Iterator[tuple[StepChange, str]]:
    """Yield changes, in order; those of a cause alone after _HELD_STEPS where the iterations may show them until then."""
    steps = group.lead.steps
    due: list[tuple[StepChange, str]] = []
    for change, found_in in ready:
        if found_in and is_near(change, state.search.known, change.known_ns):
            state.held.append((change, found_in))
        else:
            due.append((change, found_in))
    held, state.held = state.held, []
    for change, found_in in held:
        first, last = np.searchsorted(steps["step"], (change.after["step"][0], change.after["step"][-1])).tolist()
        last += _HELD_STEPS
        if last >= len(steps):
            state.held.append((change, found_in))
        elif found_in == SIZE or _is_outside(steps["iteration_s"][WARM_UP_STEPS : last + 1], first - WARM_UP_STEPS):
            due.append((replace(change, known_ns=max(change.known_ns, int(steps["end_unix_ns"][last]))), found_in))
    yield from sorted(due, key=lambda one: one[0].known_ns)


def _is_outside(seconds: Floats, middle: int) -> bool:
    """Whether iterations from an index on are notably outside the range of those before, if these are enough."""
    if middle < _ENOUGH_BEFORE:
        return False
    before, after = seconds[:middle], seconds[middle:]
    is_longer = compute_known_median(after) >= _LONGER_TIMES * compute_known_median(before)
    return is_longer and stands_out(before, after, times=0.0, floor=0.0)


def _follow_up(group: Group, state: _State, until_ns: int) -> Iterator[PaceShift]:
    """Yield changes that have stayed, up to a time and in its order: of a wandering pace, and those that are pending."""
    steps = group.lead.steps_until(until_ns)
    while len(steps) >= state.lasting_steps:
        known = steps[: state.lasting_steps]
        state.lasting_steps += max(2 * BLOCK, len(known) // _MORE_STEPS)
        known_ns = int(known["end_unix_ns"][-1])
        yield from _judge_pending(group, state, known)
        told = [one.step for one in state.told if one.known_ns <= known_ns]
        since = max([int(known["step"][0]) + _FIRST_STEPS, *told])
        shift = find_lasting(group, known[np.searchsorted(known["step"], since) :])
        if shift is None or not (shift.is_worse or shift.is_expected):
            continue
        state.pending = [one for one in state.pending if one.shift.step < shift.step - NEAR_STEPS]
        state.told.append(KnownChange(shift.step, known_ns))
        state.real.append((state.told[-1], shift))
        yield shift
    yield from _judge_pending(group, state, steps)


def _judge_pending(group: Group, state: _State, steps: Rows) -> Iterator[PaceShift]:
    pending, state.pending = state.pending, []
    for one in pending:
        yield from _judge_again(state, one, steps)


def _judge_again(state: _State, pending: _Pending, steps: Rows) -> Iterator[PaceShift]:
    """Yield a change that has lasted; it is judged after each BLOCK of steps, and dropped once another one is real."""
    shift = pending.shift
    first = int(np.searchsorted(steps["step"], shift.step))
    for count in range(pending.judged + BLOCK, len(steps) - first + 1, BLOCK):
        pending = _Pending(shift, count)
        known_ns = int(steps["end_unix_ns"][first + count - 1])
        if any(other.step > shift.step and other.known_ns <= known_ns for other, _ in state.real):
            return
        if known_ns < shift.change.known_ns:
            continue
        shift = _explain_by_training(shift, known_ns)
        history, earlier = _select_history(steps[: first + count], state, shift)
        if shift.is_real(history, known_ns=known_ns, earlier=earlier, is_lasting=True) and _is_lasting_gain(shift, history):
            state.told.append(KnownChange(shift.step, known_ns))
            yield replace(shift, change=replace(shift.change, known_ns=known_ns))
            return
    state.pending.append(pending)


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


def _select_history(steps: Rows, state: _State, shift: PaceShift) -> tuple[Rows, PaceShift | None]:
    """Return the steps since the last real change before this one, without the very first step, and that change."""
    before = [(one.step, real) for one, real in state.real if one.step < shift.step]
    since, earlier = max(before, key=lambda one: one[0], default=(int(steps["step"][0]) + 1, None))
    return steps[np.searchsorted(steps["step"], since) :], earlier


def _list_ready(group: Group, state: _State) -> list[tuple[StepChange, str]]:
    """Return the changes for which all records that may explain them have come, by the time when they were known."""
    ready: list[tuple[StepChange, str]] = []
    held, state.waiting = state.waiting, []
    for change, found_in in state.search.list_changes(group):
        waits = awaits_use(change) or awaits_threads(change) or change.lacks_phases or is_short(change)
        (held if waits else ready).append((change, found_in))
    for change, found_in in held:
        known_ns = find_deadline(group.lead, change.known_ns, USE_NS)
        if known_ns <= group.lead.at.cursor_ns:
            change = replace(change, known_ns=known_ns)
            if not is_short(change) or check_training(change) is not None:
                ready.append((change, found_in))
        else:
            state.waiting.append((change, found_in))
    return sorted(ready, key=lambda one: one[0].known_ns)


def _find_begin(shift: PaceShift, known_ns: int) -> Rows:
    """Return the steps from the one with which the change began: counted steps may precede the first one that shows it."""
    before, after = shift.change.before, shift.change.after
    if not shift.found_in:
        return after
    steps = shift.change.process.steps_until(known_ns)
    onset = find_onset(steps, int(before["step"][-1]), int(after["step"][0]))
    return steps[onset : np.searchsorted(steps["step"], after["step"][-1]) + 1]


def _place_in_iterations(shift: PaceShift, found: FoundLine) -> PaceShift:
    """Return a change that iterations show too, though not for certain, as one of these from the step where it began."""
    steps, after = shift.change.process.steps_until(found.known_ns), _find_begin(shift, found.known_ns)
    first = int(np.searchsorted(steps["step"], after["step"][0]))
    change = replace(shift.change, before=steps[max(0, first - LEVEL_STEPS) : first], after=after)
    return replace(shift, change=change, found_in="")


def _may_be_warm_up(shift: PaceShift) -> bool:
    """Whether the steps before the change are the first of all, and may have been faster because queues were not full.

    Code outside the phases waits for no queue, except where the GPU is busy.
    """
    process, use = shift.change.process, shift.gpu_uses[1]
    waits = shift.carrier != "other_s" or (process.is_on_gpu and not use < BUSY_SHARE)
    return waits and int(np.searchsorted(process.steps["step"], shift.step)) <= WARM_UP_STEPS


def _is_line_named(shift: PaceShift, line: StackLine | None) -> bool:
    """Whether a line explains the change."""
    if line is None or (shift.is_uncertain and line.known_call is None and not line.is_new):
        return False
    return is_cause(line, shift.find_delay())


def _is_explained(shift: PaceShift, line: StackLine | None) -> bool:
    """Whether a cause is known for a change that the iteration times do not show."""
    has_certain_cause = shift.is_worse and shift.cause is not None and not shift.is_uncertain
    if shift.found_in == STEP_PHASE:
        return shift.is_worse and shift.carrier == "step_s" and shift.is_far("step_s")
    return shift.found_in == SIZE or has_certain_cause or _is_line_named(shift, line)


def _choose_kind(shift: PaceShift) -> FindingKind:
    cause = shift.cause
    kind = _BY_GPU if shift.is_by_gpu else _BETWEEN if shift.carrier in ("data_s", "other_s") else _KIND
    if shift.is_by_gpu and not shift.device_parts:
        kind = kind.with_changes(details=_BUSY_DETAILS)
    elif not shift.carrier:
        kind = kind.with_changes(details=_SPREAD_DETAILS if shift.parts else _UNPHASED_DETAILS)
    if cause is not None:
        kind = kind.with_changes(confidence=cause.confidence, advice=cause.advice, fix=cause.fix)
    if cause is not None and cause.line is not None:
        kind = kind.with_changes(headline=f"{_LINE_HEADLINE}: {{place}}")
    return kind


def _build_finding(state: _State, shift: PaceShift, found: FoundLine, until_step: int | None = None) -> Finding:
    """Return the finding as known at a time. ``until_step``: the last step with the change, if it has ended."""
    others = state.list_others(found.known_ns)
    begin, whole = shift, measure_whole(shift, others, found.known_ns, until_step)
    change, cause, kind = shift.change, shift.cause, _choose_kind(whole)
    is_named = _is_line_named(shift, found.line)
    is_told = is_named or not (shift.is_uncertain or is_wait(found.line) or (found.line is not None and found.line.is_new))
    line = found.line if is_told else None
    if line is not None and is_named:
        kind = name_line(kind.with_changes(confidence=0.9, headline=_LINE_HEADLINE), line)
        note_named_line(change.group, line, found.known_ns)
    is_warm_up = cause is None and not is_named and _may_be_warm_up(shift)
    if not shift.is_worse or is_warm_up:
        kind = kind.with_changes(severity=Severity.INFO, advice="", fix="")
    elif cause is not None:
        kind = kind.with_changes(measured_cause=cause.finding)
    values: dict[str, Any] = line_values(line)
    if cause is not None and cause.where:
        values |= {"line": None, "cause_line": values["line"]}
    if cause is not None and cause.line is not None:
        values["place"] = cause.line.place
    unexplained = None if is_named else "no other change was recorded"
    jump_s, shift = shift.added_s, whole  # what the first steps showed: the level may go on to rise
    evidence = {"before_s": shift.before_s, "after_s": shift.after_s, "change_share": shift.after_s / shift.before_s - 1}
    evidence["jump_s"] = jump_s
    evidence |= {f"{name.removesuffix('_s')}_change_s": value for name, value in shift.parts.items()}
    return kind.at_steps(
        change.group,
        _find_begin(begin, found.known_ns),
        {**evidence, "until_step": until_step},
        known_ns=found.known_ns,
        take="take" if until_step is None else "took",
        until="on" if until_step is None else f"to {until_step}",
        carried=shift.carried_s if shift.carrier else None,
        busy_before=shift.gpu_uses[0] if shift.is_by_gpu else None,
        busy_after=shift.gpu_uses[1] if shift.is_by_gpu else None,
        longer="longer" if shift.is_worse else "shorter",
        part=_describe_part(shift),
        cost=0.0 if is_warm_up else shift.cost,
        pid=change.process.source.pid,
        cause=Text("at the same time {text}", {"text": cause.text}) if cause else unexplained,
        **values,
    )


def _describe_part(shift: PaceShift) -> str | None:
    if not shift.is_by_gpu:
        return name_part(shift.carrier) if shift.carrier else None
    parts = sorted(shift.device_parts.items(), key=lambda one: -abs(one[1]))
    return ", ".join(
        f"{format_seconds(abs(part))} {name_part(name)}"
        for name, part in parts
        if part * shift.added_s > 0 and abs(part) >= _PART_SHARE * abs(shift.added_s)
    )
