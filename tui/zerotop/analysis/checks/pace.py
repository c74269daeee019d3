"""The pace of a recording and its noise, and whether another recording is slower.

Two recordings of the same job differ by chance and by other load on the machine. Steps in which threads of a rank waited for
a core are left out; if nearly all waited, the waiting time is left out. A difference counts beyond three effects:

- the spread: how much the medians of parts of a recording differ, because the noise of neighbouring steps is similar;
- crowding: cores that are busy for others slow down the cores beside them (shared caches, hyper-threads, clocks);
- the luck of a process: equal runs on a CPU differ for reasons that no sample shows, such as the placement of their pages.

``benchmarks/check_noise.py`` measures how often equal runs differ, and how often one that is slower by 3 % does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.live_view import Floats
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Ints, Rows

MIN_STEPS = 20
"""A pace of fewer steps cannot be compared."""

# Number of parts of a recording whose medians are compared, and the least steps of each.
_PARTS, _PART_STEPS = 8, 5
# A core whose neighbours are all busy loses up to this share of its speed.
_CROWDED_LOSS = 0.5
# Equal runs whose time is spent computing on a CPU, on a virtual machine, differed by up to this share.
_PROCESS_LUCK = 0.06
# Steps with less waiting than this are quiet. If there are few, this many steps with the least waiting are taken.
_QUIET_SHARE, _QUIET_STEPS_SHARE = 0.01, 0.2
# Samples show only roughly how long a single step waited: the time left out may be wrong by this share.
_WAITING_ERROR = 0.2


@dataclass(frozen=True, slots=True)
class MeasuredPace:
    """Iterations of a recording after the warm-up, without skipped and unrecorded steps."""

    steps: int
    iteration_s: float  # median of all
    unhindered_s: float  # median of the quiet steps
    waiting: float  # share of all iterations that the rank which waited longest had no core
    spread: float  # share of unhindered_s by which parts of the recording differ from it
    hindrance: float  # share by which the machine may still have slowed the quiet steps


def measure_pace(source: RecordingSource, warmup_steps: int) -> MeasuredPace | None:
    """Measure the iterations of a recording; None if no step remains after the warm-up."""
    rows = source.job_steps[warmup_steps:]
    rows = rows[~np.isnan(rows["iteration_s"]) & ~rows["skipped"] & (rows["iteration_s"] > 0)]
    if not len(rows):
        return None
    seconds = rows["iteration_s"]
    waited = np.minimum(_measure_waiting(source.recording, rows) / seconds, 0.95)
    quiet = waited <= max(_QUIET_SHARE, float(np.quantile(waited, _QUIET_STEPS_SHARE)))
    unhindered = (seconds * (1 - waited))[quiet]
    return MeasuredPace(
        steps=len(rows),
        iteration_s=float(np.median(seconds)),
        unhindered_s=float(np.median(unhindered)),
        waiting=float((seconds * waited).sum() / seconds.sum()),
        spread=_measure_spread(unhindered) if len(rows) >= MIN_STEPS else math.inf,
        hindrance=_measure_hindrance(source.recording, rows) + _WAITING_ERROR * float(waited[quiet].mean()),
    )


def compare_paces(pace: MeasuredPace, baseline: MeasuredPace) -> tuple[float, float]:
    """Return the share by which the recording is slower than the baseline, and the share that noise explains.

    Both times are without waiting for cores. Disturbances of the baseline only make this recording look faster, so they
    explain nothing.
    """
    slower = pace.unhindered_s / baseline.unhindered_s - 1
    return slower, pace.hindrance + math.hypot(pace.spread, baseline.spread)


def _measure_spread(seconds: Floats) -> float:
    """Return the share by which medians of parts deviate from the whole's, leaving out the worst part.

    One part may be disturbed, for example by the start of the job, without an effect on the median of the whole.
    """
    parts = np.array_split(seconds, min(_PARTS, max(2, len(seconds) // _PART_STEPS)))
    medians = np.array([np.median(part) for part in parts])
    return float(np.sort(np.abs(medians / np.median(seconds) - 1))[-2])


def _measure_waiting(recording: Recording, rows: Rows) -> Floats:
    """Return for each step how many seconds a thread of the rank that waited longest had no core."""
    longest = np.zeros(len(rows))
    for source in recording.sources["processes"]:
        for rank in np.unique(source.array["rank"][source.array["rank"] >= 0]).tolist():
            longest = np.maximum(longest, _integrate_samples(source, rank, rows))
    return longest


def _integrate_samples(source: Source, rank: int, rows: Rows) -> Floats:
    samples = source.array[source.array["rank"] == rank]
    times = source.unix_times(samples)
    waiting = np.minimum(1.0, np.nan_to_num(samples["waiting_cores"].astype(np.float64)))
    sums = np.append(0.0, np.cumsum(waiting[1:] * np.diff(times) / 1e9))
    spent: Floats = np.interp(rows["end_unix_ns"], times, sums) - np.interp(rows["begin_unix_ns"], times, sums)
    return spent


def _measure_hindrance(recording: Recording, rows: Rows) -> float:
    """Return the share by which busy neighbours and luck may have slowed the ranks, for the time that they compute."""
    begin_ns, end_ns = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    worst = 0.0
    for host in recording.sources["hosts"]:
        samples = _select_between(host, host.array, begin_ns, end_ns)
        if not len(samples):
            continue
        busy, cores = float(np.nanmean(samples["cores_used"])), float(np.nanmax(samples["cores"]))
        own, waiting, ranks = 0.0, 0.0, 0
        for source in recording.host_sources("processes", host.host):
            of_job = _select_between(source, source.array, begin_ns, end_ns)
            of_job = of_job[of_job["rank"] >= 0]
            ticks = max(1, len(np.unique(of_job["time_ns"])))
            own += float(np.nansum(of_job["cores_used"])) / ticks
            waiting += float(np.nansum(np.minimum(1.0, of_job["waiting_cores"]))) / ticks
            ranks += len(np.unique(of_job["rank"]))
        running = own / max(1e-9, ranks - waiting) if ranks > waiting else 1.0
        crowding = _CROWDED_LOSS * min(1.0, max(0.0, busy - own) / max(1.0, cores))
        luck = _PROCESS_LUCK * (1 - _measure_gpu_load(recording, host.host, begin_ns, end_ns))
        worst = max(worst, min(1.0, running) * (crowding + luck))
    return worst


def _measure_gpu_load(recording: Recording, host: str, begin_ns: int, end_ns: int) -> float:
    """Return the utilization of the busiest GPU of a host, 0 to 1; 0 without GPUs."""
    loads = [0.0]
    for source in recording.host_sources("gpus", host):
        samples = _select_between(source, source.array, begin_ns, end_ns)
        for gpu in np.unique(samples["gpu"]):
            percent = samples["utilization_percent"][samples["gpu"] == gpu]
            loads += [float(np.nanmean(percent)) / 100] if np.isfinite(percent).any() else []
    return min(1.0, max(loads))


def _select_between(source: Source, rows: Rows, begin_ns: int, end_ns: int) -> Rows:
    times: Ints = source.unix_times(rows)
    selected: Rows = rows[(times >= begin_ns) & (times <= end_ns)]
    return selected
