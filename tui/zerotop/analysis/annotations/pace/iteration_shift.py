"""Iterations begin to take another time for good: which phase carries it, and what else changed at that moment."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, Severity, build_step_finding
from zerotop.analysis.annotations.support.causes import (
    Cause,
    StepChange,
    compute_own_seconds,
    find_cause,
    measure_change_loads,
)
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Rows
from zerotop.analysis.annotations.support.thresholds import SHORTEST_ITERATION_S
from zerotop.analysis.formatting import format_percent, format_seconds
from zerotop.analysis.stats.change_points import Shift, ShiftFinder

_PHASES = ("data_s", "forward_s", "backward_s", "step_s")


class _ShiftFinder(ShiftFinder):
    """Of the time of iterations."""


def detect(facts: Evidence) -> Iterator[Annotation]:
    """One finding for each change of level."""
    for group in facts.groups:
        values = group.lead.steps["iteration_s"]
        for shift in group.lead.get_state(_ShiftFinder).find_shifts(values):
            if max(values[shift.before].max(), values[shift.first]) >= SHORTEST_ITERATION_S:
                yield from _check_shift(group, shift)


def _check_shift(group: Group, shift: Shift) -> Iterator[Annotation]:
    steps = group.lead.steps
    change = StepChange(group, steps[shift.before], steps[shift.first : shift.last + 1])
    cause = find_cause(change)
    if cause is None and _is_by_others(change):
        return
    yield _build_finding(group, change.before, change.after, cause)


def _is_by_others(change: StepChange) -> bool:
    """Whether others, who have the cores, may have done it: the phases that compute take now longer, now shorter."""
    was, becomes = (_compute_median(rows, "iteration_s") for rows in (change.before, change.after))
    own = float(np.median(compute_own_seconds(change.after)) - np.median(compute_own_seconds(change.before)))
    return own / (becomes - was) <= 0.5 and any(
        load is not None and load.is_starved for load in measure_change_loads(change)
    )


def _build_finding(group: Group, before: Rows, after: Rows, cause: Cause | None) -> Annotation:
    was, becomes = _compute_median(before, "iteration_s"), _compute_median(after, "iteration_s")
    changes = {name: _compute_median(after, name) - _compute_median(before, name) for name in _PHASES}
    changes["other_s"] = becomes - was - sum(changes.values())
    carrier = max(changes, key=lambda name: changes[name] * (1 if becomes > was else -1))
    evidence = {"before_s": was, "after_s": becomes, "change_share": becomes / was - 1}
    evidence |= {f"{name.removesuffix('_s')}_change_s": value for name, value in changes.items()}
    return build_step_finding(
        after,
        name="iteration_shift",
        ranks=group.ranks_at(int(after["end_unix_ns"][-1])),
        severity=Severity.WARNING if becomes > was else Severity.INFO,
        confidence=cause.confidence if cause else 0.5,
        sentence=_describe_finding(evidence, int(after["step"][0]), carrier, changes[carrier], cause),
        advice=cause.advice if cause else _ADVICE,
        evidence=evidence,
    )


_ADVICE = 'Set "wall_clock_breakdown": true in the DeepSpeed config, to see which part of that phase takes longer.'


def _compute_median(rows: Rows, name: str) -> float:
    return float(np.median(rows[name]))


def _describe_finding(evidence: dict[str, float], step: int, carrier: str, change: float, cause: Cause | None) -> str:
    name = carrier.removesuffix("_s")
    part = "what lies between the phases" if name == "other" else f"the {name} phase"
    return (
        f"From step {step} on iterations take {format_seconds(evidence['after_s'])} instead of {format_seconds(evidence['before_s'])}"
        f" ({'+' if evidence['change_share'] > 0 else '-'}{format_percent(abs(evidence['change_share']))}); {part} carries"
        f" {format_seconds(abs(change))} of it; at that moment {cause.text if cause else 'nothing else that is recorded changed'}."
    )
