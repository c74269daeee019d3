"""Device memory that is still allocated after a step grows from step to step: something keeps tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from zerotop.analysis.annotations.annotation import Annotation, Severity, of_steps
from zerotop.analysis.annotations.facts import Facts, Ints, Process, Rows
from zerotop.analysis.annotations.phase_peaks import held_after_steps
from zerotop.analysis.annotations.thresholds import CREEP_BYTES, CREEP_STEPS
from zerotop.analysis.annotations.words import size


@dataclass
class _Seen:
    """How far a rank's steps were read; what was held after the last and after each of those that grew up to it."""

    steps: int = 0
    last: int = -1
    run: list[int] = field(default_factory=list)  # the first is that of the step before them
    told: bool = False


def detect(facts: Facts) -> Iterator[Annotation]:
    """One finding for each rank and stretch of growth, after CREEP_STEPS steps of it or when it is CREEP_BYTES."""
    for process in facts.processes:
        seen = process.kept(_Seen)
        if len(process.steps) == seen.steps:
            continue
        for value in held_after_steps(process, process.steps[seen.steps :]).tolist():
            seen.steps += 1
            _take(seen, value)
            if not seen.told and len(seen.run) > CREEP_STEPS and value - seen.run[0] >= CREEP_BYTES:
                seen.told = True
                yield _annotation(process, process.steps[seen.steps - len(seen.run) + 1 : seen.steps], np.array(seen.run))


def _take(seen: _Seen, value: int) -> None:
    if not 0 <= seen.last < value:
        seen.run, seen.told = [], False
    elif not seen.told:
        seen.run = seen.run or [seen.last]
        seen.run.append(value)
    seen.last = value


def _annotation(process: Process, rows: Rows, held: Ints) -> Annotation:
    slope = float(np.median(np.diff(held)))
    evidence = {
        "bytes_per_step": slope,
        "grown_bytes": float(held[-1] - held[0]),
        "steps": float(len(rows)),
        "held_bytes": float(held[-1]),
    }
    text = (
        f"What rank {process.rank} has allocated after each step grew in each of {len(rows)} steps, by"
        f" {size(evidence['grown_bytes'])} in all, {size(slope)} a step"
    )
    peak = int(rows["allocated_peak_bytes"][-1])
    if process.device_bytes and peak > 0 and slope > 0:
        evidence["last_step"] = float(int(rows["step"][-1]) + int((process.device_bytes - peak) / slope))
        text += f": at that pace it will not fit any more at about step {evidence['last_step']:.0f}"
    return of_steps(
        rows,
        name="memory_creep",
        ranks=(process.rank,),
        severity=Severity.WARNING,
        confidence=0.9,
        sentence=text + ".",
        advice="Keep numbers, not tensors: loss.item() or loss.detach().cpu() where losses or outputs are collected.",
        evidence=evidence,
    )
