"""Device memory that is still allocated after a step grows from step to step: something keeps tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.annotation import Annotation, Severity
from zerotop.analysis.annotations.facts import Facts, Process
from zerotop.analysis.annotations.phase_peaks import held_after_steps
from zerotop.analysis.annotations.thresholds import CREEP_BYTES, CREEP_STEPS
from zerotop.analysis.annotations.words import size


def detect(facts: Facts) -> Iterator[Annotation]:
    """One finding for each rank and stretch of growth, after CREEP_STEPS steps of it or when it is CREEP_BYTES."""
    for process in facts.processes:
        held = held_after_steps(process)
        grows = (np.diff(held, prepend=held[:1]) > 0) & (held >= 0) if len(held) else np.empty(0, np.bool_)
        for begin, end in _runs(grows):
            long = np.arange(begin + CREEP_STEPS - 1, end)
            enough = long[held[long] - held[begin - 1] >= CREEP_BYTES]
            if len(enough):
                yield _annotation(process, held, begin, int(enough[0]))


def _runs(flags: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Iterator[tuple[int, int]]:
    """Where flags are set, as (first, after the last)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _annotation(
    process: Process, held: np.ndarray[tuple[int, ...], np.dtype[np.int64]], begin: int, last: int
) -> Annotation:
    rows = process.steps[begin : last + 1]
    slope = float(np.median(np.diff(held[begin - 1 : last + 1])))
    evidence = {
        "bytes_per_step": slope,
        "grown_bytes": float(held[last] - held[begin - 1]),
        "steps": float(len(rows)),
        "held_bytes": float(held[last]),
    }
    text = (
        f"What rank {process.rank} has allocated after each step grew in each of {len(rows)} steps, by"
        f" {size(evidence['grown_bytes'])} in all, {size(slope)} a step"
    )
    peak = int(rows["allocated_peak_bytes"][-1])
    if process.device_bytes and peak > 0 and slope > 0:
        evidence["last_step"] = float(int(rows["step"][-1]) + int((process.device_bytes - peak) / slope))
        text += f": at that pace it will not fit any more at about step {evidence['last_step']:.0f}"
    known_ns = int(rows["end_unix_ns"][-1])
    return Annotation(
        name="memory_creep",
        begin_ns=int(rows["begin_unix_ns"][0]),
        end_ns=known_ns,
        known_ns=known_ns,
        step=int(rows["step"][0]),
        ranks=(process.rank,),
        severity=Severity.WARNING,
        confidence=0.9,
        sentence=text + ".",
        advice="Keep numbers, not tensors: loss.item() or loss.detach().cpu() where losses or outputs are collected.",
        evidence=evidence,
    )
