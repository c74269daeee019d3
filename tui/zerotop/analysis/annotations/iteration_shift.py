"""Iterations begin to take another time for good: which phase carries it, and what else changed at that moment."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.annotation import Annotation, Severity, of_steps
from zerotop.analysis.annotations.causes import Cause, Change, cause_of
from zerotop.analysis.annotations.facts import Facts, Group, Rows
from zerotop.analysis.annotations.steady import Levels, Shift
from zerotop.analysis.annotations.thresholds import SHORTEST_ITERATION_S
from zerotop.analysis.annotations.words import percent, seconds

_PHASES = ("data_s", "forward_s", "backward_s", "step_s")


class _Levels(Levels):
    """Of the time of iterations."""


def detect(facts: Facts) -> Iterator[Annotation]:
    """One finding for each change of level."""
    for group in facts.groups:
        values = group.lead.steps["iteration_s"]
        for shift in group.lead.kept(_Levels).shifts(values):
            if max(values[shift.before].max(), values[shift.first]) >= SHORTEST_ITERATION_S:
                yield _annotation(group, shift)


def _annotation(group: Group, shift: Shift) -> Annotation:
    steps = group.lead.steps
    before, after = steps[shift.before], steps[shift.first : shift.last + 1]
    cause = cause_of(Change(group.lead, before, after))
    was, becomes = _middle(before, "iteration_s"), _middle(after, "iteration_s")
    changes = {name: _middle(after, name) - _middle(before, name) for name in _PHASES}
    changes["other_s"] = becomes - was - sum(changes.values())
    carrier = max(changes, key=lambda name: changes[name] * (1 if becomes > was else -1))
    evidence = {"before_s": was, "after_s": becomes, "change_share": becomes / was - 1}
    evidence |= {f"{name.removesuffix('_s')}_change_s": value for name, value in changes.items()}
    return of_steps(
        after,
        name="iteration_shift",
        ranks=group.ranks(int(after["end_unix_ns"][-1])),
        severity=Severity.WARNING if becomes > was else Severity.INFO,
        confidence=cause.confidence if cause else 0.5,
        sentence=_sentence(evidence, int(after["step"][0]), carrier, changes[carrier], cause),
        advice=cause.advice if cause else _ADVICE,
        evidence=evidence,
    )


_ADVICE = 'Set "wall_clock_breakdown": true in the DeepSpeed config, to see which part of that phase takes longer.'


def _middle(rows: Rows, name: str) -> float:
    return float(np.median(rows[name]))


def _sentence(seen: dict[str, float], step: int, carrier: str, change: float, cause: Cause | None) -> str:
    name = carrier.removesuffix("_s")
    part = "what lies between the phases" if name == "other" else f"the {name} phase"
    return (
        f"From step {step} on iterations take {seconds(seen['after_s'])} instead of {seconds(seen['before_s'])}"
        f" ({'+' if seen['change_share'] > 0 else '-'}{percent(abs(seen['change_share']))}); {part} carries"
        f" {seconds(abs(change))} of it; at that moment {cause.text if cause else 'nothing else that is recorded changed'}."
    )
