"""Which phase has the highest allocation, and so what would lower it; said again when another phase takes over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, Severity, of_steps
from zerotop.analysis.annotations.support.evidence import Facts, Group, Ints
from zerotop.analysis.annotations.support.phase_peaks import PARTS, held_after_steps, phase_peaks
from zerotop.analysis.annotations.support.thresholds import PEAK_SHARE, PLATEAU_STEPS
from zerotop.analysis.failures.oom_advice import less_kept
from zerotop.analysis.formatting import percent, size

# States kept for good that make up this share of the peak: then they, not activations, are what counts.
_STATES_SHARE = 0.7


@dataclass
class _Seen:
    """How far the lead's steps were read, the last real ones of them (place, peaks by part), and who was told."""

    steps: int = 0
    real: bool = False
    places: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    peaks: Ints = field(default_factory=lambda: np.empty((0, len(PARTS)), np.int64))
    owner: int = -1


def detect(facts: Facts) -> Iterator[Annotation]:
    """The first owner of each attempt, and each other one after it, once PLATEAU_STEPS real steps agree."""
    for group in facts.groups:
        seen, lead = group.kept(_Seen), group.lead
        if len(lead.steps) == seen.steps:
            continue
        steps = lead.steps[seen.steps :]
        fresh = np.flatnonzero(~steps["skipped"])
        # The first real one builds the optimizer's state.
        first = 0 if seen.real else 1
        seen.real |= len(fresh) > 0
        fresh = fresh[first:]
        seen.places = np.concatenate([seen.places, seen.steps + fresh])
        seen.peaks = np.concatenate([seen.peaks, phase_peaks(lead, steps)[fresh]])
        seen.steps = len(lead.steps)
        yield from _owned(group, seen)
        seen.places, seen.peaks = seen.places[1 - PLATEAU_STEPS :], seen.peaks[1 - PLATEAU_STEPS :]


def _owned(group: Group, seen: _Seen) -> Iterator[Annotation]:
    if len(seen.places) < PLATEAU_STEPS:
        return
    windows = np.lib.stride_tricks.sliding_window_view(_owners(seen.peaks), PLATEAU_STEPS)
    agreed = np.flatnonzero((windows == windows[:, :1]).all(axis=1) & (windows[:, 0] >= 0))
    found = windows[agreed, 0]
    for place in np.flatnonzero(np.diff(found, prepend=seen.owner)).tolist():
        at = slice(agreed[place], agreed[place] + PLATEAU_STEPS)
        flipped, seen.owner = seen.owner >= 0, int(found[place])
        yield _annotation(group, seen.places[at], seen.peaks[at].max(axis=0), seen.owner, flipped=flipped)


def _owners(peaks: Ints) -> Ints:
    """The part with the highest peak of each step; -1 where two are alike or one is not known."""
    ordered = np.sort(peaks, axis=1)
    clear = (ordered[:, 0] >= 0) & (ordered[:, -1] - ordered[:, -2] > PEAK_SHARE * ordered[:, -1])
    return np.where(clear, np.argmax(peaks, axis=1), -1).astype(np.int64)


def _annotation(group: Group, at: Ints, peaks: Ints, owner: int, *, flipped: bool) -> Annotation:
    lead = group.lead
    rows = lead.steps[at]
    evidence = {f"{part}_peak_bytes": float(peak) for part, peak in zip(PARTS, peaks, strict=True)}
    held = int(held_after_steps(lead, lead.steps[at[0] : at[-1] + 1])[at - at[0]].max())
    evidence["held_after_step_bytes"] = float(held)
    kept = held > _STATES_SHARE * peaks[owner]
    return of_steps(
        rows,
        name="peak_owner",
        ranks=group.ranks(int(rows["end_unix_ns"][-1])),
        severity=Severity.INFO,
        confidence=0.95,
        sentence=_sentence(evidence, PARTS[owner], held, flipped),
        advice=_advice(PARTS[owner], kept, lead.engine),
        evidence=evidence,
    )


def _sentence(seen: dict[str, float], owner: str, held: int, flipped: bool) -> str:
    peak = seen[f"{owner}_peak_bytes"]
    others = " and ".join(f"{part}'s {size(seen[f'{part}_peak_bytes'])}" for part in PARTS if part != owner)
    text = f"The {owner} phase {'now has' if flipped else 'has'} the highest allocation, {size(peak)}, above {others}"
    return f"{text}; {size(held)} ({percent(held / peak)}) of it are kept from step to step."


def _advice(owner: str, kept: bool, engine: Mapping[str, Any]) -> str:
    less = less_kept(engine) if kept or owner == "step" else None
    if less is not None:
        return f"{less[0]} A smaller batch does not lower the peak much."
    if engine.get("activation_checkpointing"):
        return "To lower the peak lower Trainer's per_device_train_batch_size: gradients are checkpointed already."
    return "To lower the peak set Trainer's gradient_checkpointing=True, or lower per_device_train_batch_size."
