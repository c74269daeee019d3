"""Ranks wait for their data in each iteration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity, build_step_finding, find_first_run
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.annotations.support.thresholds import SETTLED_STEPS, STALL_SECONDS, STALL_SHARE
from zerotop.analysis.formatting import format_percent, format_ranks, format_seconds


@dataclass
class _State:
    """How far a process's steps were read, and whether it was found to wait."""

    steps_read: int = 0
    is_reported: bool = False


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """One finding for each attempt: the first SETTLED_STEPS steps in a row in which a rank waits."""
    for group in facts.groups:
        if group.get_state(_State).is_reported:
            continue
        found = []
        for process in group.processes:
            yield PAUSE
            first = _find_first_wait(process)
            if first is not None:
                found.append((first, process))
        if found:
            group.get_state(_State).is_reported = True
            ends = [int(process.steps["end_unix_ns"][first + SETTLED_STEPS - 1]) for first, process in found]
            known_ns = min(ends)
            yield _build_finding(group, *found[ends.index(known_ns)], known_ns)


def _find_first_wait(process: Process) -> int | None:
    """The first of the first SETTLED_STEPS steps in a row that waited for data."""
    seen, count = process.get_state(_State), len(process.steps)
    begin = max(0, seen.steps_read - SETTLED_STEPS + 1)
    if count == seen.steps_read:
        return None
    steps, seen.steps_read = process.steps[begin:], count
    waits = (steps["data_s"] >= STALL_SECONDS) & (steps["data_s"] >= STALL_SHARE * steps["iteration_s"])
    first = find_first_run(waits, SETTLED_STEPS)
    return None if first is None else begin + first


def _build_finding(group: Group, first: int, process: Process, known_ns: int) -> Annotation:
    rows = process.steps[first : first + SETTLED_STEPS]
    waits, lasts = float(np.median(rows["data_s"])), float(np.median(rows["iteration_s"]))
    step = int(rows["step"][0])
    ranks = _find_waiting(group, step, known_ns)
    evidence = {"data_s": waits, "iteration_s": lasts, "share": waits / lasts, "ranks": float(len(ranks))}
    who = f"{format_ranks(ranks)} waits" if len(ranks) == 1 else f"{format_ranks(ranks)} wait"
    return build_step_finding(
        rows,
        name="data_stall",
        ranks=ranks,
        severity=Severity.WARNING,
        confidence=0.95,
        sentence=(
            f"From step {step} on {who} {format_seconds(waits)} of each {format_seconds(lasts)} ({format_percent(waits / lasts)}) for data."
        ),
        advice="Raise Trainer's dataloader_num_workers, or tokenize before training with Dataset.map(...).",
        evidence=evidence,
    )


def _find_waiting(group: Group, step: int, known_ns: int) -> tuple[int, ...]:
    """The ranks that waited in most of what each had finished of these steps by then."""
    found = []
    for process in group.processes:
        steps = process.steps_until(known_ns)[-2 * SETTLED_STEPS :]
        steps = steps[steps["step"] >= step]
        if len(steps) and float(np.median(steps["data_s"] / steps["iteration_s"])) >= STALL_SHARE:
            found.append(process.rank)
    return tuple(found)
