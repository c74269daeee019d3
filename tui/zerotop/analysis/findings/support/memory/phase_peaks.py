"""The highest allocation of each phase in each step, if the allocator's peaks were reset at each phase."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.findings.support.evidence import Ints, Process, Rows
from zerotop_probe.recording.tables import BEGIN, PHASES

PARTS = ("forward", "backward", "step")
_PART_BY_PHASE = {
    "forward": "forward",
    "backward": "backward",
    "reduce": "backward",
    "step": "step",
    "grads_to_cpu": "step",
    "cpu_optimizer": "step",
    "params_to_gpu": "step",
    "optimizer": "step",
    "allgather": "step",
}
_FORWARD = PHASES.index("forward")
# One of this many steps must be in full detail.
_MOST_SEARCHED = 256
# The part of each phase, -1 for none; the last entry stands for unknown newer phases.
_PART_CODES = np.array([PARTS.index(_PART_BY_PHASE[name]) if name in _PART_BY_PHASE else -1 for name in PHASES] + [-1])


def read_phase_peaks(process: Process, steps: Rows) -> Ints:
    """Return peaks in bytes, shape (steps, PARTS), of consecutive steps; -1 if not sampled, as in light detail."""
    peaks = np.full((len(steps), len(PARTS)), -1, np.int64)
    if not process.has_exact_peaks or not len(steps):
        return peaks
    samples = process.records("allocator").read_window(int(steps["begin_unix_ns"][0]), int(steps["end_unix_ns"][-1]))
    if not len(samples):
        return peaks
    part = _PART_CODES[np.minimum(samples.rows["phase"], len(PHASES))]
    step = np.searchsorted(steps["end_unix_ns"], samples.times, "left")
    # Not counted: samples at the begin of a phase, which cover the time before; forwards of an evaluation; damaged times.
    inside = (part >= 0) & (samples.rows["edge"] != BEGIN) & ~_is_evaluating(process, samples.times) & (step < len(steps))
    # Between these steps others may have been counted.
    inside[inside] &= ~steps["light"][step[inside]] & (samples.times[inside] > steps["begin_unix_ns"][step[inside]])
    np.maximum.at(peaks, (step[inside], part[inside]), samples.rows["allocated_peak_bytes"][inside])
    return peaks


def _is_evaluating(process: Process, times: Ints) -> NDArray[np.bool_]:
    evaluations = process.read_rare_phases("eval")
    if not len(evaluations):
        return np.zeros(len(times), np.bool_)
    begins = process.compute_begins(evaluations)
    index = np.searchsorted(evaluations.times, times, "left")
    inside: NDArray[np.bool_] = (index < len(evaluations)) & (times >= begins[np.minimum(index, len(evaluations) - 1)])
    return inside


def read_held_bytes(process: Process, steps: Rows) -> Ints:
    """Return the bytes allocated at the end of each step; -1 if the step was not sampled."""
    held = np.full(len(steps), -1, np.int64)
    if not len(steps):
        return held
    samples = process.records("allocator").read_window(int(steps["begin_unix_ns"][0]), int(steps["end_unix_ns"][-1]))
    if len(samples):
        last = np.searchsorted(samples.times, steps["end_unix_ns"], "right") - 1
        times = samples.times[np.maximum(last, 0)]
        # In a counted step the device is read at its end, if at all; anything else is from the middle of it.
        sampled = (last >= 0) & np.where(steps["counted"], times == steps["end_unix_ns"], times > steps["begin_unix_ns"])
        held[sampled] = samples.rows["allocated_bytes"][last[sampled]]
    return held


@dataclass(frozen=True)
class BetweenPhases:
    """What readings at the begin of phases show in some steps, in bytes."""

    staying_bytes: int  # that stay allocated from each step to the next
    peak_bytes: int  # since the end of the phase before; 0 without exact peaks


def read_between_phases(process: Process, steps: Rows) -> BetweenPhases | None:
    """Return what was allocated between phases; None if memory was not read when any of these steps began its forward.

    Gradients are still there at the end of a step, which zero_grad() frees: only the least reading of a step stays.
    """
    staying, peak = [], 0
    for step in steps:
        samples = process.records("allocator").read_window(int(step["begin_unix_ns"]), int(step["end_unix_ns"]))
        inside = (samples.times > step["begin_unix_ns"]) & ~_is_evaluating(process, samples.times)
        rows = samples.rows[inside]
        begins = rows[rows["edge"] == BEGIN]
        if (begins["phase"] == _FORWARD).any():
            staying.append(int(rows["allocated_bytes"].min()))
        if process.has_exact_peaks:
            peak = max(peak, int(begins["allocated_peak_bytes"].max(initial=0)))
    return BetweenPhases(max(staying), peak) if staying else None


@dataclass(frozen=True)
class SettledPeaks:
    """The peaks of a step after the first, when the optimizer's state exists."""

    steps: Rows  # that one
    owner: str  # of PARTS, the one with the highest peak
    highest_bytes: int


def find_settled_peaks(process: Process) -> SettledPeaks | None:
    """Return the peaks of the first full-detail step after step 0; None before it, or without peaks."""
    settled = np.flatnonzero(~process.phased_steps["light"][1:_MOST_SEARCHED]) + 1
    if not len(settled):
        return None
    steps = process.phased_steps[settled[0] : settled[0] + 1]
    peaks = read_phase_peaks(process, steps)[0]
    return SettledPeaks(steps, PARTS[int(peaks.argmax())], int(peaks.max())) if peaks.max() > 0 else None
