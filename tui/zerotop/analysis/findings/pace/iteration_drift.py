"""Iterations slowly become longer: by how much, in which phase, and what else grew at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.causes.batch_causes import find_batch_step
from zerotop.analysis.findings.support.causes.causes import find_drift_cause
from zerotop.analysis.findings.support.causes.host_causes import is_by_others
from zerotop.analysis.findings.support.causes.pace_shift import HOST_TIMES, PaceShift
from zerotop.analysis.findings.support.causes.step_change import StepChange, name_part
from zerotop.analysis.findings.support.causes.training_causes import find_repeated_steps
from zerotop.analysis.findings.support.gpu_use import is_paced_by_host
from zerotop.analysis.findings.support.lines import line_findings, stack_lines
from zerotop.analysis.findings.support.lines.stack_lines import UNSEEN, Delay, FoundLine, await_line
from zerotop.analysis.findings.support.links import (
    Kinds,
    goes_on,
    grew_in_a_jump,
    is_by_growth,
    slowed_by_saves,
    slowed_by_threads,
)
from zerotop.analysis.findings.support.steps.lost_time import Level, await_notable
from zerotop.analysis.findings.support.thresholds import SHORTEST_ITERATION_S
from zerotop.analysis.formatting import Text
from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop.analysis.stats.knee import fit_knee, is_gradual
from zerotop.analysis.stats.trend import TREND_BLOCK, Rise, TrendFinder
from zerotop.analysis.stats.wander import compute_levels
from zerotop.recording.samples import Floats, Rows
from zerotop_probe.recording.events import Stacks

_KIND = FindingKind(
    name="iteration_drift",
    confidence=0.6,
    headline="Iterations grow by {pace} a step: {before_s:seconds} became {after_s:seconds} in {steps:.0f} steps",
    details=(
        "{growth:change} from about step {step} on[, {carried:seconds} of it {part}][, {most} of that at {line}][; {cause}]."
    ),
    advice="{breakdown}",
    fix="{breakdown_fix}",
    explained_by=(Kinds(slowed_by_saves, "checkpoint_pause"), Kinds(slowed_by_threads, "piled_threads")),
    superseded_by=(
        Kinds(goes_on, "iteration_shift"),
        Kinds(grew_in_a_jump, "data_stall", "iteration_shift", "time_lost_in_line"),
        Kinds(is_by_growth, "batch_growth"),
    ),
)
_GROWING_LINE = "See whether {location} goes through all that was kept so far, or runs more and more often in each step."
# Advice and fix by the phase that takes longer.
_BY_PHASE = {
    "data_s": ("Check what the dataset keeps or reads again and again.", "py-spy dump --pid {pid}"),
    "other_s": (
        "See what takes longer between the phases with each step: work on all that was kept so far, or on larger inputs.",
        "py-spy dump --pid {pid}",
    ),
}
# A rise is visible from this share on, as with a shift.
DRIFT_SHARE = 0.15
# By chance, six blocks are in order once in 720 times. Each is higher by at least this share of an even rise.
DRIFT_BLOCKS = 6
DRIFT_EVENNESS = 0.2

# For so long (ns) a rise that may be the run's own wandering waits for samples that show what takes the time.
_SAMPLED_NS = 60 * 10**9
# It is looked at again, block by block, until it has lasted for so many times its length.
_LATER_TIMES = 8
# The part of their slope with which values went on to rise between two rises.
_GOES_ON_SHARE = 0.5
_PLACES = (*line_findings.PLACES.values(), UNSEEN)

_new_trend_finder = partial(TrendFinder, DRIFT_BLOCKS, DRIFT_EVENNESS)


@in_each_attempt(None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each rise by DRIFT_SHARE, with newer numbers if it continues for long."""
    group, steps = window.subject, window.subject.lead.steps
    # The finder reads each step once.
    rises = window.keep(_new_trend_finder).find_rises(steps["iteration_s"], SETTLED_STEPS, share=DRIFT_SHARE)
    rises = (rise for rise in rises if rise.high >= SHORTEST_ITERATION_S)
    waiting = window.keep(list[Rise])  # the next rise may lead back: then they are dropped
    costly = await_notable(waiting, steps, rises, partial(_measure_level, group))
    measured = [_Drift.measure(group, rise, known_ns) for rise, known_ns in costly]
    judged = [(drift, _is_drift(drift, steps["iteration_s"])) for drift in measured]
    hidden = [drift for drift, is_drift in judged if not is_drift and _is_gradual(steps["iteration_s"], drift.rise)]
    known = [*(drift for drift, is_drift in judged if is_drift), *_judge_later(window, hidden)]
    known.sort(key=lambda drift: drift.change.known_ns)
    named = window.await_each(known, lambda drift: await_line(drift.find_delay()))
    shown = _find_shown(window, hidden)
    for told in window.extend(partial(_follow, chain(named, shown)), 0):
        yield _build_finding(told)


def _judge_later(window: SearchWindow[Group], hidden: list[_Drift]) -> Iterator[_Drift]:
    """Yield rises that were within the run's own wandering, once they go beyond it. ``hidden``: new ones."""
    steps, waiting = window.subject.lead.steps, window.keep(list[_Hidden], "later")
    waiting += [_Hidden(drift, drift.rise.end) for drift in hidden]
    for one in waiting[:]:
        begin, end, length = one.drift.rise.begin, one.drift.rise.end, one.drift.rise.block_length
        last = begin + _LATER_TIMES * (end - begin)
        while (judged := one.judged_end + length) <= min(len(steps), last):
            one.judged_end = judged
            later = one.drift.extend(int(steps["end_unix_ns"][judged - 1]))
            if later is not None and _is_drift(later, steps["iteration_s"][:judged]):
                waiting.remove(one)
                yield later
                break


def _find_shown(window: SearchWindow[Group], hidden: list[_Drift]) -> Iterator[tuple[_Drift, FoundLine]]:
    """Yield rises within the run's own wandering, once samples show a line that hardly took time before.

    ``hidden``: new ones that are gradual.
    """
    # Only those that samples may still explain are looked at with each event.
    lead, waiting = window.subject.lead, window.keep(list[_Drift], "hidden")
    waiting += hidden
    for event in stack_lines.select_events_in(window.items(lead.events_of(Stacks)), _PLACES, stack_lines.SHARE):
        waiting[:] = [drift for drift in waiting if event.unix_ns <= drift.change.known_ns + _SAMPLED_NS]
        for drift in [one for one in waiting if one.change.known_ns <= event.unix_ns]:
            later = drift.extend(event.unix_ns)
            line = stack_lines.find_new(later.find_delay(), event.unix_ns, is_alone=True) if later is not None else None
            if later is not None and line is not None:
                waiting[:] = [one for one in waiting if one is not drift]
                yield later, FoundLine(line, event.unix_ns)


@dataclass(eq=False)
class _Hidden:
    """A rise within the run's own wandering, and up to where it was looked at again."""

    drift: _Drift
    judged_end: int


class _Told(NamedTuple):
    """A rise with the line that takes the time, from the begin of the first rise that it continues."""

    drift: _Drift
    found: FoundLine
    begin: int  # index of the step
    low_s: float


def _follow(drifts: Iterator[tuple[_Drift, FoundLine]], last: _Told | None) -> _Told | None:
    """Return the next of the rises; ``last`` is the one before it."""
    for drift, found in drifts:
        if last is None or not _continues(drift.rise, last.drift.rise):
            return _Told(drift, found, drift.rise.begin + _find_onset(drift), drift.rise.low)
        return _Told(drift.measure_since(last.drift.change.before), found, last.begin, last.low_s)
    return None


def _continues(rise: Rise, earlier: Rise) -> bool:
    """Whether a rise overlaps an earlier one, or values went on to rise about as fast between them."""
    if rise.begin <= earlier.end:
        return True
    apart = rise.begin - earlier.end + (rise.block_length + earlier.block_length) / 2
    return (rise.low - earlier.high) / apart >= _GOES_ON_SHARE * min(rise.slope, earlier.slope)


def _is_drift(drift: _Drift, values: Floats) -> bool:
    """Whether a rise is neither a change of level, nor the load of other processes, nor the run's own wandering."""
    cause = find_drift_cause(drift.change)
    if cause is not None and find_batch_step(drift.change, cause) is not None:
        return True
    if not _is_gradual(values, drift.rise) or (cause is None and is_by_others(drift.change)):
        return False
    return cause is not None or not _is_wandering(drift, values)


def _is_wandering(drift: _Drift, values: Floats) -> bool:
    """Whether the run had already risen half as far, or the host sets its pace and wanders by this much.

    So may that of short steps of which none was recorded with its phases.
    """
    rise, shift = drift.rise, PaceShift(drift.change, None)
    earlier = compute_levels(np.asarray(values[SETTLED_STEPS : rise.begin], np.float64))
    if len(earlier) and (rise.low + rise.high) / 2 <= earlier.max():
        return True
    first, last = drift.change.before, drift.change.after
    is_host = is_paced_by_host(drift.change.group.processes, int(first["begin_unix_ns"][0]), int(last["end_unix_ns"][-1]))
    if not is_host and not drift.changes:
        return bool(rise.high < HOST_TIMES * min([rise.low, *earlier]))
    return is_host and rise.high < HOST_TIMES * rise.low and not shift.has_own_part


def _is_gradual(values: Floats, rise: Rise) -> bool:
    return is_gradual(_compute_points(values[rise.begin : rise.end], rise.block_length))


def _compute_points(values: Floats, block_length: int) -> Floats:
    """Return medians of groups of steps: no single step counts, and a long rise is only a few points."""
    return np.asarray(np.median(values.reshape(-1, _count_steps(block_length)), axis=1))


def _count_steps(block_length: int) -> int:
    """Return the steps of each point."""
    return max(1, block_length // TREND_BLOCK)


def _measure_level(group: Group, rise: Rise) -> Level:
    steps = group.lead.steps["step"]
    return Level(int(steps[rise.begin]), int(steps[rise.end - 1]), rise.low, rise.high)


class _Drift(NamedTuple):
    """A rise, the steps in its first and last block, and the phase that carries it."""

    rise: Rise
    rows: Rows
    change: StepChange
    changes: dict[str, float]  # of the phases, in seconds
    carrier: str  # empty where the phases are unknown

    @classmethod
    def measure(cls, group: Group, rise: Rise, known_ns: int) -> _Drift:
        """Measure a rise of a group's iterations."""
        rows = group.lead.steps[rise.begin : rise.end]
        change = StepChange(group, rows[: rise.block_length], rows[-rise.block_length :], known_ns)
        changes = change.measure_parts()
        return cls(rise, rows, change, changes, max(changes, key=lambda name: changes[name], default=""))

    def measure_since(self, before: Rows) -> _Drift:
        """Return the rise with the changes since earlier steps, the first ones of a rise that it continues."""
        change = StepChange(self.change.group, before, self.change.after, self.change.known_ns)
        changes = change.measure_parts()
        return self._replace(change=change, changes=changes, carrier=max(changes, key=lambda one: changes[one], default=""))

    def extend(self, known_ns: int) -> _Drift | None:
        """Return the rise up to a later time; None if it has not stayed."""
        group, rise = self.change.group, self.rise
        steps = group.lead.steps_until(known_ns)
        end = rise.begin + (len(steps) - rise.begin) // rise.block_length * rise.block_length
        high = float(np.median(steps["iteration_s"][end - rise.block_length : end]))
        later = rise._replace(end=end, high=high)
        stays = high >= (1 + DRIFT_SHARE) * rise.low and end >= rise.end
        return _Drift.measure(group, later, known_ns) if stays else None

    def find_delay(self) -> Delay:
        """Return where the time is lost."""
        last = self.change.after
        end_ns = int(last["end_unix_ns"][-1])
        where = line_findings.PLACES[self.carrier] if self.carrier else UNSEEN
        delay = Delay(self.change.process, where, int(last["begin_unix_ns"][0]), end_ns, self.change.known_ns)
        since = self.rows[_find_onset(self) :]
        whole = self.rise.low, float(np.nanmean(since["iteration_s"]))
        part = self.change.measure_levels().get(self.carrier, whole)
        return delay._replace(levels=(part, whole), onset_ns=int(since["begin_unix_ns"][0]))


def _find_batch_step(drift: _Drift) -> int | None:
    """Return the step at which a rank's batches changed, if they are the cause."""
    cause = find_drift_cause(drift.change)
    return find_batch_step(drift.change, cause) if cause is not None else None


def _find_onset(drift: _Drift) -> int:
    """Return the index of the step with which the rise begins, as iterations may have been even before it."""
    rows, length = drift.rows, drift.rise.block_length
    most = len(rows) - 2 * length
    sized = _find_batch_step(drift)
    if sized is not None:
        return min(most, int(np.searchsorted(rows["step"], sized)))
    each, points = _count_steps(length), _compute_points(rows["iteration_s"], length)
    fit = fit_knee(np.asarray(np.arange(len(points)) + 0.5, np.float64) * each, points)
    onset = round(fit.knee_x) if fit is not None and fit.knee_x is not None else 0
    made = find_repeated_steps(drift.change)
    if made is not None:  # it did not begin before the first of the changes that explain it
        onset = int(np.clip(onset, *np.searchsorted(rows["step"], made)))
    return min(most, onset)


def _build_finding(told: _Told) -> Finding:
    drift, found = told.drift, told.found
    rise, _, change, changes, carrier = drift
    cause, kind, rows = find_drift_cause(change), _KIND, change.group.lead.steps[told.begin : rise.end]
    # To the middle of the last block; from the onset, or from the middle of the first block.
    first = rise.block_length / 2 if told.begin == rise.begin else 0.0
    slope, growth = (rise.high - told.low_s) / (len(rows) - first - rise.block_length / 2), rise.high / told.low_s - 1
    if cause is not None:
        kind = _KIND.with_changes(
            confidence=cause.confidence, advice=cause.advice, fix=cause.fix, measured_cause=cause.finding
        )
        if cause.is_expected:
            kind = kind.with_changes(severity=Severity.INFO, advice="", fix="")
    elif carrier in _BY_PHASE:
        advice, fix = _BY_PHASE[carrier]
        kind = _KIND.with_changes(advice=advice, fix=fix)
    line = found.line if cause is None else None
    is_named = line is not None and line_findings.is_cause(line, drift.find_delay())
    if line is not None and is_named:
        kind = line_findings.name_line(kind.with_changes(confidence=0.9), line, in_headline=False)
        kind = kind if line.known_call is not None else kind.with_changes(advice=_GROWING_LINE)
    line = None if line_findings.is_wait(line) and not is_named else line
    is_known = is_named or cause is not None or stack_lines.has_moved(drift.find_delay(), found.known_ns)
    unexplained = None if is_known else "no cause was found"
    evidence = {"slope_s": slope, "before_s": told.low_s, "after_s": rise.high, "steps": len(rows)}
    return kind.at_steps(
        change.group,
        rows,
        evidence | {f"{name.removesuffix('_s')}_change_s": value for name, value in changes.items()},
        pace=f"{slope * 1e3:.2g} ms" if slope >= 1e-4 else f"{slope * 1e6:.2g} us",
        cost=1 - told.low_s / rise.high if cause is None or not cause.is_expected else 0.0,
        growth=growth,
        known_ns=found.known_ns,
        pid=change.process.source.pid,
        carried=changes[carrier] if carrier else None,
        part=name_part(carrier) if carrier else None,
        cause=Text("meanwhile {text}", {"text": cause.text}) if cause else unexplained,
        **line_findings.line_values(line),
    )
