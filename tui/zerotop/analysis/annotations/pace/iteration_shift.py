"""Iteration time changes permanently: the phase that changed, and what else changed at that moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.causes.batch_causes import check_batch
from zerotop.analysis.annotations.support.causes.causes import find_cause
from zerotop.analysis.annotations.support.causes.gpu_causes import USE_NS, awaits_use
from zerotop.analysis.annotations.support.causes.host_causes import is_by_others
from zerotop.analysis.annotations.support.causes.step_change import (
    Cause,
    StepChange,
    get_batch_sizes,
    name_part,
)
from zerotop.analysis.annotations.support.causes.thread_causes import awaits_threads
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Rows
from zerotop.analysis.annotations.support.lines.line_findings import (
    PLACES,
    await_lines,
    is_cause,
    line_values,
    measure_between,
    name_line,
    note_named_line,
)
from zerotop.analysis.annotations.support.lines.stack_lines import PATIENCE_NS, Delay, FoundLine, StackLine, find_deadline
from zerotop.analysis.annotations.support.steps.lost_time import Level, await_notable
from zerotop.analysis.annotations.support.steps.onsets import find_onset
from zerotop.analysis.annotations.support.steps.step_values import StepValues
from zerotop.analysis.annotations.support.thresholds import BETWEEN_SECONDS, SHORTEST_ITERATION_S
from zerotop.analysis.formatting import Text
from zerotop.analysis.stats.change_points import LEVEL_STEPS, SHIFT_SHARE, ShiftFinder, Values

_KIND = FindingKind(
    name="iteration_shift",
    severity=Severity.WARNING,
    confidence=0.5,
    headline="Iterations take {after_s:seconds} instead of {before_s:seconds} ({change_share:change}) from step {step} on",
    details="{carried:seconds} of it {part}[, most of that at {line}][; {cause}[: {cause_line}]].",
    advice="{breakdown}",
    fix="{breakdown_fix}",
)
_UNPHASED_DETAILS = "The phases of these steps were not recorded[; {cause}[: {cause_line}]]."
# Changes that begin within this many steps of each other are the same.
_SAME_STEPS = 3
# Values that may show a change, besides the iteration time.
_BETWEEN_PHASES, _SIZE = " between phases", " size"
# The most steps after which iterations become shorter by themselves.
_WARM_UP_STEPS = 10
# A cause with less confidence gives way to a line that takes the time.
CERTAIN = 0.85
_LINE_HEADLINE = "Iterations take {after_s:seconds} instead of {before_s:seconds} from step {step} on"
_BETWEEN = _KIND.with_changes(
    advice="See where the time goes outside {tool}: in the training loop, the data or a callback.",
    fix="py-spy dump --pid {pid}",
)


class _Known(NamedTuple):
    """The first step of a change, and when the change was known."""

    step: int
    known_ns: int


class _Shift(NamedTuple):
    """A change of level with its cause, and the phase that carries it."""

    change: StepChange
    cause: Cause | None
    changes: dict[str, float]  # of the phases, in seconds
    carrier: str  # empty where the phases are unknown
    before_s: float
    after_s: float
    found_in: str  # what showed it where the iterations did not, else empty

    @property
    def is_worse(self) -> bool:
        """Whether iterations became longer for no good reason."""
        return self.after_s > self.before_s and not (self.cause is not None and self.cause.is_expected)

    @property
    def is_uncertain(self) -> bool:
        """Whether the cause may be a coincidence, such as load on a shared machine."""
        return self.cause is not None and not self.cause.where and self.cause.confidence < CERTAIN

    def find_delay(self) -> Delay:
        """Return where the time is lost."""
        rows, cause = self.change.after, self.cause
        process, where = self.change.process, PLACES[self.carrier] if self.carrier else ""
        if cause is not None and cause.where:
            process, where = cause.culprit or process, cause.where
        elif not self.is_worse or (cause is not None and not self.is_uncertain):
            where = ""
        end_ns = int(rows["end_unix_ns"][-1])
        callee, known_ns = cause.callee if cause is not None else "", self.change.known_ns
        # The first steps may have passed unsampled.
        slow_until_ns = known_ns + PATIENCE_NS if self.is_worse else 0
        return Delay(process, where, int(rows["begin_unix_ns"][0]), end_ns, known_ns, callee, slow_until_ns=slow_until_ns)


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report each change of level of the iterations, including changes that show only in their cause."""
    for group in recording.groups:
        reported = group.get_state(list[_Known], f"{_KIND.name} by cause")
        steps = group.get_state(list[_Known], f"{_KIND.name} steps")
        known = await_lines(group, _KIND.name, _find_shifts(group), _Shift.find_delay)
        for shift, found in sorted(known, key=lambda one: one[1].known_ns):
            if not shift.found_in:
                if not _is_near(shift.change, reported, found.known_ns):
                    yield _build_finding(shift, found)
            elif _is_near(shift.change, steps, found.known_ns):
                continue  # the iterations showed it while its line was searched
            elif _is_explained(shift, found.line) and group.count_report(_KIND.name):
                reported.append(_Known(int(shift.change.after["step"][0]), found.known_ns))
                yield _build_finding(shift, found)


def _find_shifts(group: Group) -> Iterator[_Shift]:
    waiting = group.get_state(list[tuple[StepChange, str]], f"{_KIND.name} waiting")
    held, waiting[:] = waiting[:], []
    for change, found_in in (*_list_costly_changes(group), *_list_hidden_changes(group)):
        if awaits_use(change) or awaits_threads(change) or change.lacks_phases:
            held.append((change, found_in))
        else:
            yield from _explain_change(change, found_in)
    for change, found_in in held:
        known_ns = find_deadline(group.lead, change.known_ns, USE_NS)
        if known_ns <= group.lead.recording.cursor_ns:
            yield from _explain_change(replace(change, known_ns=known_ns), found_in)
        else:
            waiting.append((change, found_in))


def _list_costly_changes(group: Group) -> Iterator[tuple[StepChange, str]]:
    """Yield each change of the iteration time once it has cost or saved a notable time."""
    steps = group.lead.steps
    for change, known_ns in await_notable(group, _KIND.name, steps, _list_changes(group), _measure_level):
        if not _is_warm_up(change) and group.count_report(_KIND.name):
            yield replace(change, known_ns=known_ns), ""


def _list_changes(group: Group) -> Iterator[StepChange]:
    rows, steps = group.lead.steps, group.get_state(list[_Known], f"{_KIND.name} steps")
    for change in _find_changes(group, "", rows, rows["iteration_s"]):
        is_long = max(change.before["iteration_s"].max(), change.after["iteration_s"][0]) >= SHORTEST_ITERATION_S
        if is_long and not _is_by_probe(change):
            steps.append(_Known(int(change.after["step"][0]), change.known_ns))
            yield change


def _is_by_probe(change: StepChange) -> bool:
    """Whether short steps became shorter when the probe no longer recorded each of them in full."""
    before, after = ((rows["counted"] | rows["light"]).mean() for rows in (change.before, change.after))
    slower = np.median(change.after["iteration_s"]) - np.median(change.before["iteration_s"])
    return bool(slower < 0 and before < 1 / 2 < after)


def _is_warm_up(change: StepChange) -> bool:
    """Whether iterations became shorter only after the first ones, which also allocate, compile and load."""
    before, after = _compute_medians(change)
    return after < before and int(change.after["step"][0]) <= _WARM_UP_STEPS


def _measure_level(change: StepChange) -> Level:
    return Level(int(change.after["step"][0]), int(change.after["step"][-1]), *_compute_medians(change))


def _list_hidden_changes(group: Group) -> Iterator[tuple[StepChange, str]]:
    """Yield changes of a cause, such as the time between phases, that the iteration time itself does not show.

    If the phases vary much, for example because other processes use the cores, a change may only show in its cause.
    """
    rows, steps = group.lead.phased_steps, group.get_state(list[_Known], f"{_KIND.name} steps")
    for change in _find_changes(group, _BETWEEN_PHASES, rows, _list_notable_between(rows)):
        if _is_longer_between(change) and not _is_near(change, steps, change.known_ns):
            yield change, _BETWEEN_PHASES
    for change in _find_changes(group, _SIZE, rows, StepValues(rows, get_batch_sizes)):
        is_by_size = _is_notable(change) and not _is_warm_up(change) and check_batch(change) is not None
        if is_by_size and not _is_near(change, steps, change.known_ns):
            yield change, _SIZE


def _find_changes(group: Group, key: str, steps: Rows, values: Values) -> Iterator[StepChange]:
    for shift in group.lead.get_state(ShiftFinder, _KIND.name + key).find_shifts(values):
        after = steps[shift.first : shift.last + 1]
        yield StepChange(group, steps[shift.before], after, int(after["end_unix_ns"][-1]))


def _is_near(change: StepChange, others: list[_Known], known_ns: int) -> bool:
    """Whether a change begins near one already known. It may have begun in a counted step before its first step."""
    first, last = int(change.before["step"][-1]) + 1 - _SAME_STEPS, int(change.after["step"][0]) + _SAME_STEPS
    return any(first <= other.step <= last for other in others if other.known_ns <= known_ns)


def _list_notable_between(steps: Rows) -> Values:
    """Return the seconds of each step between its phases, at least a notable part of the first iterations.

    Smaller values are raised to that part, so that their noise is no change. Empty before there are enough steps.
    """
    if len(steps) < LEVEL_STEPS:
        return np.empty(0)
    least = max(BETWEEN_SECONDS, SHIFT_SHARE * float(np.median(steps["iteration_s"][:LEVEL_STEPS])))
    return StepValues(steps, lambda rows: np.maximum(measure_between(rows), least))


def _is_longer_between(change: StepChange) -> bool:
    """Whether the time between the phases grew by a notable part of the iteration."""
    added = change.measure_parts()["other_s"]
    return added >= max(BETWEEN_SECONDS, SHIFT_SHARE * float(np.median(change.after["iteration_s"])))


def _is_notable(change: StepChange) -> bool:
    """Whether iterations take notably another time."""
    before, after = _compute_medians(change)
    return abs(after - before) >= SHIFT_SHARE * before and max(before, after) >= SHORTEST_ITERATION_S


def _explain_change(change: StepChange, found_in: str = "") -> Iterator[_Shift]:
    """Yield the change with its cause, unless it has another finding."""
    cause = find_cause(change)
    if not (cause.has_own_finding if cause is not None else is_by_others(change)):
        before, after = _compute_medians(change)
        changes = change.measure_parts()
        carrier = max(changes, key=lambda name: changes[name] * (1 if after > before else -1), default="")
        yield _Shift(change, cause, changes, carrier, before, after, found_in)


def _find_begin(shift: _Shift, known_ns: int) -> Rows:
    """Return the steps from the one with which the change began: counted steps may precede the first one that shows it."""
    before, after = shift.change.before, shift.change.after
    if not shift.found_in:
        return after
    steps = shift.change.process.steps_until(known_ns)
    onset = find_onset(steps, int(before["step"][-1]), int(after["step"][0]))
    return steps[onset : np.searchsorted(steps["step"], after["step"][-1]) + 1]


def _compute_medians(change: StepChange) -> tuple[float, float]:
    return float(np.median(change.before["iteration_s"])), float(np.median(change.after["iteration_s"]))


def _is_line_named(shift: _Shift, line: StackLine | None) -> bool:
    """Whether a line explains the change."""
    if line is None or (shift.is_uncertain and line.known_call is None):
        return False
    return is_cause(line, shift.find_delay())


def _is_explained(shift: _Shift, line: StackLine | None) -> bool:
    """Whether a cause is known for a change that the iteration times do not show."""
    has_certain_cause = shift.is_worse and shift.cause is not None and not shift.is_uncertain
    return shift.found_in == _SIZE or has_certain_cause or _is_line_named(shift, line)


def _build_finding(shift: _Shift, found: FoundLine) -> Annotation:
    change, cause, changes, carrier, before, after, _ = shift
    kind = _BETWEEN if carrier in ("data_s", "other_s") else _KIND
    if not carrier:
        kind = kind.with_changes(details=_UNPHASED_DETAILS)
    if cause is not None:
        details = kind.details
        kind = _KIND.with_changes(confidence=cause.confidence, details=details, advice=cause.advice, fix=cause.fix)
    is_named = _is_line_named(shift, found.line)
    line = found.line if is_named or not shift.is_uncertain else None
    if line is not None and is_named:
        kind = name_line(kind.with_changes(confidence=0.9, headline=_LINE_HEADLINE), line)
        note_named_line(change.group, line, found.known_ns)
    if not shift.is_worse:
        kind = kind.with_changes(advice="", fix="")
    elif cause is not None:
        kind = kind.with_changes(measured_cause=cause.finding)
    evidence = {"before_s": before, "after_s": after, "change_share": after / before - 1}
    values = line_values(line)
    if cause is not None and cause.where:
        values |= {"line": None, "cause_line": values["line"]}
    unexplained = None if is_named else "no other change was recorded"
    return kind.with_changes(severity=Severity.WARNING if shift.is_worse else Severity.INFO).at_steps(
        change.group,
        _find_begin(shift, found.known_ns),
        evidence | {f"{name.removesuffix('_s')}_change_s": value for name, value in changes.items()},
        known_ns=found.known_ns,
        carried=abs(changes[carrier]) if carrier else None,
        part=name_part(carrier) if carrier else None,
        cost=1 - before / after if shift.is_worse else 0.0,
        pid=change.process.source.pid,
        cause=Text("at the same time {text}", {"text": cause.text}) if cause else unexplained,
        **values,
    )
