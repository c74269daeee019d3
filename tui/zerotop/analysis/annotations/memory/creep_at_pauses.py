"""Device memory that is still allocated grows with each checkpoint or evaluation, and not between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, Severity, build_step_finding
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.phase_peaks import read_held_bytes
from zerotop.analysis.annotations.support.thresholds import CREEP_BYTES, CREEP_PAUSES
from zerotop.analysis.formatting import format_bytes

_KIND_NAMES = {"checkpoint_save": "checkpoint", "eval": "evaluation"}


class Pause(NamedTuple):
    """The first step after one, by its place, and what was held after the step before and after it."""

    step_index: int
    before: int
    after: int


@dataclass
class _State:
    """How many pauses of a kind were looked at, the last of them, and whether it was told."""

    pause_count: int = 0
    last_pauses: list[Pause] = field(default_factory=list)
    is_reported: bool = False


@dataclass
class _KindStates:
    """Those of a group."""

    by_kind: dict[str, _State] = field(default_factory=dict)


def detect(facts: Evidence) -> Iterator[Annotation]:
    """At most one finding for each attempt and kind, after CREEP_PAUSES pauses in a row with growth."""
    for group in facts.groups:
        for kind in _KIND_NAMES:
            seen = group.get_state(_KindStates).by_kind.setdefault(kind, _State())
            if not seen.is_reported:
                yield from _check_kind(group, kind, seen)


def _check_kind(group: Group, kind: str, state: _State) -> Iterator[Annotation]:
    lead = group.lead
    for end_ns in lead.read_rare_phases(kind).times[state.pause_count :].tolist():
        place = len(lead.steps_until(end_ns))
        if place >= len(lead.steps):
            return
        state.pause_count += 1
        if not place:
            continue
        before, after = read_held_bytes(lead, lead.steps[place - 1 : place + 1]).tolist()
        state.last_pauses = [*state.last_pauses[1 - CREEP_PAUSES :], Pause(place, before, after)]
        if len(state.last_pauses) == CREEP_PAUSES and _is_growing(state.last_pauses):
            state.is_reported = True
            yield _build_finding(group, kind, state.last_pauses)
            return


def _is_growing(pauses: list[Pause]) -> bool:
    jumps = np.array([pause.after - pause.before for pause in pauses])
    between = np.array([late.before - early.after for early, late in pairwise(pauses)])
    known = min(pause.before for pause in pauses) >= 0
    return bool(known and (jumps > 0).all() and jumps.sum() >= CREEP_BYTES and (np.abs(between) < jumps.min() / 2).all())


def _build_finding(group: Group, kind: str, pauses: list[Pause]) -> Annotation:
    lead, first, last = group.lead, pauses[0], pauses[-1]
    rows = lead.steps[first.step_index : last.step_index + 1]
    each = float(np.median([pause.after - pause.before for pause in pauses]))
    evidence = {"bytes_per_pause": each, "grown_bytes": float(last.after - first.before), "held_bytes": float(last.after)}
    text = (
        f"What rank {lead.rank} has allocated after each step grew with each of the last {len(pauses)} {_KIND_NAMES[kind]}s, by"
        f" {format_bytes(each)}, and not between them"
    )
    peak, apart = int(rows["allocated_peak_bytes"][-1]), (last.step_index - first.step_index) / (len(pauses) - 1)
    if lead.device_bytes and peak > 0:
        evidence["last_step"] = float(int(rows["step"][-1]) + int((lead.device_bytes - peak) / each * apart))
        text += f": at that pace it will not fit any more at about step {evidence['last_step']:.0f}"
    return build_step_finding(
        rows,
        name="memory_creep",
        ranks=group.ranks_at(int(rows["end_unix_ns"][-1])),
        severity=Severity.WARNING,
        confidence=0.85,
        sentence=text + ".",
        advice="Let nothing of it live on: del its outputs, or keep numbers (.item(), .cpu()) instead of tensors."
        if kind == "eval"
        else "Save without copies on the GPU: move the state dict to the CPU first, and del what was gathered for it.",
        evidence=evidence,
    )
