"""One rank is the last to begin the collectives: the others wait for it, spread over all phases.

Under ZeRO-3 and FSDP all ranks' phases become longer alike, whoever is slow. PyTorch's times of the collectives show who it
is: a collective ends on all ranks together, so the slowest rank is in it for the shortest time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.causes.step_change import compute_own_seconds
from zerotop.analysis.annotations.support.collectives import Collectives, align_collectives
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.annotations.support.lines.stack_lines import find_deadline
from zerotop.analysis.annotations.support.thresholds import STALL_SECONDS
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.session.reader import Event
from zerotop_probe.recording import events

_GPU = FindingKind(
    name="slow_gpu",
    severity=Severity.WARNING,
    confidence=0.85,
    headline="The others wait up to {wait_s:seconds} of each iteration for the GPU of rank {rank}",
    details=(
        "It begins NCCL's collectives that much later, although its CPU launches them as early as the others do. An"
        " iteration takes {iteration_s:seconds}."
    ),
    advice="See whether this GPU has more to do, runs at lower clocks, or has another process on it.",
    fix="nvidia-smi -q -d CLOCK,PERFORMANCE,PIDS -i {gpu}",
)
_RANK = _GPU.with_changes(
    headline="The others wait up to {wait_s:seconds} of each iteration for rank {rank}",
    details=(
        "It begins NCCL's collectives that much later, and its CPU launches them later, too: either its Python code is"
        " slower, or it waits for its GPU. An iteration takes {iteration_s:seconds}."
    ),
    advice="See what only this rank computes in forward and backward; if nothing, compare its cores and its GPU.",
    fix="py-spy dump --pid {pid}",
)
# The others wait for a share of an iteration, at least. Of that much of the wait the rank must be the cause.
_LEAST_SHARE, _SAME_RANK = 0.06, 0.85
# The CPU counts as late if the launches are by this part of the wait.
_LATE_LAUNCHES = 0.3
# Looks at the collectives in a row that must show the same rank, and the blocks in each.
_LOOKS, _BLOCKS = 2, 8
# Ranks look within this time of each other, and write what they saw a little later.
_TOGETHER_NS = 5_000_000_000


class _Wait(NamedTuple):
    """For whom the others waited in the collectives of one look, in seconds of an iteration."""

    rank: int  # index of the process; -1 for nobody
    wait_s: float = 0.0
    launch_s: float = 0.0  # by which this rank launched a collective later than the others, as a share of ``wait_s``
    iteration_s: float = 0.0
    begin_ns: int = 0
    end_ns: int = 0


class _State:
    def __init__(self) -> None:
        self.looks = 0  # of the lead, judged so far
        self.waits: list[_Wait] = []  # the last ones, for the same rank


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report once for each attempt: the first rank that the others waited for at _LOOKS looks in a row."""
    for group in recording.groups:
        if len(group.processes) > 1 and _GPU.name not in group.reported:
            yield from _check_group(group)


def _check_group(group: Group) -> Iterator[Annotation]:
    state, lead = group.get_state(_State, _GPU.name), group.lead
    for look in lead.events_named(events.COLLECTIVE_TIMES)[state.looks :]:
        known_ns = max(find_deadline(process, look.unix_ns + _TOGETHER_NS, 0) for process in group.processes)
        if known_ns > lead.recording.cursor_ns:
            return
        state.looks += 1
        wait = _find_wait(group, look)
        if state.waits and wait.rank != state.waits[-1].rank:
            state.waits.clear()
        if wait.rank >= 0:
            state.waits.append(wait)
        if len(state.waits) == _LOOKS:
            group.reported.add(_GPU.name)
            yield _build_finding(group, state.waits, known_ns)
            return


def _find_wait(group: Group, look: Event) -> _Wait:
    looks = [_find_look(process, look.unix_ns) for process in group.processes]
    found = [one for one in looks if one is not None]
    if len(found) < len(looks):
        return _Wait(-1)
    offsets = [process.source.offset_ns for process in group.processes]
    collectives = align_collectives([one.facts for one in found], [one.rank for one in group.processes], offsets)
    return (
        _measure_wait(group, collectives) if collectives is not None and len(collectives.numbers) >= _BLOCKS else _Wait(-1)
    )


def _find_look(process: Process, unix_ns: int) -> Event | None:
    """Return the look of a process that was nearest to a time."""
    near = [one for one in process.events_named(events.COLLECTIVE_TIMES) if abs(one.unix_ns - unix_ns) <= _TOGETHER_NS]
    return min(near, key=lambda one: abs(one.unix_ns - unix_ns), default=None)


def _measure_wait(group: Group, collectives: Collectives) -> _Wait:
    nobody = _Wait(-1)
    spent = collectives.spent_s
    slow = int(np.argmin(spent.sum(axis=1)))
    others = np.delete(spent, slow, axis=0).min(axis=0)
    # Per block: by how much the others were in its collectives for longer, and by how much another rank was the last one.
    waited, reverse = np.maximum(others - spent[slow], 0).sum(), np.maximum(spent[slow] - others, 0).sum()
    if waited + reverse <= 0 or waited < _SAME_RANK * (waited + reverse):
        return nobody
    begin_ns, end_ns = int(collectives.launched_ns.min()), int(collectives.launched_ns.max())
    rows = [process.steps_until(end_ns) for process in group.processes]
    rows = [steps[np.searchsorted(steps["end_unix_ns"], begin_ns) :] for steps in rows]
    if not all(map(len, rows)):
        return nobody
    iteration = compute_known_median(rows[0]["iteration_s"])
    per_iteration = collectives.count_per_second() * iteration / len(collectives.numbers)
    wait = float((waited - reverse) * per_iteration)
    # Work between the phases is another finding's.
    own = [compute_known_median(compute_own_seconds(steps)) for steps in rows]
    longer = own[slow] - float(np.median(np.delete(own, slow)))
    if not wait >= max(STALL_SECONDS, _LEAST_SHARE * iteration) or longer >= wait / 2:
        return nobody
    launched = _measure_late_launch(group, collectives, slow) * collectives.block * len(collectives.numbers) * per_iteration
    return _Wait(slow, min(wait, iteration), launched / wait, iteration, begin_ns, end_ns)


def _measure_late_launch(group: Group, collectives: Collectives, slow: int) -> float:
    """Return by how many seconds a rank launches a collective later than the others of its node; infinite without any."""
    host = group.processes[slow].host
    near = [index for index, one in enumerate(group.processes) if one.host == host and index != slow]
    if not near:
        return float("inf")  # clocks of nodes differ
    return float((collectives.launched_ns[slow] - collectives.launched_ns[near].min(axis=0)).mean()) / 1e9


def _build_finding(group: Group, waits: Sequence[_Wait], known_ns: int) -> Annotation:
    process = group.processes[waits[0].rank]
    wait, launch, iteration = (float(np.mean([one[part] for one in waits])) for part in (1, 2, 3))
    evidence = {"wait_s": wait, "iteration_s": iteration, "late_launches": launch if np.isfinite(launch) else None}
    return (_GPU if launch <= _LATE_LAUNCHES else _RANK).at(
        process,
        waits[0].begin_ns,
        waits[-1].end_ns,
        evidence,
        known_ns=known_ns,
        cost=wait / iteration,
        pid=process.source.pid,
        gpu=(process.gpu_key or ("", -1))[1],
    )
