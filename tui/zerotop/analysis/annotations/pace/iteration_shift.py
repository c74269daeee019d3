"""Iterations begin to take another time for good: in which phase, and what else changed at that moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.causes.causes import find_cause
from zerotop.analysis.annotations.support.causes.gpu_causes import find_known_ns
from zerotop.analysis.annotations.support.causes.host_causes import measure_change_loads
from zerotop.analysis.annotations.support.causes.step_change import Cause, StepChange, compute_own_seconds, name_part
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.lines.line_findings import (
    PLACES,
    Delay,
    await_lines,
    is_cause,
    line_values,
    name_line,
)
from zerotop.analysis.annotations.support.lines.stack_lines import FoundLine
from zerotop.analysis.annotations.support.thresholds import SHORTEST_ITERATION_S
from zerotop.analysis.formatting import Text
from zerotop.analysis.stats.change_points import ShiftFinder

_KIND = FindingKind(
    name="iteration_shift",
    severity=Severity.WARNING,
    confidence=0.5,
    headline="Iterations take {after_s:seconds} instead of {before_s:seconds} ({change_share:change}) from step {step} on",
    details="{carried:seconds} of it {part}[, most of that at {line}][; {cause}[: {cause_line}]].",
    advice="{breakdown}",
    fix="{breakdown_fix}",
)
# A cause of less confidence gives way to a line that takes the time.
CERTAIN = 0.85
_LINE_HEADLINE = "Iterations take {after_s:seconds} instead of {before_s:seconds} from step {step} on"
_BETWEEN = _KIND.with_changes(
    advice="See where the time goes outside {tool}: in the training loop, the data or a callback.",
    fix="py-spy dump --pid {pid}",
)


class _Shift(NamedTuple):
    """A change of level with its cause, and the phase that carries it."""

    change: StepChange
    cause: Cause | None
    changes: dict[str, float]  # of the phases, in seconds
    carrier: str
    before_s: float
    after_s: float

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
        process, where = self.change.process, PLACES[self.carrier]
        if cause is not None and cause.where:
            process, where = cause.culprit or process, cause.where
        elif not self.is_worse or (cause is not None and not self.is_uncertain):
            where = ""
        end_ns, known_ns = int(rows["end_unix_ns"][-1]), find_known_ns(self.change)
        callee = cause.callee if cause is not None else ""
        return Delay(process, where, int(rows["begin_unix_ns"][0]), end_ns, known_ns, callee)


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report each change of level."""
    for group in recording.groups:
        for shift, found in await_lines(group, _KIND.name, _find_shifts(group), _Shift.find_delay):
            yield _build_finding(shift, found)


def _find_shifts(group: Group) -> Iterator[_Shift]:
    steps, waiting = group.lead.steps, group.get_state(list[StepChange], f"{_KIND.name} waiting")
    values = steps["iteration_s"]
    for shift in group.lead.get_state(ShiftFinder, _KIND.name).find_shifts(values):
        is_long = max(values[shift.before].max(), values[shift.first]) >= SHORTEST_ITERATION_S
        if is_long and group.count_report(_KIND.name):
            waiting.append(StepChange(group, steps[shift.before], steps[shift.first : shift.last + 1]))
    held, waiting[:] = waiting[:], []
    for change in held:
        if find_known_ns(change) > group.lead.recording.cursor_ns:
            waiting.append(change)
            continue
        cause = find_cause(change)
        if not (cause.has_own_finding if cause is not None else _is_by_others(change)):
            before, after = _compute_medians(change)
            changes = change.measure_phases(after - before)
            carrier = max(changes, key=lambda name: changes[name] * (1 if after > before else -1))
            yield _Shift(change, cause, changes, carrier, before, after)


def _is_by_others(change: StepChange) -> bool:
    """Whether other processes, which use the cores, may be the reason: the phases that compute vary then."""
    before, after = _compute_medians(change)
    own = float(np.median(compute_own_seconds(change.after)) - np.median(compute_own_seconds(change.before)))
    return own / (after - before) <= 0.5 and any(
        load is not None and load.is_starved for load in measure_change_loads(change)
    )


def _compute_medians(change: StepChange) -> tuple[float, float]:
    return float(np.median(change.before["iteration_s"])), float(np.median(change.after["iteration_s"]))


def _build_finding(shift: _Shift, found: FoundLine) -> Annotation:
    change, cause, changes, carrier, before, after = shift
    kind = _BETWEEN if carrier in ("data_s", "other_s") else _KIND
    if cause is not None:
        kind = _KIND.with_changes(confidence=cause.confidence, advice=cause.advice, fix=cause.fix)
    line = found.line
    is_named = line is not None and is_cause(line, shift.find_delay())
    if shift.is_uncertain and (line is None or line.known_call is None):
        line, is_named = None, False
    if line is not None and is_named:
        kind = name_line(kind.with_changes(confidence=0.9, headline=_LINE_HEADLINE), line)
    if not shift.is_worse:
        kind = kind.with_changes(advice="", fix="")
    evidence = {"before_s": before, "after_s": after, "change_share": after / before - 1}
    values = line_values(line)
    if cause is not None and cause.where:
        values |= {"line": None, "cause_line": values["line"]}
    unexplained = None if is_named else "no other change was recorded"
    return kind.with_changes(severity=Severity.WARNING if shift.is_worse else Severity.INFO).at_steps(
        change.group,
        change.after,
        evidence | {f"{name.removesuffix('_s')}_change_s": value for name, value in changes.items()},
        known_ns=found.known_ns,
        carried=abs(changes[carrier]),
        part=name_part(carrier),
        cost=1 - before / after if shift.is_worse else 0.0,
        pid=change.process.source.pid,
        measured_cause=cause.finding if cause is not None and shift.is_worse else "",
        cause=Text("at the same time {text}", {"text": cause.text}) if cause else unexplained,
        **values,
    )
