"""Allocated device memory grows with each checkpoint or evaluation, and not between them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.memory.phase_peaks import read_held_bytes
from zerotop.analysis.findings.support.thresholds import CREEP_BYTES
from zerotop.recording.samples import Ints

_CHECKPOINTS = FindingKind(
    name="memory_creep",
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


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report at most once for each attempt and phase, after CREEP_PAUSES pauses in a row with growth."""
    for phase in _KINDS:
        yield window.find_once(partial(_check_phase, window, phase), phase)


def _check_phase(window: SearchWindow[Group], phase: str) -> Finding | None:
    lead = window.subject.lead
    last_ns = int(lead.phased_steps["end_unix_ns"][-1]) if len(lead.phased_steps) else 0
    ends = lead.read_rare_phases(phase).times
    new = window.steps(ends[: np.searchsorted(ends, last_ns)], of=phase)  # after which a step with phases has ended
    pauses = window.results(_read_pauses(lead, ends[new]), CREEP_PAUSES - 1, phase)
    for count in range(CREEP_PAUSES, len(pauses) + 1):
        if _is_growing(pauses[count - CREEP_PAUSES : count]):
            return _build_finding(window.subject, phase, pauses[count - CREEP_PAUSES : count])
    return None


def _read_pauses(lead: Process, ends: Ints) -> Iterator[Pause]:
    for end_ns in ends.tolist():
        if index := len(lead.phased_steps_until(end_ns)):
            yield Pause(index, *read_held_bytes(lead, lead.phased_steps[index - 1 : index + 1]).tolist())


def _is_growing(pauses: list[Pause]) -> bool:
    jumps = np.array([pause.after - pause.before for pause in pauses])
    between = np.array([late.before - early.after for early, late in pairwise(pauses)])
    is_known = min(pause.before for pause in pauses) >= 0
    is_alike = jumps.min() > 0 and jumps.min() >= _ALIKE_SHARE * jumps.max()
    return bool(is_known and is_alike and jumps.sum() >= CREEP_BYTES and (np.abs(between) < jumps.min() / 2).all())


def _build_finding(group: Group, phase: str, pauses: list[Pause]) -> Finding:
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
