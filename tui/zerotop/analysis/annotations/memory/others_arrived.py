"""A process that is none of the job's takes memory of its GPU while it trains, or was left over from an earlier attempt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Process
from zerotop.analysis.annotations.support.thresholds import OTHERS_BYTES
from zerotop.analysis.formatting import format_bytes
from zerotop.session.reader import Source


@dataclass
class _State:
    """How far NVML's lists of processes were read."""

    counts: dict[Source, int] = field(default_factory=dict)
    reported_pids: set[int] = field(default_factory=set)


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """One finding for each such process and GPU, once its rank's first step has ended; before that see others_on_gpu."""
    earlier: dict[tuple[str, int], Process] = {}
    for group in facts.groups:
        of_host: dict[str, list[int]] = {}
        for host, pid in (process.key for process in group.processes):
            of_host.setdefault(host, []).append(pid)
        for process in group.processes:
            yield PAUSE
            if process.gpu_key is not None and len(process.steps):
                yield from _check_rank(facts, of_host.get(process.gpu_key[0], []), process, earlier)
        earlier |= {process.key: process for process in group.processes}


def _check_rank(
    facts: Evidence, job_pids: list[int], process: Process, earlier: dict[tuple[str, int], Process]
) -> Iterator[Annotation]:
    (host, gpu), seen = process.gpu_key or ("", -1), process.get_state(_State)
    begin_ns = int(process.steps["end_unix_ns"][0])
    samples = (
        facts.get_records("gpu_processes", host, "gpu", gpu).read_new(seen.counts).clip_window(begin_ns, facts.cursor_ns)
    )
    if not len(samples):
        return
    # In a container NVML numbers processes as the host does: then nobody can be told from the job.
    if not np.isin(samples.rows["pid"], job_pids).any() and not seen.reported_pids:
        return
    first = facts.get_records("gpu_processes", host).read_first()
    before = first.rows["pid"].tolist() if len(first) else []
    others = ~np.isin(samples.rows["pid"], job_pids) & (samples.rows["used_bytes"] >= OTHERS_BYTES)
    for at in np.flatnonzero(others).tolist():
        pid = int(samples.rows["pid"][at])
        if pid not in seen.reported_pids and (pid not in before or (host, pid) in earlier):
            seen.reported_pids.add(pid)
            left = earlier.get((host, pid))
            yield _build_finding(process, int(samples.times[at]), pid, float(samples.rows["used_bytes"][at]), left)


def _build_finding(process: Process, known_ns: int, pid: int, used: float, left: Process | None) -> Annotation:
    gpu = process.gpu_key[1] if process.gpu_key else -1
    text = f"Process {pid}, which is none of this job's, holds {format_bytes(used)} of rank {process.rank}'s GPU {gpu} beside it"
    if left is not None:
        text = f"Process {pid}, rank {left.rank} of an attempt before, still holds {format_bytes(used)} of GPU {gpu}"
    return Annotation(
        name="others_arrived",
        begin_ns=known_ns,
        end_ns=known_ns,
        known_ns=known_ns,
        step=process.step_at(known_ns),
        ranks=(process.rank,),
        severity=Severity.WARNING,
        confidence=0.9,
        sentence=text + ".",
        advice=f"End it (kill {pid}), or keep it off this GPU with CUDA_VISIBLE_DEVICES.",
        evidence={"used_bytes": used, "left_over": float(left is not None)},
    )
