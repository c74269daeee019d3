"""One rank's own work takes longer, and the others wait for it where ranks synchronize.

Own work is data and the time between phases, not the phases in which ranks wait for each other. It is known for steps whose
phases all ranks have recorded; counted steps between these are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.findings.support.causes.loader_causes import find_loader_cause
from zerotop.analysis.findings.support.causes.step_change import compute_own_seconds, measure_distance
from zerotop.analysis.findings.support.evidence import Floats, Group, Ints, Process, Rows
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.lines.line_findings import is_cause, line_values, name_line
from zerotop.analysis.findings.support.lines.stack_lines import BETWEEN, Delay, FoundLine, StackLine, await_line, find_line
from zerotop.analysis.findings.support.links import Kinds, is_simultaneous, waits_for_data
from zerotop.analysis.findings.support.nccl_figures import NcclWait, find_wait
from zerotop.analysis.findings.support.steps.contests import find_slow_rounds
from zerotop.analysis.findings.support.steps.onsets import select_from_onset
from zerotop.analysis.findings.support.thresholds import MORE_STEPS, RECENT_STEPS, STALL_SECONDS, STRAGGLER_SHARE
from zerotop.analysis.findings.support.window import SearchWindow, in_each_attempt
from zerotop.analysis.stats.change_points import SETTLED_STEPS

_KIND = FindingKind(
    name="straggler",
    severity=Severity.WARNING,
    confidence=0.9,
    headline="Rank {rank} delays each iteration by {late_s:seconds} ({share:percent}) from step {step} on",
    details=(
        "In steps {first_step} to {last_step} its own work between the phases takes that much longer"
        "[, {most} of it at {line}], and the other ranks wait for it where they synchronize. The median iteration takes"
        " {iteration_s:seconds}.[ NCCL says that the other ranks are in {collective} for {nccl_wait_s:seconds} of it longer"
        " than this one.]"
    ),
    advice="See what only this rank does between the phases: do it less often, or in a thread of its own.",
    fix="py-spy dump --pid {pid}",
    explained_by=(Kinds(is_simultaneous, "nvlink_faults", "pcie_link"), Kinds(waits_for_data, "data_stall")),
)
_DATA = _KIND.with_changes(
    details=_KIND.details.replace(
        "its own work between the phases takes that much longer", "it waits that much longer for data"
    ),
    advice="Give each rank the same amount of data, of similar length, and workers that load it ahead.",
    fix="{worker_setting}",
)


_Late = tuple[int, Ints, float]  # index of the process, the indices of its steps, and the seconds of each


class _Look(NamedTuple):
    """A delay measured again later: the end index of its steps, and the delay; None where the rank is no longer as late."""

    end: int
    late: _Late | None


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report once for each attempt the first rank that was last in SETTLED_STEPS steps with phases in a row.

    It is told again when NCCL's figures about it are known, and while it lasts, with the figures of more steps.
    """
    late = window.find_once(partial(_find_late, window))
    found = await_line(delay := _find_delay(window.subject, late)) if late is not None else None
    if late is None or found is None:
        return
    # A rank that waits for its GPU there, as for the value of a loss, may wait for another rank.
    if found.line is not None and not is_cause(found.line, delay):
        window.is_closed = True
        return
    group, since = window.subject, late[1]
    wait = find_wait(group.processes, delay.process, delay.begin_ns)
    if wait is None or wait.known_ns > found.known_ns:
        yield _build_finding(group, since, late, found, None)
    if wait is not None:
        yield _build_finding(group, since, late, found, wait)
    for end, later in window.extend(partial(_look_again, group, late), 0):
        known_ns = max(int(process.aligned_steps["end_unix_ns"][end - 1]) for process in group.processes)
        if later is not None and known_ns > found.known_ns:
            is_priced = wait is not None and wait.known_ns <= known_ns
            known = FoundLine(found.line or _find_later_line(delay, known_ns), known_ns)
            yield _build_finding(group, since, later, known, wait if is_priced else None)


def _find_later_line(delay: Delay, known_ns: int) -> StackLine | None:
    """Return the line that takes the time, from samples that came after the delay had been told without one."""
    line = find_line(delay._replace(end_ns=known_ns, known_ns=known_ns))
    return line if line is not None and is_cause(line, delay) else None


def _look_again(group: Group, late: _Late, last: _Look | None) -> _Look | None:
    """Return the delay in the RECENT_STEPS before a step, after each quarter of more steps; None before there are these."""
    index, first = late[0], int(late[1][0])
    count = last.end - first if last is not None else SETTLED_STEPS
    end = first + max(2 * SETTLED_STEPS, count + count // MORE_STEPS)
    if end > min(len(process.aligned_steps) for process in group.processes):
        return None
    begin = max(first, end - RECENT_STEPS)
    steps = begin + np.flatnonzero(~_find_counted(group, slice(begin, end)))
    if len(steps) < SETTLED_STEPS:
        return _Look(end, None)
    own = _measure_own(group, steps)
    seconds = float(np.median(own[index] - np.delete(own, index, axis=0).max(axis=0)))
    return _Look(end, (index, steps, seconds) if seconds >= late[2] / 2 else None)


def _find_late(window: SearchWindow[Group]) -> _Late | None:
    group = window.subject
    if len(group.processes) < 2 or group.has_stages:
        return None
    fresh = window.steps(min((process.aligned_steps for process in group.processes), key=len))
    # Steps that no rank has only counted.
    indices = np.array(
        window.results((fresh.start + np.flatnonzero(~_find_counted(group, fresh))).tolist(), SETTLED_STEPS - 1), int
    )
    slowest, late = _measure_lateness(group, indices)
    found = find_slow_rounds(slowest, SETTLED_STEPS)
    return (int(slowest[found.start]), indices[found], float(np.median(late[found]))) if found is not None else None


def _find_counted(group: Group, window: slice) -> NDArray[np.bool_]:
    counted: NDArray[np.bool_] = np.any([process.aligned_steps["counted"][window] for process in group.processes], axis=0)
    return counted


def _measure_lateness(group: Group, indices: Ints) -> tuple[Ints, Floats]:
    """Return the index of the process that the others waited for in each step (-1: none), and the seconds."""
    own = _measure_own(group, indices)
    late = own.max(axis=0) - np.partition(own, -2, axis=0)[-2]
    is_late = (late >= STALL_SECONDS) & (late >= STRAGGLER_SHARE * _measure_iterations(group, indices))
    return np.where(is_late, np.argmax(own, axis=0), -1), late


def _measure_own(group: Group, indices: Ints) -> Floats:
    """Return the seconds of each rank's own work, ranks x steps."""
    own: Floats = np.stack([compute_own_seconds(process.aligned_steps[indices]) for process in group.processes])
    return own


def _measure_iterations(group: Group, indices: Ints) -> Floats:
    longest: Floats = np.max([process.aligned_steps["iteration_s"][indices] for process in group.processes], axis=0)
    return longest


def _find_delay(group: Group, late: _Late) -> Delay:
    index, steps, delay = late
    process = group.processes[index]
    rows = process.aligned_steps[steps]
    known_ns = max(int(other.aligned_steps["end_unix_ns"][steps][-1]) for other in group.processes)
    where = "data" if float(np.median(rows["data_s"])) >= delay / 2 else BETWEEN
    return Delay(process, where, int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]), known_ns)


def _build_finding(group: Group, since: Ints, delay: _Late, found: FoundLine, wait: NcclWait | None) -> Finding:
    index, steps, late = delay
    process = group.processes[index]
    rows = process.aligned_steps[steps]
    usual, data = float(np.median(_measure_iterations(group, steps))), float(np.median(rows["data_s"]))
    kind, evidence = _KIND, {"late_s": late, "iteration_s": usual, "data_s": data}
    if data >= late / 2:
        loader = find_loader_cause(process, int(rows["begin_unix_ns"][0]), found.known_ns)
        kind = loader.advise(_DATA, _DATA.advice) if loader is not None else _DATA
    evidence |= measure_distance(rows)
    if wait is not None:
        evidence["nccl_wait_s"] = wait.share * usual
    if found.line is not None:
        kind = name_line(kind, found.line)
    return kind.at_steps(
        process,
        _find_begin(group, process, np.append(since, steps[-1]), found.known_ns),
        evidence,
        known_ns=max(found.known_ns, wait.known_ns if wait is not None else 0),
        cost=late / usual,
        share=late / usual,
        collective=wait.collective if wait is not None else None,
        pid=process.source.pid,
        first_step=int(rows["step"][0]),
        last_step=int(rows["step"][-1]),
        **line_values(found.line),
    )


def _find_begin(group: Group, process: Process, indices: Ints, known_ns: int) -> Rows:
    """Return a process's steps from the begin of the delay, some of which ranks may only have counted."""
    changed = process.aligned_steps[indices[[0, -1]]]
    known = np.flatnonzero(~_find_counted(group, slice(0, int(indices[0]))))
    before = process.aligned_steps["step"][known[-1]] if len(known) else changed["step"][0] - 1
    return select_from_onset(process.steps_until(known_ns), int(before), changed)
