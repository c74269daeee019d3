"""Device memory that is still allocated after a step grows from step to step: something keeps tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity, of_steps
from zerotop.analysis.annotations.support.evidence import Facts, Ints, Process, Rows
from zerotop.analysis.annotations.support.phase_peaks import held_after_steps
from zerotop.analysis.annotations.support.thresholds import CREEP_BYTES, CREEP_STEPS
from zerotop.analysis.formatting import size


@dataclass
class _Seen:
    """How far a rank's steps were read, what was held after the last one, and the stretch of growth up to there."""

    steps: int = 0
    held: int = -1
    length: int = 0  # of the stretch
    base: int = -1  # what was held before it
    told: bool = False


def detect(facts: Facts) -> Iterator[Annotation | None]:
    """One finding for each rank and stretch of growth, after CREEP_STEPS steps of it or when it is CREEP_BYTES."""
    for process in facts.processes:
        yield PAUSE
        seen = process.kept(_Seen)
        if len(process.steps) > seen.steps:
            held = held_after_steps(process, process.steps[seen.steps :])
            for begin, end in _stretches(held, seen):
                rows = process.steps[begin : end + 1]
                # With what was held before the first.
                yield _annotation(process, rows[1:], held_after_steps(process, rows))
            seen.steps = len(process.steps)


def _stretches(held: Ints, seen: _Seen) -> Iterator[tuple[int, int]]:
    """From the step before a stretch to the one (included) in which there is enough of it to be told."""
    before = np.concatenate([[seen.held], held[:-1]])
    grows = (before >= 0) & (held > before)
    # Where the last step lies that did not grow; -1 is before these steps.
    broken = np.maximum.accumulate(np.where(grows, -1, np.arange(len(held))))
    carried = broken < 0
    length = np.arange(len(held)) - broken + np.where(carried, seen.length, 0)
    base = np.where(carried, seen.base if seen.length else seen.held, held[broken])
    told = carried & seen.told
    enough = np.flatnonzero(grows & ~told & (length >= CREEP_STEPS) & (held - base >= CREEP_BYTES))
    for place in enough[np.diff(broken[enough], prepend=-2) != 0].tolist():
        yield seen.steps + place - int(length[place]), seen.steps + place
    seen.told = bool(told[-1]) or bool((broken[enough] == broken[-1]).any())
    seen.held, seen.length, seen.base = int(held[-1]), int(length[-1]), int(base[-1])


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
