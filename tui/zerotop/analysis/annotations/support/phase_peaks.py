"""The highest allocation of each phase in each step, where the allocator's peaks are each phase's own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.support.evidence import Process, Rows
from zerotop_probe.recording.tables import BEGIN, PHASE_CODE, PHASES

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


def read_phase_peaks(process: Process, steps: Rows) -> NDArray[np.int64]:
    """Bytes by step and part (steps, PARTS) of some steps in a row; -1 where nothing was sampled."""
    peaks = np.full((len(steps), len(PARTS)), -1, np.int64)
    if not process.has_exact_peaks or not len(steps):
        return peaks
    samples = process.allocator.read_window(int(steps["begin_unix_ns"][0]), int(steps["end_unix_ns"][-1]))
    if not len(samples):
        return peaks
    part = _PART_CODES[np.minimum(samples.rows["phase"], len(PHASES))]
    step = np.searchsorted(steps["end_unix_ns"], samples.times, "left")
    # A sample at a begin tells of what lay before; an evaluation's forwards are not training's; a damaged time is none.
    inside = (part >= 0) & (samples.rows["edge"] != BEGIN) & ~_is_evaluating(process, samples.times) & (step < len(steps))
    np.maximum.at(peaks, (step[inside], part[inside]), samples.rows["allocated_peak_bytes"][inside])
    return peaks


def _map_parts() -> NDArray[np.int64]:
    """The part of each phase, -1 for none; the last phase stands for unknown newer ones."""
    found = np.full(len(PHASES) + 1, -1, np.int64)
    for phase, part in _PART_BY_PHASE.items():
        found[PHASE_CODE[phase]] = PARTS.index(part)
    return found


_PART_CODES = _map_parts()


def _is_evaluating(process: Process, times: NDArray[np.int64]) -> NDArray[np.bool_]:
    evaluations = process.read_rare_phases("eval")
    if not len(evaluations):
        return np.zeros(len(times), np.bool_)
    begins = process.compute_begins(evaluations)
    of = np.searchsorted(evaluations.times, times, "left")
    at = np.minimum(of, len(evaluations) - 1)
    inside: NDArray[np.bool_] = (of < len(evaluations)) & (times >= begins[at])
    return inside


def read_held_bytes(process: Process, steps: Rows) -> NDArray[np.int64]:
    """Bytes allocated at the end of each of some steps in a row; -1 where it was not sampled within the step."""
    held = np.full(len(steps), -1, np.int64)
    if not len(steps):
        return held
    samples = process.allocator.read_window(int(steps["begin_unix_ns"][0]), int(steps["end_unix_ns"][-1]))
    if len(samples):
        last = np.searchsorted(samples.times, steps["end_unix_ns"], "right") - 1
        sampled = (last >= 0) & (samples.times[np.maximum(last, 0)] > steps["begin_unix_ns"])
        held[sampled] = samples.rows["allocated_bytes"][last[sampled]]
    return held
