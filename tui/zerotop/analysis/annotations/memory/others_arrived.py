"""A process of another job takes memory of a rank's GPU during training, or one of an earlier attempt still holds some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.annotations.support.thresholds import OTHERS_BYTES
from zerotop.analysis.formatting import format_ranks, pluralize

_KIND = FindingKind(
    name="others_arrived",
    severity=Severity.WARNING,
    confidence=0.9,
    headline="{owner} {used_bytes:bytes} of {gpus}, beside the job",
    details="{pids} {verb} not part of this job: {concerned:ranks} {have} less memory, and may wait for the GPU.",
    advice="See whose it is before ending it, or keep one of the jobs off with CUDA_VISIBLE_DEVICES.",
    fix="ps -o user,lstart,cmd -p {pid_list}",
)
_LEFT_OVER = _KIND.with_changes(
    headline="A rank of an earlier attempt still holds {used_bytes:bytes} of {gpus}",
    details="{pids} should have ended with that attempt: {concerned:ranks} {have} less memory.",
    advice="Look at it, and end it if it is yours.",
)


class _Other(NamedTuple):
    """Memory of a process that does not belong to the job, and when it was first seen."""

    time_ns: int
    host: str
    is_left_over: bool
    pid: int
    gpu: int
    used_bytes: int
    rank: int  # whose GPU it is


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report each such process and GPU after the ranks' first step has ended, together if they were seen at one time.

    Those that came before are reported by ``others_on_gpu``.
    """
    earlier: set[tuple[str, int]] = set()  # (host, PID) of ranks of earlier attempts
    for group in recording.groups:
        if all(len(process.steps) for process in group.processes):
            begin_ns = max(int(process.steps["end_unix_ns"][0]) for process in group.processes)
            found = [
                other for process in group.processes for other in _find_others(recording, group, process, begin_ns, earlier)
            ]
            for key in sorted({other[:3] for other in found}):
                yield _build_finding(group, [other for other in found if other[:3] == key])
        earlier |= {process.key for process in group.processes}


def _find_others(
    recording: Evidence, group: Group, process: Process, begin_ns: int, earlier: set[tuple[str, int]]
) -> Iterator[_Other]:
    if process.gpu_key is None:
        return
    host, gpu = process.gpu_key
    records = recording.at.records("gpu_processes", host, "gpu", gpu)
    samples = process.read_new(records, _KIND.name).clip_window(begin_ns, recording.cursor_ns)
    if not len(samples):
        return
    # In a container NVML has the host's PIDs: then the job's processes cannot be recognized.
    is_own = np.isin(samples.rows["pid"], [other.source.pid for other in group.processes_on(host)])
    reported: set[int] = process.get_state(set, _KIND.name)
    if not is_own.any() and not reported:
        return
    first = recording.at.records("gpu_processes", host).read_first()
    before = first.rows["pid"].tolist() if len(first) else []
    large = np.flatnonzero(~is_own & (samples.rows["used_bytes"] >= OTHERS_BYTES))
    _, first_of_pid = np.unique(samples.rows["pid"][large], return_index=True)
    for at in large[np.sort(first_of_pid)].tolist():
        pid, is_left_over = int(samples.rows["pid"][at]), (host, int(samples.rows["pid"][at])) in earlier
        if pid not in reported and (pid not in before or is_left_over):
            reported.add(pid)
            used = int(samples.rows["used_bytes"][at])
            yield _Other(int(samples.times[at]), host, is_left_over, pid, gpu, used, process.rank)


def _build_finding(group: Group, others: list[_Other]) -> Annotation:
    time_ns, _, is_left_over, *_ = others[0]
    ranks, pids = sorted({other.rank for other in others}), sorted({other.pid for other in others})
    used = max(other.used_bytes for other in others)
    return (_LEFT_OVER if is_left_over else _KIND).at(
        group,
        time_ns,
        time_ns,
        {"used_bytes": used, "left_over": is_left_over, "processes": len(pids)},
        ranks=ranks,
        concerned=ranks,
        owner="Another process holds" if len(pids) == 1 else "Other processes hold up to",
        gpus=name_gpus(other.gpu for other in others),
        pids=f"{pluralize(len(pids), 'Process')} {', '.join(map(str, pids))}",
        verb="is" if len(pids) == 1 else "are",
        have="has" if len(ranks) == 1 else "have",
        pid_list=",".join(map(str, pids)),
    )


def name_gpus(numbers: Iterable[int]) -> str:
    """Return ``GPU 0``, ``GPUs 0 and 1`` or ``GPUs 0 to 3``."""
    gpus = sorted(set(numbers))
    return format_ranks(gpus).replace("rank", "GPU")
