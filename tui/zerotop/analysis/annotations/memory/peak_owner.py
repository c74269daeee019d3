"""Which phase has the highest allocation, and so what would lower it; said again when another phase takes over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, Severity, build_step_finding
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Ints
from zerotop.analysis.annotations.support.phase_peaks import PARTS, read_held_bytes, read_phase_peaks
from zerotop.analysis.annotations.support.thresholds import PEAK_SHARE, PLATEAU_STEPS
from zerotop.analysis.failures.oom_advice import advise_keeping_less
from zerotop.analysis.formatting import format_bytes, format_percent

# States kept for good that make up this share of the peak: then they, not activations, are what counts.
_STATES_SHARE = 0.7


@dataclass
class _State:
    """How far the lead's steps were read, the last real ones of them (place, peaks by part), and who was told."""

    steps_read: int = 0
    has_real_step: bool = False
    indices: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    peaks: Ints = field(default_factory=lambda: np.empty((0, len(PARTS)), np.int64))
    owner: int = -1


def detect(facts: Evidence) -> Iterator[Annotation]:
    """The first owner of each attempt, and each other one after it, once PLATEAU_STEPS real steps agree."""
    for group in facts.groups:
        seen, lead = group.get_state(_State), group.lead
        if len(lead.steps) == seen.steps_read:
            continue
        steps = lead.steps[seen.steps_read :]
        fresh = np.flatnonzero(~steps["skipped"])
        # The first real one builds the optimizer's state.
        first = 0 if seen.has_real_step else 1
        seen.has_real_step |= len(fresh) > 0
        fresh = fresh[first:]
        seen.indices = np.concatenate([seen.indices, seen.steps_read + fresh])
        seen.peaks = np.concatenate([seen.peaks, read_phase_peaks(lead, steps)[fresh]])
        seen.steps_read = len(lead.steps)
        yield from _check_owner(group, seen)
        seen.indices, seen.peaks = seen.indices[1 - PLATEAU_STEPS :], seen.peaks[1 - PLATEAU_STEPS :]


def _check_owner(group: Group, state: _State) -> Iterator[Annotation]:
    if len(state.indices) < PLATEAU_STEPS:
        return
    windows = np.lib.stride_tricks.sliding_window_view(_find_owners(state.peaks), PLATEAU_STEPS)
    agreed = np.flatnonzero((windows == windows[:, :1]).all(axis=1) & (windows[:, 0] >= 0))
    found = windows[agreed, 0]
    for place in np.flatnonzero(np.diff(found, prepend=state.owner)).tolist():
        at = slice(agreed[place], agreed[place] + PLATEAU_STEPS)
        flipped, state.owner = state.owner >= 0, int(found[place])
        yield _build_finding(group, state.indices[at], state.peaks[at].max(axis=0), state.owner, flipped=flipped)


def _find_owners(peaks: Ints) -> Ints:
    """The part with the highest peak of each step; -1 where two are alike or one is not known."""
    ordered = np.sort(peaks, axis=1)
    clear = (ordered[:, 0] >= 0) & (ordered[:, -1] - ordered[:, -2] > PEAK_SHARE * ordered[:, -1])
    return np.where(clear, np.argmax(peaks, axis=1), -1).astype(np.int64)


def _build_finding(group: Group, indices: Ints, peaks: Ints, owner: int, *, flipped: bool) -> Annotation:
    lead = group.lead
    rows = lead.steps[indices]
    evidence = {f"{part}_peak_bytes": float(peak) for part, peak in zip(PARTS, peaks, strict=True)}
    held = int(read_held_bytes(lead, lead.steps[indices[0] : indices[-1] + 1])[indices - indices[0]].max())
    evidence["held_after_step_bytes"] = float(held)
    kept = held > _STATES_SHARE * peaks[owner]
    return build_step_finding(
        rows,
        name="peak_owner",
        ranks=group.ranks_at(int(rows["end_unix_ns"][-1])),
        severity=Severity.INFO,
        confidence=0.95,
        sentence=_describe_finding(evidence, PARTS[owner], held, flipped),
        advice=_choose_advice(PARTS[owner], kept, lead.engine),
        evidence=evidence,
    )


def _describe_finding(evidence: dict[str, float], owner: str, held: int, flipped: bool) -> str:
    peak = evidence[f"{owner}_peak_bytes"]
    others = " and ".join(f"{part}'s {format_bytes(evidence[f'{part}_peak_bytes'])}" for part in PARTS if part != owner)
    text = (
        f"The {owner} phase {'now has' if flipped else 'has'} the highest allocation, {format_bytes(peak)}, above {others}"
    )
    return f"{text}; {format_bytes(held)} ({format_percent(held / peak)}) of it are kept from step to step."


def _choose_advice(owner: str, kept: bool, engine: Mapping[str, Any]) -> str:
    less = advise_keeping_less(engine) if kept or owner == "step" else None
    if less is not None:
        return f"{less[0]} A smaller batch does not lower the peak much."
    if engine.get("activation_checkpointing"):
        return "To lower the peak lower Trainer's per_device_train_batch_size: gradients are checkpointed already."
    return "To lower the peak set Trainer's gradient_checkpointing=True, or lower per_device_train_batch_size."
