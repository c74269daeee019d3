"""The other ranks' GPUs wait for one rank where parameters are gathered, in all phases.

Under ZeRO-3 and FSDP all ranks' iterations become longer alike, whoever is slow. Two times of the GPUs show who it is. The
streams that compute wait for those that gather: the slowest rank's waits only for the transfers. And what a forward takes
without these waits is a rank's own. Each says how much the others wait at least, for gathers may run far ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.causes.step_change import compute_own_seconds, get_batch_sizes
from zerotop.analysis.annotations.support.evidence import Evidence, Floats, Group, Process, Rows
from zerotop.analysis.annotations.support.lines.stack_lines import find_deadline
from zerotop.analysis.annotations.support.thread_use import gathers_parameters
from zerotop.analysis.annotations.support.thresholds import BETWEEN_SECONDS
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.session.reader import Event
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import PHASE_CODE

_GPU = FindingKind(
    name="slow_gpu",
    severity=Severity.WARNING,
    confidence=0.85,
    headline="The others wait for the GPU of rank {rank}, {wait_s:seconds} or more of each iteration",
    details=(
        "By its own time it computes for longer, and theirs wait where all ranks gather parameters. An iteration takes"
        " {iteration_s:seconds}."
    ),
    advice="See whether this GPU has more to do, runs at lower clocks, or has another process on it.",
    fix="nvidia-smi -q -d CLOCK,PERFORMANCE,PIDS[ -i {gpu}]",
)
_RANK = _GPU.with_changes(
    headline="The others wait for rank {rank}, {wait_s:seconds} or more of each iteration",
    details=(
        "Its GPU takes longer, and has often done all that its CPU launched: its Python code is slower. The others' GPUs"
        " wait where all ranks gather parameters. An iteration takes {iteration_s:seconds}."
    ),
    advice="See what only this rank does in forward and backward; if nothing, compare its cores with the others'.",
    fix="py-spy dump --pid {pid}",
)
# The others wait for this share of an iteration, at least. On two H200s that did the same it was 0.4 %.
_LEAST_SHARE = 0.03
# A GPU that had done all that was launched at this share of its waits has too little to do. Of busy ones it was 4 %.
_STARVED = 0.12
# Where GPUs have too little to do, that of the slow rank is idle at this much more of its waits.
_MORE_STARVED = 0.08
# Looks in a row that must show the same rank, and how long after the first rank's the last one's may come.
_LOOKS, _TOGETHER_NS = 2, 10_000_000_000
# Forwards count from so long before the steps of a look (ns): few steps have a device time.
_BEFORE_NS = 20_000_000_000
# Batches of ranks that have the same to do differ by less.
_SAME_SIZE = 0.05


class _Look(NamedTuple):
    """What a process measured in the same steps as the others, in seconds of a step."""

    rows: Rows  # of these steps (STEP_DTYPE)
    waited: Floats  # of its stream, in each step
    starved: float  # share of the waits at which its GPU had done all that was launched
    forward_s: float  # the GPU's time in a forward, NaN if unknown


class _Wait(NamedTuple):
    """For whom the others waited in the steps of one look, in seconds of an iteration."""

    rank: int  # index of the process; -1 for nobody
    wait_s: float = 0.0
    iteration_s: float = 0.0
    starved: float = 0.0
    begin_ns: int = 0
    end_ns: int = 0


_NOBODY = _Wait(-1)


class _State:
    def __init__(self) -> None:
        self.looks = 0  # of the lead, read so far
        self.waits: list[_Wait] = []  # the last ones, for the same rank


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report once for each attempt: the first rank that the others waited for at _LOOKS looks in a row."""
    for group in recording.groups:
        if len(group.processes) > 1 and _GPU.name not in group.reported and gathers_parameters(group):
            yield from _check_group(group)


def _check_group(group: Group) -> Iterator[Annotation]:
    state, lead = group.get_state(_State, _GPU.name), group.lead
    for event in lead.events_named(events.STREAM_WAITS)[state.looks :]:
        each = [_find_event(process, event.facts["first_step"]) for process in group.processes]
        found = [one for one in each if one is not None]
        if len(found) < len(each):
            deadlines = [find_deadline(process, event.unix_ns, _TOGETHER_NS) for process in group.processes]
            if max(deadlines) > lead.recording.cursor_ns:
                return
        state.looks += 1
        # Ranks of different pace share only some of their looks.
        if len(found) == len(each):
            yield from _add_wait(group, state, _measure_wait(group, found), max(one.unix_ns for one in found))
        if _GPU.name in group.reported:
            return


def _add_wait(group: Group, state: _State, wait: _Wait, known_ns: int) -> Iterator[Annotation]:
    if state.waits and wait.rank != state.waits[-1].rank:
        state.waits.clear()
    if wait.rank >= 0:
        state.waits.append(wait)
    if len(state.waits) == _LOOKS:
        group.reported.add(_GPU.name)
        yield _build_finding(group, state.waits, known_ns)


def _find_event(process: Process, step: int) -> Event | None:
    """Return what a process measured from a step on; None if there is none, or it is not whole."""
    for event in reversed(process.events_named(events.STREAM_WAITS)):
        if event.facts["first_step"] == step:
            lists = [event.facts[name] for name in ("waited_ns", "waits", "starved")]
            return event if lists[0] and len(set(map(len, lists))) == 1 else None
    return None


def _measure_wait(group: Group, found: Sequence[Event]) -> _Wait:
    looks = [_read_look(process, event) for process, event in zip(group.processes, found, strict=True)]
    if len({len(look.waited) for look in looks}) > 1 or any(len(look.rows) < len(look.waited) for look in looks):
        return _NOBODY
    if not _have_same_batches(looks):
        return _NOBODY
    slow, wait = max(_compare_forwards(looks), _compare_waits(looks), key=lambda one: one[1])
    iteration = float(np.mean([look.rows["iteration_s"].mean() for look in looks]))
    starved = looks[slow].starved
    is_by_chance = starved > _STARVED and starved < _MORE_STARVED + max(
        look.starved for index, look in enumerate(looks) if index != slow
    )
    # Work between the phases is another finding's.
    own = [compute_known_median(compute_own_seconds(look.rows)) for look in looks]
    own_longer = own[slow] - float(np.median(np.delete(own, slow)))
    if not wait >= max(BETWEEN_SECONDS, _LEAST_SHARE * iteration) or is_by_chance or own_longer >= wait / 2:
        return _NOBODY
    rows = looks[slow].rows
    return _Wait(slow, wait, iteration, starved, int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]))


def _read_look(process: Process, event: Event) -> _Look:
    first, waited = event.facts["first_step"], np.array(event.facts["waited_ns"]) / 1e9
    steps = process.steps
    begin, end = np.searchsorted(steps["step"], [first, first + len(waited)])
    rows = steps[int(begin) : int(end)]
    starved = sum(event.facts["starved"]) / max(1, sum(event.facts["waits"]))
    return _Look(rows, waited, starved, _measure_forward(process, rows) if len(rows) else float("nan"))


def _measure_forward(process: Process, rows: Rows) -> float:
    """Return how long the GPU takes for the forwards of a step: the median of the last steps that have a device time."""
    samples = process.device_times.read_window(int(rows["begin_unix_ns"][0]) - _BEFORE_NS, int(rows["end_unix_ns"][-1]))
    if not len(samples):
        return float("nan")
    found = samples.rows
    found = found[(found["phase"] == PHASE_CODE["forward"]) & (found["depth"] == 0) & (found["engine"] == 0)]
    _, indices = np.unique(found["step"], return_inverse=True)
    return (
        compute_known_median(np.bincount(indices, found["device_ns"] / 1e9).astype(np.float64))
        if len(found)
        else float("nan")
    )


def _have_same_batches(looks: Sequence[_Look]) -> bool:
    sizes = np.array([float(np.nansum(get_batch_sizes(look.rows))) for look in looks])
    return bool(sizes.max() - sizes.min() <= _SAME_SIZE * sizes.max())


def _compare_forwards(looks: Sequence[_Look]) -> tuple[int, float]:
    """Return the index of the rank that computes longest in a forward, and by how much more than any other one, at least."""
    forwards = np.array([look.forward_s for look in looks])
    own = forwards - np.array([float(look.waited.mean()) for look in looks])
    slow = int(np.argmax(own))
    longer = float(own[slow] - np.delete(forwards, slow).max())
    return slow, longer if np.isfinite(longer) else 0.0


def _compare_waits(looks: Sequence[_Look]) -> tuple[int, float]:
    """Return the index of the rank that waits least, and how much longer the others wait, in most of the steps."""
    waited = np.array([look.waited for look in looks])
    slow = int(np.argmin(waited.sum(axis=1)))
    longer = np.delete(waited, slow, axis=0).min(axis=0) - waited[slow]
    return slow, float(min(longer.mean(), 2 * np.median(longer)))


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
        gpu=process.gpu_key[1] if process.gpu_key is not None else None,
    )
