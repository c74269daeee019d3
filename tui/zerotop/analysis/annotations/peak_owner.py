"""Which phase has the highest allocation, and so what would lower it; said again when another phase takes over."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.annotation import Annotation, Severity
from zerotop.analysis.annotations.facts import Facts, Group
from zerotop.analysis.annotations.phase_peaks import PARTS, held_after_steps, phase_peaks
from zerotop.analysis.annotations.thresholds import PEAK_SHARE, PLATEAU_STEPS
from zerotop.analysis.annotations.words import percent, size

# States kept for good that make up this share of the peak: then they, not activations, are what counts.
_STATES_SHARE = 0.7


def detect(facts: Facts) -> Iterator[Annotation]:
    """The first owner of each attempt, and each other one after it, once PLATEAU_STEPS real steps agree."""
    for group in facts.groups:
        real = np.flatnonzero(~group.lead.steps["skipped"])[1:]
        peaks = phase_peaks(group.lead)[real]
        if len(peaks) < PLATEAU_STEPS:
            continue
        owner = _owners(peaks)
        windows = np.lib.stride_tricks.sliding_window_view(owner, PLATEAU_STEPS)
        agreed = np.flatnonzero((windows == windows[:, :1]).all(axis=1) & (windows[:, 0] >= 0))
        found = owner[agreed]
        new = np.flatnonzero(np.diff(found, prepend=-1))
        for place in new.tolist():
            at = real[agreed[place] : agreed[place] + PLATEAU_STEPS]
            yield _annotation(group, at, int(found[place]), flipped=place > 0)


def _owners(peaks: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The part with the highest peak of each step; -1 where two are alike or one is not known."""
    ordered = np.sort(peaks, axis=1)
    clear = (ordered[:, 0] >= 0) & (ordered[:, -1] - ordered[:, -2] > PEAK_SHARE * ordered[:, -1])
    return np.where(clear, np.argmax(peaks, axis=1), -1)


def _annotation(
    group: Group, at: np.ndarray[tuple[int, ...], np.dtype[np.int64]], owner: int, *, flipped: bool
) -> Annotation:
    lead = group.lead
    rows, peaks = lead.steps[at], phase_peaks(lead)[at].max(axis=0)
    evidence = {f"{part}_peak_bytes": float(peak) for part, peak in zip(PARTS, peaks, strict=True)}
    held = int(held_after_steps(lead)[at].max())
    evidence["held_after_step_bytes"] = float(held)
    known_ns = int(rows["end_unix_ns"][-1])
    kept = held > _STATES_SHARE * peaks[owner]
    return Annotation(
        name="peak_owner",
        begin_ns=int(rows["begin_unix_ns"][0]),
        end_ns=known_ns,
        known_ns=known_ns,
        step=int(rows["step"][0]),
        ranks=group.ranks(known_ns),
        severity=Severity.INFO,
        confidence=0.95,
        sentence=_sentence(evidence, PARTS[owner], held, flipped),
        advice=_advice(PARTS[owner], kept, bool(lead.engine.get("activation_checkpointing"))),
        evidence=evidence,
    )


def _sentence(seen: dict[str, float], owner: str, held: int, flipped: bool) -> str:
    peak = seen[f"{owner}_peak_bytes"]
    others = " and ".join(f"{part}'s {size(seen[f'{part}_peak_bytes'])}" for part in PARTS if part != owner)
    text = f"The {owner} phase {'now has' if flipped else 'has'} the highest allocation, {size(peak)}, above {others}"
    return f"{text}; {size(held)} ({percent(held / peak)}) of it are kept from step to step."


def _advice(owner: str, kept: bool, checkpointing: bool) -> str:
    if kept or owner == "step":
        return (
            'To lower the peak raise "zero_optimization.stage" or set "offload_optimizer.device" to "cpu": a smaller batch'
            " does not lower it much."
        )
    if checkpointing:
        return "To lower the peak lower Trainer's per_device_train_batch_size: gradients are checkpointed already."
    return "To lower the peak set Trainer's gradient_checkpointing=True, or lower per_device_train_batch_size."
