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
from zerotop.analysis.annotations.support.evidence import Facts, Ints, Samples
from zerotop.analysis.annotations.support.thresholds import (
    SPIKE_LIKE_SHARE,
    SPIKE_SHARE,
    SPIKE_STEPS,
    UNPROBED_CORES,
    UNPROBED_IDLE,
    UNPROBED_MEMORY_BYTES,
    UNPROBED_TICKS,
    UNPROBED_WORKS,
)
from zerotop.analysis.formatting import percent, plural, seconds
from zerotop.session.reader import Source

Floats = NDArray[np.float64]


class Stretch(NamedTuple):
    """Ticks in a row in which the ranks' cores were busy, or were not."""

    begin_ns: int  # of the tick before the first
    end_ns: int
    busy: bool
    cores: float  # their median
    utilization: float  # the GPUs', without the first moments, of which NVML still tells what was before


@dataclass
class _Seen:
    """How far a node's samples were read; the last ticks of a stretch that goes on, and the last stretches that are over."""

    processes: dict[Source, int] = field(default_factory=dict)
    gpus: dict[Source, int] = field(default_factory=dict)
    last_ns: int = 0
    ticks: list[tuple[int, float, float]] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    utilization: float = float("nan")
    told: bool = False


def detect(facts: Facts) -> Iterator[Annotation | None]:
    """At most one finding for each node, from the time before a rank on it told its phases."""
    told: dict[str, int] = {}
    for process in facts.processes:
        host, born_ns = process.source.host, process.source.born_ns
        told[host] = min(born_ns, told.get(host, born_ns))
    for host in facts.hosts:
        yield PAUSE
        seen = facts.kept(_Seen, host)
        if not seen.told:
            yield from _of_host(facts, host, seen, told.get(host))


def _of_host(facts: Facts, host: str, seen: _Seen, until_ns: int | None) -> Iterator[Annotation]:
    processes = facts.table("processes", host).after(seen.processes)
    if until_ns is not None and len(processes):
        processes = processes.where(processes.times < until_ns)
    gpus = facts.table("gpus", host).after(seen.gpus)
    processes = processes.where(processes.rows["rank"] >= 0) if len(processes) else processes
    if not len(processes):
        return
    times, where, count = np.unique(processes.times, return_inverse=True, return_counts=True)
    cores = np.bincount(where, np.nan_to_num(processes.rows["cores_used"]))
    for time_ns, used, ranks, works in zip(
        times.tolist(), cores.tolist(), count.tolist(), _utilization(gpus, times, seen).tolist(), strict=True
    ):
        busy = used >= UNPROBED_CORES * ranks
        if seen.ticks and busy != (seen.ticks[-1][1] >= UNPROBED_CORES * ranks):
            _close(seen, busy=not busy)
            found = _cycle(seen.stretches)
            if found is not None:
                seen.told = True
                yield _annotation(facts, host, found, time_ns, processes.rows["rank"][processes.times == time_ns])
                return
        seen.ticks.append((time_ns, used, works))


def _utilization(gpus: Samples, times: Ints, seen: _Seen) -> Floats:
    """The mean of the GPUs in use at each of some moments: as NVML said last before."""
    if len(gpus):
        gpus = gpus.where(gpus.rows["used_bytes"] >= UNPROBED_MEMORY_BYTES)
    if not len(gpus):
        return np.full(len(times), seen.utilization)
    ticks, where, count = np.unique(gpus.times, return_inverse=True, return_counts=True)
    means = np.append(np.bincount(where, gpus.rows["utilization_percent"]) / count, seen.utilization)
    found: Floats = means[np.searchsorted(ticks, times, "right") - 1]
    seen.utilization = float(means[-2])
    return found


def _close(seen: _Seen, *, busy: bool) -> None:
    """Ends the stretch that went on."""
    times, cores, works = (list(column) for column in zip(*seen.ticks, strict=True))
    late = works[UNPROBED_TICKS:] or [float("nan")]
    begin_ns = seen.last_ns or times[0]
    seen.stretches.append(Stretch(begin_ns, times[-1], busy, float(np.median(cores)), float(np.median(late))))
    del seen.stretches[: -2 * SPIKE_STEPS]
    seen.last_ns, seen.ticks = times[-1], []


def _cycle(stretches: list[Stretch]) -> list[Stretch] | None:
    """The last stretches, if SPIKE_STEPS gaps of the GPUs and the work between them are alike."""
    last = stretches[1 - 2 * SPIKE_STEPS :]
    gaps, works = last[::2], last[1::2]
    if len(last) < 2 * SPIKE_STEPS - 1 or not gaps[0].busy:
        return None
    # A comparison with what is not known is false.
    idle = all(gap.utilization <= UNPROBED_IDLE for gap in gaps)
    busy = all(work.utilization >= UNPROBED_WORKS for work in works)
    return last if idle and busy and _alike(gaps) and _alike(works) and _share(last) >= SPIKE_SHARE else None


def _alike(stretches: list[Stretch]) -> bool:
    lengths = np.array([stretch.end_ns - stretch.begin_ns for stretch in stretches])
    middle = np.median(lengths)
    return bool((np.abs(lengths - middle) <= SPIKE_LIKE_SHARE * middle).all())


def _seconds(stretches: list[Stretch]) -> float:
    return float(np.median([stretch.end_ns - stretch.begin_ns for stretch in stretches])) / 1e9


def _share(cycle: list[Stretch]) -> float:
    gap = _seconds(cycle[::2])
    return gap / (gap + _seconds(cycle[1::2]))


def _annotation(facts: Facts, host: str, cycle: list[Stretch], known_ns: int, ranks: Ints) -> Annotation:
    gap, work, share = _seconds(cycle[::2]), _seconds(cycle[1::2]), _share(cycle)
    cores = float(np.median([stretch.cores for stretch in cycle[::2]]))
    least = float(np.median([stretch.cores for stretch in cycle[1::2]]))
    evidence = {"gap_s": gap, "iteration_s": gap + work, "share": share, "cores_used": cores, "cores_else": least}
    evidence |= {"processes": float(len(ranks))}
    of = facts.cores(host)
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
            f"Every {seconds(gap + work)} the GPUs idle for {seconds(gap)} ({percent(share)}) while {cores:.0f}"
            f"{f' of {of}' if of else ''} cores are busy in {plural(len(ranks), 'process')}, and {least:.0f} in between: the"
            " pattern of an optimizer on the CPU, seen from outside."
        ),
        advice='Set "offload_optimizer.device" to "none" where that fits, or raise "gradient_accumulation_steps".',
        evidence=evidence,
    )
