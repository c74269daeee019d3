"""One rank's own work takes longer, and the others wait for it where all ranks meet.

A rank's own work is data, and what lies between the phases; the phases in which ranks wait for each other are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.support.annotation import Annotation, Severity, build_step_finding, find_first_run
from zerotop.analysis.annotations.support.causes import compute_own_seconds
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.thresholds import SETTLED_STEPS, STALL_SECONDS, STRAGGLER_SHARE
from zerotop.analysis.formatting import format_percent, format_seconds

Floats = NDArray[np.float64]


@dataclass
class _State:
    """How far the steps of all ranks were read, and whether one was told."""

    steps_read: int = 0
    is_reported: bool = False


def detect(facts: Evidence) -> Iterator[Annotation]:
    """One finding for each attempt: the first rank that was the last for SETTLED_STEPS steps in a row."""
    for group in facts.groups:
        seen, count = group.get_state(_State), min(len(process.steps) for process in group.processes)
        if seen.is_reported or len(group.processes) < 2 or count <= seen.steps_read:
            continue
        begin, seen.steps_read = max(0, seen.steps_read - SETTLED_STEPS + 1), count
        waits, late = _measure_lateness(group, slice(begin, count))
        runs = [(find_first_run(waits == which, SETTLED_STEPS), which) for which in np.unique(waits[waits >= 0]).tolist()]
        found = [(first, which) for first, which in runs if first is not None]
        if found:
            seen.is_reported = True
            first, which = min(found)
            window = slice(begin + first, begin + first + SETTLED_STEPS)
            yield _build_finding(group, which, window, float(np.median(late[first : first + SETTLED_STEPS])))


def _measure_lateness(group: Group, window: slice) -> tuple[NDArray[np.int64], Floats]:
    """Which process the others waited for in each step, by its place, -1 for none; and how long."""
    own = np.stack([compute_own_seconds(process.steps[window]) for process in group.processes])
    late = own.max(axis=0) - np.partition(own, -2, axis=0)[-2]
    enough = (late >= STALL_SECONDS) & (late >= STRAGGLER_SHARE * _measure_iterations(group, window))
    return np.where(enough, np.argmax(own, axis=0), -1), late


def _measure_iterations(group: Group, window: slice) -> Floats:
    longest: Floats = np.max([process.steps["iteration_s"][window] for process in group.processes], axis=0)
    return longest


def _build_finding(group: Group, index: int, window: slice, late: float) -> Annotation:
    process = group.processes[index]
    rows = process.steps[window]
    usual = float(np.median(_measure_iterations(group, window)))
    data = float(np.median(rows["data_s"])) >= late / 2
    return build_step_finding(
        rows,
        known_ns=max(int(other.steps["end_unix_ns"][window][-1]) for other in group.processes),
        name="straggler",
        ranks=(process.rank,),
        severity=Severity.WARNING,
        confidence=0.9,
        sentence=(
            f"From step {int(rows['step'][0])} on rank {process.rank} comes {format_seconds(late)} after the others in each"
            f" iteration of {format_seconds(usual)} ({format_percent(late / usual)}),"
            f" {'waiting for its data' if data else 'busy between the phases'}: they wait for it."
        ),
        advice="Raise Trainer's dataloader_num_workers, and give each rank as much data of as even a length."
        if data
        else "Do on every rank what only this one does between steps (logging, saving), or do it less often: logging_steps.",
        evidence={"late_s": late, "iteration_s": usual, "data_s": float(np.median(rows["data_s"]))},
    )
