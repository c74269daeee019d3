"""Changes in a run whose pace wanders: too small or noisy to be told at once, but they stay, and one part carries them."""

from __future__ import annotations

import numpy as np

from zerotop.analysis.findings.support.causes.host_causes import computes_longer, find_shortage
from zerotop.analysis.findings.support.causes.pace_shift import PaceShift, explain_change
from zerotop.analysis.findings.support.causes.step_change import StepChange
from zerotop.analysis.findings.support.evidence import Floats, Group, Rows
from zerotop.analysis.findings.support.lines.line_findings import measure_between, read_part
from zerotop.analysis.findings.support.lines.stack_lines import find_new
from zerotop.analysis.findings.support.steps.onsets import find_onset
from zerotop.analysis.findings.support.thresholds import WARM_UP_STEPS
from zerotop.analysis.stats.knee import is_gradual
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.analysis.stats.wander import BLOCK, compute_levels, find_split, measure_order, refine_split
from zerotop.recording.steps.step_dtype import has_phases

# Blocks of steps on each side of the change, the most that are searched, and how long (seconds) the sides last.
_LEAST_BLOCKS, _MOST_BLOCKS, _BEFORE_S, _AFTER_S = 5, 400, 3.0, 6.0
_SAMPLED_BLOCKS, _SAMPLED_S = 3, 3.0  # where samples show a line that is new
# In at least this share of all pairs of a block before and a block after, the later block takes longer.
_ORDERED_SHARE = 0.85
# The last blocks, which still show it, and those on each side next to it.
_LAST_BLOCKS, _JUMP_BLOCKS = 3, 2
# How much longer iterations are, the share of it in the part that carries it, and the most that all others may take.
_CHANGED_SHARE, _CARRIED_SHARE, _REST_SHARE = 0.1, 0.5, 0.5
# How many times as long that part takes. Backward runs in a thread of its own: its core alone may be slow.
_PART_TIMES, _BACKWARD_TIMES = 1.4, 2.0
# Steps with phases on each side, and standard errors by which their means differ.
_FEWEST_PHASED, _ERRORS = 5, 4.0
_PARTS = ("data_s", "forward_s", "backward_s", "step_s", "other_s")
# Blocks of steps in each half of those that show slow growth, and its part of the change in the phases.
_GROWING_BLOCKS, _GROWN_SHARE = 4, 0.25
# A pause in a step counts as that many times the usual time.
_MOST_TIMES = 5.0


def find_lasting(group: Group, steps: Rows) -> PaceShift | None:
    """Return the change after which steps stay at another level, if one part of them, a cause or a line explains it."""
    known_ns, steps = int(steps["end_unix_ns"].max(initial=0)), steps[-_MOST_BLOCKS * BLOCK :]
    steps = steps[: len(steps) // BLOCK * BLOCK]
    levels = compute_levels(np.asarray(steps["iteration_s"], np.float64))
    if len(levels) * BLOCK != len(steps) or len(levels) < 2 * _LEAST_BLOCKS:
        return None  # times of some steps are unknown
    if (shift := _find_with_memory(group, steps, known_ns)) is not None:
        return shift
    split = _find_new_level(levels, _LEAST_BLOCKS)
    shift = _explain_by_part(group, steps, split, known_ns) if split and not is_gradual(levels) else None
    if shift is not None:
        return shift
    split = _find_new_level(levels, _SAMPLED_BLOCKS)
    return _explain_by_line(group, steps, split, known_ns) if split and _is_jump(levels, split) else None


def _find_new_level(levels: Floats, fewest: int) -> int:
    """Return the index from which on the levels are others, with at least ``fewest`` on each side; 0 if there is none."""
    split = find_split(levels, fewest)
    return refine_split(levels, split, fewest) if _is_new_level(levels[:split], levels[split:]) else 0


def _explain_by_part(group: Group, steps: Rows, split: int, known_ns: int) -> PaceShift | None:
    """Return the change after so many blocks, if one part of the steps, or a cause, explains it."""
    shift = _explain_split(group, steps, split * BLOCK, known_ns)
    if shift is None:
        return None
    is_short = find_shortage(shift.change) > 1
    if shift.cause is not None and shift.cause.is_host:
        return shift if is_short else None
    if is_short and computes_longer(shift.change):
        return _explain_split(group, steps, _find_begin(steps, split), known_ns)
    is_own = not is_short and (_is_by_gpu(shift) or bool(find_carrier(shift)))
    return shift if shift.has_recorded_cause(None) or is_own else None


def _explain_by_line(group: Group, steps: Rows, split: int, known_ns: int) -> PaceShift | None:
    """Return the slowdown near the end of so many blocks, if samples show a line that is new since and explains it."""
    shift = _explain_split(group, steps, _find_begin(steps, split), known_ns, after_s=_SAMPLED_S)
    if shift is None or not shift.is_worse or (shift.cause is not None and shift.cause.is_host):
        return None
    is_shown = find_shortage(shift.change) <= 1 and find_new(shift.find_delay(), known_ns, is_alone=True) is not None
    return shift if is_shown else None


def _find_begin(steps: Rows, split: int) -> int:
    """Return the index of the step with which a change near the end of so many blocks began."""
    return find_onset(steps, int(steps["step"][(split - 1) * BLOCK]), int(steps["step"][(split + 1) * BLOCK - 1]))


def _find_with_memory(group: Group, steps: Rows, known_ns: int) -> PaceShift | None:
    """Return the change of pace at the step from which on all steps need more memory; None if there is none."""
    rows = group.lead.phased_steps_until(known_ns)
    rows = rows[(rows["step"] >= steps["step"][0]) & (rows["allocated_peak_bytes"] > 0)]
    if len(rows) < 2:
        return None
    peaks = rows["allocated_peak_bytes"].astype(np.int64)
    grown = np.minimum.accumulate(peaks[::-1])[::-1][1:] - np.maximum.accumulate(peaks)[:-1]
    at = int(grown.argmax())
    split = find_onset(steps, int(rows["step"][at]), int(rows["step"][at + 1])) if grown[at] > 0 else 0
    if min(split, len(steps) - split) < _LEAST_BLOCKS * BLOCK:
        return None
    before, after = (compute_levels(np.asarray(one["iteration_s"], np.float64)) for one in (steps[:split], steps[split:]))
    shift = _explain_split(group, steps, split, known_ns) if _is_new_level(before, after) else None
    is_by_memory = shift is not None and shift.cause is not None and shift.cause.finding == "memory_step"
    return shift if is_by_memory else None


def _explain_split(group: Group, steps: Rows, split: int, known_ns: int, *, after_s: float = _AFTER_S) -> PaceShift | None:
    """Return the change from the steps before an index to those from it on, if both are long enough and differ enough."""
    before, after = steps[:split], steps[split:]
    is_long = _measure_seconds(before) >= _BEFORE_S and _measure_seconds(after) >= after_s
    shift = explain_change(StepChange(group, before, after, known_ns)) if is_long else None
    is_enough = shift is not None and abs(shift.added_s) >= _CHANGED_SHARE * min(shift.before_s, shift.after_s)
    return shift if is_enough else None


def grows_slowly(steps: Rows, shift: PaceShift) -> bool:
    """Whether iterations became longer little by little: then no step is the one from which on they take longer.

    The time between the phases, where the change was found, has no jump then, either.
    """
    levels = compute_levels(np.asarray(steps["iteration_s"][WARM_UP_STEPS:], np.float64))
    half = len(levels) // 2
    if half < _GROWING_BLOCKS or not is_gradual(levels):
        return False
    phased = steps[has_phases(steps)][WARM_UP_STEPS:]
    if shift.change.found_in and not is_gradual(measure_between(phased), phased["step"].astype(np.float64)):
        return False
    return float(np.median(levels[half:]) - np.median(levels[:half])) >= _GROWN_SHARE * shift.added_s


def _measure_seconds(steps: Rows) -> float:
    return int(steps["end_unix_ns"][-1] - steps["begin_unix_ns"][0]) / 1e9


def _is_new_level(before: Floats, after: Floats) -> bool:
    """Whether almost all levels after a time are on the same side of those before, to the last of them."""
    order, middle = measure_order(before, after), float(np.median(before) + np.median(after)) / 2
    last = float(np.median(after[-_LAST_BLOCKS:]))
    return (order >= _ORDERED_SHARE and last > middle) or (1 - order >= _ORDERED_SHARE and last < middle)


def _is_jump(levels: Floats, split: int) -> bool:
    """Whether the levels next to a time make up most of the difference of all before and after it."""
    near, apart = (
        float(np.median(after) - np.median(before))
        for before, after in (
            (levels[:split][-_JUMP_BLOCKS:], levels[split:][:_JUMP_BLOCKS]),
            (levels[:split], levels[split:]),
        )
    )
    return bool(near * np.sign(apart) >= abs(apart) / 2)


def _is_by_gpu(shift: PaceShift) -> bool:
    """Whether the GPU's own times explain the change, and NVML saw it busy for as much longer in each iteration.

    A GPU that waits in a collective is busy, too.
    """
    before, after = shift.gpu_uses
    is_alone = len(shift.change.group.processes) == 1
    return (
        is_alone and shift.is_by_gpu and (after * shift.after_s - before * shift.before_s) / shift.added_s >= _CARRIED_SHARE
    )


def find_carrier(shift: PaceShift) -> str:
    """Return the part that takes another time in the steps with phases, by more than a slower core explains; else ""."""
    before, after = shift.change.phased
    if min(len(before), len(after)) < _FEWEST_PHASED:
        return ""
    return next((name for name in _PARTS if _carries(shift, name)), "")


def _carries(shift: PaceShift, name: str) -> bool:
    early, late = (read_part(rows, name) for rows in shift.change.phased)
    rests = [compute_known_median(rows["iteration_s"] - read_part(rows, name)) for rows in shift.change.phased]
    factor, sign = rests[1] / rests[0] if rests[0] > 0 else 1.0, float(np.sign(shift.added_s))
    early = early * (max(1.0, factor) if sign > 0 else min(1.0, factor))
    low, high = (early, late) if sign > 0 else (late, early)
    least = _CARRIED_SHARE * abs(shift.added_s)
    is_in_most = np.median(high) - np.median(low) >= least and measure_order(low, high) >= _ORDERED_SHARE
    is_in_some = _differ(low, high) and np.mean(high) - np.mean(low) >= least
    average = np.median if is_in_most else np.mean
    times = float(average(high)) / max(float(average(low)), 1e-9)
    is_alone = sign * (rests[1] - rests[0]) <= _REST_SHARE * abs(shift.added_s)
    needed = _BACKWARD_TIMES if name == "backward_s" else _PART_TIMES
    return bool((is_in_most or is_in_some) and is_alone and times >= needed)


def _differ(low: Floats, high: Floats) -> bool:
    """Whether the means differ by more than chance explains: a part may take longer in every n-th step only."""
    most = _MOST_TIMES * max(np.median(low), np.median(high))
    low, high = np.minimum(low, most), np.minimum(high, most)
    error = np.sqrt(low.var(ddof=1) / len(low) + high.var(ddof=1) / len(high))
    return bool(high.mean() - low.mean() >= _ERRORS * error > 0)
