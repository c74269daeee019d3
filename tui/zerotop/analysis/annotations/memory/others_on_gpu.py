"""Somebody else holds memory on a GPU of the job."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Process
from zerotop.analysis.annotations.support.thresholds import OTHERS_BYTES
from zerotop.analysis.formatting import format_bytes, format_percent
from zerotop.analysis.keys import GpuKey


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """One finding for each GPU: what was in use there when recording began, before any rank had made its engine."""
    seen: set[GpuKey] = set()
    born: dict[str, int] = {}
    for process in facts.processes:
        born[process.source.host] = min(process.source.created_ns, born.get(process.source.host, process.source.created_ns))
    for process in facts.processes:
        yield PAUSE
        key = process.gpu_key
        if key is None or key in seen:
            continue
        seen.add(key)
        found = _build_finding(process, key, born.get(key[0], process.source.created_ns))
        if found is not None:
            yield found


def _build_finding(process: Process, gpu_key: GpuKey, born_ns: int) -> Annotation | None:
    samples, allocator = process.gpu_samples.read_first(), process.allocator.read_first()
    if not len(samples) or not len(allocator):
        return None
    first = samples.rows[0]
    # Ranks may have made their context before they made the engine: the sampler is older than they are, or it is not told.
    found = [event.unix_ns for event in process.facts.events_named("rank_found") if event.host == gpu_key[0]]
    if int(samples.times[0]) >= min([*found, born_ns]) or int(first["used_bytes"]) < OTHERS_BYTES:
        return None
    used, total = int(first["used_bytes"]), int(first["total_bytes"])
    # Which GPU is a rank's is known from its allocator's first record.
    known_ns = max(int(allocator.times[0]), process.source.created_ns)
    pids = _find_holders(process, gpu_key, known_ns)
    return Annotation(
        name="others_on_gpu",
        begin_ns=int(samples.times[0]),
        end_ns=known_ns,
        known_ns=known_ns,
        step=None,
        ranks=(process.rank,),
        severity=Severity.WARNING,
        confidence=0.9,
        sentence=(
            f"{format_bytes(used)} of GPU {gpu_key[1]}'s {format_bytes(total)} ({format_percent(used / total)}) were in use before the job began"
            f"{f', by process {pids[0]}' if len(pids) == 1 else ''}: rank {process.rank} has that much less."
        ),
        advice="End what holds it (nvidia-smi lists it; often a rank of a dead job), or set CUDA_VISIBLE_DEVICES.",
        evidence={"used_bytes": float(used), "total_bytes": float(total), "processes": float(len(pids))},
    )


def _find_holders(process: Process, gpu_key: GpuKey, known_ns: int) -> list[int]:
    """Processes with memory on the GPU at the first look, as NVML numbers them."""
    first = process.facts.get_records("gpu_processes", gpu_key[0]).read_first()
    if not len(first) or first.times[0] > known_ns:
        return []
    at_ns = int(first.times[0])
    rows = process.facts.get_records("gpu_processes", *gpu_key[:1], "gpu", gpu_key[1]).read_window(at_ns - 1, at_ns).rows
    return [int(pid) for pid in np.unique(rows["pid"])] if len(rows) else []
