"""The double spike of an optimizer on the CPU where no probe says so: GPUs idle whenever the ranks' cores are busy, in turn.

Read from NVML's utilization, which looks back for 200 ms, and the ranks' processor time. Iterations shorter than a second do
not show in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Ints, Samples
from zerotop.analysis.annotations.support.thresholds import (
    SPIKE_SHARE,
    SPIKE_SIMILAR_SHARE,
    SPIKE_STEPS,
    UNPROBED_BUSY_PERCENT,
    UNPROBED_CORES,
    UNPROBED_IDLE_PERCENT,
    UNPROBED_MEMORY_BYTES,
    UNPROBED_TICKS,
)
from zerotop.analysis.formatting import format_count, format_percent, format_seconds
from zerotop.session.reader import Source

Floats = NDArray[np.float64]


class Stretch(NamedTuple):
    """Ticks in a row in which the ranks' cores were busy, or were not."""

    begin_ns: int  # of the tick before the first
    end_ns: int
    is_busy: bool
    cores: float  # their median
    utilization: float  # the GPUs', without the first moments, of which NVML still tells what was before


@dataclass
class _State:
    """How far a node's samples were read; the last ticks of a stretch that goes on, and the last stretches that are over."""

    process_counts: dict[Source, int] = field(default_factory=dict)
    gpu_counts: dict[Source, int] = field(default_factory=dict)
    last_ns: int = 0
    ticks: list[tuple[int, float, float]] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    utilization: float = float("nan")
    is_reported: bool = False


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """At most one finding for each node, from the time before a rank on it told its phases."""
    told: dict[str, int] = {}
    for process in facts.processes:
        host, born_ns = process.source.host, process.source.created_ns
        told[host] = min(born_ns, told.get(host, born_ns))
    for host in facts.sampled_hosts:
        yield PAUSE
        seen = facts.get_state(_State, host)
        if not seen.is_reported:
            yield from _check_host(facts, host, seen, told.get(host))


def _check_host(facts: Evidence, host: str, state: _State, until_ns: int | None) -> Iterator[Annotation]:
    processes = facts.get_records("processes", host).read_new(state.process_counts)
    if until_ns is not None and len(processes):
        processes = processes.select_rows(processes.times < until_ns)
    gpus = facts.get_records("gpus", host).read_new(state.gpu_counts)
    processes = processes.select_rows(processes.rows["rank"] >= 0) if len(processes) else processes
    if not len(processes):
        return
    times, where, count = np.unique(processes.times, return_inverse=True, return_counts=True)
    cores = np.bincount(where, np.nan_to_num(processes.rows["cores_used"]))
    for time_ns, used, ranks, works in zip(
        times.tolist(), cores.tolist(), count.tolist(), _measure_utilization(gpus, times, state).tolist(), strict=True
    ):
        busy = used >= UNPROBED_CORES * ranks
        if state.ticks and busy != (state.ticks[-1][1] >= UNPROBED_CORES * ranks):
            _close_stretch(state, busy=not busy)
            found = _find_cycle(state.stretches)
            if found is not None:
                state.is_reported = True
                yield _build_finding(facts, host, found, time_ns, processes.rows["rank"][processes.times == time_ns])
                return
        state.ticks.append((time_ns, used, works))


def _measure_utilization(gpus: Samples, times: Ints, state: _State) -> Floats:
    """The mean of the GPUs in use at each of some moments: as NVML said last before."""
    if len(gpus):
        gpus = gpus.select_rows(gpus.rows["used_bytes"] >= UNPROBED_MEMORY_BYTES)
    if not len(gpus):
        return np.full(len(times), state.utilization)
    ticks, where, count = np.unique(gpus.times, return_inverse=True, return_counts=True)
    means = np.append(np.bincount(where, gpus.rows["utilization_percent"]) / count, state.utilization)
    found: Floats = means[np.searchsorted(ticks, times, "right") - 1]
    state.utilization = float(means[-2])
    return found


def _close_stretch(state: _State, *, busy: bool) -> None:
    """Ends the stretch that went on."""
    times, cores, works = (list(column) for column in zip(*state.ticks, strict=True))
    late = works[UNPROBED_TICKS:] or [float("nan")]
    begin_ns = state.last_ns or times[0]
    state.stretches.append(Stretch(begin_ns, times[-1], busy, float(np.median(cores)), float(np.median(late))))
    del state.stretches[: -2 * SPIKE_STEPS]
    state.last_ns, state.ticks = times[-1], []


def _find_cycle(stretches: list[Stretch]) -> list[Stretch] | None:
    """The last stretches, if SPIKE_STEPS gaps of the GPUs and the work between them are alike."""
    last = stretches[1 - 2 * SPIKE_STEPS :]
    gaps, works = last[::2], last[1::2]
    if len(last) < 2 * SPIKE_STEPS - 1 or not gaps[0].is_busy:
        return None
    # A comparison with what is not known is false.
    idle = all(gap.utilization <= UNPROBED_IDLE_PERCENT for gap in gaps)
    busy = all(work.utilization >= UNPROBED_BUSY_PERCENT for work in works)
    return (
        last if idle and busy and _is_alike(gaps) and _is_alike(works) and _compute_gap_share(last) >= SPIKE_SHARE else None
    )


def _is_alike(stretches: list[Stretch]) -> bool:
    lengths = np.array([stretch.end_ns - stretch.begin_ns for stretch in stretches])
    middle = np.median(lengths)
    return bool((np.abs(lengths - middle) <= SPIKE_SIMILAR_SHARE * middle).all())


def _measure_seconds(stretches: list[Stretch]) -> float:
    return float(np.median([stretch.end_ns - stretch.begin_ns for stretch in stretches])) / 1e9


def _compute_gap_share(cycle: list[Stretch]) -> float:
    gap = _measure_seconds(cycle[::2])
    return gap / (gap + _measure_seconds(cycle[1::2]))


def _build_finding(facts: Evidence, host: str, cycle: list[Stretch], known_ns: int, ranks: Ints) -> Annotation:
    gap, work, share = _measure_seconds(cycle[::2]), _measure_seconds(cycle[1::2]), _compute_gap_share(cycle)
    cores = float(np.median([stretch.cores for stretch in cycle[::2]]))
    least = float(np.median([stretch.cores for stretch in cycle[1::2]]))
    evidence = {"gap_s": gap, "iteration_s": gap + work, "share": share, "cores_used": cores, "cores_else": least}
    evidence |= {"processes": float(len(ranks))}
    of = facts.count_cores(host)
    evidence |= {"host_cores": float(of)} if of else {}
    return Annotation(
        name="double_spike",
        begin_ns=cycle[0].begin_ns,
        end_ns=cycle[-1].end_ns,
        known_ns=known_ns,
        step=None,
        ranks=tuple(sorted(int(rank) for rank in ranks)),
        severity=Severity.WARNING,
        confidence=0.7,
        sentence=(
            f"Every {format_seconds(gap + work)} the GPUs idle for {format_seconds(gap)} ({format_percent(share)}) while {cores:.0f}"
            f"{f' of {of}' if of else ''} cores are busy in {format_count(len(ranks), 'process')}, and {least:.0f} in between: the"
            " pattern of an optimizer on the CPU, seen from outside."
        ),
        advice='Set "offload_optimizer.device" to "none" where that fits, or raise "gradient_accumulation_steps".',
        evidence=evidence,
    )
