"""The double spike of an optimizer on the CPU, without a probe: GPUs idle whenever the ranks' cores are busy.

Read from NVML's utilization, an average over the last 200 ms, and the ranks' processor time. Iterations shorter than a
second do not show in these.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby, pairwise
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


class _Tick(NamedTuple):
    """A sample of a node's ranks, and of its GPUs."""

    unix_ns: int
    cores: float
    utilization: float  # mean of the GPUs in use; NaN if unknown
    is_busy: bool
    ranks: list[int]


@in_job(kinds=None)
def detect(window: SearchWindow[Evidence]) -> Iterator[Finding | None]:
    """Report at most once for each node, using the time before a rank on it reported its phases."""
    created = window.recording.find_first_creations()
    for host in sorted({source.host for source in window.recording.recording.sources["hosts"]}):
        yield window.find_once(partial(_check_host, window, host, created.get(host)), host)


def _check_host(window: SearchWindow[Evidence], host: str, until_ns: int | None) -> Finding | None:
    processes, gpus = (window.records(window.recording.at.records(table, host)) for table in ("processes", "gpus"))
    if until_ns is not None and len(processes):
        processes = processes.select(processes.times < until_ns)
    processes = processes.select(processes.rows["rank"] >= 0) if len(processes) else processes
    # Only the samples of the stretch in progress, which may last any time, and the last stretches before it are kept:
    # a job without the probe may have run for weeks.
    current: list[_Tick] = window.keep(list, host)
    current += _read_ticks(processes, _measure_utilization(window, gpus, processes.times, host)) if len(processes) else []
    parts = [list(part) for _, part in groupby(current, key=lambda tick: tick.is_busy)]
    current[:] = parts[-1] if parts else []
    before: list[Stretch] = window.keep(list, (host, Stretch))
    for part, following in pairwise(parts):
        before.append(_build_stretch(part, before[-1].end_ns if before else part[0].unix_ns))
        del before[: -2 * SPIKE_STEPS]
        cycle = _find_cycle(before)
        if cycle is not None:
            return _build_finding(window.recording, host, cycle, following[0].unix_ns, following[0].ranks)
    return None


def _read_ticks(processes: Samples, utilization: Floats) -> Iterator[_Tick]:
    """Yield the samples of a node's ranks. ``utilization``: of the GPUs, at the time of each record."""
    starts = np.flatnonzero(np.diff(processes.times, prepend=-1))
    for rows, time_ns, percent in zip(
        np.split(processes.rows, starts[1:]), processes.times[starts].tolist(), utilization[starts].tolist(), strict=True
    ):
        cores = float(np.nansum(rows["cores_used"]))
        yield _Tick(time_ns, cores, percent, cores >= UNPROBED_CORES * len(rows), rows["rank"].tolist())


def _measure_utilization(window: SearchWindow[Evidence], gpus: Samples, times: Ints, host: str) -> Floats:
    """Return the mean utilization of the GPUs in use at each time, from the last sample before it."""
    if len(gpus):
        gpus = gpus.select(gpus.rows["used_bytes"] >= UNPROBED_MEMORY_BYTES)
    ticks, index, count = np.unique(gpus.times, return_inverse=True, return_counts=True)
    fresh = np.bincount(index, gpus.rows["utilization_percent"]) / count if len(gpus) else np.empty(0)
    last: list[float] = window.keep(list, (host, Samples))  # from an earlier look
    means = np.append(fresh, last or [np.nan])
    last[:] = [float(means[len(fresh) - 1])]
    return np.asarray(means[np.searchsorted(ticks, times, "right") - 1])


def _build_stretch(ticks: list[_Tick], begin_ns: int) -> Stretch:
    late = [tick.utilization for tick in ticks[UNPROBED_TICKS:]] or [float("nan")]
    cores = float(np.median([tick.cores for tick in ticks]))
    return Stretch(begin_ns, ticks[-1].unix_ns, ticks[0].is_busy, cores, float(np.median(late)))


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


def _build_finding(recording: Evidence, host: str, cycle: list[Stretch], known_ns: int, ranks: list[int]) -> Finding:
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
    return _KIND.at(None, *when, evidence, known_ns=known_ns, step=None, ranks=sorted(ranks), cost=share)
