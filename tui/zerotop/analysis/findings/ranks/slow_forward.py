"""A rank computes more slowly than the others, which wait for it in collectives: its GPU or its cores are slow.

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

from zerotop.analysis.findings.support.causes.step_change import compute_own_seconds, get_batch_sizes
from zerotop.analysis.findings.support.evidence import Floats, Group, Ints, Process, Records, Rows
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.steps.contests import are_equal, find_slow_rounds
from zerotop.analysis.findings.support.thresholds import STALL_SECONDS
from zerotop.analysis.findings.support.window import SearchWindow, in_each_attempt
from zerotop.recording.samples import read_column
from zerotop_probe.recording.tables import PHASE_CODE

_KIND = FindingKind(
    name="slow_forward",
    severity=Severity.WARNING,
    confidence=0.85,
    headline="Rank {rank} computes slowly: its forward takes {forward_s:seconds}, the others' {others_s:seconds}",
    details=(
        "Both are {clock}, for batches of the same size. The others wait for it: an iteration takes"
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
# Its forward takes this many times that of the second slowest rank; clean runs on one node stay below 1.2.
SLOW_TIMES = 1.3
# The share of an iteration that it loses in forward alone. Backward, which is longer, loses at least as much.
SLOW_SHARE = 0.08
# Steps in a row that show it.
SLOW_STEPS = 10
# Ranks with the same work have batches that differ by less than this, in tokens or rows.
_SAME_SIZE = 0.02
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


class _State:
    """Forwards of steps that other ranks have not finished: ranks write their times independently, and some much later."""

    def __init__(self) -> None:
        self.forwards: dict[int, _Forwards] = {}  # by rank; those of steps that not all ranks have finished yet
        self.unfinished: dict[int, _Forwards] = {}  # device times of each rank's last step, to which more may come
        # The last steps that were examined: number, when known, index of the process that was slow (-1 for none), the
        # longest forward, and the second longest (ns).
        self.examined: NDArray[np.int64] = np.empty((5, 0), np.int64)


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report once for each attempt: the first rank that was slowest in SLOW_STEPS steps in a row."""
    if len(window.subject.processes) > 1 and _computes_alone(window.subject):
        yield from _check_group(window.subject)


def _computes_alone(group: Group) -> bool:
    """Whether ranks hold all parameters in the forward, and need no others."""
    engine = group.engine
    if group.has_stages:
        return False
    stage = engine.zero_stage
    return stage in (0, 1, 2) if stage is not None else engine.parallelism == "DDP"


def _check_group(group: Group) -> Iterator[Finding]:
    state = group.get_state(_State, _KIND.name)
    for process in group.processes:
        fresh = _read_device_forwards(process, state) if process.is_on_gpu else _read_forwards(process)
        state.forwards[process.rank] = _join_forwards(state.forwards.get(process.rank, _NONE), fresh)
    read = [state.forwards[process.rank] for process in group.processes]
    steps = reduce(np.intersect1d, [one.steps for one in read])
    if not len(steps):
        return
    for process, each in zip(group.processes, read, strict=True):
        state.forwards[process.rank] = each.select(each.steps > steps[-1])
    both = [one.select(np.searchsorted(one.steps, steps)) for one in read]
    known_ns = np.max([one.known_ns for one in both], axis=0)
    slowest = _find_slowest(group, steps, np.stack([one.seconds for one in both]))
    examined = np.concatenate([state.examined, np.stack([steps, known_ns, *slowest])], axis=1)
    state.examined = examined[:, 1 - SLOW_STEPS :]
    found = find_slow_rounds(examined[2], SLOW_STEPS)
    if found is not None:
        yield _build_finding(group, examined[:, found])


def _join_forwards(before: _Forwards, after: _Forwards) -> _Forwards:
    return _Forwards(*(np.concatenate(parts) for parts in zip(before, after, strict=True)))


def _read_forwards(process: Process) -> _Forwards:
    window = process.next_steps(len(process.aligned_steps), _KIND.name)
    rows = process.aligned_steps[window] if window is not None else process.aligned_steps[:0]
    rows = rows[~rows["counted"]]
    return _Forwards(rows["step"].astype(np.int64), rows["forward_s"].astype(np.float64), rows["end_unix_ns"])


def _read_device_forwards(process: Process, state: _State) -> _Forwards:
    """Return the device times of whole steps. Those of one step are written one by one, some after its end."""
    samples = process.read_new(process.records("device_times"), _KIND.name)
    if not len(samples):
        return _NONE
    rows = samples.rows
    samples = samples.select((rows["phase"] == PHASE_CODE["forward"]) & (rows["depth"] == 0) & (rows["engine"] == 0))
    if not len(samples):
        return _NONE
    fresh = _Forwards(samples.rows["step"].astype(np.int64), samples.rows["device_ns"] / 1e9, samples.times)
    each = _join_forwards(state.unfinished.get(process.rank, _NONE), fresh)
    steps, firsts, indices = np.unique(each.steps, return_index=True, return_inverse=True)
    state.unfinished[process.rank] = each.select(each.steps == steps[-1])
    seconds: Floats = np.bincount(indices, each.seconds, len(steps)).astype(np.float64)
    # A step is whole when the next one has a time.
    return _Forwards(steps[:-1], seconds[:-1], each.known_ns[firsts[1:]])


def _select_rows(process: Process, steps: Ints) -> Rows:
    rows = process.aligned_steps
    return rows[np.minimum(np.searchsorted(rows["step"], steps), len(rows) - 1)]


def _measure_iterations(rows: Sequence[Rows]) -> Floats:
    longest: Floats = np.max([one["iteration_s"] for one in rows], axis=0)
    return longest


def _find_slowest(group: Group, steps: Ints, forward: Floats) -> tuple[Ints, Ints, Ints]:
    """Return the index of the slow process in each step (-1: none), and the two longest forwards (ns)."""
    rows = [_select_rows(process, steps) for process in group.processes]
    sizes, total = (
        np.stack([get_batch_sizes(one) for one in rows]),
        forward + np.stack([compute_own_seconds(one) for one in rows]),
    )
    least = np.maximum(STALL_SECONDS, SLOW_SHARE * _measure_iterations(rows))
    index, (second, first) = np.argmax(forward, axis=0), np.partition(forward, (-2, -1), axis=0)[-2:]
    total_second, total_first = np.partition(total, (-2, -1), axis=0)[-2:]
    is_slow = (first >= SLOW_TIMES * second) & (first - second >= least)
    is_slow &= (np.argmax(total, axis=0) == index) & (total_first - total_second >= least)
    is_slow &= are_equal(sizes, _SAME_SIZE)
    # The forwards of a step that was not recorded are NaN.
    first_ns, second_ns = ((np.nan_to_num(one) * 1e9).astype(np.int64) for one in (first, second))
    return np.where(is_slow, index, -1), first_ns, second_ns


def _build_finding(group: Group, examined: NDArray[np.int64]) -> Finding:
    steps, known_ns, (index, *_), forward_ns, others_ns = examined
    process = group.processes[index]
    rows, others = _select_rows(process, steps), [other for other in group.processes if other is not process]
    forward, slowest = float(np.median(forward_ns)) / 1e9, float(np.median(others_ns)) / 1e9
    iteration = float(np.median(_measure_iterations([_select_rows(one, steps) for one in group.processes])))
    window = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    machine = _compare_machine(process, others, window)
    return (_KIND if process.is_on_gpu else _ON_CPU).at_steps(
        process,
        rows,
        {"forward_s": forward, "others_s": slowest, "iteration_s": iteration, **machine},
        known_ns=int(known_ns.max()),
        cost=(forward - slowest) / iteration,
        clock="measured on the GPU" if process.is_on_gpu else "measured on the host",
        pid=process.source.pid,
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
