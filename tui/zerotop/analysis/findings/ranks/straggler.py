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
from zerotop.analysis.findings.support.steps.late_spells import LateSpell, LateSpells, LateStep, find_late
from zerotop.analysis.findings.support.steps.lost_time import has_cost_little
from zerotop.analysis.findings.support.steps.onsets import select_from_onset
from zerotop.analysis.findings.support.thresholds import MORE_STEPS, RECENT_STEPS
from zerotop.analysis.findings.support.window import SearchWindow, in_each_attempt
from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop.analysis.steps.sampled_parts import Part, measure_part

_KIND = FindingKind(
    name="straggler",
    severity=Severity.WARNING,
    confidence=0.9,
    headline="Rank {rank} {delays} by {late_s:seconds} ({share:percent}) {until}",
    details=(
        "In steps {first_step} to {last_step} its own work between the phases {takes} that much longer"
        "[, {most} of it at {line}], and the other ranks {wait} for it where they synchronize. The median"
        " iteration {takes} {iteration_s:seconds}.[ NCCL says that the other ranks {are} in {collective} for"
        " {nccl_wait_s:seconds} of it longer than this one.]"
    ),
    advice="See what only this rank does between the phases: do it less often, or in a thread of its own.",
    fix="py-spy dump --pid {pid}",
    explained_by=(Kinds(is_simultaneous, "nvlink_faults", "pcie_link"), Kinds(waits_for_data, "data_stall")),
)
_DATA = _KIND.with_changes(
    details=_KIND.details.replace(
        "its own work between the phases {takes} that much longer", "it {waits} that much longer for data"
    ),
    advice="Give each rank the same amount of data, of similar length, and workers that load it ahead.",
    fix="",
)


_LASTS = {"delays": "delays each iteration", "takes": "takes", "wait": "wait", "waits": "waits", "are": "are"}
_ENDED = {"delays": "delayed iterations", "takes": "took", "wait": "waited", "waits": "waited", "are": "were"}


class _Late(NamedTuple):
    """A delay: the index of the process, the indices of its steps, and the seconds of each."""

    at: int
    steps: Ints
    seconds: float


class _Look(NamedTuple):
    """A delay measured again later: the end index of its steps, and the delay; None where the rank is no longer as late."""

    end: int
    late: _Late | None


class _Told(NamedTuple):
    """A spell that is told, and its line once that is known."""

    spell: LateSpell
    found: FoundLine


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each rank that was last in SETTLED_STEPS steps with phases in a row.

    It is told again when NCCL's figures about it are known, while it lasts, with those of more steps, and with its end.
    """
    group, lasting = window.subject, window.keep(dict[int, _Told])
    found = window.await_each(_find_spells(window), lambda spell: await_line(_find_delay(group, _read_late(spell))))
    for spell, line in found:
        # A rank that waits for its GPU there, as for the value of a loss, may wait for another rank.
        if line.line is None or is_cause(line.line, _find_delay(group, _read_late(spell))):
            lasting[int(spell.steps[0])] = _Told(spell, line)
    for begin, told in list(lasting.items()):
        yield from _tell(window, told)
        if told.spell.after is not None:
            del lasting[begin]


def _tell(window: SearchWindow[Group], told: _Told) -> Iterator[Finding]:
    group, (spell, found) = window.subject, told
    late = _read_late(spell)
    delay, since = _find_delay(group, late), late.steps
    end_ns = _find_end_ns(group, spell.end_index) if spell.after is not None else None
    wait = find_wait(group.processes, delay.process, delay.begin_ns)
    if wait is not None and end_ns is not None and wait.known_ns > end_ns:
        wait = None
    if end_ns is None or found.known_ns < end_ns:
        if wait is None or wait.known_ns > found.known_ns:
            yield _build_finding(group, since, late, found, None)
        if wait is not None:
            yield _build_finding(group, since, late, found, wait)
    for end, later in window.extend(partial(_look_again, group, spell), 0, int(since[0])):
        known_ns = _find_end_ns(group, end - 1)
        if later is not None and known_ns > found.known_ns:
            is_priced = wait is not None and wait.known_ns <= known_ns
            known = FoundLine(found.line or _find_later_line(delay, known_ns), known_ns)
            yield _build_finding(group, since, later, known, wait if is_priced else None)
    if end_ns is not None and spell.after is not None:
        line = found.line or _find_later_line(delay, _find_end_ns(group, int(spell.after[0]) - 1))
        whole = _measure_last(group, late, int(spell.after[0])) or late
        yield _build_finding(group, since, whole, FoundLine(line, max(end_ns, found.known_ns)), wait, spell.after)


def _read_late(spell: LateSpell) -> _Late:
    return _Late(spell.rank, spell.steps, spell.late_s)


def _find_end_ns(group: Group, index: int) -> int:
    """Return when the last rank ended a step."""
    return max(int(process.aligned_steps["end_unix_ns"][index]) for process in group.processes)


def _find_later_line(delay: Delay, known_ns: int) -> StackLine | None:
    """Return the line that takes the time, from samples that came after the delay had been told without one."""
    line = find_line(delay._replace(end_ns=known_ns, known_ns=known_ns))
    return line if line is not None and is_cause(line, delay) else None


def _look_again(group: Group, spell: LateSpell, last: _Look | None) -> _Look | None:
    """Return the delay in the RECENT_STEPS before a step, after each quarter of more steps; None before there are these."""
    late, first = _read_late(spell), int(spell.steps[0])
    count = last.end - first if last is not None else SETTLED_STEPS
    end = first + max(2 * SETTLED_STEPS, count + count // MORE_STEPS)
    known = spell.end_index if spell.after is not None else min(len(process.aligned_steps) for process in group.processes)
    return _Look(end, _measure_last(group, late, end)) if end <= known else None


def _measure_last(group: Group, late: _Late, end: int) -> _Late | None:
    """Return the delay in the RECENT_STEPS before a step; None where too few are known, or the rank is not as late."""
    begin = max(int(late.steps[0]), end - RECENT_STEPS)
    steps = begin + np.flatnonzero(~_find_counted(group, slice(begin, end)))
    if len(steps) < SETTLED_STEPS:
        return None
    own = _measure_own(group, steps)
    seconds = float(np.median(own[late.at] - np.delete(own, late.at, axis=0).max(axis=0)))
    return _Late(late.at, steps, seconds) if seconds >= late.seconds / 2 else None


def _find_spells(window: SearchWindow[Group]) -> list[LateSpell]:
    """Return the spells that begin in new steps, from those that no rank has only counted."""
    group = window.subject
    if len(group.processes) < 2 or group.has_stages:
        return []
    fresh = window.steps(min((process.aligned_steps for process in group.processes), key=len))
    indices = fresh.start + np.flatnonzero(~_find_counted(group, fresh))
    slowest, late = _measure_lateness(group, indices)
    return window.keep(LateSpells).read(map(LateStep, indices.tolist(), slowest.tolist(), late.tolist()))


def _find_counted(group: Group, window: slice) -> NDArray[np.bool_]:
    counted: NDArray[np.bool_] = np.any([process.aligned_steps["counted"][window] for process in group.processes], axis=0)
    return counted


def _measure_lateness(group: Group, indices: Ints) -> tuple[Ints, Floats]:
    """Return the index of the process that the others waited for in each step (-1: none), and the seconds."""
    own = _measure_own(group, indices)
    late = own.max(axis=0) - np.partition(own, -2, axis=0)[-2]
    is_late = find_late(late, _measure_iterations(group, indices))
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


def _build_finding(
    group: Group, since: Ints, delay: _Late, found: FoundLine, wait: NcclWait | None, after: Ints | None = None
) -> Finding:
    """Return the finding. ``after``: the first steps after the end."""
    index, steps, _ = delay
    process = group.processes[index]
    rows = process.aligned_steps[steps]
    data, (late, usual) = float(np.median(rows["data_s"])), _measure_part(group, delay)
    kind, evidence = _KIND, {"late_s": late, "iteration_s": usual, "data_s": data}
    if data >= delay.seconds / 2:
        loader = find_loader_cause(process, int(rows["begin_unix_ns"][0]), found.known_ns)
        kind = loader.advise(_DATA, _DATA.advice) if loader is not None else _DATA
    evidence |= measure_distance(rows)
    if wait is not None:
        evidence["nccl_wait_s"] = wait.share * usual
    if found.line is not None:
        kind = name_line(kind, found.line)
    changed = _find_begin(group, process, np.append(since, steps[-1]), found.known_ns)
    words, first, until_step = _LASTS, int(changed["step"][0]), None
    if after is not None:
        words, until_step = _ENDED, int(_find_begin(group, process, after, found.known_ns)["step"][0]) - 1
        if has_cost_little(process.steps_until(found.known_ns), first, until_step, late / usual):
            kind = kind.with_changes(severity=Severity.INFO, advice="", fix="")
    return kind.at_steps(
        process,
        changed,
        {**evidence, "until_step": until_step},
        known_ns=max(found.known_ns, wait.known_ns if wait is not None else 0),
        cost=late / usual,
        share=late / usual,
        collective=wait.collective if wait is not None else None,
        pid=process.source.pid,
        first_step=int(rows["step"][0]),
        last_step=int(rows["step"][-1]),
        until=f"from step {first} on" if until_step is None else f"in steps {first} to {until_step}",
        **words,
        **line_values(found.line),
    )


def _measure_part(group: Group, delay: _Late) -> Part:
    """Return the seconds by which the rank is late, and the iteration, of all steps that the delay was measured in."""
    own, iterations = _measure_own(group, delay.steps), _measure_iterations(group, delay.steps)
    late = own[delay.at] - np.delete(own, delay.at, axis=0).max(axis=0)
    every = _measure_iterations(group, np.arange(delay.steps[0], delay.steps[-1] + 1))
    return measure_part(late, iterations, every)


def _find_begin(group: Group, process: Process, indices: Ints, known_ns: int) -> Rows:
    """Return a process's steps from the begin of a change on, some of which ranks may only have counted."""
    changed = process.aligned_steps[indices[[0, -1]]]
    known = np.flatnonzero(~_find_counted(group, slice(0, int(indices[0]))))
    before = process.aligned_steps["step"][known[-1]] if len(known) else changed["step"][0] - 1
    return select_from_onset(process.steps_until(known_ns), int(before), changed)
