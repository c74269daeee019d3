"""Device memory that is still allocated grows with each checkpoint or evaluation, and not between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, Severity, of_steps
from zerotop.analysis.annotations.support.evidence import Facts, Group
from zerotop.analysis.annotations.support.phase_peaks import held_after_steps
from zerotop.analysis.annotations.support.thresholds import CREEP_BYTES, CREEP_PAUSES
from zerotop.analysis.formatting import size

_KINDS = {"checkpoint_save": "checkpoint", "eval": "evaluation"}


class Pause(NamedTuple):
    """The first step after one, by its place, and what was held after the step before and after it."""

    place: int
    before: int
    after: int


@dataclass
class _Seen:
    """How many pauses of a kind were looked at, the last of them, and whether it was told."""

    count: int = 0
    last: list[Pause] = field(default_factory=list)
    told: bool = False


@dataclass
class _Kinds:
    """Those of a group."""

    of: dict[str, _Seen] = field(default_factory=dict)


def detect(facts: Facts) -> Iterator[Annotation]:
    """At most one finding for each attempt and kind, after CREEP_PAUSES pauses in a row with growth."""
    for group in facts.groups:
        for kind in _KINDS:
            seen = group.kept(_Kinds).of.setdefault(kind, _Seen())
            if not seen.told:
                yield from _of_kind(group, kind, seen)


def _of_kind(group: Group, kind: str, seen: _Seen) -> Iterator[Annotation]:
    lead = group.lead
    for end_ns in lead.rare(kind).times[seen.count :].tolist():
        place = len(lead.steps_until(end_ns))
        if place >= len(lead.steps):
            return
        seen.count += 1
        if not place:
            continue
        before, after = held_after_steps(lead, lead.steps[place - 1 : place + 1]).tolist()
        seen.last = [*seen.last[1 - CREEP_PAUSES :], Pause(place, before, after)]
        if len(seen.last) == CREEP_PAUSES and _grows(seen.last):
            seen.told = True
            yield _annotation(group, kind, seen.last)
            return


def _grows(pauses: list[Pause]) -> bool:
    jumps = np.array([pause.after - pause.before for pause in pauses])
    between = np.array([late.before - early.after for early, late in pairwise(pauses)])
    known = min(pause.before for pause in pauses) >= 0
    return bool(known and (jumps > 0).all() and jumps.sum() >= CREEP_BYTES and (np.abs(between) < jumps.min() / 2).all())


def _annotation(group: Group, kind: str, pauses: list[Pause]) -> Annotation:
    lead, first, last = group.lead, pauses[0], pauses[-1]
    rows = lead.steps[first.place : last.place + 1]
    each = float(np.median([pause.after - pause.before for pause in pauses]))
    evidence = {"bytes_per_pause": each, "grown_bytes": float(last.after - first.before), "held_bytes": float(last.after)}
    text = (
        f"What rank {lead.rank} has allocated after each step grew with each of the last {len(pauses)} {_KINDS[kind]}s, by"
        f" {size(each)}, and not between them"
    )
    peak, apart = int(rows["allocated_peak_bytes"][-1]), (last.place - first.place) / (len(pauses) - 1)
    if lead.device_bytes and peak > 0:
        evidence["last_step"] = float(int(rows["step"][-1]) + int((lead.device_bytes - peak) / each * apart))
        text += f": at that pace it will not fit any more at about step {evidence['last_step']:.0f}"
    return of_steps(
        rows,
        name="memory_creep",
        ranks=group.ranks(int(rows["end_unix_ns"][-1])),
        severity=Severity.WARNING,
        confidence=0.85,
        sentence=text + ".",
        advice="Let nothing of it live on: del its outputs, or keep numbers (.item(), .cpu()) instead of tensors."
        if kind == "eval"
        else "Save without copies on the GPU: move the state dict to the CPU first, and del what was gathered for it.",
        evidence=evidence,
    )
