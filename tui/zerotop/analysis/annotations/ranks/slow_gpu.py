"""The other ranks' GPUs wait for one rank where parameters are gathered, in all phases.

Under ZeRO-3 and FSDP all ranks' phases become longer alike, whoever is slow. Who it is shows in how long the streams that
compute wait for other streams: that of the slowest rank waits only for the transfers themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.causes.step_change import compute_own_seconds
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.annotations.support.lines.stack_lines import find_deadline
from zerotop.analysis.annotations.support.thresholds import BETWEEN_SECONDS
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.session.reader import Event
from zerotop_probe.recording import events

_GPU = FindingKind(
    name="slow_gpu",
    severity=Severity.WARNING,
    confidence=0.85,
    headline="The others wait for the GPU of rank {rank}, {wait_s:seconds} of each iteration",
    details=(
        "Their GPUs wait that much longer than this one for parameters that all ranks gather, while it computes without a"
        " break. An iteration takes {iteration_s:seconds}."
    ),
    advice="See whether this GPU has more to do, runs at lower clocks, or has another process on it.",
    fix="nvidia-smi -q -d CLOCK,PERFORMANCE,PIDS -i {gpu}",
)
_RANK = _GPU.with_changes(
    headline="The others wait for rank {rank}, {wait_s:seconds} of each iteration",
    details=(
        "Their GPUs wait that much longer than that of this rank for parameters that all ranks gather. That GPU has often"
        " done all that its CPU launched: the Python code of this rank may be slower. An iteration takes"
        " {iteration_s:seconds}."
    ),
    advice="See what only this rank does in forward and backward; if nothing, compare its cores with the others'.",
    fix="py-spy dump --pid {pid}",
)
# The others wait for this share of an iteration, at least. Two GPUs of a kind differ by 1 to 3 %.
_LEAST_SHARE = 0.06
# A GPU that had done all that was launched at this share of its waits is not what is slow.
_STARVED = 0.3
# Looks in a row that must show the same rank, and how long after the first rank's the last one's may come.
_LOOKS, _TOGETHER_NS = 2, 10_000_000_000


class _Wait(NamedTuple):
    """For whom the others waited in the steps of one look, in seconds of an iteration."""

    rank: int  # index of the process; -1 for nobody
    wait_s: float = 0.0
    iteration_s: float = 0.0
    starved: float = 0.0  # share of this rank's waits at which its GPU had done all that was launched
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
    for look in lead.events_named(events.STREAM_WAITS)[state.looks :]:
        looks = [_find_look(process, look.facts["first_step"]) for process in group.processes]
        found = [one for one in looks if one is not None]
        if len(found) == len(looks):
            known_ns = max(one.unix_ns for one in found)
        else:
            known_ns = max(find_deadline(process, look.unix_ns, _TOGETHER_NS) for process in group.processes)
            if known_ns > lead.recording.cursor_ns:
                return
        state.looks += 1
        wait = _measure_wait(group, found) if len(found) == len(looks) else _Wait(-1)
        if state.waits and wait.rank != state.waits[-1].rank:
            state.waits.clear()
        if wait.rank >= 0:
            state.waits.append(wait)
        if len(state.waits) == _LOOKS:
            group.reported.add(_GPU.name)
            yield _build_finding(group, state.waits, known_ns)
            return


def _find_look(process: Process, step: int) -> Event | None:
    """Return the look of a process that began with a step; None if there is none, or it is not whole."""
    for look in reversed(process.events_named(events.STREAM_WAITS)):
        if look.facts["first_step"] == step:
            lists = [look.facts[name] for name in ("waited_ns", "waits", "starved")]
            return look if lists[0] and len(set(map(len, lists))) == 1 else None
    return None


def _measure_wait(group: Group, looks: Sequence[Event]) -> _Wait:
    nobody = _Wait(-1)
    if len({len(look.facts["waited_ns"]) for look in looks}) > 1:
        return nobody
    waited = np.array([look.facts["waited_ns"] for look in looks]) / 1e9
    slow = int(np.argmin(waited.sum(axis=1)))
    first, count = int(looks[0].facts["first_step"]), waited.shape[1]
    rows = [process.steps[_select_steps(process, first, count)] for process in group.processes]
    if any(len(steps) < count for steps in rows):
        return nobody
    iteration = float(np.mean([steps["iteration_s"].mean() for steps in rows]))
    longer = np.delete(waited, slow, axis=0).min(axis=0) - waited[slow]
    wait = float(longer.mean())
    # Work between the phases is another finding's.
    own = [compute_known_median(compute_own_seconds(steps)) for steps in rows]
    own_longer = own[slow] - float(np.median(np.delete(own, slow)))
    is_slow = wait >= max(BETWEEN_SECONDS, _LEAST_SHARE * iteration) and np.median(longer) >= wait / 2
    if not is_slow or own_longer >= wait / 2:
        return nobody
    starved = sum(looks[slow].facts["starved"]) / max(1, sum(looks[slow].facts["waits"]))
    begin_ns, end_ns = int(rows[slow]["begin_unix_ns"][0]), int(rows[slow]["end_unix_ns"][-1])
    return _Wait(slow, wait, iteration, starved, begin_ns, end_ns)


def _select_steps(process: Process, first: int, count: int) -> slice:
    begin, end = np.searchsorted(process.steps["step"], [first, first + count])
    return slice(int(begin), int(end))


def _build_finding(group: Group, waits: Sequence[_Wait], known_ns: int) -> Annotation:
    process = group.processes[waits[0].rank]
    wait, iteration, starved = (float(np.mean([one[part] for one in waits])) for part in (1, 2, 3))
    return (_GPU if starved <= _STARVED else _RANK).at(
        process,
        waits[0].begin_ns,
        waits[-1].end_ns,
        {"wait_s": wait, "iteration_s": iteration, "starved_share": starved},
        known_ns=known_ns,
        cost=wait / iteration,
        pid=process.source.pid,
        gpu=(process.gpu_key or ("", -1))[1],
    )
