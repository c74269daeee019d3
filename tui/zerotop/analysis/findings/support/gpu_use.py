"""How busy the ranks' GPUs are, and whether the CPU sets the pace of a job because it launches kernels too slowly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zerotop.analysis.findings.support.rank_process import Process
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.recording.moments.at import At
from zerotop.recording.moments.rank_records import RankRecords
from zerotop.recording.samples import Rows, Samples
from zerotop_probe.recording.events import GpuProcess, JobStarted, RankFound

# A GPU that is busy for a larger share of the time sets the pace itself.
BUSY_SHARE = 0.85
# Samples of the GPU that show its use.
_FEWEST_SAMPLES = 3


# An iteration that takes as long as this many usual ones has a pause, in which the GPU waits for something else. A sample
# of NVML covers some time before it (ns).
_PAUSE_TIMES, _SAMPLE_NS = 5, 200_000_000


def measure_use_in_steps(process: RankRecords, steps: Rows, average: Callable[[Rows], Any] = np.median) -> float:
    """Return the GPU's use, as :func:`measure_gpu_use` does, in those of some steps that have no pause.

    ``average``: of the samples. Steps of several kinds have none that is usual, but a mean.
    """
    seconds = steps["iteration_s"]
    paused = steps[seconds > _PAUSE_TIMES * compute_known_median(seconds)]
    samples = process.gpu_samples.read_window(int(steps["begin_unix_ns"][0]), int(steps["end_unix_ns"][-1]))
    begun = np.searchsorted(paused["begin_unix_ns"], samples.times)
    ended = np.searchsorted(paused["end_unix_ns"] + _SAMPLE_NS, samples.times)
    return _compute_use(process, samples.select(begun == ended), average)


def measure_gpu_use(process: RankRecords, begin_ns: int, end_ns: int) -> float:
    """Return the median share of the time in which a kernel ran on a rank's GPU, from NVML; NaN if it is unknown."""
    return _compute_use(process, process.gpu_samples.read_window(begin_ns, end_ns))


def _compute_use(process: RankRecords, samples: Samples, average: Callable[[Rows], Any] = np.median) -> float:
    if not process.is_on_gpu or process.gpu_key is None:
        return float("nan")
    used = samples.rows["utilization_percent"] if len(samples) else np.empty(0)
    used = used[~np.isnan(used)]
    return float(average(used)) / 100 if len(used) >= _FEWEST_SAMPLES else float("nan")


def measure_free_bytes(process: Process, known_ns: int) -> float:
    """Return the bytes of a rank's GPU that nobody has used up to a time, and that it may use; NaN if they are unknown."""
    samples = process.gpu_samples.read_window(0, known_ns)
    total = int(samples.rows["total_bytes"][-1]) if len(samples) else 0
    if not total:
        return float("nan")
    free = total - int(samples.rows["used_bytes"].max())
    if process.limit_bytes is not None:
        free = min(free, process.limit_bytes - int(process.steps_until(known_ns)["reserved_peak_bytes"].max(initial=0)))
    return float(max(0, free))


def offloads(process: Process) -> bool:
    """Whether the rank keeps parameters or the optimizer on the host, where the optimizer computes."""
    devices = (process.engine.offload_optimizer, process.engine.offload_parameters)
    return any((device or "none") != "none" for device in devices)


def is_paced_by_host(processes: Sequence[Process], begin_ns: int, end_ns: int) -> bool:
    """Whether a rank's GPU waits for the host for a notable share of the time, and its optimizer is not there.

    The pace of such a job is that of one thread, and wanders with the clock and the neighbours of its core: loops that
    launched kernels of 27 ms took 26 to 48 ms, where loops that kept the GPU busy took 71.9 to 73.9.
    """
    uses = [measure_gpu_use(one, begin_ns, end_ns) for one in processes]
    return any(use < BUSY_SHARE for use in uses) and not any(map(offloads, processes))


def find_own_processes(at: At, host: str) -> dict[int, GpuProcess]:
    """Return the processes on a node's GPUs, by PID, that the job has started beside its ranks."""
    ranks = {source.pid for source in at.host_sources("spans", host)}
    ranks.update(event.pid for event in at.events_of(RankFound) if event.pid is not None and event.writer.host == host)
    found = (event for event in at.events_of(GpuProcess) if event.of_job and event.writer.host == host)
    return {event.pid: event for event in found if event.pid not in ranks}


def find_starter(at: At, event: GpuProcess) -> int | None:
    """Return the rank that has started a process of the job, itself or by others; None where that is not known."""
    host = event.writer.host
    ranks = {source.pid: source.rank for source in at.host_sources("spans", host)}
    # In a job without a launcher, all processes are below its only rank.
    roots = [started.pid for started in at.events_of(JobStarted) if started.writer.host == host]
    return next((ranks[pid] for pid in event.parents or roots if pid in ranks), None)


def name_process(event: GpuProcess) -> str:
    """Return ``process 300 (vllm)``."""
    return f"process {event.pid}{f' ({event.program})' if event.program else ''}"
