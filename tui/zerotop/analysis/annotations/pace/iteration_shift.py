"""Iterations begin to take another time for good: in which phase, and what else changed at that moment."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.causes import (
    Cause,
    StepChange,
    compute_own_seconds,
    find_cause,
    measure_change_loads,
    name_part,
)
from zerotop.analysis.annotations.support.evidence import Evidence
from zerotop.analysis.annotations.support.thresholds import SHORTEST_ITERATION_S
from zerotop.analysis.formatting import Text
from zerotop.analysis.stats.change_points import ShiftFinder

_KIND = FindingKind(
    name="iteration_shift",
    severity=Severity.WARNING,
    confidence=0.5,
    headline="Iterations take {after_s:seconds} instead of {before_s:seconds} ({change_share:change}) from step {step} on",
    details="{carried:seconds} of it {part}; {cause}.",
    advice="{breakdown}",
    fix="{breakdown_fix}",
)
_BETWEEN = _KIND.with_changes(
    advice="See where the time goes outside {tool}: in the training loop, the data or a callback.",
    fix="py-spy dump --pid {pid}",
)


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report each change of level."""
    for group in recording.groups:
        steps = group.lead.steps
        values = steps["iteration_s"]
        for shift in group.lead.get_state(ShiftFinder, _KIND.name).find_shifts(values):
            is_long = max(values[shift.before].max(), values[shift.first]) >= SHORTEST_ITERATION_S
            if is_long and group.count_report(_KIND.name):
                change = StepChange(group, steps[shift.before], steps[shift.first : shift.last + 1])
                cause = find_cause(change)
                if not (cause.has_own_finding if cause is not None else _is_by_others(change)):
                    yield _build_finding(change, cause)


def _is_by_others(change: StepChange) -> bool:
    """Whether other processes, which use the cores, may be the reason: the phases that compute vary then."""
    before, after = _compute_medians(change)
    own = float(np.median(compute_own_seconds(change.after)) - np.median(compute_own_seconds(change.before)))
    return own / (after - before) <= 0.5 and any(
        load is not None and load.is_starved for load in measure_change_loads(change)
    )


def _compute_medians(change: StepChange) -> tuple[float, float]:
    return float(np.median(change.before["iteration_s"])), float(np.median(change.after["iteration_s"]))


def _build_finding(change: StepChange, cause: Cause | None) -> Annotation:
    before, after = _compute_medians(change)
    changes = change.measure_phases(after - before)
    carrier = max(changes, key=lambda name: changes[name] * (1 if after > before else -1))
    kind = _BETWEEN if carrier in ("data_s", "other_s") else _KIND
    if cause is not None:
        kind = _KIND.with_changes(confidence=cause.confidence, advice=cause.advice, fix=cause.fix)
    is_worse = after > before and not (cause is not None and cause.is_expected)
    if not is_worse:
        kind = kind.with_changes(advice="", fix="")
    evidence = {"before_s": before, "after_s": after, "change_share": after / before - 1}
    return kind.with_changes(severity=Severity.WARNING if is_worse else Severity.INFO).at_steps(
        change.group,
        change.after,
        evidence | {f"{name.removesuffix('_s')}_change_s": value for name, value in changes.items()},
        carried=abs(changes[carrier]),
        part=name_part(carrier),
        cost=1 - before / after if is_worse else 0.0,
        pid=change.process.source.pid,
        cause=Text("at the same time {text}", {"text": cause.text}) if cause else "no other change was recorded",
    )
