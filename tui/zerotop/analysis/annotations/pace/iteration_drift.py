"""Iterations take slowly longer: by how much in each, which phase carries it, and what else grew meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, Severity, of_steps
from zerotop.analysis.annotations.support.causes import Cause, Change, cause_of_drift
from zerotop.analysis.annotations.support.evidence import Facts, Group
from zerotop.analysis.annotations.support.thresholds import (
    DRIFT_BLOCKS,
    DRIFT_EVEN,
    DRIFT_SHARE,
    SETTLED_STEPS,
    SHORTEST_ITERATION_S,
)
from zerotop.analysis.formatting import percent, seconds
from zerotop.analysis.stats.trend import Rise, Trend

_PHASES = ("data_s", "forward_s", "backward_s", "step_s")


class _Trend(Trend):
    """Of the time of iterations."""

    def __init__(self) -> None:
        super().__init__(DRIFT_BLOCKS, DRIFT_EVEN)


def detect(facts: Facts) -> Iterator[Annotation]:
    """One finding for each rise by DRIFT_SHARE, and again when it has gone on for long."""
    for group in facts.groups:
        values = group.lead.steps["iteration_s"]
        for rise in group.lead.kept(_Trend).rises(values, SETTLED_STEPS, share=DRIFT_SHARE):
            if rise.high >= SHORTEST_ITERATION_S:
                yield _annotation(group, rise)


def _annotation(group: Group, rise: Rise) -> Annotation:
    rows = group.lead.steps[rise.begin : rise.end]
    before, after = rows[: rise.block], rows[-rise.block :]
    changes = {name: float(np.median(after[name]) - np.median(before[name])) for name in _PHASES}
    changes["other_s"] = rise.high - rise.low - sum(changes.values())
    carrier = max(changes, key=lambda name: changes[name])
    cause = cause_of_drift(Change(group, before, after))
    evidence = {"slope_s": rise.slope, "before_s": rise.low, "after_s": rise.high, "steps": float(len(rows))}
    evidence |= {f"{name.removesuffix('_s')}_change_s": value for name, value in changes.items()}
    return of_steps(
        rows,
        name="iteration_drift",
        ranks=group.ranks(int(rows["end_unix_ns"][-1])),
        severity=Severity.WARNING,
        confidence=cause.confidence if cause else 0.6,
        sentence=_sentence(evidence, int(rows["step"][0]), carrier, changes[carrier], cause),
        advice=cause.advice if cause else _advice(carrier),
        evidence=evidence,
    )


def _sentence(seen: dict[str, float], step: int, carrier: str, change: float, cause: Cause | None) -> str:
    name = carrier.removesuffix("_s")
    part = "what lies between the phases" if name == "other" else f"the {name} phase"
    slope = seen["slope_s"]
    pace = f"{slope * 1e3:.2g} ms" if slope >= 1e-4 else f"{slope * 1e6:.2g} us"
    return (
        f"From about step {step} on each iteration takes {pace} longer than the one before: {seconds(seen['before_s'])}"
        f" became {seconds(seen['after_s'])} (+{percent(seen['after_s'] / seen['before_s'] - 1)}) in {seen['steps']:.0f}"
        f" steps; {part} carries {seconds(change)} of it; {cause.text if cause else 'nothing else that is recorded'}"
        f" {'meanwhile' if cause else 'changed with it'}."
    )


def _advice(carrier: str) -> str:
    if carrier == "data_s":
        return "Look at what the dataset keeps or reads over again; raise Trainer's dataloader_num_workers."
    if carrier == "other_s":
        return "Look for a list that grows between the steps (logged values, kept outputs); raise Trainer's logging_steps."
    return 'Set "wall_clock_breakdown": true in the DeepSpeed config, to see which part of that phase takes longer.'
