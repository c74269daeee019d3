"""Iterations begin to take another time for good: which phase carries it, and what else changed at that moment."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, Severity, of_steps
from zerotop.analysis.annotations.support.causes import Cause, Change, cause_of, loads, own_s
from zerotop.analysis.annotations.support.evidence import Facts, Group, Rows
from zerotop.analysis.annotations.support.thresholds import SHORTEST_ITERATION_S
from zerotop.analysis.formatting import percent, seconds
from zerotop.analysis.stats.change_points import Levels, Shift

_PHASES = ("data_s", "forward_s", "backward_s", "step_s")


class _Levels(Levels):
    """Of the time of iterations."""


def detect(facts: Facts) -> Iterator[Annotation]:
    """One finding for each change of level."""
    for group in facts.groups:
        values = group.lead.steps["iteration_s"]
        for shift in group.lead.kept(_Levels).shifts(values):
            if max(values[shift.before].max(), values[shift.first]) >= SHORTEST_ITERATION_S:
                yield from _told(group, shift)


def _told(group: Group, shift: Shift) -> Iterator[Annotation]:
    steps = group.lead.steps
    change = Change(group, steps[shift.before], steps[shift.first : shift.last + 1])
    cause = cause_of(change)
    if cause is None and _by_others(change):
        return
    yield _annotation(group, change.before, change.after, cause)


def _by_others(change: Change) -> bool:
    """Whether others, who have the cores, may have done it: the phases that compute take now longer, now shorter."""
    was, becomes = (_middle(rows, "iteration_s") for rows in (change.before, change.after))
    own = float(np.median(own_s(change.after)) - np.median(own_s(change.before)))
    return own / (becomes - was) <= 0.5 and any(load is not None and load.taken for load in loads(change))


def _annotation(group: Group, before: Rows, after: Rows, cause: Cause | None) -> Annotation:
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
