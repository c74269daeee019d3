"""Iteration time changes permanently: the phase that changed, and what else changed at that moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.findings.pace.changes_of_pace import (
    BETWEEN_PHASES,
    SIZE,
    STEP_PHASE,
    KnownChange,
    PaceSearch,
    is_near,
    is_same,
    is_short,
    join_shifts,
    measure_whole,
)
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.causes.gpu_causes import USE_NS, awaits_use
from zerotop.analysis.findings.support.causes.lasting_shift import find_lasting, grows_slowly
from zerotop.analysis.findings.support.causes.pace_shift import CERTAIN, PaceShift, explain_change
from zerotop.analysis.findings.support.causes.step_change import StepChange, name_part
from zerotop.analysis.findings.support.causes.thread_causes import awaits_threads
from zerotop.analysis.findings.support.causes.training_causes import check_training
from zerotop.analysis.findings.support.gpu_use import BUSY_SHARE
from zerotop.analysis.findings.support.lines import line_findings
from zerotop.analysis.findings.support.lines.stack_lines import (
    FoundLine,
    StackLine,
    await_line,
    find_deadline,
    find_line,
    find_new,
    has_moved,
)
from zerotop.analysis.findings.support.links import (
    Kinds,
    explains_shift,
    is_lost_there,
    is_part_of,
    is_that_wait,
    is_told_of_mode,
    names_same_line,
    waits_as_long,
)
from zerotop.analysis.findings.support.steps.onsets import find_onset
from zerotop.analysis.findings.support.steps.runs import find_first_run
from zerotop.analysis.findings.support.thresholds import NEAR_STEPS, WARM_UP_STEPS
from zerotop.analysis.formatting import Text, format_seconds
from zerotop.analysis.stats.change_points import LEVEL_STEPS, SHIFT_STEPS
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.analysis.stats.wander import BLOCK, compute_levels, stands_out
from zerotop.recording.events.event_files import select_events
from zerotop.recording.samples import Floats, Rows
from zerotop_probe.recording.events import Stacks, TrainingChanged

_KIND = FindingKind(
    name="iteration_shift",
    confidence=0.5,
    headline="Iterations {take} {after_s:seconds} instead of {before_s:seconds} ({change_share:change})"
    " from step {step} {until}",
    details="{carried:seconds} of it {part}[, {most} of that at {line}][; {cause}[: {cause_line}]].",
    advice="{breakdown}",
    fix="{breakdown_fix}",
    explained_by=(
        Kinds(explains_shift, "nvlink_faults", "pcie_link", "straggler", "data_stall", "skipping_ended"),
        Kinds(explains_shift, "time_lost_in_line", "slow_forward", "slow_cores"),
        Kinds(waits_as_long, "slow_gpu"),
        Kinds(explains_shift, "iteration_drift", "throttled"),
    ),
    repeats=(Kinds(names_same_line, "time_lost_in_line"),),
    superseded_by=(
        Kinds(is_part_of, "iteration_shift"),
        Kinds(is_that_wait, "data_stall"),
        Kinds(is_told_of_mode, "anomaly_mode", "profiler_on", "cache_emptied"),
        Kinds(is_lost_there, "time_lost_in_line"),
    ),
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
# Samples that were written so recently (ns) may show a new line, unless iterations rose by this part of the change since.
_RECENT_NS, _GROWN_SHARE = 5 * 10**9, 0.25
# For so long (ns) the line of a change is looked for with each event that has samples; then with the levels only.
_SAMPLED_NS = 60 * 10**9
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
# The share of the time from which a slowdown is worth telling.
_LEAST_COST = 0.03


class _Candidate(NamedTuple):
    """A change that may be real, and what showed it where the iterations did not."""

    change: StepChange
    found_in: str
    waits: bool  # whether records may come that explain it


@dataclass(eq=False)
class _Followed:
    """A change that was reported and is not known to have ended."""

    shift: PaceShift
    found: FoundLine
    steps: int  # since it began, with which its levels were looked at last
    levels: tuple[float, float]  # that were shown last, in seconds
    blocks: int = 0  # of steps since it began, in which it has not ended


class _Changes:
    """The changes of an attempt up to now, with which each new one is compared."""

    def __init__(self) -> None:
        self.search = PaceSearch()
        self.real: list[tuple[KnownChange, PaceShift]] = []  # explained: levels before them do not count any more
        self.lasting: list[KnownChange] = []  # those of them that were found in a wandering pace
        self.told: list[KnownChange] = []  # real changes of the iterations themselves
        self.by_cause: list[KnownChange] = []  # reported without the iterations' own change
        self.open: list[_Followed] = []

    def list_others(self, until_ns: int) -> list[int]:
        """Return the first steps of changes that were known at a time."""
        return [one.step for one in self.told if one.known_ns <= until_ns]


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each change of level of the iterations, including changes that show only in their cause, and their ends."""
    lead, changes = window.subject.lead, window.keep(_Changes)
    known = window.await_each(_list_real(window, changes), lambda shift: await_line(shift.find_delay()), await_line)
    for shift, found in sorted(known, key=lambda one: one[1].known_ns):
        yield from _follow_open(lead, changes, found.known_ns - 1)  # its end may be known at the same time
        if not shift.found_in:
            if not is_near(shift.change, changes.by_cause, found.known_ns):
                yield from _report(window, changes, shift, found)
        elif is_near(shift.change, changes.told, found.known_ns):
            continue  # the iterations showed it while its line was searched
        elif _is_explained(shift, found.line):
            changes.by_cause.append(KnownChange(shift.step, found.known_ns))
            is_shown = is_near(shift.change, changes.search.known, found.known_ns)
            yield from _report(window, changes, _place_in_iterations(shift, found) if is_shown else shift, found)
    told = [event.unix_ns for kind in (TrainingChanged, Stacks) for event in window.items(lead.events_of(kind), kind)]
    for known_ns in sorted(told):
        yield from _explain_again(changes, known_ns)
    yield from _end_far(lead, changes)
    yield from _follow_open(lead, changes, lead.at.cursor_ns)


def _follow_open(lead: Process, changes: _Changes, until_ns: int) -> Iterator[Finding]:
    """Yield changes again as the levels become known from more steps, and the ends of slowdowns that have passed."""
    steps = lead.steps_until(until_ns)
    for one in [one for one in changes.open if len(one.shift.change.after) >= SHIFT_STEPS]:
        passed = _find_passed(one, steps) if one.shift.is_worse else None
        known_ns = max(passed[1], one.found.known_ns) if passed is not None else until_ns
        yield from _show_levels(changes, one, lead.steps_until(until_ns if passed is None else known_ns - 1))
        if passed is not None:
            yield _end(changes, one, known_ns, passed[0])


def _end(changes: _Changes, one: _Followed, known_ns: int, until_step: int) -> Finding:
    """Return a change with its end, and follow it no further. The end is told after the change."""
    changes.open.remove(one)
    known_ns = max(known_ns, one.found.known_ns + 1)
    shift = replace(one.shift, cause=None) if _outlasts(one.shift, until_step, known_ns) else one.shift
    return _build_finding(changes, shift, one.found._replace(known_ns=known_ns), until_step)


def _outlasts(shift: PaceShift, until_step: int, known_ns: int) -> bool:
    """Whether a change of the training, which seemed the cause, was not taken back when iterations became shorter again."""
    change, process = replace(shift.change, known_ns=known_ns), shift.change.process
    if shift.cause is None or shift.cause.is_code or check_training(change) != shift.cause:
        return False
    steps = process.steps_until(known_ns)
    end_ns = int(steps["end_unix_ns"][np.searchsorted(steps["step"], until_step)])
    off_ns = round(BLOCK * 1e9 * shift.after_s)  # the end is known by blocks
    return not process.find_changes(end_ns - off_ns, end_ns + off_ns, known_ns)


def _find_passed(one: _Followed, steps: Rows) -> tuple[int, int] | None:
    """Return the last step of a change, and when that was known: after _PASSED_BLOCKS in a row nearer to the old level."""
    shift, later = one.shift, steps[np.searchsorted(steps["step"], one.shift.step) :]
    count, begin = len(later) // BLOCK, max(0, one.blocks - _PASSED_BLOCKS)
    seconds = later["iteration_s"][begin * BLOCK : count * BLOCK].reshape(-1, BLOCK)
    is_back = np.median(seconds, axis=1) < (shift.before_s + shift.after_s) / 2  # false for NaN
    first, one.blocks = find_first_run(is_back, _PASSED_BLOCKS), count
    if first is None:
        return None
    first = (begin + first) * BLOCK
    return int(later["step"][max(first - 1, 0)]), int(later["end_unix_ns"][first + _PASSED_BLOCKS * BLOCK - 1])


def _show_levels(changes: _Changes, one: _Followed, steps: Rows) -> Iterator[Finding]:
    """Yield a change again where its levels, looked at after each quarter of more steps, or its line are not those shown."""
    shift, later = one.shift, steps[np.searchsorted(steps["step"], one.shift.step) :]
    while not shift.found_in and len(later) >= (due := one.steps + max(BLOCK, one.steps // _MORE_SHOWN)):
        known_ns = int(later["end_unix_ns"][due - 1])
        is_later = known_ns > one.found.known_ns
        line = _find_later_line(shift, known_ns) if one.found.line is None and is_later else None
        if line is not None:
            one.found = FoundLine(line, known_ns)
        told = _build_finding(changes, _explain_by_training(shift, known_ns), one.found._replace(known_ns=known_ns))
        present = told.evidence["before_s"], told.evidence["after_s"]
        is_other = max(abs(now / then - 1) for now, then in zip(present, one.levels, strict=True)) > _SHOWN_SHARE
        if line is not None or (is_other and is_later):
            yield told
        one.steps, one.levels = due, present if is_other else one.levels


def _find_later_line(shift: PaceShift, known_ns: int) -> StackLine | None:
    """Return the line that takes the time, from samples that came after the change had been told without one."""
    delay = shift.find_delay()
    if not shift.is_worse or not delay.where:
        return None
    line = find_line(delay._replace(end_ns=known_ns, known_ns=known_ns))
    return line if _is_line_named(shift, line) else None


def _explain_again(changes: _Changes, known_ns: int) -> Iterator[Finding]:
    """Yield changes again for which a change of the training, or a line, is known by now."""
    for one in changes.open:
        told, later_ns = _explain_by_training(one.shift, known_ns), max(one.found.known_ns, known_ns)
        is_sought = one.found.line is None and one.shift.begin_ns + _SAMPLED_NS >= known_ns >= one.found.known_ns
        line = _find_later_line(one.shift, known_ns) if is_sought else None
        if told is not one.shift or line is not None:
            one.shift, one.found = told, FoundLine(line or one.found.line, later_ns)
            yield _build_finding(changes, one.shift, one.found)


def _explain_by_training(shift: PaceShift, known_ns: int) -> PaceShift:
    """Return the change with a change of the training as its cause, if it had none that is certain."""
    if shift.cause is not None and shift.cause.confidence >= CERTAIN:
        return shift
    change = replace(shift.change, known_ns=known_ns)
    cause = check_training(change)
    return shift if cause is None else replace(shift, change=change, cause=cause)


def _end_far(lead: Process, changes: _Changes) -> Iterator[Finding]:
    """Yield the ends of changes that were told with two far outliers, if the next BLOCK of steps are none."""
    steps = lead.steps
    for one in [one for one in changes.open if len(one.shift.change.after) < SHIFT_STEPS]:
        shift, last = one.shift, one.shift.change.after[-1]
        later = steps[np.searchsorted(steps["step"], last["step"], "right") :][:BLOCK]
        known_ns = max(int(later["end_unix_ns"].max(initial=0)), one.found.known_ns)
        if len(later) < BLOCK or known_ns > lead.at.cursor_ns:
            continue
        if np.median(later["iteration_s"]) < (shift.before_s + shift.after_s) / 2:
            yield _end(changes, one, known_ns, int(last["step"]))
        else:  # followed from now on as other changes are
            after = steps[np.searchsorted(steps["step"], shift.step) : np.searchsorted(steps["step"], later["step"][-1])]
            change = StepChange(shift.change.group, shift.change.before, after, known_ns)
            changes.open.remove(one)
            _follow(changes, replace(shift, change=change), one.found._replace(known_ns=known_ns))


def _report(window: SearchWindow[Group], changes: _Changes, shift: PaceShift, found: FoundLine) -> Iterator[Finding]:
    """Yield the change, the end of the earlier one that it takes back, or that of which it is a part."""
    for earlier in reversed(changes.open):
        if _is_back(earlier.shift, shift):
            yield _end(changes, earlier, found.known_ns, shift.step - 1)
            return
        if is_same(earlier.shift, shift):
            yield from _tell_joined(changes, earlier, shift, found)
            return
    shift = _explain_by_training(shift, found.known_ns)
    whole = measure_whole(shift, changes.list_others(found.known_ns), found.known_ns)
    is_unknown = shift.cause is None and not _is_line_named(shift, found.line)
    fills_queue = is_unknown and _may_be_warm_up(shift) and not sum(shift.device_parts.values()) > shift.added_s / 2
    if fills_queue or _has_passed(shift, found.known_ns) or _is_moment(shift):
        return
    if shift.is_worse and whole.cost < _LEAST_COST:
        return
    told = _build_finding(changes, shift, found)
    yield told
    if told in window.subject.findings[-1:]:  # it is news
        _follow(changes, shift, found)


def _has_passed(shift: PaceShift, known_ns: int) -> bool:
    """Whether a load of other processes is over before it could be told as the cause of a change."""
    if shift.found_in or shift.cause is None or shift.cause.finding != "cores_taken":
        return False
    steps = shift.change.process.steps_until(known_ns)
    last = steps[np.searchsorted(steps["step"], shift.step) :]["iteration_s"][-LEVEL_STEPS:]
    return bool((np.nanmedian(last) - (shift.before_s + shift.after_s) / 2) * shift.added_s < 0)


def _is_moment(shift: PaceShift) -> bool:
    """Whether only the first of the steps with other batches took longer, as each new size does."""
    seconds = shift.change.after["iteration_s"]
    later = float(np.nanmedian(seconds[len(seconds) // 2 :]))
    return shift.found_in == SIZE and shift.added_s > 0 and later < (shift.before_s + shift.after_s) / 2


def _tell_joined(changes: _Changes, earlier: _Followed, shift: PaceShift, found: FoundLine) -> Iterator[Finding]:
    """Yield an earlier change and its near part as one; more of the same load shows in the levels of the earlier one."""
    is_part = abs(shift.step - earlier.shift.step) <= NEAR_STEPS
    joined = join_shifts(earlier.shift, shift, found.known_ns) if is_part else None
    if joined is None or joined.added_s * shift.added_s <= 0:
        return
    joined = _explain_by_training(joined, found.known_ns)
    found = FoundLine(found.line if found.line is not None else earlier.found.line, found.known_ns)
    changes.open.remove(earlier)
    _follow(changes, joined, found)
    yield _build_finding(changes, joined, found)


def _follow(changes: _Changes, shift: PaceShift, found: FoundLine) -> None:
    """Follow a change from now on."""
    steps = shift.change.process.steps_until(found.known_ns)
    count = len(steps) - int(np.searchsorted(steps["step"], shift.step))
    whole = measure_whole(shift, changes.list_others(found.known_ns), found.known_ns)
    changes.open.append(_Followed(shift, found, count, (whole.before_s, whole.after_s)))


def _is_back(earlier: PaceShift, later: PaceShift) -> bool:
    """Whether a change leads back to the level before an earlier one."""
    is_alike = abs(later.after_s - earlier.before_s) < _BACK_SHARE * max(abs(earlier.added_s), earlier.before_s)
    return is_alike and later.step > earlier.step and later.added_s * earlier.added_s < 0


def _list_real(window: SearchWindow[Group], changes: _Changes) -> Iterator[PaceShift]:
    """Yield the changes that are more than the run's own wandering, once that is known."""
    lead, pending = window.subject.lead, list[PaceShift]()
    for change, found_in, _ in _list_shown(window, changes):
        yield from _follow_up(window, changes, pending, change.known_ns)
        shift = explain_change(change, found_in)
        if shift is None or (found_in == BETWEEN_PHASES and grows_slowly(lead.steps_until(change.known_ns), shift)):
            continue
        # What follows two far outliers does not count against them.
        until_ns = change.known_ns if len(change.after) >= SHIFT_STEPS else int(change.after["end_unix_ns"][-1])
        steps, earlier = _select_history(lead.steps_until(until_ns), changes, shift)
        if shift.is_real(steps, known_ns=change.known_ns, earlier=earlier) and _is_lasting_gain(shift, steps):
            is_held = found_in and is_near(change, changes.search.known, change.known_ns)  # its line may be missing
            if not is_held and (shift.has_own_part or shift.has_recorded_cause(None)):
                changes.real.append((KnownChange(shift.step, change.known_ns), shift))
            if not found_in:
                changes.told.append(KnownChange(shift.step, change.known_ns))
            yield shift
        else:
            pending.append(shift)
    yield from _follow_up(window, changes, pending, lead.at.cursor_ns)


def _list_shown(window: SearchWindow[Group], changes: _Changes) -> list[_Candidate]:
    """Return changes in the order in which they became known; a hidden one only after steps that may have shown it."""
    known = window.await_each(
        _list_ready(window, changes), partial(_await_steps, changes, window.subject.lead), _await_steps
    )
    shown = (one._replace(change=replace(one.change, known_ns=known_ns)) for one, known_ns in known if known_ns >= 0)
    return sorted(shown, key=lambda one: one.change.known_ns)


def _await_steps(changes: _Changes, lead: Process, one: _Candidate) -> int | None:
    """Return when a change is known, None while the next _HELD_STEPS may show it, and -1 if they do not."""
    change, steps = one.change, lead.steps
    if not one.found_in or not is_near(change, changes.search.known, change.known_ns):
        return change.known_ns
    first, last = np.searchsorted(steps["step"], (change.after["step"][0], change.after["step"][-1])).tolist()
    last += _HELD_STEPS
    if last >= len(steps):
        return None
    is_shown = one.found_in == SIZE or _is_outside(steps["iteration_s"][WARM_UP_STEPS : last + 1], first - WARM_UP_STEPS)
    return max(change.known_ns, int(steps["end_unix_ns"][last])) if is_shown else -1


def _is_outside(seconds: Floats, middle: int) -> bool:
    """Whether iterations from an index on are notably outside the range of those before, if these are enough."""
    if middle < _ENOUGH_BEFORE:
        return False
    before, after = seconds[:middle], seconds[middle:]
    is_longer = compute_known_median(after) >= _LONGER_TIMES * compute_known_median(before)
    return is_longer and stands_out(before, after, times=0.0, floor=0.0)


def _follow_up(
    window: SearchWindow[Group], changes: _Changes, pending: list[PaceShift], until_ns: int
) -> Iterator[PaceShift]:
    """Yield changes that have stayed, up to a time and in its order: of a wandering pace, and those that are pending."""
    steps = window.subject.lead.steps_until(until_ns)
    for due in window.extend(partial(_find_due, len(steps)), 0):
        known = steps[:due]
        known_ns = int(known["end_unix_ns"][-1])
        yield from _judge_pending(window, changes, pending, known)
        since = max([int(known["step"][0]) + _FIRST_STEPS, *changes.list_others(known_ns)])
        shift = find_lasting(window.subject, known[np.searchsorted(known["step"], since) :])
        if shift is not None and (shift.is_worse or shift.is_expected):
            changes.told.append(KnownChange(shift.step, known_ns))
            changes.lasting.append(changes.told[-1])
            changes.real.append((changes.told[-1], shift))
            yield shift
    yield from _judge_pending(window, changes, pending, steps)


def _find_due(count: int, last: int | None) -> int | None:
    """Return with how many steps lasting changes are searched next; None if there are fewer."""
    due = _FIRST_STEPS if last is None else last + max(2 * BLOCK, last // _MORE_STEPS)
    return due if due <= count else None


def _judge_pending(
    window: SearchWindow[Group], changes: _Changes, pending: list[PaceShift], steps: Rows
) -> Iterator[PaceShift]:
    """Yield those that have lasted. ``pending``: new ones, which are taken from there."""
    fresh, pending[:] = pending[:], []
    for _, lasting in window.await_each(fresh, partial(_judge_again, window, changes, steps), _judge_again):
        yield from lasting


def _judge_again(
    window: SearchWindow[Group], changes: _Changes, steps: Rows, shift: PaceShift
) -> tuple[PaceShift, ...] | None:
    """Judge a change after each BLOCK of steps, and return it once it has lasted; nothing if another one has replaced it."""
    first, judged = int(np.searchsorted(steps["step"], shift.step)), len(shift.change.after)
    new = window.steps(steps[first:], of=shift)
    for count in range(judged + max(1, (new.start - judged) // BLOCK + 1) * BLOCK, new.stop + 1, BLOCK):
        known_ns = int(steps["end_unix_ns"][first + count - 1])
        if _is_replaced(changes, shift, known_ns):
            return ()
        if known_ns < shift.change.known_ns:
            continue
        told = _explain_by_training(shift, known_ns)
        history, earlier = _select_history(steps[: first + count], changes, told)
        is_real = told.is_real(history, known_ns=known_ns, earlier=earlier, is_lasting=True)
        if (is_real or _has_new_line(told, history, known_ns)) and _is_lasting_gain(told, history):
            changes.told.append(KnownChange(told.step, known_ns))
            return (replace(told, change=replace(told.change, known_ns=known_ns)),)
    return None


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


def _is_replaced(changes: _Changes, shift: PaceShift, known_ns: int) -> bool:
    """Whether a later change became real by then, or the same one, in a wandering pace, since it was judged first."""
    return any(one.step > shift.step and one.known_ns <= known_ns for one, _ in changes.real) or any(
        one.step - NEAR_STEPS <= shift.step and shift.change.known_ns < one.known_ns <= known_ns for one in changes.lasting
    )


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


def _select_history(steps: Rows, changes: _Changes, shift: PaceShift) -> tuple[Rows, PaceShift | None]:
    """Return the steps since the last real change before this one, without the very first step, and that change."""
    before = [(one.step, real) for one, real in changes.real if one.step < shift.step]
    since, earlier = max(before, key=lambda one: one[0], default=(int(steps["step"][0]) + 1, None))
    return steps[np.searchsorted(steps["step"], since) :], earlier


def _list_ready(window: SearchWindow[Group], changes: _Changes) -> list[_Candidate]:
    """Return the changes for which all records that may explain them have come, by the time when they were known."""
    fresh = (
        _Candidate(change, found_in, awaits_use(change) or awaits_threads(change) or change.lacks_phases or is_short(change))
        for change, found_in in changes.search.list_changes(window.subject)
    )
    known = window.await_each(fresh, partial(_await_records, window.subject.lead), _await_records)
    ready = (one._replace(change=replace(one.change, known_ns=known_ns)) for one, known_ns in known)
    told = (one for one in ready if not is_short(one.change) or check_training(one.change) is not None)
    return sorted(told, key=lambda one: one.change.known_ns)


def _await_records(lead: Process, one: _Candidate) -> int | None:
    known_ns = find_deadline(lead, one.change.known_ns, USE_NS) if one.waits else one.change.known_ns
    return known_ns if known_ns <= lead.at.cursor_ns else None


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
    return line_findings.is_cause(line, shift.find_delay())


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


def _build_finding(changes: _Changes, shift: PaceShift, found: FoundLine, until_step: int | None = None) -> Finding:
    """Return the finding as known at a time. ``until_step``: the last step with the change, if it has ended."""
    others = changes.list_others(found.known_ns)
    begin, whole = shift, measure_whole(shift, others, found.known_ns, until_step)
    change, cause, kind = shift.change, shift.cause, _choose_kind(whole)
    is_named = _is_line_named(shift, found.line)
    is_told = is_named or not (
        shift.is_uncertain or line_findings.is_wait(found.line) or (found.line is not None and found.line.is_new)
    )
    line = found.line if is_told else None
    if line is not None and is_named:
        kind = line_findings.name_line(kind.with_changes(confidence=0.9, headline=_LINE_HEADLINE), line)
    is_warm_up = cause is None and not is_named and _may_be_warm_up(shift)
    if not shift.is_worse or is_warm_up or whole.cost < _LEAST_COST:
        kind = kind.with_changes(severity=Severity.INFO, advice="", fix="")
    elif cause is not None:
        kind = kind.with_changes(measured_cause=cause.finding)
    values: dict[str, Any] = line_findings.line_values(line)
    if cause is not None and cause.where:
        values |= {"line": None, "cause_line": values["line"]}
    if cause is not None and cause.line is not None:
        values["place"] = cause.line.place
    is_known = is_named or cause is not None or has_moved(shift.find_delay(), found.known_ns)
    unexplained = None if is_known else "no other change was recorded"
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
