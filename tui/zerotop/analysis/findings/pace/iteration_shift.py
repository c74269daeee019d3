"""Iteration time changes permanently: the phase that changed, and what else changed at that moment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from zerotop.analysis.findings.pace.changes_of_pace import BETWEEN_PHASES, SIZE, STEP_PHASE, find_begin, is_near
from zerotop.analysis.findings.pace.followed_shifts import FollowedShifts, ToldShift, explain, is_line_named
from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.causes.batch_causes import BATCH_GROWTH, describe_other_size
from zerotop.analysis.findings.support.causes.late_ranks import blame_rank
from zerotop.analysis.findings.support.causes.pace_shift import PaceShift
from zerotop.analysis.findings.support.causes.step_change import COMPUTING_COLUMNS, Cause, name_part
from zerotop.analysis.findings.support.causes.training_causes import OPTIMIZER_REMADE
from zerotop.analysis.findings.support.gpu_use import BUSY_SHARE
from zerotop.analysis.findings.support.lines import line_findings
from zerotop.analysis.findings.support.lines.stack_lines import FoundLine, StackLine, await_line, has_moved
from zerotop.analysis.findings.support.links import (
    TO_DEAD_THREADS,
    Kinds,
    explains_shift,
    is_by_growth,
    is_lost_there,
    is_part_of,
    is_that_wait,
    is_told_of_mode,
    names_same_line,
    slowed_by_saves,
    slowed_by_threads,
    waits_as_long,
)
from zerotop.analysis.findings.support.steps.lost_time import LEAST_COST, has_cost_little
from zerotop.analysis.findings.support.thresholds import WARM_UP_STEPS
from zerotop.analysis.formatting import Text, format_seconds
from zerotop.analysis.stats.change_points import LEVEL_STEPS
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
        *TO_DEAD_THREADS,
        Kinds(explains_shift, "nvlink_faults", "pcie_link", "straggler", "data_stall", "skipping_ended"),
        Kinds(explains_shift, "time_lost_in_line", "slow_forward", "slow_cores", "workers_restarted"),
        Kinds(waits_as_long, "slow_gpu"),
        Kinds(explains_shift, "iteration_drift", "throttled"),
        Kinds(slowed_by_saves, "checkpoint_pause"),
        Kinds(slowed_by_threads, "piled_threads"),
    ),
    repeats=(Kinds(names_same_line, "time_lost_in_line"),),
    superseded_by=(
        Kinds(is_part_of, "iteration_shift"),
        Kinds(is_that_wait, "data_stall"),
        Kinds(is_told_of_mode, "anomaly_mode", "profiler_on", "cache_emptied"),
        Kinds(is_lost_there, "time_lost_in_line"),
        Kinds(is_by_growth, "batch_growth"),
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
# The first step of a change is named if it took so many times what the next ones do, as one that compiles.
_FIRST_TIMES = 4.0
# A part of the GPU's work is named from this share of the change on.
_PART_SHARE = 0.2


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each change of level of the iterations, including changes that show only in their cause, and their ends."""
    lead, followed = window.subject.lead, window.keep(FollowedShifts)  # each change is compared with those before it
    events = [event.unix_ns for kind in (TrainingChanged, Stacks) for event in window.items(lead.events_of(kind), kind)]
    events.sort()
    shifts = (blame_rank(shift, shift.change.known_ns) for shift in followed.real.list_new(window))
    known = window.await_each(shifts, lambda shift: await_line(shift.find_delay()), await_line)
    seen = 0  # of the events, by which changes may have been explained that the iterations did not show
    for shift, found in sorted(known, key=lambda one: one[1].known_ns):
        due = bisect_right(events, found.known_ns)
        yield from _report_explained(window, followed, events[seen:due])
        seen = max(seen, due)
        yield from map(_build_finding, followed.tell_until(lead, found.known_ns - 1))  # its end may be known then, too
        yield from _report(window, followed, shift, found)
    for known_ns in events:
        yield from map(_build_finding, followed.tell_explained(known_ns))
    yield from _report_explained(window, followed, events[seen:])
    yield from map(_build_finding, followed.tell_far_ends(lead))
    yield from map(_build_finding, followed.tell_until(lead, lead.at.cursor_ns))


def _report_explained(window: SearchWindow[Group], followed: FollowedShifts, times: Iterable[int]) -> Iterator[Finding]:
    """Yield changes that the iterations did not show, for which samples written at one of these times show a line."""
    for known_ns in times:
        for shift, found in followed.list_explained(window.subject.lead, known_ns):
            yield from _report(window, followed, shift, found)


def _report(window: SearchWindow[Group], followed: FollowedShifts, new: PaceShift, found: FoundLine) -> Iterator[Finding]:
    """Yield the change, the end of the earlier one that it follows or takes back, or that of which it is a part."""
    shift = _choose_shown(followed, new, found)
    if shift is None:
        return
    yield from map(_build_finding, followed.tell_level(shift, found))
    told_again = followed.tell_known(shift, found)
    if told_again is not None:
        yield from map(_build_finding, told_again)
        return
    told = followed.measure(*explain(shift, found))
    if _is_worth_telling(told):
        finding = _build_finding(told)
        yield finding
        if finding in window.subject.findings[-1:]:  # it is news
            followed.follow(told)


def _choose_shown(followed: FollowedShifts, shift: PaceShift, found: FoundLine) -> PaceShift | None:
    """Return the change as the iterations show it, or its cause; None if that is not known, or was told."""
    change, known_ns = shift.change, found.known_ns
    if not change.found_in:
        return None if is_near(change, followed.by_cause, known_ns) else shift
    if is_near(change, followed.real.shown, known_ns):
        return None  # the iterations showed it while its line was searched
    if not _is_explained(shift, found.line):
        if change.found_in == BETWEEN_PHASES:
            followed.unexplained.append(shift)
        return None
    followed.by_cause.append(replace(change, known_ns=known_ns))
    return _place_in_iterations(shift, found) if is_near(change, followed.real.search.known, known_ns) else shift


def _is_worth_telling(told: ToldShift) -> bool:
    """Whether a change still holds, costs enough, and is more than the end of a warm-up."""
    shift, found = told.shift, told.found
    is_unknown = shift.cause is None and not is_line_named(shift, found.line)
    fills_queue = is_unknown and _may_be_warm_up(shift) and not sum(shift.device_parts.values()) > shift.added_s / 2
    if fills_queue or _has_passed(shift, found.known_ns) or _is_moment(shift):
        return False
    return not shift.is_worse or told.whole.cost >= LEAST_COST


def _has_passed(shift: PaceShift, known_ns: int) -> bool:
    """Whether a lack of cores is over before it could be told as the cause of a change."""
    if shift.change.found_in or shift.cause is None or shift.cause.finding not in ("cores_taken", "crowded_cores"):
        return False
    steps = shift.change.process.steps_until(known_ns)
    last = steps[np.searchsorted(steps["step"], shift.step) :]["iteration_s"][-LEVEL_STEPS:]
    return bool((np.nanmedian(last) - (shift.before_s + shift.after_s) / 2) * shift.added_s < 0)


def _is_moment(shift: PaceShift) -> bool:
    """Whether only the first of the steps with other batches took longer, as each new size does."""
    seconds = shift.change.after["iteration_s"]
    later = float(np.nanmedian(seconds[len(seconds) // 2 :]))
    return shift.change.found_in == SIZE and shift.added_s > 0 and later < (shift.before_s + shift.after_s) / 2


def _place_in_iterations(shift: PaceShift, found: FoundLine) -> PaceShift:
    """Return a change that iterations show too, though not for certain, as one of these from the step where it began."""
    steps, after = shift.change.process.steps_until(found.known_ns), find_begin(shift.change, found.known_ns)
    first = int(np.searchsorted(steps["step"], after["step"][0]))
    change = replace(shift.change, before=steps[max(0, first - LEVEL_STEPS) : first], after=after, found_in="")
    return replace(shift, change=change)


def _may_be_warm_up(shift: PaceShift) -> bool:
    """Whether the steps before the change are the first of all, and may have been faster because queues were not full.

    Code outside the phases waits for no queue, except where the GPU is busy.
    """
    process, use = shift.change.process, shift.gpu_uses[1]
    waits = shift.carrier != "other_s" or (process.is_on_gpu and not use < BUSY_SHARE)
    return waits and int(np.searchsorted(process.steps["step"], shift.step)) <= WARM_UP_STEPS


def _is_explained(shift: PaceShift, line: StackLine | None) -> bool:
    """Whether a cause is known for a change that the iteration times do not show."""
    has_certain_cause = shift.is_worse and shift.cause is not None and not shift.is_uncertain
    if shift.change.found_in == STEP_PHASE:
        return shift.is_worse and shift.carrier == "step_s" and shift.is_far("step_s")
    return shift.change.found_in == SIZE or has_certain_cause or is_line_named(shift, line)


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


def _build_finding(told: ToldShift) -> Finding:
    """Return the finding as known at a time."""
    shift, whole, found, until_step = told
    change, cause, kind = shift.change, shift.cause, _choose_kind(whole)
    is_named = is_line_named(shift, found.line)
    is_told = is_named or not (
        shift.is_uncertain or line_findings.is_wait(found.line) or (found.line is not None and found.line.is_new)
    )
    line = found.line if is_told else None
    if line is not None and is_named:
        kind = line_findings.name_line(kind.with_changes(confidence=0.9, headline=_LINE_HEADLINE), line)
    is_warm_up = cause is None and not is_named and _may_be_warm_up(shift)
    if not shift.is_worse or is_warm_up or whole.cost < LEAST_COST or _has_cost_little(told):
        kind = kind.with_changes(severity=Severity.INFO, advice="", fix="")
    if cause is not None and (kind.severity is not Severity.INFO or cause.finding in (BATCH_GROWTH, OPTIMIZER_REMADE)):
        kind = kind.with_changes(measured_cause=cause.finding)
    values: dict[str, Any] = line_findings.line_values(line)
    if cause is not None and cause.where:
        values |= {"line": None, "cause_line": values["line"]}
    if cause is not None and cause.line is not None:
        values["place"] = cause.line.place
    is_known = is_named or cause is not None or has_moved(shift.find_delay(), found.known_ns)
    unexplained = None if is_known else describe_other_size(shift.change) or "no cause was found"
    evidence = {"before_s": whole.before_s, "after_s": whole.after_s, "change_share": whole.after_s / whole.before_s - 1}
    evidence["jump_of_first_steps_s"] = shift.added_s  # the level may go on to rise
    evidence |= {f"{name.removesuffix('_s')}_change_s": value for name, value in whole.parts.items()}
    begin = find_begin(change, found.known_ns)
    first_s = float(begin["iteration_s"][0])
    if first_s >= _FIRST_TIMES * whole.after_s:
        kind = kind.with_changes(details=f"{kind.details} Step {{step}} itself took {{first_s:seconds}}.")
    return kind.at_steps(
        change.group,
        begin,
        {**evidence, "until_step": until_step},
        known_ns=found.known_ns,
        take="take" if until_step is None else "took",
        until="on" if until_step is None else f"to {until_step}",
        carried=whole.carried_s if whole.carrier else None,
        busy_before=whole.gpu_uses[0] if whole.is_by_gpu else None,
        busy_after=whole.gpu_uses[1] if whole.is_by_gpu else None,
        longer="longer" if whole.is_worse else "shorter",
        first_s=first_s,
        part=_describe_part(whole),
        cost=0.0 if is_warm_up else whole.cost,
        pid=change.process.source.pid,
        cause=_describe_cause(cause) if cause is not None else unexplained,
        **values,
    )


def _describe_cause(cause: Cause) -> Text:
    template = "{text}; this changed {when}" if cause.when else "at the same time {text}"
    return Text(template, {"text": cause.text, "when": cause.when})


def _has_cost_little(told: ToldShift) -> bool:
    """Whether a slowdown has ended, and took little of the training time up to now."""
    if told.until_step is None:
        return False
    steps = told.shift.change.process.steps_until(told.found.known_ns)
    return has_cost_little(steps, told.shift.step, told.until_step, told.whole.cost)


def _may_wait(shift: PaceShift) -> bool:
    """Whether a phase became longer on the host while the GPU was busy, and its work in that phase is not known."""
    is_unknown = shift.carrier in COMPUTING_COLUMNS and shift.carrier not in shift.device_parts
    return is_unknown and shift.added_s > 0 and shift.gpu_uses[1] >= BUSY_SHARE


def _describe_part(shift: PaceShift) -> str | None:
    if not shift.is_by_gpu:
        whose = f" of rank {shift.change.process.rank}" if shift.cause is not None and shift.cause.culprit else ""
        waits = " on the host, which may wait for the GPU there, also for the step before" if _may_wait(shift) else ""
        return f"{name_part(shift.carrier)}{whose}{waits}" if shift.carrier else None
    parts = sorted(shift.device_parts.items(), key=lambda one: -abs(one[1]))
    return ", ".join(
        f"{format_seconds(abs(part))} {name_part(name)}"
        for name, part in parts
        if part * shift.added_s > 0 and abs(part) >= _PART_SHARE * abs(shift.added_s)
    )
