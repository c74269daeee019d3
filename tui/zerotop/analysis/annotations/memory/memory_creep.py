"""Device memory that is still allocated after a step grows from step to step: something keeps tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Ints, Process, Rows
from zerotop.analysis.annotations.support.phase_peaks import read_held_bytes
from zerotop.analysis.annotations.support.thresholds import CREEP_BYTES

_KIND = FindingKind(
    name="memory_creep",
    severity=Severity.WARNING,
    confidence=0.9,
    sentence=(
        "Rank {rank}'s allocated memory after a step grew in each of {steps:.0f} steps, by {grown_bytes:bytes} in all,"
        " {bytes_per_step:bytes} a step[: at that pace it runs out at about step {last_step:.0f}]."
    ),
    advice="Keep numbers, not tensors: loss.item() or loss.detach().cpu() where losses or outputs are collected.",
)
# Steps in a row in which it grows; leaks that matter do so in each.
CREEP_STEPS = 12


@dataclass
class _State:
    steps_read: int = 0
    held_bytes: int = -1  # after the last step
    stretch_length: int = 0  # steps in a row with growth, up to the last one
    base_bytes: int = -1  # held before them
    is_reported: bool = False


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report each stretch of growth of each rank, when it has CREEP_STEPS steps and CREEP_BYTES."""
    for process in recording.processes:
        state = process.get_state(_State)
        if len(process.steps) > state.steps_read:
            held = read_held_bytes(process, process.steps[state.steps_read :])
            for begin, end in _find_stretches(held, state):
                rows = process.steps[begin : end + 1]
                if process.count_report(_KIND.name):
                    yield _build_finding(process, rows[1:], read_held_bytes(process, rows))
            state.steps_read = len(process.steps)


def _find_stretches(held: Ints, state: _State) -> Iterator[tuple[int, int]]:
    """From the step before a stretch to the step (included) that makes it long enough to report."""
    before = np.concatenate([[state.held_bytes], held[:-1]])
    grows = (before >= 0) & (held > before)
    # The index of the last step without growth; -1 is before these steps.
    broken = np.maximum.accumulate(np.where(grows, -1, np.arange(len(held))))
    carried = broken < 0
    length = np.arange(len(held)) - broken + np.where(carried, state.stretch_length, 0)
    base = np.where(carried, state.base_bytes if state.stretch_length else state.held_bytes, held[broken])
    reported = carried & state.is_reported
    enough = np.flatnonzero(grows & ~reported & (length >= CREEP_STEPS) & (held - base >= CREEP_BYTES))
    for index in enough[np.diff(broken[enough], prepend=-2) != 0].tolist():
        yield state.steps_read + index - int(length[index]), state.steps_read + index
    state.is_reported = bool(reported[-1]) or bool((broken[enough] == broken[-1]).any())
    state.held_bytes, state.stretch_length, state.base_bytes = int(held[-1]), int(length[-1]), int(base[-1])


def _build_finding(process: Process, rows: Rows, held: Ints) -> Annotation:
    """``held``: after the step before the rows and after each of them."""
    slope, peak, last_step = float(np.median(np.diff(held))), int(rows["allocated_peak_bytes"][-1]), None
    if process.device_bytes and peak > 0 and slope > 0:
        last_step = int(rows["step"][-1]) + int((process.device_bytes - peak) / slope)
    evidence = {
        "bytes_per_step": slope,
        "grown_bytes": held[-1] - held[0],
        "steps": len(rows),
        "held_bytes": held[-1],
        "last_step": last_step,
    }
    return _KIND.at_steps(process, rows, evidence)
