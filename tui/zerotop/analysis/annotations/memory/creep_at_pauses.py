"""Allocated device memory grows with each checkpoint or evaluation, and not between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.memory.phase_peaks import read_held_bytes
from zerotop.analysis.annotations.support.thresholds import CREEP_BYTES

_CHECKPOINTS = FindingKind(
    name="memory_creep",
    severity=Severity.WARNING,
    confidence=0.85,
    gpu_bytes="grown_bytes",
    headline="{bytes_per_pause:bytes} stay on the GPU after each {pause}[; full near step {last_step:.0f}]",
    details=(
        "Rank {rank}'s allocated memory grew with each of the last {pauses} {pause}s, and not between them: by"
        " {grown_bytes:bytes} to {held_bytes:bytes}."
    ),
    advice="Save without copies on the GPU: move the state dict to the CPU first, and del what was gathered for it.",
    fix="state = dict((name, value.cpu()) for name, value in model.state_dict().items())",
)
_EVALUATIONS = _CHECKPOINTS.with_changes(
    advice="Keep nothing of the evaluation alive: del its outputs, or keep numbers (.item(), .cpu()) instead of tensors.",
    fix="{eval_tensors_fix}",
)
_KINDS = {"checkpoint_save": (_CHECKPOINTS, "checkpoint"), "eval": (_EVALUATIONS, "evaluation")}
# Checkpoints or evaluations in a row with growth, and the least growth as a share of the most.
CREEP_PAUSES = 4
_ALIKE_SHARE = 0.2


class Pause(NamedTuple):
    """The index of the first step with phases after a pause, and the allocated bytes before and after that pause."""

    step_index: int
    before: int
    after: int


@dataclass
class _State:
    pause_count: int = 0
    last_pauses: list[Pause] = field(default_factory=list)


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report at most once for each attempt and phase, after CREEP_PAUSES pauses in a row with growth."""
    for group in recording.groups:
        for phase in _KINDS:
            if phase not in group.reported:
                yield _check_phase(group, phase)


def _check_phase(group: Group, phase: str) -> Annotation | None:
    lead, state = group.lead, group.get_state(_State, phase)
    for end_ns in lead.read_rare_phases(phase).times[state.pause_count :].tolist():
        index = len(lead.phased_steps_until(end_ns))
        if index >= len(lead.phased_steps):
            return None
        state.pause_count += 1
        if not index:
            continue
        before, after = read_held_bytes(lead, lead.phased_steps[index - 1 : index + 1]).tolist()
        state.last_pauses = [*state.last_pauses[1 - CREEP_PAUSES :], Pause(index, before, after)]
        if len(state.last_pauses) == CREEP_PAUSES and _is_growing(state.last_pauses):
            group.reported.add(phase)
            return _build_finding(group, phase, state.last_pauses)
    return None


def _is_growing(pauses: list[Pause]) -> bool:
    jumps = np.array([pause.after - pause.before for pause in pauses])
    between = np.array([late.before - early.after for early, late in pairwise(pauses)])
    is_known = min(pause.before for pause in pauses) >= 0
    is_alike = jumps.min() > 0 and jumps.min() >= _ALIKE_SHARE * jumps.max()
    return bool(is_known and is_alike and jumps.sum() >= CREEP_BYTES and (np.abs(between) < jumps.min() / 2).all())


def _build_finding(group: Group, phase: str, pauses: list[Pause]) -> Annotation:
    lead, first, last = group.lead, pauses[0], pauses[-1]
    rows = lead.phased_steps[first.step_index : last.step_index + 1]
    growth = float(np.median([pause.after - pause.before for pause in pauses]))
    peak, distance = int(rows["allocated_peak_bytes"][-1]), int(rows["step"][-1] - rows["step"][0]) / (len(pauses) - 1)
    last_step = None
    if lead.device_bytes and peak > 0:
        last_step = int(rows["step"][-1]) + int((lead.device_bytes - peak) / growth * distance)
    kind, name = _KINDS[phase]
    evidence = {
        "bytes_per_pause": growth,
        "steps_per_pause": distance,
        "grown_bytes": last.after - first.before,
        "held_bytes": last.after,
        "last_step": last_step,
    }
    return kind.at_steps(group, rows, evidence, pauses=len(pauses), pause=name)
