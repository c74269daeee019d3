"""Ranks wait for their data in each iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.causes.loader_causes import find_late_line, find_loader_cause
from zerotop.analysis.findings.support.causes.step_change import measure_distance
from zerotop.analysis.findings.support.lines.line_findings import line_values
from zerotop.analysis.findings.support.lines.stack_lines import Delay, FoundLine, await_line, find_line
from zerotop.analysis.findings.support.steps.onsets import find_onset
from zerotop.analysis.findings.support.steps.runs import MOST_TURNS, find_settled_run, find_turns
from zerotop.analysis.findings.support.steps.step_values import StepValues
from zerotop.analysis.findings.support.thresholds import STALL_SECONDS, STALL_SHARE
from zerotop.analysis.stats.change_points import SETTLED_STEPS, ShiftFinder
from zerotop.recording.samples import Rows

KIND = FindingKind(
    name="data_stall",
    confidence=0.95,
    headline="{share:percent} of each {iteration_s:seconds} iteration is spent waiting for data",
    details="{data_s:seconds} on {waiting:ranks}, from step {step} on[, {most} of it at {line}][; {workers}].",
    advice="Raise {worker_count}, or tokenize before training with Dataset.map(...).",
    fix="{worker_setting}",
)

# If the other ranks have their data, and wait for this one.
_ONE_RANK_HEADLINE = "Rank {rank} waits for data for {share:percent} of each {iteration_s:seconds} iteration"
# Steps that are enough if counted ones are between them.
_SPARSE_STEPS = 3
# The share of an iteration by which waiting must rise at once.
_RISE_SHARE = 0.10
# A wait is looked at again after this part of more steps, and reported if its iterations differ by this share.
_MORE_STEPS, _SHOWN_SHARE = 4, 0.02
# How long a finding waits for its line (ns): on a slow machine samples are written late.
_PATIENCE_NS = 30_000_000_000


class _Wait(NamedTuple):
    """Steps in which a process waited for data, as indices of steps with phases, and the time at which they were known."""

    first: int
    last: int
    process: Process
    known_ns: int
    is_rise: bool = False  # whether it may be too short to matter but for its line
    in_turns: bool = False  # whether only some of the steps wait

    @property
    def rows(self) -> Rows:
        return self.process.phased_steps[self.first : self.last + 1]

    def find_delay(self) -> Delay:
        """Return where the time is lost."""
        return Delay(
            self.process, "data", int(self.rows["begin_unix_ns"][0]), self.known_ns, self.known_ns, patience_ns=_PATIENCE_NS
        )


class _Told:
    """A wait that was reported, the number of its steps that were looked at, and the iteration that was shown (seconds)."""

    def __init__(self, wait: _Wait, found: FoundLine, finding: Finding) -> None:
        self.wait, self.found, self.finding = wait, found, finding
        self.steps, self.iteration_s = wait.last + 1 - wait.first, _measure(wait)[1]
        self.line = found.line
        self.awaits_workers = True


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report one wait of each attempt: a rank waits long in SETTLED_STEPS steps or turns, or begins to wait for good.

    It is reported again as long as it lasts, when the time of its steps has become another one.
    """
    group, told = window.subject, window.keep(list[_Told])
    fresh = _find_waits(window) if not group.has_found(KIND) else []
    for wait, found in window.await_each(fresh, lambda wait: await_line(wait.find_delay())):
        if not group.has_found(KIND) and (found.line is not None or not wait.is_rise):
            finding = _build_finding(group, wait, found, _find_waiting(group, wait))
            told.append(_Told(wait, found, finding))
            yield finding
    for one in told:
        yield from _follow(group, one)


def _follow(group: Group, told: _Told) -> Iterator[Finding]:
    """Yield a wait after each quarter of more steps, if their times differ from those shown or its line is known now.

    Once more when the line of the workers is known.
    """
    begin_ns, known_ns = int(told.wait.rows["begin_unix_ns"][0]), told.found.known_ns
    late_ns = find_late_line(told.wait.process, begin_ns, known_ns) if told.awaits_workers else None
    if late_ns is not None and late_ns <= group.lead.at.cursor_ns:
        told.awaits_workers = False
        finding = _build_finding(group, told.wait, FoundLine(told.line, late_ns), told.finding.ranks)
        yield replace(finding, begin_ns=told.finding.begin_ns, step=told.finding.step)
    steps = told.wait.process.phased_steps
    while (last := told.wait.first + told.steps + max(SETTLED_STEPS, told.steps // _MORE_STEPS) - 1) < len(steps):
        told.steps = last + 1 - told.wait.first
        known_ns, wait = int(steps["end_unix_ns"][last]), told.wait._replace(last=last)
        if _measure_share(steps[last + 1 - SETTLED_STEPS : last + 1], in_turns=wait.in_turns) < STALL_SHARE:
            continue
        iteration_s, first = _measure(wait)[1], told.finding
        is_new = abs(iteration_s / told.iteration_s - 1) > _SHOWN_SHARE
        if told.line is None:  # there were few samples
            told.line = find_line(wait._replace(known_ns=known_ns).find_delay())
            is_new |= told.line is not None
        if known_ns > told.found.known_ns and is_new:
            told.iteration_s = iteration_s
            finding = _build_finding(group, wait, FoundLine(told.line, known_ns), first.ranks)
            yield replace(finding, begin_ns=first.begin_ns, step=first.step)


def _measure(wait: _Wait) -> tuple[float, float]:
    """Return the seconds of the wait, and of the whole iteration."""
    average = np.mean if wait.in_turns else np.median
    return float(average(wait.rows["data_s"])), float(average(wait.rows["iteration_s"]))


def _find_waits(window: SearchWindow[Group]) -> list[_Wait]:
    processes = window.subject.processes
    waits = [wait for process in processes for wait in _list_waits(window, process)]
    turns = window.find_once(lambda: [one for process in processes for one in _list_new(window, process, *_TURNS)] or None)
    waits += [wait._replace(in_turns=True) for wait in window.items(turns or ())]
    return sorted(waits, key=lambda wait: (wait.known_ns, wait.first))


def _list_waits(window: SearchWindow[Group], process: Process) -> Iterator[_Wait]:
    yield from _list_new(window, process, _find_first_wait, SETTLED_STEPS - 1)
    rise = _find_rise(process, window.keep(ShiftFinder, process))
    if rise is not None:
        yield _Wait(*rise, process, int(process.phased_steps["end_unix_ns"][rise[1]]), is_rise=True)


def _list_new(
    window: SearchWindow[Group], process: Process, find: Callable[[Rows], slice | None], look_back: int
) -> Iterator[_Wait]:
    """Yield the first waiting steps among the new ones with phases, and so many before them."""
    fresh = window.steps(process.phased_steps, look_back, (process, find))
    run = find(process.phased_steps[fresh])
    if run is not None:
        first, last = fresh.start + run.start, fresh.start + run.stop - 1
        yield _Wait(first, last, process, int(process.phased_steps["end_unix_ns"][last]))


def _find_first_wait(steps: Rows) -> slice | None:
    """Return the first run of steps that all waited for data."""
    is_waiting = (steps["data_s"] >= STALL_SECONDS) & (steps["data_s"] >= STALL_SHARE * steps["iteration_s"])
    return find_settled_run(is_waiting, steps["step"], _SPARSE_STEPS)


def _find_turns(steps: Rows) -> slice | None:
    """Return steps of which every n-th waits, as when n loader workers finish late together and then deliver n batches."""
    waited_s = np.where(steps["data_s"] >= STALL_SECONDS, steps["data_s"], 0.0)  # false for NaN
    return find_turns(steps["step"], waited_s, np.nan_to_num(steps["iteration_s"]), STALL_SHARE)


_TURNS = (_find_turns, SETTLED_STEPS * MOST_TURNS - 1)


def _find_rise(process: Process, finder: ShiftFinder) -> tuple[int, int] | None:
    """Return the first steps after which a rank waits notably longer than before, although its iterations vary."""
    steps = process.phased_steps
    # Waits shorter than a stall are noise.
    waited = StepValues(steps, lambda rows: np.maximum(rows["data_s"], STALL_SECONDS))
    for shift in finder.find_shifts(waited):
        before, after = (steps[rows] for rows in (shift.before, slice(shift.first, shift.last + 1)))
        added = float(np.median(after["data_s"]) - np.median(before["data_s"]))
        if added >= max(STALL_SECONDS, _RISE_SHARE * float(np.median(after["iteration_s"]))):
            return shift.first, shift.last
    return None


def _build_finding(group: Group, wait: _Wait, found: FoundLine, ranks: tuple[int, ...]) -> Finding:
    rows, (waited, duration) = wait.rows, _measure(wait)
    evidence = {"data_s": waited, "iteration_s": duration, "share": waited / duration, "ranks": len(ranks)}
    evidence |= measure_distance(rows)
    is_one_of_several = len(ranks) == 1 < len(group.processes)
    headline = _ONE_RANK_HEADLINE if is_one_of_several else KIND.headline
    kind = KIND.with_changes(headline=headline if found.line is None else headline + ": {place}")
    loader = find_loader_cause(wait.process, int(rows["begin_unix_ns"][0]), found.known_ns)
    if loader is not None and loader.advice is not None:
        kind = kind.with_changes(advice=loader.advice[0], fix=loader.advice[1])
    values = {
        "pid": wait.process.source.pid,
        "waiting": ranks,
        "workers": loader.text if loader is not None else None,
        **line_values(found.line),
    }
    began = _find_begin(wait, found.known_ns)
    return kind.at_steps(group, began, evidence, known_ns=found.known_ns, ranks=ranks, cost=waited / duration, **values)


def _find_begin(wait: _Wait, known_ns: int) -> Rows:
    """Return the steps from the first that waited, which may only have been counted."""
    process, rows = wait.process, wait.rows
    steps, first = process.steps_until(known_ns), int(rows["step"][0])
    before = int(process.phased_steps["step"][wait.first - 1]) if wait.first else first - 1
    onset = find_onset(steps, before, first)
    return steps[onset : np.searchsorted(steps["step"], rows["step"][-1]) + 1]


def _find_waiting(group: Group, wait: _Wait) -> tuple[int, ...]:
    """Return the ranks that waited in most of the steps that they have finished since then."""
    ranks = []
    for process in group.processes:
        steps = process.phased_steps_until(wait.known_ns)[-max(2 * SETTLED_STEPS, wait.last - wait.first + 1) :]
        steps = steps[steps["step"] >= wait.rows["step"][0]]
        is_waiting = len(steps) and _measure_share(steps, in_turns=wait.in_turns) >= STALL_SHARE
        if is_waiting or process is wait.process:
            ranks.append(process.rank)
    return tuple(ranks)


def _measure_share(steps: Rows, *, in_turns: bool) -> float:
    if in_turns:
        return float(steps["data_s"].sum() / steps["iteration_s"].sum())
    return float(np.median(steps["data_s"] / steps["iteration_s"]))
