"""Device memory that is still allocated after a step grows from step to step: something keeps tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity, build_step_finding
from zerotop.analysis.annotations.support.evidence import Evidence, Ints, Process, Rows
from zerotop.analysis.annotations.support.phase_peaks import read_held_bytes
from zerotop.analysis.annotations.support.thresholds import CREEP_BYTES, CREEP_STEPS
from zerotop.analysis.formatting import format_bytes


@dataclass
class _State:
    """How far a rank's steps were read, what was held after the last one, and the stretch of growth up to there."""

    steps_read: int = 0
    held_bytes: int = -1
    stretch_length: int = 0  # of the stretch
    base_bytes: int = -1  # what was held before it
    is_reported: bool = False


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """One finding for each rank and stretch of growth, after CREEP_STEPS steps of it or when it is CREEP_BYTES."""
    for process in facts.processes:
        yield PAUSE
        seen = process.get_state(_State)
        if len(process.steps) > seen.steps_read:
            held = read_held_bytes(process, process.steps[seen.steps_read :])
            for begin, end in _find_stretches(held, seen):
                rows = process.steps[begin : end + 1]
                # With what was held before the first.
                yield _build_finding(process, rows[1:], read_held_bytes(process, rows))
            seen.steps_read = len(process.steps)


def _find_stretches(held: Ints, state: _State) -> Iterator[tuple[int, int]]:
    """From the step before a stretch to the one (included) in which there is enough of it to be told."""
    before = np.concatenate([[state.held_bytes], held[:-1]])
    grows = (before >= 0) & (held > before)
    # Where the last step lies that did not grow; -1 is before these steps.
    broken = np.maximum.accumulate(np.where(grows, -1, np.arange(len(held))))
    carried = broken < 0
    length = np.arange(len(held)) - broken + np.where(carried, state.stretch_length, 0)
    base = np.where(carried, state.base_bytes if state.stretch_length else state.held_bytes, held[broken])
    told = carried & state.is_reported
    enough = np.flatnonzero(grows & ~told & (length >= CREEP_STEPS) & (held - base >= CREEP_BYTES))
    for place in enough[np.diff(broken[enough], prepend=-2) != 0].tolist():
        yield state.steps_read + place - int(length[place]), state.steps_read + place
    state.is_reported = bool(told[-1]) or bool((broken[enough] == broken[-1]).any())
    state.held_bytes, state.stretch_length, state.base_bytes = int(held[-1]), int(length[-1]), int(base[-1])


def _build_finding(process: Process, rows: Rows, held: Ints) -> Annotation:
    slope = float(np.median(np.diff(held)))
    evidence = {
        "bytes_per_step": slope,
        "grown_bytes": float(held[-1] - held[0]),
        "steps": float(len(rows)),
        "held_bytes": float(held[-1]),
    }
    text = (
        f"What rank {process.rank} has allocated after each step grew in each of {len(rows)} steps, by"
        f" {format_bytes(evidence['grown_bytes'])} in all, {format_bytes(slope)} a step"
    )
    peak = int(rows["allocated_peak_bytes"][-1])
    if process.device_bytes and peak > 0 and slope > 0:
        evidence["last_step"] = float(int(rows["step"][-1]) + int((process.device_bytes - peak) / slope))
        text += f": at that pace it will not fit any more at about step {evidence['last_step']:.0f}"
    return build_step_finding(
        rows,
        name="memory_creep",
        ranks=(process.rank,),
        severity=Severity.WARNING,
        confidence=0.9,
        sentence=text + ".",
        advice="Keep numbers, not tensors: loss.item() or loss.detach().cpu() where losses or outputs are collected.",
        evidence=evidence,
    )
