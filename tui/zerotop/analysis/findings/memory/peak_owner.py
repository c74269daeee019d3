"""The phase with the highest allocation, where memory has to be saved. Reported again if the phase changes."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.failures.oom_advice import advise_keeping_less
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.memory.copied_weights import find_copies
from zerotop.analysis.findings.support.memory.looks import FoundLook, await_look
from zerotop.analysis.findings.support.memory.phase_peaks import (
    PARTS,
    read_between_phases,
    read_held_bytes,
    read_phase_peaks,
)
from zerotop.analysis.findings.support.thresholds import PLATEAU_STEPS
from zerotop.analysis.formatting import format_bytes, pluralize
from zerotop.analysis.memory.tensor_inventory import read_held
from zerotop.recording.samples import Ints
from zerotop_probe.recording.event_values import PEAK
from zerotop_probe.recording.events import EngineFacts, Tensors

_KIND = FindingKind(
    name="peak_owner",
    severity=Severity.INFO,
    confidence=0.95,
    headline="In steps {step} to {last_step}, memory peaks {owner}: {peak:bytes}[ of {device_bytes:bytes}]",
    details=(
        "{others}[ {held_between_steps_bytes:bytes} ({share:percent} of the peak) stay allocated from step to step{kept}.]"
        "[ {lines}]"
    ),
    advice="To lower the peak, recompute activations or lower {batch_size}.",
    fix="{recompute_fix}",
)
_SMALLER_BATCH = "To lower the peak, lower {batch_size}: gradient checkpointing is on already.", ""
# Phases' peaks are equal within this share.
PEAK_SHARE = 0.02
# The share of the peak from which permanent states are its main part, and not the activations.
_STATES_SHARE = 0.7
_BETWEEN = "between the phases"
# The share of what stays allocated from which a variable that keeps it is named.
_KEPT_SHARE = 0.25


class _Owner(NamedTuple):
    """The part with the highest peak in some steps."""

    indices: Ints  # of the steps
    peaks: Ints  # by part
    owner: int


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report the first owner of each attempt, and each later one, after PLATEAU_STEPS real steps in full detail agree."""
    for owner, found in window.await_each(_find_changes(window), partial(_await_look, window.subject.lead)):
        yield _build_finding(window, owner, found)


def _await_look(lead: Process, owner: _Owner) -> FoundLook | None:
    rows = lead.phased_steps[owner.indices]
    begin_ns = int(rows["begin_unix_ns"][0])
    return await_look(lead, PEAK, lambda look: look.end_ns > begin_ns, int(rows["end_unix_ns"][-1]))


def _find_changes(window: SearchWindow[Group]) -> Iterator[_Owner]:
    lead = window.subject.lead
    new = window.steps(lead.phased_steps)
    steps = lead.phased_steps[new]
    # The first real step creates the optimizer state. In light detail the peaks of phases are not recorded.
    first = window.find_once(lambda: next(iter((np.flatnonzero(~steps["skipped"]) + new.start).tolist()), None))
    fresh = np.flatnonzero(~steps["skipped"] & ~steps["light"] & (np.arange(len(steps)) + new.start != first))
    peaks = read_phase_peaks(lead, steps)[fresh] if len(fresh) else np.empty((0, len(PARTS)), np.int64)
    together = window.results(zip((fresh + new.start).tolist(), peaks, strict=True), PLATEAU_STEPS - 1)
    if len(together) < PLATEAU_STEPS:
        return
    indices, peaks = np.array([index for index, _ in together]), np.array([peak for _, peak in together])
    windows = np.lib.stride_tricks.sliding_window_view(_find_owners(peaks), PLATEAU_STEPS)
    agreed = np.flatnonzero((windows == windows[:, :1]).all(axis=1) & (windows[:, 0] >= 0))
    for at in agreed.tolist():
        if window.is_news(owner := int(windows[at, 0]), operator.ne):
            found = slice(at, at + PLATEAU_STEPS)
            yield _Owner(indices[found], peaks[found].max(axis=0), owner)


def _find_owners(peaks: Ints) -> Ints:
    """Return the index of the part with the highest peak in each step; -1 if two are equal or one is unknown."""
    ordered = np.sort(peaks, axis=1)
    is_clear = (ordered[:, 0] >= 0) & (ordered[:, -1] - ordered[:, -2] > PEAK_SHARE * ordered[:, -1])
    return np.where(is_clear, np.argmax(peaks, axis=1), -1).astype(np.int64)


def _build_finding(window: SearchWindow[Group], found: _Owner, look: FoundLook) -> Finding:
    group, lead, (indices, peaks, owner) = window.subject, window.subject.lead, found
    rows = lead.phased_steps[indices]
    held = int(read_held_bytes(lead, rows).max())
    between = read_between_phases(lead, rows)
    outside = between.peak_bytes if between is not None else 0
    staying = between.staying_bytes if between is not None else None
    is_outside = outside > (1 + PEAK_SHARE) * peaks[owner]
    peak = outside if is_outside else int(peaks[owner])
    is_kept = (held if staying is None else staying) > _STATES_SHARE * peak
    evidence = {f"{part}_peak_bytes": peak for part, peak in zip(PARTS, peaks, strict=True)}
    advice, fix = "", ""
    if group.is_memory_short(int(rows["end_unix_ns"][-1])):
        advice, fix = _choose_advice(PARTS[owner], is_kept, lead.engine)
    return _KIND.with_changes(advice=advice, fix=fix).at_steps(
        group,
        rows,
        evidence | {"held_between_steps_bytes": staying},
        known_ns=look.known_ns,
        owner=_BETWEEN if is_outside else f"in {PARTS[owner]}",
        peak=peak,
        device_bytes=lead.device_bytes,
        others=_describe_others(peaks, None, 0) if is_outside else _describe_others(peaks, owner, outside),
        share=staying / peak if staying is not None else None,
        last_step=int(rows["step"][-1]),
        kept=_describe_kept(lead, staying or held, look.known_ns),
        lines=look.look.describe_lines() if look.look is not None else None,
    )


def _describe_others(peaks: Ints, owner: int | None, outside: int) -> str:
    """Return a sentence about the parts but the owner, and the time outside them where it peaks higher than forward.

    A model whose modules are called one by one hardly runs in the phase called forward.
    """
    others = [(part, int(peak)) for index, (part, peak) in enumerate(zip(PARTS, peaks, strict=True)) if index != owner]
    if outside > (1 + PEAK_SHARE) * peaks[PARTS.index("forward")]:
        others.append((f"the time {_BETWEEN}", outside))
    (first, peak), *rest = others
    sentence = f"The peak of {first} is {format_bytes(peak)} there"
    return f"{', '.join([sentence, *(f'that of {part} {format_bytes(peak)}' for part, peak in rest)])}."


def _describe_kept(lead: Process, held_bytes: int, known_ns: int) -> str:
    """Return which variable of the script keeps a large part, or "", as no count since its search shows that it let go."""
    counts = [event for event in lead.events_of(Tensors) if event.unix_ns <= known_ns and event.unclaimed_bytes is not None]
    index = next((index for index in reversed(range(len(counts))) if counts[index].held), None)
    holder = max(read_held(counts[index]), key=lambda one: one.bytes, default=None) if index is not None else None
    if holder is None or not _KEPT_SHARE * held_bytes <= holder.bytes <= held_bytes:
        return ""
    if any((event.unclaimed_bytes or 0) < holder.bytes for event in counts[index:]):
        return ""
    copies = find_copies(lead, known_ns)
    if copies is not None and copies.holder is not None and copies.holder.name == holder.name:
        return ""  # of which weight_copies tells
    tensors = f"{holder.count:,} {pluralize(holder.count, 'tensor')}"
    return f", of which {holder.text} keeps {format_bytes(holder.bytes)} in {tensors}"


def _choose_advice(owner: str, is_kept: bool, engine: EngineFacts) -> tuple[str, str]:
    less = advise_keeping_less(engine) if is_kept or owner == "step" else None
    if less is not None:
        return f"{less.text} A smaller batch hardly lowers the peak.", less.fix
    return _SMALLER_BATCH if engine.activation_checkpointing else (_KIND.advice, _KIND.fix)
