"""Ranks wait for their data in each iteration."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.causes.loader_causes import find_loader_cause
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.annotations.support.lines.line_findings import Delay, await_lines, line_values
from zerotop.analysis.annotations.support.lines.stack_lines import FoundLine
from zerotop.analysis.annotations.support.runs import find_first_run
from zerotop.analysis.annotations.support.thresholds import STALL_SECONDS, STALL_SHARE
from zerotop.analysis.stats.change_points import SETTLED_STEPS

_KIND = FindingKind(
    name="data_stall",
    severity=Severity.WARNING,
    confidence=0.95,
    headline="{share:percent} of each {iteration_s:seconds} iteration is spent waiting for data",
    details="{data_s:seconds} on {waiting:ranks}, from step {step} on[, most of it at {line}][; {workers}].",
    advice="Raise {worker_count}, or tokenize before training with Dataset.map(...).",
    fix="{workers_fix}",
)


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report once for each attempt: the first SETTLED_STEPS steps in a row in which a rank waits."""
    for group in recording.groups:
        for (first, process, known_ns), found in await_lines(group, _KIND.name, _find_waits(group), _find_delay):
            yield _build_finding(group, first, process, known_ns, found)


_Wait = tuple[int, Process, int]  # index of the first step, the process, and when it was known


def _find_waits(group: Group) -> Iterator[_Wait]:
    if _KIND.name not in group.reported:
        waits = []
        for process in group.processes:
            first = _find_first_wait(process)
            if first is not None:
                waits.append((int(process.steps["end_unix_ns"][first + SETTLED_STEPS - 1]), first, process))
        if waits:
            group.reported.add(_KIND.name)
            known_ns, first, process = min(waits, key=lambda wait: wait[0])
            yield first, process, known_ns


def _find_delay(wait: _Wait) -> Delay:
    first, process, known_ns = wait
    rows = process.steps[first : first + SETTLED_STEPS]
    return Delay(process, "data", int(rows["begin_unix_ns"][0]), known_ns, known_ns)


def _find_first_wait(process: Process) -> int | None:
    """The first of SETTLED_STEPS new steps in a row that waited for data."""
    window = process.next_steps(len(process.steps), _KIND.name, SETTLED_STEPS - 1)
    if window is None:
        return None
    steps = process.steps[window]
    is_waiting = (steps["data_s"] >= STALL_SECONDS) & (steps["data_s"] >= STALL_SHARE * steps["iteration_s"])
    first = find_first_run(is_waiting, SETTLED_STEPS)
    return None if first is None else window.start + first


def _build_finding(group: Group, first: int, process: Process, known_ns: int, found: FoundLine) -> Annotation:
    rows = process.steps[first : first + SETTLED_STEPS]
    waited, duration = float(np.median(rows["data_s"])), float(np.median(rows["iteration_s"]))
    ranks = _find_waiting(group, int(rows["step"][0]), known_ns)
    evidence = {"data_s": waited, "iteration_s": duration, "share": waited / duration, "ranks": len(ranks)}
    kind = _KIND if found.line is None else _KIND.with_changes(headline=_KIND.headline + ": {place}")
    loader = find_loader_cause(process, int(rows["begin_unix_ns"][0]), found.known_ns)
    if loader is not None and loader.advice is not None:
        kind = kind.with_changes(advice=loader.advice[0], fix=loader.advice[1])
    values = {"waiting": ranks, "workers": loader.text if loader is not None else None, **line_values(found.line)}
    return kind.at_steps(group, rows, evidence, known_ns=found.known_ns, ranks=ranks, cost=waited / duration, **values)


def _find_waiting(group: Group, step: int, known_ns: int) -> tuple[int, ...]:
    """The ranks that waited in most of the steps since ``step`` that they had finished."""
    ranks = []
    for process in group.processes:
        steps = process.steps_until(known_ns)[-2 * SETTLED_STEPS :]
        steps = steps[steps["step"] >= step]
        if len(steps) and float(np.median(steps["data_s"] / steps["iteration_s"])) >= STALL_SHARE:
            ranks.append(process.rank)
    return tuple(ranks)
