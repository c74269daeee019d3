"""Another process held memory on a GPU of the job before the job started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zerotop.analysis.annotations.memory.others_arrived import name_gpus
from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.annotations.support.thresholds import OTHERS_BYTES
from zerotop.analysis.formatting import pluralize
from zerotop.session.keys import GpuKey
from zerotop_probe.recording.events import Entered, RankFound

_KIND = FindingKind(
    name="others_on_gpu",
    severity=Severity.WARNING,
    confidence=0.9,
    headline="{used_bytes:bytes} of {gpus} {verb} in use before the job started",
    details="That is {share:percent} of the device[, held by {pids}]: {concerned:ranks} {have} less memory.",
    advice="See whose process it is before ending it: it may be a rank of a dead job. Or choose other GPUs.",
    fix="nvidia-smi[; ps -o user,lstart,cmd -p {pid_list}]",
)


class _Other(NamedTuple):
    """Memory in use on a rank's GPU before the job started."""

    time_ns: int
    rank: int
    gpu: int
    used_bytes: int
    total_bytes: int
    pids: list[int]


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report once for each attempt and node, after the first step, the memory in use before any rank created its engine."""
    created = recording.find_first_creations()
    for group in recording.groups:
        if _KIND.name not in group.reported and all(len(process.steps) for process in group.processes):
            group.reported.add(_KIND.name)
            known_ns = max(int(process.steps["end_unix_ns"][0]) for process in group.processes)
            for host in group.hosts:
                yield from _check_host(group, host, created[host], known_ns)


def _check_host(group: Group, host: str, created_ns: int, known_ns: int) -> Iterator[Annotation]:
    by_gpu: dict[GpuKey, _Other] = {}
    for process in group.processes_on(host):
        key = process.gpu_key
        if key is not None and key not in by_gpu and (other := _find_other(process, key, created_ns)) is not None:
            by_gpu[key] = other
    if not by_gpu:
        return
    others = list(by_gpu.values())
    most = max(others, key=lambda other: other.used_bytes)
    ranks, pids = sorted(other.rank for other in others), sorted({pid for other in others for pid in other.pids})
    yield _KIND.at(
        group,
        min(other.time_ns for other in others),
        known_ns,
        {"used_bytes": most.used_bytes, "total_bytes": most.total_bytes, "processes": len(pids)},
        step=None,
        ranks=ranks,
        concerned=ranks,
        gpus=name_gpus(other.gpu for other in others),
        verb="was" if len(others) == 1 else "were each",
        have="has" if len(ranks) == 1 else "have",
        share=most.used_bytes / most.total_bytes,
        pids=f"{pluralize(len(pids), 'process')} {', '.join(map(str, pids))}" if pids else None,
        pid_list=",".join(map(str, pids)) or None,
    )


def _find_other(process: Process, gpu_key: GpuKey, created_ns: int) -> _Other | None:
    if process.events_of(Entered):
        return None  # it was there before the first sample itself, in a container perhaps under another PID
    samples, allocator = process.gpu_samples.read_first(), process.records("allocator").read_first()
    if not len(samples) or not len(allocator):
        return None
    used, total = int(samples.rows["used_bytes"][0]), int(samples.rows["total_bytes"][0])
    # Ranks may have created their context before the engine: only a sampler that started before the ranks can tell.
    events = [event.unix_ns for event in process.recording.events_of(RankFound) if event.writer.host == gpu_key[0]]
    if int(samples.times[0]) >= min([*events, created_ns]) or used < OTHERS_BYTES:
        return None
    pids = _find_holders(process, gpu_key)
    return _Other(int(samples.times[0]), process.rank, gpu_key[1], used, total, pids)


def _find_holders(process: Process, gpu_key: GpuKey) -> list[int]:
    """NVML's PIDs of the processes with memory on the GPU in the first sample."""
    host, gpu = gpu_key
    first = process.at.records("gpu_processes", host).read_first()
    if not len(first):
        return []
    time_ns = int(first.times[0])
    rows = process.at.records("gpu_processes", host, "gpu", gpu).read_window(time_ns - 1, time_ns).rows
    return [int(pid) for pid in np.unique(rows["pid"])] if len(rows) else []
