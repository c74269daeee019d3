"""What the ranks of a recorded training measured around the micro-batches and the update of the steps that stand for it.

The steps of a recording that stand for its setting: memory and times of one stretch, in which neither the pace changed
lastingly nor the memory of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.engine import read_first_engine
from zerotop.analysis.memory.expected.zero_model import EngineSetup, compute_expected, parse_setup
from zerotop.analysis.memory.tensor_inventory import GRADIENTS
from zerotop.analysis.stats.change_points import ShiftFinder
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.analysis.steps.job_pace import measure_mean
from zerotop.recording.keys import RankProcess, identify_process
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Rows
from zerotop.recording.steps.step_table import RankSteps
from zerotop_probe.recording.events import EngineFacts
from zerotop_probe.recording.tables import BEGIN, END, PHASE_CODE, TICK

_MOST_STEPS = 8  # that stand for a setting
_MOST_VARYING, _MOST_LENGTHS = 64, 3  # steps that are searched for the longest, if the last ones have more lengths
_NEW_PACE = 1.2  # times as long, or as short: more than runs of one setting differ by
_SAME_PEAK = 0.05  # of allocated memory, by which steps of one moment differ at most


class LaterBatch(NamedTuple):
    """The batch of steps after those that stand for the setting, and the most that they allocated (0: unknown)."""

    micro_batch: int
    sequence: int
    accumulation: int
    peak: int
    steps: tuple[int, int]


class SteadySteps(NamedTuple):
    """Steps without a lasting change of pace, until another one begins."""

    begin: float
    end: float

    def measure_mean(self, process: RankSteps) -> float:
        """Return the mean seconds of a rank's iterations but the first, pauses included; NaN without any."""
        rows = process.step_rows[1:]
        return measure_mean(rows[(rows["step"] >= self.begin) & (rows["step"] < self.end) & (rows["steps"] == 1)])

    def measure_later(self, process: RankSteps) -> tuple[int, float] | None:
        """Return the step at which it ended, and the median iteration since then; None if it did not end."""
        rows = process.step_rows
        later = rows["iteration_s"][(rows["step"] >= self.end) & (rows["steps"] == 1)]
        later = later[np.isfinite(later)]
        return (int(self.end), float(np.median(later))) if len(later) else None

    def read_later(self, process: RankSteps) -> LaterBatch | None:
        """Return the one batch of all steps since it ended; None if they differ or it is unknown."""
        rows = process.step_rows
        rows = rows[(rows["step"] > self.end) & (rows["rows"] > 0) & (rows["micro_steps"] > 0)]
        if len(np.unique(rows[["rows", "tokens", "micro_steps"]])) != 1:
            return None
        micro_steps, peak = int(rows["micro_steps"][0]), int(rows["allocated_peak_bytes"].max())
        micro_batch = int(rows["rows"][0]) // micro_steps
        sequence = max(0, int(rows["tokens"][0])) // micro_steps // max(1, micro_batch)
        return LaterBatch(micro_batch, sequence, micro_steps, peak, (int(rows["step"][0]), int(rows["step"][-1])))

    def measure_median(self, process: RankSteps) -> float:
        """Return the median seconds of a rank's iterations; NaN without any."""
        rows = process.step_rows
        return compute_known_median(rows["iteration_s"][(rows["step"] >= self.begin) & (rows["step"] < self.end)])


class ChosenSteps(NamedTuple):
    """Steps that stand for a setting, and the stretch that they are of."""

    rows: Rows  # whose memory counts
    timed: Rows  # whose times count: more, where only the memory changed
    stretch: SteadySteps
    batches_differ: bool = False  # of the steps with times: there are several, but one of each batch at most
    pace_change: int | None = None  # the step at which the pace changed before these, else the one after them


def list_steady_steps(rows: Rows) -> list[SteadySteps]:
    """Return the stretches of steps (STEP_DTYPE), the oldest first."""
    rows = rows[np.isfinite(rows["iteration_s"]) & (rows["steps"] == 1)]
    begins: list[float] = [0]
    level = None
    for shift in ShiftFinder().find_shifts(rows["iteration_s"]):
        before, after = (
            float(np.median(rows["iteration_s"][part])) for part in (shift.before, slice(shift.first, shift.last + 1))
        )
        level = before if level is None else level
        if max(after / level, level / after) > _NEW_PACE:
            begins.append(int(rows["step"][shift.first]))
            level = after
    return [SteadySteps(*ends) for ends in pairwise([*begins, np.inf])]


def choose_steps(process: RankSteps, stretches: Sequence[SteadySteps], until_step: int | None) -> ChosenSteps:
    """Return the steps of the last setting whose phases were recorded, of the latest stretch that has some."""
    rows: Rows = process.phased_steps
    if until_step is not None:
        rows = rows[rows["step"] < until_step]
    rows = rows[~rows["light"] & ~rows["skipped"] & (rows["steps"] == 1) & (rows["micro_steps"] > 0)]
    if len(rows) > 2:
        rows = rows[1:]  # the first update makes the optimizer's state
    for stretch in reversed(stretches):
        own = rows[(rows["step"] >= stretch.begin) & (rows["step"] < stretch.end)]
        if len(own):
            timed = _choose_setting(process, own, stretch)
            if len(timed) == 1 and not _is_usual(process, timed, stretch):
                timed = timed[:0]
            chosen, batches_differ = _choose_peak(timed if len(timed) else own[-1:]), not len(timed) and len(own) > 1
            return ChosenSteps(chosen, timed, stretch, batches_differ, _find_pace_change(process, stretches, stretch))
    return ChosenSteps(rows[:0], rows[:0], stretches[0])


def _find_pace_change(process: RankSteps, stretches: Sequence[SteadySteps], stretch: SteadySteps) -> int | None:
    """Return the step at which the stretch began, or ended if it is the first one; None if the median is then as before:
    the few steps that tell a change may have been others.
    """
    step = stretch.begin or stretch.end
    parts = [one for one in stretches if step in (one.begin, one.end)]
    levels = [one.measure_median(process) for one in parts]
    is_new = len(levels) == 2 and max(levels) > _NEW_PACE * min(levels)
    return int(step) if is_new else None


def _is_usual(process: RankSteps, row: Rows, stretch: SteadySteps) -> bool:
    """Return whether a step took as long as those around it, most of which may lack phases."""
    others = process.step_rows
    others = others[(others["step"] >= stretch.begin) & (others["step"] < stretch.end)]
    ratio = float(row["iteration_s"][0] / np.nanmedian(others["iteration_s"]))
    return 1 / _NEW_PACE <= ratio <= _NEW_PACE


def _choose_setting(process: RankSteps, rows: Rows, stretch: SteadySteps) -> Rows:
    """Return the last steps of one setting: before the first evaluation, if there is one."""
    last = rows[-1]
    recent = rows[-_MOST_VARYING:]
    if len(np.unique(recent["tokens"][-_MOST_STEPS:])) > _MOST_LENGTHS:  # lengths vary: the longest decides
        last = recent[recent["tokens"].argmax()]
    same = np.ones(len(rows), bool)
    for column in ("micro_steps", "rows", "tokens"):
        same &= rows[column] == last[column]
    rows = rows[same]
    evaluated = process.step_rows["step"][process.step_rows["eval_s"] > 0]
    evaluated = evaluated[evaluated >= stretch.begin]
    before: Rows = rows[rows["step"] < evaluated[0]] if len(evaluated) else rows
    chosen: Rows = (before if len(before) > 1 else rows)[-_MOST_STEPS:]
    return chosen


def _choose_peak(rows: Rows) -> Rows:
    """Return the last steps whose memory had one peak."""
    peaks = rows["allocated_peak_bytes"].astype(float)
    others = np.flatnonzero(np.abs(peaks - peaks[-1]) > _SAME_PEAK * peaks[-1])
    return rows[others[-1] + 1 :] if len(others) else rows


_MOST_PACES = 4  # ranks in which a change of pace is searched, which takes 0.1 s for 100,000 steps
_STATES_SHARE = 0.98  # of the states by formula, or of what a backward leaves, that counts as all of it
_UPDATES = frozenset(
    PHASE_CODE[name] for name in ("step", "optimizer", "cpu_optimizer", "grads_to_cpu", "params_to_gpu", "allgather")
)


@dataclass(frozen=True, slots=True)
class MicroStep:
    """A GPU's allocated bytes around one micro-batch."""

    kept: int  # before the forward
    forward_end: int
    forward_peak: int
    backward_peak: int
    backward_end: int


class RankMoments(NamedTuple):
    """What one rank measured in the steps that stand for the setting."""

    process: RankSteps
    source: Source
    chosen: ChosenSteps
    first: MicroStep
    last: MicroStep
    step_peak: int


def find_moments(
    recording: Recording,
    ranks: Sequence[RankSteps],
    allocators: Mapping[RankProcess, Source],
    until_step: int | None,
) -> tuple[EngineFacts, list[RankMoments]]:
    """Return the facts and what each rank measured, of the latest steady part of the run in which one has all edges."""
    # The rank whose pace changed last tells it for all; they wait for each other, so a few are enough.
    parts = max((list_steady_steps(process.step_rows) for process in ranks[:_MOST_PACES]), key=lambda one: one[-1].begin)
    for count in range(len(parts), 0, -1):
        engine, found = _measure_part(recording, ranks, allocators, parts[:count], until_step)
        if found:
            break
    return engine, found


def _measure_part(
    recording: Recording,
    ranks: Sequence[RankSteps],
    allocators: Mapping[RankProcess, Source],
    parts: Sequence[SteadySteps],
    until_step: int | None,
) -> tuple[EngineFacts, list[RankMoments]]:
    steps_of = {process: choose_steps(process, parts, until_step) for process in ranks}
    latest = max(steps_of.values(), key=lambda one: one.stretch.begin if len(one.rows) else -1)
    engine = _read_engine(recording, latest)
    setup = parse_setup(engine)
    found = []
    for process, chosen in steps_of.items():
        source = allocators.get(identify_process(process.source))
        if source is None or setup is None or chosen.stretch != latest.stretch:
            continue
        if (moments := _read_moments(source, chosen.rows, setup)) is not None:
            found.append(RankMoments(process, source, chosen, *moments))
    return engine, found


def _read_engine(recording: Recording, chosen: ChosenSteps) -> EngineFacts:
    """Return the facts that were known at the steps: a loop's are written again when the training has changed."""
    is_last = not len(chosen.rows) or chosen.stretch.end == inf
    return read_first_engine(recording.at(None if is_last else int(chosen.rows["end_unix_ns"][-1])))


def _read_moments(source: Source, steps: Rows, setup: EngineSetup) -> tuple[MicroStep, MicroStep, int] | None:
    """Return the highest of each moment in the steps that stand for the setting; None if they lack an edge."""
    if not len(steps):
        return None
    readings = source.array[np.isin(source.array["step"], steps["step"])]
    last = int(steps[-1]["micro_steps"]) - 1
    micros = [_read_micro_step(readings, number) for number in (0, last)]
    if micros[0] is None or micros[1] is None:
        return None
    first = micros[0]
    gradients = setup.bytes_each * setup.trainable // (setup.ranks if setup.stage == 3 else 1)
    states = sum(size for name, size in compute_expected(setup).gpu.items() if name != GRADIENTS)
    is_with_gradients = (
        min(first.kept / _STATES_SHARE - first.backward_end, first.kept - gradients - _STATES_SHARE * states) >= 0
    )
    if setup.is_loop and last == 0 and is_with_gradients:
        # The script frees the gradients between the last reading of a step and the next forward.
        first = replace(first, kept=first.kept - gradients)
    updates = readings[np.isin(readings["phase"], list(_UPDATES)) & (readings["edge"] != BEGIN)]
    peak = int(updates["allocated_peak_bytes"].max(initial=0))
    return first, micros[1] if last else first, peak


def _read_micro_step(readings: NDArray[Any], number: int) -> MicroStep | None:
    """Return the highest of each moment over the micro-batches of that number; None if they lack an edge."""
    is_own = readings["micro_step"] == number

    def select(*phases: str, edge: int | None = None) -> NDArray[np.bool_]:
        selected: NDArray[np.bool_] = is_own & np.isin(readings["phase"], [PHASE_CODE[phase] for phase in phases])
        selected &= readings["edge"] == edge if edge is not None else readings["edge"] != BEGIN
        return selected

    forward_ends, backward_ends = select("forward", edge=END), select("backward", edge=END)
    if not forward_ends.any() or not backward_ends.any():
        return None
    kept = readings["allocated_bytes"][select("forward", edge=BEGIN)]
    if not len(kept):  # an edge soon after another is not read again
        edges = np.flatnonzero(readings["edge"] != TICK)
        places = np.searchsorted(edges, np.flatnonzero(forward_ends)) - 1
        kept = readings["allocated_bytes"][edges[places[places >= 0]]]
    if not len(kept) and number == 0:  # nor one after a step without readings: it leaves what this one leaves
        kept = readings["allocated_bytes"][readings["edge"] == END][-1:]
    if not len(kept):
        return None
    return MicroStep(
        kept=int(np.median(kept)),
        forward_end=int(readings["allocated_bytes"][forward_ends].max()),
        forward_peak=int(readings["allocated_peak_bytes"][select("forward")].max()),
        backward_peak=int(readings["allocated_peak_bytes"][select("backward", "reduce")].max()),
        backward_end=int(readings["allocated_bytes"][backward_ends].max()),
    )
