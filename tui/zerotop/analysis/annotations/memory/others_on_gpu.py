"""Another process holds memory on a GPU of the job from before the job."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Process
from zerotop.analysis.annotations.support.thresholds import OTHERS_BYTES
from zerotop.analysis.keys import GpuKey

_KIND = FindingKind(
    name="others_on_gpu",
    severity=Severity.WARNING,
    confidence=0.9,
    sentence=(
        "{used_bytes:bytes} of GPU {gpu}'s {total_bytes:bytes} ({share:percent}) were in use before the job started"
        "[, by process {pid}]: rank {rank} has less memory available."
    ),
    advice="End the process that holds it (nvidia-smi lists it; often a rank of a dead job), or set CUDA_VISIBLE_DEVICES.",
)


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report for each GPU what was in use when recording began, before any rank had created its engine."""
    seen: set[GpuKey] = set()
    created = recording.find_first_creations()
    for process in recording.processes:
        key = process.gpu_key
        if key is not None and key not in seen:
            seen.add(key)
            yield _check_gpu(process, key, created.get(key[0], process.source.created_ns))


def _check_gpu(process: Process, gpu_key: GpuKey, created_ns: int) -> Annotation | None:
    samples, allocator = process.gpu_samples.read_first(), process.allocator.read_first()
    if not len(samples) or not len(allocator):
        return None
    used, total = int(samples.rows["used_bytes"][0]), int(samples.rows["total_bytes"][0])
    # Ranks may have created their context before the engine: only a sampler that is older than they are can tell.
    events = [event.unix_ns for event in process.recording.events_named("rank_found") if event.host == gpu_key[0]]
    if int(samples.times[0]) >= min([*events, created_ns]) or used < OTHERS_BYTES:
        return None
    # A rank's GPU is known from its allocator's first record on.
    known_ns = max(int(allocator.times[0]), process.source.created_ns)
    pids = _find_holders(process, gpu_key, known_ns)
    evidence = {"used_bytes": used, "total_bytes": total, "processes": len(pids)}
    pid = pids[0] if len(pids) == 1 else None
    when, share = (int(samples.times[0]), known_ns), used / total
    return _KIND.at(process, *when, evidence, step=None, gpu=gpu_key[1], share=share, pid=pid)


def _find_holders(process: Process, gpu_key: GpuKey, known_ns: int) -> list[int]:
    """NVML's PIDs of the processes with memory on the GPU in the first sample."""
    host, gpu = gpu_key
    first = process.recording.get_records("gpu_processes", host).read_first()
    if not len(first) or first.times[0] > known_ns:
        return []
    time_ns = int(first.times[0])
    rows = process.recording.get_records("gpu_processes", host, "gpu", gpu).read_window(time_ns - 1, time_ns).rows
    return [int(pid) for pid in np.unique(rows["pid"])] if len(rows) else []
