"""Ranks wait for their data in each iteration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity, first_run, of_steps
from zerotop.analysis.annotations.support.evidence import Facts, Group, Process
from zerotop.analysis.annotations.support.thresholds import SETTLED_STEPS, STALL_SECONDS, STALL_SHARE
from zerotop.analysis.formatting import of_ranks, percent, seconds


@dataclass
class _Seen:
    """How far a process's steps were read, and whether it was found to wait."""

    steps: int = 0
    told: bool = False


def detect(facts: Facts) -> Iterator[Annotation | None]:
    """One finding for each attempt: the first SETTLED_STEPS steps in a row in which a rank waits."""
    for group in facts.groups:
        if group.kept(_Seen).told:
            continue
        found = []
        for process in group.processes:
            yield PAUSE
            first = _first(process)
            if first is not None:
                found.append((first, process))
        if found:
            group.kept(_Seen).told = True
            ends = [int(process.steps["end_unix_ns"][first + SETTLED_STEPS - 1]) for first, process in found]
            known_ns = min(ends)
            yield _annotation(group, *found[ends.index(known_ns)], known_ns)


def _first(process: Process) -> int | None:
    """The first of the first SETTLED_STEPS steps in a row that waited for data."""
    seen, count = process.kept(_Seen), len(process.steps)
    begin = max(0, seen.steps - SETTLED_STEPS + 1)
    if count == seen.steps:
        return None
    steps, seen.steps = process.steps[begin:], count
    waits = (steps["data_s"] >= STALL_SECONDS) & (steps["data_s"] >= STALL_SHARE * steps["iteration_s"])
    first = first_run(waits, SETTLED_STEPS)
    return None if first is None else begin + first


def _annotation(group: Group, first: int, process: Process, known_ns: int) -> Annotation:
    rows = process.steps[first : first + SETTLED_STEPS]
    waits, lasts = float(np.median(rows["data_s"])), float(np.median(rows["iteration_s"]))
    step = int(rows["step"][0])
    ranks = _waiting(group, step, known_ns)
    evidence = {"data_s": waits, "iteration_s": lasts, "share": waits / lasts, "ranks": float(len(ranks))}
    who = f"{of_ranks(ranks)} waits" if len(ranks) == 1 else f"{of_ranks(ranks)} wait"
    return of_steps(
        rows,
        name="data_stall",
        ranks=ranks,
        severity=Severity.WARNING,
        confidence=0.95,
        sentence=(
            f"From step {step} on {who} {seconds(waits)} of each {seconds(lasts)} ({percent(waits / lasts)}) for data."
        ),
        advice="Raise Trainer's dataloader_num_workers, or tokenize before training with Dataset.map(...).",
        evidence=evidence,
    )


def _waiting(group: Group, step: int, known_ns: int) -> tuple[int, ...]:
    """The ranks that waited in most of what each had finished of these steps by then."""
    found = []
    for process in group.processes:
        steps = process.steps_until(known_ns)[-2 * SETTLED_STEPS :]
        steps = steps[steps["step"] >= step]
        if len(steps) and float(np.median(steps["data_s"] / steps["iteration_s"])) >= STALL_SHARE:
            found.append(process.rank)
    return tuple(found)
