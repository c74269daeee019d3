"""A run against the last runs of the same command: one sentence, and none where noise may explain the difference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np

from zerotop.analysis.checks.checks import describe_machines
from zerotop.analysis.checks.pace import MIN_STEPS, MeasuredPace, measure_pace
from zerotop.analysis.formatting import format_percent
from zerotop.analysis.reports.comparison import compare_configuration
from zerotop.analysis.reports.recorded_run import RecordedRun

MOST_RUNS = 3
_MIN_RUNS = 2  # of a single run nobody knows by how much runs differ
_WARMUP_STEPS = 5
_PHASES = ("data", "forward", "backward", "step")
_MIN_PHASED = 5  # steps with phases
_MOST_DIFFERENCES = 2
_NUMBERS = {2: "two", 3: "three"}


def compare_with_past(run: RecordedRun, earlier: Sequence[RecordedRun]) -> str:
    """Return ``8 % slower than your last three runs: forward; micro-batch 8 instead of 12``; "" without a difference.

    ``earlier``: runs of the same command, newest first; the last ``MOST_RUNS`` count that ran on a machine of the same kind
    and long enough. A difference counts beyond what noise explains in ``checks.pace`` and beyond the range of the earlier
    runs. The phase that makes up most of it is named, and settings that the earlier runs had in common. That
    they are the cause is not said.
    """
    ours = measure_pace(run.source, _WARMUP_STEPS)
    if ours is None or ours.steps < MIN_STEPS:
        return ""
    usable = [(one, pace) for one in earlier if not describe_machines(run, one) and (pace := _measure_usable(one))]
    usable = usable[:MOST_RUNS]
    if len(usable) < _MIN_RUNS:
        return ""
    sides, paces = [one for one, _ in usable], [pace for _, pace in usable]
    slower = _compare_pace(ours, paces)
    if not slower:
        return ""
    reasons = [_find_phase(run, sides, slower > 0), ", ".join(_describe_differences(run, sides))]
    text = f"{format_percent(abs(slower))} {'slower' if slower > 0 else 'faster'} than your last {_NUMBERS[len(sides)]} runs"
    return ": ".join(filter(None, (text, "; ".join(filter(None, reasons)))))


def _measure_usable(run: RecordedRun) -> MeasuredPace | None:
    pace = measure_pace(run.source, _WARMUP_STEPS)
    return pace if pace is not None and pace.steps >= MIN_STEPS else None


def _compare_pace(ours: MeasuredPace, theirs: Sequence[MeasuredPace]) -> float:
    """Return by which share the iterations are longer; 0 where noise or the range of the earlier runs explains it."""
    times = [pace.unhindered_s for pace in theirs]
    usual = median(times)
    slower = ours.unhindered_s / usual - 1
    hindrance = ours.hindrance if slower > 0 else max(pace.hindrance for pace in theirs)
    explained = hindrance + math.hypot(ours.spread, max(pace.spread for pace in theirs))
    return slower if abs(slower) > max(explained, (max(times) - min(times)) / usual) else 0.0


def _find_phase(run: RecordedRun, earlier: Sequence[RecordedRun], is_slower: bool) -> str:
    """Return the phase whose time makes up more than half of the difference; "" without one."""
    ours, theirs = _measure_phases(run), [_measure_phases(one) for one in earlier]
    if not ours or not all(theirs):
        return ""
    sign = 1 if is_slower else -1
    changes = {name: sign * (ours[name] - median(one[name] for one in theirs)) for name in ours}
    name = max(_PHASES, key=lambda phase: changes[phase])
    seconds = [one[name] for one in theirs]
    is_most = changes[name] > changes["iteration"] / 2 > 0
    return name if is_most and changes[name] > max(seconds) - min(seconds) else ""


def _measure_phases(run: RecordedRun) -> dict[str, float]:
    """Return the median of the iteration and of each phase over the steps with phases; empty: too few of them."""
    rows = run.source.job_steps[_WARMUP_STEPS:]
    columns = {name: rows[f"{name}_s"] for name in ("iteration", *_PHASES)}
    known = ~np.isnan(np.sum(list(columns.values()), axis=0)) & ~rows["skipped"]
    return {name: float(np.median(values[known])) for name, values in columns.items()} if known.sum() >= _MIN_PHASED else {}


def _describe_differences(run: RecordedRun, earlier: Sequence[RecordedRun]) -> Iterator[str]:
    """Describe what the earlier runs had in common and this one has not."""
    told: set[tuple[object, object]] = set()
    left = 0
    for measure in compare_configuration([run, *earlier]):
        ours, *theirs = measure.values
        if len(set(theirs)) > 1 or ours == theirs[0] or (ours, theirs[0]) in told:
            continue
        told.add((ours, theirs[0]))
        if len(told) <= _MOST_DIFFERENCES:
            yield f"{measure.name.strip()} {_name(ours)} instead of {_name(theirs[0])}"
        else:
            left += 1
    if left:
        yield f"{left} more in zerotop compare"


def _name(value: object) -> str:
    return "none" if value is None else str(value)
