"""Ranks wait for their data in each iteration."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.annotation import Annotation, Severity
from zerotop.analysis.annotations.facts import Facts, Group, Process
from zerotop.analysis.annotations.thresholds import SETTLED_STEPS, STALL_SECONDS, STALL_SHARE
from zerotop.analysis.annotations.words import of_ranks, percent, seconds


def detect(facts: Facts) -> Iterator[Annotation]:
    """One finding for each attempt: the first SETTLED_STEPS steps in a row in which a rank waits."""
    for group in facts.groups:
        found = [(last, process) for process in group.processes if (last := _first(process)) is not None]
        if found:
            ends = [int(process.steps["end_unix_ns"][last]) for last, process in found]
            known_ns = min(ends)
            yield _annotation(group, *found[ends.index(known_ns)], known_ns)


def _first(process: Process) -> int | None:
    """The last of the first SETTLED_STEPS steps in a row that waited for data."""
    steps = process.steps
    if len(steps) < SETTLED_STEPS:
        return None
    waits = (steps["data_s"] >= STALL_SECONDS) & (steps["data_s"] >= STALL_SHARE * steps["iteration_s"])
    runs = np.lib.stride_tricks.sliding_window_view(waits, SETTLED_STEPS).all(axis=1)
    return int(np.argmax(runs)) + SETTLED_STEPS - 1 if runs.any() else None


def _annotation(group: Group, last: int, process: Process, known_ns: int) -> Annotation:
    rows = process.steps[last - SETTLED_STEPS + 1 : last + 1]
    waits, lasts = float(np.median(rows["data_s"])), float(np.median(rows["iteration_s"]))
    step = int(rows["step"][0])
    ranks = _waiting(group, step, known_ns)
    evidence = {"data_s": waits, "iteration_s": lasts, "share": waits / lasts, "ranks": float(len(ranks))}
    who = f"{of_ranks(ranks)} waits" if len(ranks) == 1 else f"{of_ranks(ranks)} wait"
    return Annotation(
        name="data_stall",
        begin_ns=int(rows["begin_unix_ns"][0]),
        end_ns=known_ns,
        known_ns=known_ns,
        step=step,
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
        steps = process.steps[(process.steps["step"] >= step) & (process.steps["end_unix_ns"] <= known_ns)]
        if len(steps) and float(np.median(steps["data_s"] / steps["iteration_s"])) >= STALL_SHARE:
            found.append(process.rank)
    return tuple(found)
