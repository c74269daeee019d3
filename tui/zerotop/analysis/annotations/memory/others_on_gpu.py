"""Somebody else holds memory on a GPU of the job."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Facts, Process
from zerotop.analysis.annotations.support.thresholds import OTHERS_BYTES
from zerotop.analysis.formatting import percent, size


def detect(facts: Facts) -> Iterator[Annotation | None]:
    """One finding for each GPU: what was in use there when recording began, before any rank had made its engine."""
    seen: set[tuple[str, int]] = set()
    born: dict[str, int] = {}
    for process in facts.processes:
        born[process.source.host] = min(process.source.born_ns, born.get(process.source.host, process.source.born_ns))
    for process in facts.processes:
        yield PAUSE
        key = process.gpu
        if key is None or key in seen:
            continue
        seen.add(key)
        found = _of_gpu(process, key, born.get(key[0], process.source.born_ns))
        if found is not None:
            yield found


def _of_gpu(process: Process, key: tuple[str, int], born_ns: int) -> Annotation | None:
    samples, allocator = process.gpu_samples.first(), process.allocator.first()
    if not len(samples) or not len(allocator):
        return None
    first = samples.rows[0]
    # Ranks may have made their context before they made the engine: the sampler is older than they are, or it is not told.
    found = [event.unix_ns for event in process.facts.events("rank_found") if event.host == key[0]]
    if int(samples.times[0]) >= min([*found, born_ns]) or int(first["used_bytes"]) < OTHERS_BYTES:
        return None
    used, total = int(first["used_bytes"]), int(first["total_bytes"])
    # Which GPU is a rank's is known from its allocator's first record.
    known_ns = max(int(allocator.times[0]), process.source.born_ns)
    pids = _holders(process, key, known_ns)
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
            f"{size(used)} of GPU {key[1]}'s {size(total)} ({percent(used / total)}) were in use before the job began"
            f"{f', by process {pids[0]}' if len(pids) == 1 else ''}: rank {process.rank} has that much less."
        ),
        advice="End what holds it (nvidia-smi lists it; often a rank of a dead job), or set CUDA_VISIBLE_DEVICES.",
        evidence={"used_bytes": float(used), "total_bytes": float(total), "processes": float(len(pids))},
    )


def _holders(process: Process, key: tuple[str, int], known_ns: int) -> list[int]:
    """Processes with memory on the GPU at the first look, as NVML numbers them."""
    first = process.facts.table("gpu_processes", key[0]).first()
    if not len(first) or first.times[0] > known_ns:
        return []
    at_ns = int(first.times[0])
    rows = process.facts.table("gpu_processes", *key[:1], "gpu", key[1]).within(at_ns - 1, at_ns).rows
    return [int(pid) for pid in np.unique(rows["pid"])] if len(rows) else []
