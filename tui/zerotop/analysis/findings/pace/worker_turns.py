"""Every n-th step waits for n loader workers that cannot keep up, in steps of which hardly any was recorded in full."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Process
from zerotop.analysis.findings.support.causes.loader_causes import are_workers_busy
from zerotop.analysis.findings.support.host_load import count_workers
from zerotop.analysis.findings.support.thresholds import STALL_SECONDS
from zerotop.recording.samples import Floats, Ints, Rows
from zerotop.recording.steps.step_dtype import has_phases, sum_training_s

# Turns in a row that show it: workers are few, so a step of another kind hardly falls on the same one of them so often.
_FEWEST = 5
# The last steps, in which the workers are counted.
_LAST_STEPS = 32
# How much longer the step that waits takes: seconds, share of the others. The share of the time that is lost.
_LEAST_S, _LEAST_SHARE, _LOST_SHARE = STALL_SECONDS / 2, 0.4, 0.1
# The part of what a step takes longer that its wait for data explains, and the share of the known ones that do.
_EXPLAINED_SHARE, _KNOWN_SHARE = 0.5, 0.75
# The part of what these steps usually take longer that the first ones take longer, too.
_ALIKE_SHARE = 0.25


class WorkerTurns(NamedTuple):
    """The steps from the first one that waits."""

    rows: Rows
    evidence: dict[str, float]


def find_worker_turns(process: Process, steps: Rows, sampled: list[int], first_step: int | None) -> WorkerTurns | None:
    """Return the turns that last up to the end of some steps; None if there are none, or other reasons are not excluded.

    Exactly every n-th step takes longer than all others, where n workers prepare the batches, and those of these steps
    whose phases or stacks are known wait for data. If that is one step, the workers must be busy, too.

    ``sampled``: steps in which stacks show the wait. ``first_step``: the first one of turns that were told before.
    """
    since_ns, end_ns = int(steps["begin_unix_ns"][-min(len(steps), _LAST_STEPS)]), int(steps["end_unix_ns"][-1])
    period = count_workers([process], since_ns, end_ns)
    if period < 2 or len(steps) < (_FEWEST + 1) * period:
        return None
    seconds = np.nan_to_num(np.asarray(steps["iteration_s"], np.float64))
    place = _find_place(seconds, period)
    if place is None:
        return None
    usual_s, longer_s = place.usual_s, place.long_s - place.usual_s
    turns = np.arange(place.last, -1, -period)[::-1]
    begin = _find_begin(seconds, turns, period, usual_s + _ALIKE_SHARE * longer_s)
    if first_step is not None:
        begin = max(begin, int(np.searchsorted(steps["step"], first_step)))
    turns = turns[turns >= begin]
    rows = steps[begin:]
    lost_s = float((seconds[turns] - usual_s).sum())
    share = lost_s / sum_training_s(rows)
    if len(turns) < _FEWEST or share < _LOST_SHARE:
        return None
    waits = _count_waits(steps, turns, period, sampled, longer_s)
    if not waits or (waits == 1 and not are_workers_busy(process, int(rows["begin_unix_ns"][0]), end_ns)):
        return None
    evidence = {"pauses": len(turns), "period": period, "share": share, "pause_s": lost_s / len(turns)}
    return WorkerTurns(rows, {**evidence, "iteration_s": usual_s})


class _Place(NamedTuple):
    last: int  # step of the latest turns that takes longer, as index
    usual_s: float
    long_s: float


def _find_place(seconds: Floats, period: int) -> _Place | None:
    """Return the step of the latest turns that takes longer in each of them than all others."""
    table = seconds[-_FEWEST * period :].reshape(_FEWEST, period)
    index = int(np.argmax(np.median(table, axis=0)))
    turns, others = table[:, index], np.delete(table, index, axis=1)
    usual_s, long_s = float(np.median(others)), float(np.median(turns))
    is_apart = turns.min() > others.max() and long_s - usual_s >= max(_LEAST_S, _LEAST_SHARE * usual_s)
    return _Place(len(seconds) - period + index, usual_s, long_s) if is_apart else None


def _find_begin(seconds: Floats, turns: Ints, period: int, least_s: float) -> int:
    """Return the first of the turns, as index of its step: from it on each takes that long, and longer than the others."""
    begin = len(seconds)
    for index in turns[::-1].tolist():
        if seconds[index] < max(least_s, float(seconds[index + 1 : index + period].max(initial=0.0))):
            break
        begin = index
    return begin


def _count_waits(steps: Rows, turns: Ints, period: int, sampled: list[int], longer_s: float) -> int:
    """Return how many of the turns are known to wait for data, with the step in progress.

    0 if some are known not to, or the others wait as well.
    """
    is_phased, is_turn = has_phases(steps), np.zeros(len(steps), bool)
    is_turn[turns] = True
    data_s = np.nan_to_num(steps["data_s"])
    does_wait = data_s >= _EXPLAINED_SHARE * longer_s
    phased, others = is_phased & is_turn, (is_phased & ~is_turn)[turns[0] :]
    if phased.any() and does_wait[phased].mean() < _KNOWN_SHARE:
        return 0
    if others.any() and does_wait[turns[0] :][others].mean() > 1 - _KNOWN_SHARE:
        return 0
    known = int(np.count_nonzero((phased & does_wait) | (is_turn & ~is_phased & np.isin(steps["step"], sampled))))
    in_progress = int(steps["step"][-1]) + 1
    return known + (in_progress in sampled and len(steps) == turns[-1] + period)
