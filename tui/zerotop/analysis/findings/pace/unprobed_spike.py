"""The double spike of an optimizer on the CPU, without a probe: GPUs idle whenever the ranks' cores are busy.

Read from NVML's utilization, an average over the last 200 ms, and the ranks' processor time. Iterations shorter than a
second do not show in these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, SearchWindow, in_job
from zerotop.analysis.findings.support.thresholds import SPIKE_SHARE, SPIKE_SIMILAR_SHARE, SPIKE_STEPS
from zerotop.analysis.formatting import GIB
from zerotop.recording.moments.at import find_cores
from zerotop.recording.samples import Floats, Ints, Samples

_KIND = FindingKind(
    name="double_spike",
    confidence=0.7,
    headline="The GPUs idle {share:percent} of every {iteration_s:seconds} while {cores_used:.0f} cores are busy",
    details=(
        "They idle {gap_s:seconds} while {processes:count process} keep {cores_used:.0f}[ of {host_cores:.0f}] cores"
        " busy; otherwise {cores_else:.0f} are busy. That is the pattern of an optimizer on the CPU, seen from outside."
    ),
    advice="Keep the optimizer on the GPU if that fits, or accumulate more micro-batches.",
    fix='"offload_optimizer": {"device": "none"}',
)
# Cores that each rank keeps busy while its optimizer runs on them; 1 is usual.
UNPROBED_CORES = 3.0
# Utilization (percent) of a GPU that idles, and of one that works.
UNPROBED_IDLE_PERCENT = 20.0
UNPROBED_BUSY_PERCENT = 50.0
# Ticks (100 ms) until NVML's average covers only the current stretch.
UNPROBED_TICKS = 3
# Memory of a GPU in use: more than a context.
UNPROBED_MEMORY_BYTES = 1 * GIB


class Stretch(NamedTuple):
    """Consecutive ticks in which the ranks' cores were busy, or were not."""

    begin_ns: int  # of the tick before the first
    end_ns: int
    is_busy: bool
    cores: float  # median
    utilization: float  # median of the GPUs', without the first ticks, whose average covers the time before too


@dataclass
class _State:
    """The last stretches of a node, and the one in progress: each of them may last any time."""

    last_ns: int = 0
    ticks: list[tuple[int, float, float]] = field(default_factory=list)  # of the current stretch
    stretches: list[Stretch] = field(default_factory=list)  # the last finished ones
    utilization: float = float("nan")


@in_job(kinds=None)
def detect(window: SearchWindow[Evidence]) -> Iterator[Finding | None]:
    """Report at most once for each node, using the time before a rank on it reported its phases."""
    created = window.recording.find_first_creations()
    for host in sorted({source.host for source in window.recording.recording.sources["hosts"]}):
        yield window.find_once(partial(_check_host, window, host, created.get(host)), host)


def _check_host(window: SearchWindow[Evidence], host: str, until_ns: int | None) -> Finding | None:
    recording, state = window.recording, window.keep(_State, host)
    processes, gpus = (window.records(recording.at.records(table, host)) for table in ("processes", "gpus"))
    if until_ns is not None and len(processes):
        processes = processes.select(processes.times < until_ns)
    processes = processes.select(processes.rows["rank"] >= 0) if len(processes) else processes
    if not len(processes):
        return None
    times, index, count = np.unique(processes.times, return_inverse=True, return_counts=True)
    cores = np.bincount(index, np.nan_to_num(processes.rows["cores_used"]))
    for time_ns, used, ranks, utilization in zip(
        times.tolist(), cores.tolist(), count.tolist(), _measure_utilization(gpus, times, state).tolist(), strict=True
    ):
        is_busy = used >= UNPROBED_CORES * ranks
        if state.ticks and is_busy != (state.ticks[-1][1] >= UNPROBED_CORES * ranks):
            _close_stretch(state, is_busy=not is_busy)
            cycle = _find_cycle(state.stretches)
            if cycle is not None:
                return _build_finding(recording, host, cycle, time_ns, processes.rows["rank"][processes.times == time_ns])
        state.ticks.append((time_ns, used, utilization))
    return None


def _measure_utilization(gpus: Samples, times: Ints, state: _State) -> Floats:
    """Return the mean utilization of the GPUs in use at each time, from the last sample before it."""
    if len(gpus):
        gpus = gpus.select(gpus.rows["used_bytes"] >= UNPROBED_MEMORY_BYTES)
    if not len(gpus):
        return np.full(len(times), state.utilization)
    ticks, index, count = np.unique(gpus.times, return_inverse=True, return_counts=True)
    means = np.append(np.bincount(index, gpus.rows["utilization_percent"]) / count, state.utilization)
    state.utilization = float(means[-2])
    return np.asarray(means[np.searchsorted(ticks, times, "right") - 1])


def _close_stretch(state: _State, *, is_busy: bool) -> None:
    times, cores, utilization = (list(column) for column in zip(*state.ticks, strict=True))
    late = utilization[UNPROBED_TICKS:] or [float("nan")]
    begin_ns = state.last_ns or times[0]
    state.stretches.append(Stretch(begin_ns, times[-1], is_busy, float(np.median(cores)), float(np.median(late))))
    del state.stretches[: -2 * SPIKE_STEPS]
    state.last_ns, state.ticks = times[-1], []


def _find_cycle(stretches: list[Stretch]) -> list[Stretch] | None:
    """Return the last stretches if they are SPIKE_STEPS similar gaps of the GPUs with similar work between them."""
    last = stretches[1 - 2 * SPIKE_STEPS :]
    gaps, works = last[::2], last[1::2]
    if len(last) < 2 * SPIKE_STEPS - 1 or not gaps[0].is_busy:
        return None
    # A comparison with NaN, for unknown, is false.
    idle = all(gap.utilization <= UNPROBED_IDLE_PERCENT for gap in gaps)
    busy = all(work.utilization >= UNPROBED_BUSY_PERCENT for work in works)
    is_cycle = idle and busy and _are_similar(gaps) and _are_similar(works) and _compute_gap_share(last) >= SPIKE_SHARE
    return last if is_cycle else None


def _are_similar(stretches: list[Stretch]) -> bool:
    lengths = np.array([stretch.end_ns - stretch.begin_ns for stretch in stretches])
    middle = np.median(lengths)
    return bool((np.abs(lengths - middle) <= SPIKE_SIMILAR_SHARE * middle).all())


def _measure_seconds(stretches: list[Stretch]) -> float:
    return float(np.median([stretch.end_ns - stretch.begin_ns for stretch in stretches])) / 1e9


def _compute_gap_share(cycle: list[Stretch]) -> float:
    gap = _measure_seconds(cycle[::2])
    return gap / (gap + _measure_seconds(cycle[1::2]))


def _build_finding(recording: Evidence, host: str, cycle: list[Stretch], known_ns: int, ranks: Ints) -> Finding:
    gap, work = _measure_seconds(cycle[::2]), _measure_seconds(cycle[1::2])
    share = _compute_gap_share(cycle)
    evidence = {
        "gap_s": gap,
        "iteration_s": gap + work,
        "share": share,
        "cores_used": float(np.median([stretch.cores for stretch in cycle[::2]])),
        "cores_else": float(np.median([stretch.cores for stretch in cycle[1::2]])),
        "processes": len(ranks),
        "host_cores": find_cores(recording.at, host),
    }
    when = cycle[0].begin_ns, cycle[-1].end_ns
    return _KIND.at(None, *when, evidence, known_ns=known_ns, step=None, ranks=sorted(ranks.tolist()), cost=share)
