"""One rank's own work takes longer, and the others wait for it where all ranks meet.

A rank's own work is data, and what lies between the phases; the phases in which ranks wait for each other are not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.annotation import Annotation, Severity
from zerotop.analysis.annotations.facts import Facts, Group
from zerotop.analysis.annotations.thresholds import SETTLED_STEPS, STALL_SECONDS, STRAGGLER_SHARE
from zerotop.analysis.annotations.words import percent, seconds
from zerotop.analysis.steps import Rows

Floats = NDArray[np.float64]


def detect(facts: Facts) -> Iterator[Annotation]:
    """One finding for each attempt: the first rank that was the last for SETTLED_STEPS steps in a row."""
    for group in facts.groups:
        count = min(len(process.steps) for process in group.processes)
        if len(group.processes) < 2 or count < SETTLED_STEPS:
            continue
        own = np.stack([_own(process.steps[:count]) for process in group.processes])
        last = np.argmax(own, axis=0)
        others = np.sort(own, axis=0)[-2]
        late = own.max(axis=0) - others
        iteration = np.max([process.steps["iteration_s"][:count] for process in group.processes], axis=0)
        waits = np.where((late >= STALL_SECONDS) & (late >= STRAGGLER_SHARE * iteration), last, -1)
        windows = np.lib.stride_tricks.sliding_window_view(waits, SETTLED_STEPS)
        runs = (windows == windows[:, :1]).all(axis=1) & (windows[:, 0] >= 0)
        if runs.any():
            first = int(np.argmax(runs))
            window = slice(first, first + SETTLED_STEPS)
            yield _annotation(group, int(waits[first]), window, float(np.median(late[window])), iteration[window])


def _own(rows: Rows) -> Floats:
    met = rows["forward_s"] + rows["backward_s"] + rows["step_s"]
    return np.asarray(rows["iteration_s"] - met, np.float64)


def _annotation(group: Group, which: int, window: slice, late: float, iteration: Floats) -> Annotation:
    process = group.processes[which]
    rows = process.steps[window]
    usual = float(np.median(iteration))
    known_ns = max(int(other.steps["end_unix_ns"][window][-1]) for other in group.processes)
    data = float(np.median(rows["data_s"])) >= late / 2
    return Annotation(
        name="straggler",
        begin_ns=int(rows["begin_unix_ns"][0]),
        end_ns=known_ns,
        known_ns=known_ns,
        step=int(rows["step"][0]),
        ranks=(process.rank,),
        severity=Severity.WARNING,
        confidence=0.9,
        sentence=(
            f"From step {int(rows['step'][0])} on rank {process.rank} comes {seconds(late)} after the others in each"
            f" iteration of {seconds(usual)} ({percent(late / usual)}),"
            f" {'waiting for its data' if data else 'busy between the phases'}: they wait for it."
        ),
        advice="Raise Trainer's dataloader_num_workers, and give each rank as much data of as even a length."
        if data
        else "Do on every rank what only this one does between steps (logging, saving), or do it less often: logging_steps.",
        evidence={"late_s": late, "iteration_s": usual, "data_s": float(np.median(rows["data_s"]))},
    )
