"""A DataLoader starts its workers again in each step, for a new iterator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from zerotop.analysis.code_line import CodeLine, find_own
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.causes.loader_causes import KEEP_WORKERS
from zerotop.analysis.findings.support.causes.step_change import compute_own_seconds
from zerotop.analysis.steps.sampled_parts import measure_in_steps
from zerotop.recording.events.event_files import select_events
from zerotop_probe.recording.events import LoaderStarted, Stacks

_KIND = FindingKind(
    name="workers_restarted",
    confidence=0.95,
    headline="In each step {count:count loader worker} {start} again[: {place}]",
    details=(
        "{starts:.0f} times up to step {last_step}[, by a new iterator of the DataLoader at {place}]. Each"
        " {iteration_s:seconds} iteration spends {own_s:seconds} outside forward, backward and step, in which workers start,"
        " load a first batch, and end."
    ),
    advice=KEEP_WORKERS[0],
    fix=KEEP_WORKERS[1],
)
# Starts that show it, and how many there are for each step.
_STARTS, _PER_STEP = 8, 0.8
# The part of an iteration outside forward, backward and step from which this is worth a finding.
_LEAST_SHARE = 0.1
_LOADER = "torch/utils/data/dataloader.py"
# Samples in the loader's own code that show the line.
_FEWEST_SAMPLES = 2


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report once for each attempt."""
    for process in window.subject.processes:
        if window.items(process.events_of(LoaderStarted), process):
            yield _find_restarts(window.subject, process)


def _find_restarts(group: Group, process: Process) -> Finding | None:
    known_ns = process.at.cursor_ns
    run = _find_run([(process.step_at(one.unix_ns) or 0, one) for one in process.events_of(LoaderStarted)])
    rows = process.phased_steps_until(known_ns)
    rows = rows[np.searchsorted(rows["step"], run[0][0]) :] if run else rows[:0]
    if not len(rows):
        return None
    own = measure_in_steps(process.steps, rows, compute_own_seconds(rows))
    if own.share < _LEAST_SHARE:
        return None
    line = _find_line(process, int(rows["begin_unix_ns"][0]), known_ns)
    evidence = {"starts": len(run), "own_s": own.seconds, "iteration_s": own.iteration_s}
    count = len(run[-1][1].workers)
    values: dict[str, Any] = {"last_step": run[-1][0], "count": count, "start": "start" if count > 1 else "starts"}
    values |= {"place": line.place, "location": line.location} if line is not None else {"place": None}
    kind = _KIND.with_changes(names_line=line is not None)
    return kind.at_steps(group, rows, evidence, known_ns=known_ns, cost=own.share, **values)


def _find_run(starts: list[tuple[int, LoaderStarted]]) -> list[tuple[int, LoaderStarted]]:
    """Return the last starts, each with the step in which it was written, if there is about one for each step; else none.

    Those of counted steps are written together in the next step with phases.
    """
    for begin in range(len(starts) - _STARTS):
        later, steps = len(starts) - 1 - begin, starts[-1][0] - starts[begin][0]
        if later >= _PER_STEP * steps:
            return starts[begin:]
    return []


def _find_line(process: Process, begin_ns: int, known_ns: int) -> CodeLine | None:
    """Return the line at which most samples in the loader's code since a time were taken."""
    found: Counter[CodeLine] = Counter()
    for event in select_events(process.events_of(Stacks), begin_ns, known_ns):
        for stack in event.stacks:
            frames = [event.frames[one] for one in stack.frames if 0 <= one < len(event.frames)]
            own = find_own(event.frames, stack) if any(frame.file == _LOADER for frame in frames) else None
            if own is not None:
                found[CodeLine(own.file, own.line, own.function, ())] += stack.count or 0
    return next((line for line, count in found.most_common(1) if count >= _FEWEST_SAMPLES), None)
