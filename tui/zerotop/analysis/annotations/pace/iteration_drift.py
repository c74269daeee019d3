"""Iterations take slowly longer: by how much in each, which phase carries it, and what else grew meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, Severity, build_step_finding
from zerotop.analysis.annotations.support.causes import Cause, StepChange, find_drift_cause
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.thresholds import (
    DRIFT_BLOCKS,
    DRIFT_EVENNESS,
    DRIFT_SHARE,
    SETTLED_STEPS,
    SHORTEST_ITERATION_S,
)
from zerotop.analysis.formatting import format_percent, format_seconds
from zerotop.analysis.stats.trend import Rise, TrendFinder

_PHASES = ("data_s", "forward_s", "backward_s", "step_s")


class _TrendFinder(TrendFinder):
    """Of the time of iterations."""

    def __init__(self) -> None:
        super().__init__(DRIFT_BLOCKS, DRIFT_EVENNESS)


def detect(facts: Evidence) -> Iterator[Annotation]:
    """One finding for each rise by DRIFT_SHARE, and again when it has gone on for long."""
    for group in facts.groups:
        values = group.lead.steps["iteration_s"]
        for rise in group.lead.get_state(_TrendFinder).find_rises(values, SETTLED_STEPS, share=DRIFT_SHARE):
            if rise.high >= SHORTEST_ITERATION_S:
                yield _build_finding(group, rise)


def _build_finding(group: Group, rise: Rise) -> Annotation:
    rows = group.lead.steps[rise.begin : rise.end]
    before, after = rows[: rise.block_length], rows[-rise.block_length :]
    changes = {name: float(np.median(after[name]) - np.median(before[name])) for name in _PHASES}
    changes["other_s"] = rise.high - rise.low - sum(changes.values())
    carrier = max(changes, key=lambda name: changes[name])
    cause = find_drift_cause(StepChange(group, before, after))
    evidence = {"slope_s": rise.slope, "before_s": rise.low, "after_s": rise.high, "steps": float(len(rows))}
    evidence |= {f"{name.removesuffix('_s')}_change_s": value for name, value in changes.items()}
    return build_step_finding(
        rows,
        name="iteration_drift",
        ranks=group.ranks_at(int(rows["end_unix_ns"][-1])),
        severity=Severity.WARNING,
        confidence=cause.confidence if cause else 0.6,
        sentence=_describe_finding(evidence, int(rows["step"][0]), carrier, changes[carrier], cause),
        advice=cause.advice if cause else _choose_advice(carrier),
        evidence=evidence,
    )


def _describe_finding(evidence: dict[str, float], step: int, carrier: str, change: float, cause: Cause | None) -> str:
    name = carrier.removesuffix("_s")
    part = "what lies between the phases" if name == "other" else f"the {name} phase"
    slope = evidence["slope_s"]
    pace = f"{slope * 1e3:.2g} ms" if slope >= 1e-4 else f"{slope * 1e6:.2g} us"
    return (
        f"From about step {step} on each iteration takes {pace} longer than the one before: {format_seconds(evidence['before_s'])}"
        f" became {format_seconds(evidence['after_s'])} (+{format_percent(evidence['after_s'] / evidence['before_s'] - 1)}) in {evidence['steps']:.0f}"
        f" steps; {part} carries {format_seconds(change)} of it; {cause.text if cause else 'nothing else that is recorded'}"
        f" {'meanwhile' if cause else 'changed with it'}."
    )


def _choose_advice(carrier: str) -> str:
    if carrier == "data_s":
        return "Look at what the dataset keeps or reads over again; raise Trainer's dataloader_num_workers."
    if carrier == "other_s":
        return "Look for a list that grows between the steps (logged values, kept outputs); raise Trainer's logging_steps."
    return 'Set "wall_clock_breakdown": true in the DeepSpeed config, to see which part of that phase takes longer.'
