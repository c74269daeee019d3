"""A rank computes longer than the others, which wait for it in collectives: it is slow, or gets larger batches.

Waiting hides the difference in backward and step. It shows in the forward if no rank gathers parameters there (ZeRO up to
stage 2, DDP), measured on the GPU if there is one. A forward may begin with a broadcast, in which ranks wait for one that is
late for another reason. So the time before the forward counts too: in a rank that only waits, the sum of both is no longer
than in the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.causes.step_change import compute_own_seconds
from zerotop.analysis.findings.support.links import Kinds, is_simultaneous
from zerotop.analysis.findings.support.steps.contests import are_equal, find_slow_rounds
from zerotop.analysis.findings.support.steps.growing_batches import UNKNOWN_SIZES, get_batch_sizes, name_size
from zerotop.analysis.findings.support.thresholds import STALL_SECONDS
from zerotop.analysis.steps.sampled_parts import measure_part
from zerotop.recording.moments.records import Records
from zerotop.recording.samples import Floats, Ints, Rows, read_column
from zerotop_probe.recording.tables import PHASE_CODE

_KIND = FindingKind(
    name="slow_forward",
    confidence=0.85,
    headline="Rank {rank} computes slowly: its forward takes {forward_s:seconds}, the others' {others_s:seconds}",
    details=(
        "Both are {clock}[, for batches with as many {same}]. The others wait for it: an iteration takes"
        " {iteration_s:seconds}[. The SM clock of its GPU is {sm_clock_mhz:.0f} MHz, that of the others"
        " {others_clock_mhz:.0f}][. Its threads wait for {waiting_cores:.1f} cores, those of the others for"
        " {others_waiting:.1f}]."
    ),
    advice="Compare clocks, other processes and the binding to cores with those of the other ranks.",
    fix="nvidia-smi -q -d CLOCK,PERFORMANCE",
)
_ON_CPU = _KIND.with_changes(
    advice="Compare other processes and the binding to cores with those of the other ranks.", fix="taskset -pc {pid}"
)
_UNEVEN = FindingKind(
    name="uneven_batches",
    confidence=0.9,
    headline="Rank {rank} gets {times:.1f} times the {unit} of {others}, which {wait} for it",
    details=(
        "In steps {first_step} to {last_step} its batches have {size:,.0f} {unit}, those of {others} {others_size:,.0f}"
        " (medians). Its forward takes {forward_s:seconds}, that of {others} {others_s:seconds}, {clock}; an iteration takes"
        " {iteration_s:seconds}.[ They wait as long a part of its backward, {backward_s:seconds}, too.]"
    ),
    advice=(
        "Deal examples of similar length out to the ranks in turn. Where they are sorted or grouped by length, do so within"
        " each group, instead of giving each rank one part of the data."
    ),
    fix="{dealing}",
    repeats=(Kinds(is_simultaneous, "iteration_shift"),),
)
# Its forward takes this many times that of the second slowest rank; clean runs on one node stay below 1.2.
SLOW_TIMES = 1.3
# The share of an iteration that it loses in forward alone. Backward, which is longer, loses at least as much.
SLOW_SHARE = 0.08
# Steps in a row that show it.
SLOW_STEPS = 10
# Ranks with the same work have batches that differ by less than this, in tokens or rows.
_SAME_SIZE = 0.02
# The batches of one that has more work are so many times as large as any others.
_LARGER_TIMES = 1.2
# A clock below this share of the others', and cores waited for beyond theirs, may be the reason.
_LOWER_CLOCK, _WAITING_CORES = 0.95, 0.2


class _Forwards(NamedTuple):
    """The forwards of a rank's steps in order: their seconds, and when these were known (unix nanoseconds)."""

    steps: Ints
    seconds: Floats
    known_ns: Ints

    def select(self, which: NDArray[Any]) -> _Forwards:
        """Return the entries that a mask or indices select."""
        return _Forwards(self.steps[which], self.seconds[which], self.known_ns[which])


_NONE = _Forwards(np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64))


class _Step(NamedTuple):
    """A step that was examined."""

    number: int
    known_ns: int
    slow: int  # index of the process that was slow; -1 for none
    larger: int  # index of the process that had more to do and took longer; -1 for none
    longest_s: float  # forward; NaN in a step that was not recorded
    second_s: float
    share: float  # of the iteration, by which the longest is longer


@in_each_attempt(kinds=2)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report once for each attempt and kind: the first rank that took longest in SLOW_STEPS steps in a row."""
    if len(window.subject.processes) > 1 and _computes_alone(window.subject):
        examined = window.results(_examine_steps(window), SLOW_STEPS - 1)
        found = find_slow_rounds([one.slow for one in examined], SLOW_STEPS)
        if found is not None:
            yield _build_finding(window.subject, examined[found])
        uneven = _find_uneven(examined)
        if uneven is not None:
            yield _build_uneven(window.subject, uneven)


def _find_uneven(examined: Sequence[_Step]) -> Sequence[_Step] | None:
    """Return the first SLOW_STEPS in a row in which the same rank had more to do, and took notably longer for it."""
    for begin in range(len(examined) - SLOW_STEPS + 1):
        steps = examined[begin : begin + SLOW_STEPS]
        ranks = {one.larger for one in steps}
        if len(ranks) == 1 and min(ranks) >= 0 and float(np.median([one.share for one in steps])) >= SLOW_SHARE:
            return steps
    return None


def _computes_alone(group: Group) -> bool:
    """Whether ranks hold all parameters in the forward, and need no others."""
    engine = group.engine
    if group.has_stages:
        return False
    stage = engine.zero_stage
    return stage in (0, 1, 2) if stage is not None else engine.parallelism == "DDP"


def _examine_steps(window: SearchWindow[Group]) -> Iterator[_Step]:
    """Yield the steps that all ranks have finished now: they write their times independently, and some much later."""
    group = window.subject
    forwards: dict[Process, _Forwards] = window.keep(dict)  # of steps that not all ranks have finished yet
    for process in group.processes:
        fresh = (_read_device_forwards if process.is_on_gpu else _read_forwards)(window, process)
        forwards[process] = _join_forwards(forwards.get(process, _NONE), fresh)
    steps = reduce(np.intersect1d, [forwards[process].steps for process in group.processes])
    if len(steps):
        both = [forwards[process].select(np.searchsorted(forwards[process].steps, steps)) for process in group.processes]
        known_ns = np.max([one.known_ns for one in both], axis=0)
        slowest = _find_slowest(group, steps, np.stack([one.seconds for one in both]))
        yield from map(_Step, *(column.tolist() for column in (steps, known_ns, *slowest)))
        forwards.update({process: each.select(each.steps > steps[-1]) for process, each in forwards.items()})


def _join_forwards(before: _Forwards, after: _Forwards) -> _Forwards:
    return _Forwards(*(np.concatenate(parts) for parts in zip(before, after, strict=True)))


def _read_forwards(window: SearchWindow[Group], process: Process) -> _Forwards:
    rows = process.aligned_steps[window.steps(process.aligned_steps, of=process)]
    rows = rows[~rows["counted"]]
    return _Forwards(rows["step"].astype(np.int64), rows["forward_s"].astype(np.float64), rows["end_unix_ns"])


def _read_device_forwards(window: SearchWindow[Group], process: Process) -> _Forwards:
    """Return the device times of whole steps. Those of one step are written one by one, some after its end."""
    samples = window.records(process.records("device_times"))
    if not len(samples):
        return _NONE
    rows = samples.rows
    samples = samples.select((rows["phase"] == PHASE_CODE["forward"]) & (rows["depth"] == 0) & (rows["engine"] == 0))
    if not len(samples):
        return _NONE
    fresh = _Forwards(samples.rows["step"].astype(np.int64), samples.rows["device_ns"] / 1e9, samples.times)
    unfinished: list[_Forwards] = window.keep(list, process)  # of the last step, to which more may come
    each = _join_forwards(unfinished.pop() if unfinished else _NONE, fresh)
    steps, firsts, indices = np.unique(each.steps, return_index=True, return_inverse=True)
    unfinished.append(each.select(each.steps == steps[-1]))
    seconds: Floats = np.bincount(indices, each.seconds, len(steps)).astype(np.float64)
    # A step is whole when the next one has a time.
    return _Forwards(steps[:-1], seconds[:-1], each.known_ns[firsts[1:]])


def _select_rows(process: Process, steps: Ints) -> Rows:
    rows = process.aligned_steps
    return rows[np.minimum(np.searchsorted(rows["step"], steps), len(rows) - 1)]


def _measure_iterations(rows: Sequence[Rows]) -> Floats:
    longest: Floats = np.max([one["iteration_s"] for one in rows], axis=0)
    return longest


def _find_slowest(group: Group, steps: Ints, forward: Floats) -> tuple[Ints, Ints, Floats, Floats, Floats]:
    """Return the fields of _Step from ``slow`` on, each with a value for each step."""
    rows = [_select_rows(process, steps) for process in group.processes]
    sizes, total = (
        np.stack([get_batch_sizes(one) for one in rows]),
        forward + np.stack([compute_own_seconds(one) for one in rows]),
    )
    iterations = _measure_iterations(rows)
    least = np.maximum(STALL_SECONDS, SLOW_SHARE * iterations)
    index, (second, first) = np.argmax(forward, axis=0), np.partition(forward, (-2, -1), axis=0)[-2:]
    total_second, total_first = np.partition(total, (-2, -1), axis=0)[-2:]
    is_last = np.argmax(total, axis=0) == index
    is_slow = (first >= SLOW_TIMES * second) & (first - second >= least) & is_last & (total_first - total_second >= least)
    is_slow &= are_equal(sizes, _SAME_SIZE)
    size_second, size_first = np.partition(sizes, (-2, -1), axis=0)[-2:]
    has_more = (
        is_last & (np.argmax(sizes, axis=0) == index) & (size_first >= _LARGER_TIMES * size_second) & (size_second > 0)
    )
    return np.where(is_slow, index, -1), np.where(has_more, index, -1), first, second, (first - second) / iterations


def _build_finding(group: Group, examined: Sequence[_Step]) -> Finding:
    process, each = group.processes[examined[0].slow], _select_steps(group, examined)
    rows, others = each[process], [other for other in group.processes if other is not process]
    kind, same = _KIND if process.is_on_gpu else _ON_CPU, name_size(np.concatenate(list(each.values())))
    if same is None:
        kind = kind.with_changes(advice=f"{UNKNOWN_SIZES} {kind.advice}")
    machine = _compare_machine(process, others, (int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])))
    return _build(kind, process, each, examined, machine, pid=process.source.pid, same=same)


def _build_uneven(group: Group, examined: Sequence[_Step]) -> Finding:
    process, each = group.processes[examined[0].larger], _select_steps(group, examined)
    sizes = {one: float(np.median(get_batch_sizes(rows))) for one, rows in each.items()}
    others_size = float(np.median([size for one, size in sizes.items() if one is not process]))
    is_pair = len(group.processes) == 2
    evidence, backward_times = {"size": sizes[process]}, 0.0
    if not process.is_on_gpu:  # on the host it is not known how long a GPU works
        forward_s, backward_s = (float(np.nanmedian(each[process][name])) for name in ("forward_s", "backward_s"))
        if backward_s > 0:
            evidence["backward_s"], backward_times = backward_s, backward_s / forward_s
    return _build(
        _UNEVEN,
        process,
        each,
        examined,
        evidence,
        (1 + backward_times) * (1 - 1 / len(group.processes)),  # dealt out evenly, it and the others would take the mean
        times=sizes[process] / others_size,
        others="the other rank" if is_pair else "the others",
        wait="waits" if is_pair else "wait",
        others_size=others_size,
        unit=name_size(np.concatenate(list(each.values()))) or "rows",
        first_step=examined[0].number,
        last_step=examined[-1].number,
        dealing="indices = indices[rank::world_size]",
    )


def _select_steps(group: Group, examined: Sequence[_Step]) -> dict[Process, Rows]:
    steps = np.array([one.number for one in examined])
    return {process: _select_rows(process, steps) for process in group.processes}


def _build(
    kind: FindingKind,
    process: Process,
    each: dict[Process, Rows],
    examined: Sequence[_Step],
    evidence: dict[str, float],
    loss_times: float = 1.0,
    **values: Any,
) -> Finding:
    """Return a finding about the rank that takes longest, with the times that both kinds tell.

    An iteration loses ``loss_times`` of what its forward takes longer.
    """
    iterations, numbers = _measure_iterations(list(each.values())), np.arange(examined[0].number, examined[-1].number + 1)
    every = _measure_iterations([_select_rows(one, numbers) for one in each])
    longest, second = (
        measure_part(np.array(seconds), iterations, every)
        for seconds in zip(*((one.longest_s, one.second_s) for one in examined), strict=True)
    )
    return kind.at_steps(
        process,
        each[process],
        {"forward_s": longest.seconds, "others_s": second.seconds, "iteration_s": longest.iteration_s, **evidence},
        known_ns=max(one.known_ns for one in examined),
        cost=loss_times * (longest.share - second.share),
        clock="measured on the GPU" if process.is_on_gpu else "measured on the host",
        **values,
    )


def _compare_machine(process: Process, others: list[Process], window: tuple[int, int]) -> dict[str, float]:
    """Return the GPU clocks and the cores that threads wait for, if they differ enough to be the reason."""
    clocks = [_measure_samples(one.gpu_samples, "sm_clock_mhz", window) for one in (process, *others)]
    waits = [_measure_samples(one.host_samples, "waiting_cores", window) for one in (process, *others)]
    clock, others_clock = clocks[0], float(np.median(clocks[1:]))
    wait, others_wait = waits[0], float(np.median(waits[1:]))
    found: dict[str, float] = {}
    # Unknown figures are NaN, which compares false.
    if clock < _LOWER_CLOCK * others_clock:
        found |= {"sm_clock_mhz": clock, "others_clock_mhz": others_clock}
    if wait - others_wait > _WAITING_CORES:
        found |= {"waiting_cores": wait, "others_waiting": others_wait}
    return found


def _measure_samples(records: Records, column: str, window: tuple[int, int]) -> float:
    samples = records.read_window(*window)
    values = read_column(samples.rows, column) if len(samples) else np.empty(0)
    values = values[~np.isnan(values)]
    return float(np.mean(values)) if len(values) else float("nan")
