"""A process that is not the job's takes memory of its GPU while it trains, or is left over from an earlier attempt."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Process
from zerotop.analysis.annotations.support.thresholds import OTHERS_BYTES

_KIND = FindingKind(
    name="others_arrived",
    severity=Severity.WARNING,
    confidence=0.9,
    sentence="Process {pid}, which is not part of this job, holds {used_bytes:bytes} of rank {rank}'s GPU {gpu}.",
    advice="End it (kill {pid}), or keep it off this GPU with CUDA_VISIBLE_DEVICES.",
)
_LEFT_OVER = _KIND.with_changes(
    sentence="Process {pid}, rank {left_rank} of an earlier attempt, still holds {used_bytes:bytes} of GPU {gpu}."
)
_HostProcess = tuple[str, int]  # host, pid


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report each such process and GPU after its rank's first step has ended; before that see others_on_gpu."""
    earlier: dict[_HostProcess, Process] = {}
    for group in recording.groups:
        pids_by_host: dict[str, list[int]] = {}
        for host, pid in (process.key for process in group.processes):
            pids_by_host.setdefault(host, []).append(pid)
        for process in group.processes:
            if process.gpu_key is not None and len(process.steps):
                yield from _check_rank(recording, pids_by_host.get(process.gpu_key[0], []), process, earlier)
        earlier |= {process.key: process for process in group.processes}


def _check_rank(
    recording: Evidence, job_pids: list[int], process: Process, earlier: dict[_HostProcess, Process]
) -> Iterator[Annotation]:
    host, gpu = process.gpu_key or ("", -1)
    records = recording.get_records("gpu_processes", host, "gpu", gpu)
    begin_ns = int(process.steps["end_unix_ns"][0])
    samples = process.read_new(records, _KIND.name).clip_window(begin_ns, recording.cursor_ns)
    if not len(samples):
        return
    # In a container NVML has the host's PIDs: then the job's processes cannot be recognized.
    is_own = np.isin(samples.rows["pid"], job_pids)
    reported: set[int] = process.get_state(set, _KIND.name)
    if not is_own.any() and not reported:
        return
    first = recording.get_records("gpu_processes", host).read_first()
    before = first.rows["pid"].tolist() if len(first) else []
    large = np.flatnonzero(~is_own & (samples.rows["used_bytes"] >= OTHERS_BYTES))
    _, first_of_pid = np.unique(samples.rows["pid"][large], return_index=True)
    for at in large[np.sort(first_of_pid)].tolist():
        pid, time_ns = int(samples.rows["pid"][at]), int(samples.times[at])
        left = earlier.get((host, pid))
        if pid in reported or (pid in before and left is None):
            continue
        reported.add(pid)
        evidence = {"used_bytes": samples.rows["used_bytes"][at], "left_over": left is not None}
        kind, left_rank = (_KIND, None) if left is None else (_LEFT_OVER, left.rank)
        yield kind.at(process, time_ns, time_ns, evidence, pid=pid, gpu=gpu, left_rank=left_rank)
