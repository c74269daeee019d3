"""Ranks wait for their data in each iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.causes import new_iterators
from zerotop.analysis.findings.support.causes.loader_causes import MORE_WORKERS, find_loader_cause, list_late_times
from zerotop.analysis.findings.support.causes.step_change import measure_distance
from zerotop.analysis.findings.support.lines.line_findings import line_values
from zerotop.analysis.findings.support.lines.stack_lines import Delay, FoundLine, StackLine, await_line, find_line
from zerotop.analysis.findings.support.links import Kinds, is_simultaneous
from zerotop.analysis.findings.support.steps.onsets import select_from_onset
from zerotop.analysis.findings.support.steps.runs import MOST_TURNS, find_settled_run, find_turns
from zerotop.analysis.findings.support.steps.step_values import StepValues
from zerotop.analysis.findings.support.thresholds import MORE_STEPS, SHOWN_SHARE, STALL_SECONDS, STALL_SHARE
from zerotop.analysis.stats.change_points import SETTLED_STEPS, ShiftFinder
from zerotop.analysis.steps.sampled_parts import Part, measure_in_steps
from zerotop.recording.samples import Floats, Rows

KIND = FindingKind(
    name="data_stall",
    confidence=0.95,
    headline="{share:percent} of each {iteration_s:seconds} iteration is spent waiting for data",
    details=(
        "From step {step} on, {data_s:seconds} on {waiting:ranks} (steps {first_step} to {last_step})[, {most} of it at"
        " {line}][; {workers}]."
    ),
    advice=MORE_WORKERS,
    fix="[{location}]",
    superseded_by=(Kinds(is_simultaneous, "workers_restarted"),),
)

# If the other ranks have their data, and wait for this one.
_ONE_RANK_HEADLINE = "Rank {rank} waits for data for {share:percent} of each {iteration_s:seconds} iteration"
# From this share of an iteration on, a wait counts that is shorter than STALL_SECONDS, and no shorter than this (seconds).
_NOTABLE_SHARE, _LEAST_S = 0.25, 0.002
# Steps that are enough if counted ones are between them.
_SPARSE_STEPS = 3
# The share of an iteration by which waiting must rise at once.
_RISE_SHARE = 0.10
# By this share of an iteration, later steps are of another pace, and are measured without those before.
_OTHER_PACE = 0.2
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
        """Return where the time is lost: ranks that wait in each iteration go on to do so while samples come."""
        begin_ns, end_ns = int(self.rows["begin_unix_ns"][0]), self.known_ns + _PATIENCE_NS * (not self.is_rise)
        return Delay(self.process, "data", begin_ns, end_ns, self.known_ns, patience_ns=_PATIENCE_NS)


class _Told(NamedTuple):
    """A wait as it was told first, and as far as its steps were looked at since then, with what was told of it last."""

    begun: _Wait
    first: Finding
    wait: _Wait
    line: StackLine | None
    measured: int  # from which step on it was measured, as index
    iteration_s: float  # that was shown
    finding: Finding
    is_news: bool = True
    late_told: int = 0  # times at which more became known of the workers


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report one wait of each attempt: a rank waits long in SETTLED_STEPS steps or turns, or begins to wait for good.

    It is reported again as long as it lasts, when the time of its steps has become another one.
    """
    told = window.follow(_find_first(window), partial(_follow, window.subject))
    yield from (one.finding for one in told if one.is_news)


def _find_first(window: SearchWindow[Group]) -> Iterator[_Told]:
    """Yield the first wait, with its line if stacks show it; a rise is only one with its line."""
    group = window.subject
    fresh = _find_waits(window) if not group.has_found(KIND) else []
    for wait, found in window.await_each(fresh, lambda wait: await_line(wait.find_delay())):
        is_told = found.line is not None or not (wait.is_rise or _is_over(wait, found.known_ns))
        if is_told and not group.has_found(KIND):
            measured = _extend(wait, found.known_ns)
            finding = _build_finding(group, wait, measured, found, _find_waiting(group, wait))
            yield _Told(wait, finding, measured, found.line, wait.first, _measure(measured).iteration_s, finding)


def _is_over(wait: _Wait, known_ns: int) -> bool:
    """Whether most steps since a wait began are known by then not to wait, so that it was one of a few steps."""
    steps = wait.process.phased_steps_until(known_ns)
    has_later = len(steps) > wait.last + SETTLED_STEPS
    return has_later and _measure_share(steps[wait.first :], in_turns=wait.in_turns) < STALL_SHARE


def _extend(wait: _Wait, known_ns: int) -> _Wait:
    """Return the wait up to a time, if its later steps go on as the first ones: stacks come after them."""
    last = len(wait.process.phased_steps_until(known_ns)) - 1
    later = wait._replace(first=wait.last + 1, last=last)
    if wait.in_turns or last < wait.last + SETTLED_STEPS or _measure_share(later.rows, in_turns=False) < STALL_SHARE:
        return wait
    return wait._replace(last=last) if _find_other_pace(wait, later) is None else wait


def _follow(group: Group, last: _Told) -> _Told | None:
    """Return the wait after a quarter of more steps: it is news if their times differ from those shown, or with its line.

    Once more each time when more is known of the workers.
    """
    first, process, told_ns = last.first, last.wait.process, last.first.known_ns

    def tell_again(wait: _Wait, measured: _Wait, line: StackLine | None, known_ns: int) -> Finding:
        finding = _build_finding(group, wait, measured, FoundLine(line, known_ns), first.ranks)
        return replace(finding, begin_ns=first.begin_ns, step=first.step)

    begin_ns = int(last.begun.rows["begin_unix_ns"][0])
    late_ns = list_late_times(process, begin_ns, told_ns)[last.late_told :]
    if late_ns and late_ns[0] <= process.at.cursor_ns:
        finding = tell_again(last.begun, last.begun, last.line, late_ns[0])
        return last._replace(finding=finding, is_news=True, late_told=last.late_told + 1)
    count, steps, line = last.wait.last + 1 - last.wait.first, process.phased_steps, last.line
    wait = last.wait._replace(last=last.wait.last + max(SETTLED_STEPS, count // MORE_STEPS))
    if wait.last >= len(steps):
        return None
    fresh, before = wait._replace(first=last.wait.last + 1), last.wait._replace(first=last.measured)
    measured = wait._replace(first=last.measured if (other := _find_other_pace(before, fresh)) is None else other)
    now = last._replace(wait=wait, measured=measured.first, is_news=False)
    if _measure_share(steps[wait.last + 1 - SETTLED_STEPS : wait.last + 1], in_turns=wait.in_turns) < STALL_SHARE:
        return now
    known_ns, iteration_s = int(steps["end_unix_ns"][wait.last]), _measure(measured).iteration_s
    if line is None and known_ns > told_ns:  # there were few samples
        line = find_line(wait._replace(known_ns=known_ns).find_delay())
    is_new = abs(iteration_s / last.iteration_s - 1) > SHOWN_SHARE or line is not last.line
    if known_ns <= told_ns or not is_new:
        return now
    finding = tell_again(wait, measured, line, known_ns)
    return now._replace(line=line, iteration_s=iteration_s, finding=finding, is_news=True)


def _measure(wait: _Wait, average: Callable[[Floats], Any] = np.median) -> Part:
    """Return the seconds of the wait, and of the whole iteration."""
    if wait.in_turns:  # which are of steps in a row
        return Part(float(np.mean(wait.rows["data_s"])), float(np.mean(wait.rows["iteration_s"])))
    return measure_in_steps(wait.process.steps, wait.rows, wait.rows["data_s"], average)


def _find_other_pace(before: _Wait, after: _Wait) -> int | None:
    """Return the first step after others, as index, if they take or wait for another time. Turns differ among themselves."""
    times = _measure(before), _measure(after)
    if before.in_turns or np.abs(np.subtract(*times)).max() <= _OTHER_PACE * times[0][1]:
        return None
    distances = [np.abs(after.rows["iteration_s"] - iteration_s) for _, iteration_s in times]
    return after.first + int(np.argmax(distances[1] <= distances[0]))


def _find_waits(window: SearchWindow[Group]) -> list[_Wait]:
    processes = window.subject.processes
    waits = [wait for process in processes for wait in _list_waits(window, process)]
    turns = window.find_once(lambda: [one for process in processes for one in _list_new(window, process, *_TURNS)] or None)
    waits += [wait._replace(in_turns=True) for wait in window.items(turns or ())]
    return sorted(waits, key=lambda wait: (wait.known_ns, wait.first))


def _list_waits(window: SearchWindow[Group], process: Process) -> Iterator[_Wait]:
    yield from _list_new(window, process, _find_first_wait, SETTLED_STEPS - 1)
    rise = _find_rise(process, window.keep(ShiftFinder, process))  # reads each step once
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
    is_waiting = _does_wait(steps) & (steps["data_s"] >= STALL_SHARE * steps["iteration_s"])
    return find_settled_run(is_waiting, steps["step"], _SPARSE_STEPS)


def _does_wait(steps: Rows) -> NDArray[np.bool_]:
    """Return which steps wait for data long enough to matter: in short ones a shorter wait does."""
    least_s = np.clip(_NOTABLE_SHARE * steps["iteration_s"], _LEAST_S, STALL_SECONDS)
    waits: NDArray[np.bool_] = steps["data_s"] >= least_s  # false for NaN
    return waits


def _find_turns(steps: Rows) -> slice | None:
    """Return steps of which every n-th waits, as when n loader workers finish late together and then deliver n batches."""
    waited_s = np.where(_does_wait(steps), steps["data_s"], 0.0)
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


def _build_finding(group: Group, wait: _Wait, measured: _Wait, found: FoundLine, ranks: tuple[int, ...]) -> Finding:
    """``measured``: the steps of the wait whose times are told. It costs what all its steps wait."""
    rows, part = measured.rows, _measure(measured)
    every = _measure(wait._replace(last=measured.last), np.mean)  # which may vary
    evidence = {"data_s": part.seconds, "iteration_s": part.iteration_s, "share": part.share, "ranks": len(ranks)}
    evidence["mean_s"] = every.seconds
    evidence |= measure_distance(rows)
    is_one_of_several = len(ranks) == 1 < len(group.processes)
    begin_ns = int(wait.rows["begin_unix_ns"][0])
    iterators = new_iterators.find_new_iterators(wait.process, begin_ns, found.known_ns)
    found = found if iterators is None else found._replace(line=iterators)
    headline = _ONE_RANK_HEADLINE if is_one_of_several else KIND.headline
    kind = KIND.with_changes(headline=headline if found.line is None else headline + ": {place}")
    loader = find_loader_cause(wait.process, begin_ns, found.known_ns) if iterators is None else new_iterators.CAUSE
    kind = kind if loader is None else loader.advise(kind)
    values = {
        "pid": wait.process.source.pid,
        "waiting": ranks,
        "first_step": int(rows["step"][0]),
        "last_step": int(rows["step"][-1]),
        "workers": loader.text if loader is not None else None,
        **line_values(found.line),
    }
    began = _find_begin(wait, found.known_ns)
    return kind.at_steps(group, began, evidence, known_ns=found.known_ns, ranks=ranks, cost=every.share, **values)


def _find_begin(wait: _Wait, known_ns: int) -> Rows:
    """Return the steps from the first that waited, which may only have been counted."""
    process, rows = wait.process, wait.rows
    before = process.phased_steps["step"][wait.first - 1] if wait.first else rows["step"][0] - 1
    return select_from_onset(process.steps_until(known_ns), int(before), rows)


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
