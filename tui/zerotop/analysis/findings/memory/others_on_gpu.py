"""Processes that are not part of the job hold memory of its GPUs: since before it started, or from some moment on."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, SearchWindow, Severity, in_each_node
from zerotop.analysis.findings.support.evidence import Evidence, Group, Process
from zerotop.analysis.findings.support.finding import Kinds
from zerotop.analysis.findings.support.thresholds import COMPUTING_PERCENT, OTHERS_BYTES
from zerotop.analysis.formatting import format_ranks, pluralize
from zerotop.recording.keys import GpuKey
from zerotop.recording.moments.at import At
from zerotop.recording.samples import read_column
from zerotop_probe.recording.events import Entered, GpuProcess, RankFound


def _has_more_gpus(effect: Finding, cause: Finding) -> bool:
    """Whether another finding is about the same arrival with those that came after it."""
    return cause.begin_ns == effect.begin_ns and set(cause.ranks) > set(effect.ranks)


_BEFORE = FindingKind(
    name="others_on_gpu",
    confidence=0.9,
    gpu_bytes="used_bytes",
    headline="{used_bytes:bytes} of {gpus} {verb} in use before the job started",
    details="That is {share:percent} of the device[, held by {pids}]: {concerned:ranks} {have} less memory.",
    advice="See whose process it is before ending it: it may be a rank of a dead job. Or choose other GPUs.",
    fix="nvidia-smi[; ps -o user,lstart,cmd -p {pid_list}]",
)
_ARRIVED = _BEFORE.with_changes(
    name="others_arrived",
    headline="{owner} {used_bytes:bytes} of {gpus}, beside the job",
    details="{pids} {verb} not part of this job: {concerned:ranks} {have} less memory, and may wait for the GPU.",
    advice="See whose it is before ending it, or keep one of the jobs off with CUDA_VISIBLE_DEVICES.",
    fix="ps -o user,lstart,cmd -p {pid_list}",
    lasts=True,
    superseded_by=(Kinds(_has_more_gpus, "others_arrived"),),
)
_LEFT_OVER = _ARRIVED.with_changes(
    headline="A rank of an earlier attempt still holds {used_bytes:bytes} of {gpus}",
    details="{pids} should have ended with that attempt: {concerned:ranks} {have} less memory.",
    advice="Look at it, and end it if it is yours.",
)


# Less than this share of a device is no loss while so much of its memory is free, unless its processes compute.
_LITTLE_SHARE, _FREE_SHARE = 0.05, 0.5
# Processes are read at least this often (ns); those that arrive within this time of the first are told together.
_RECENT_NS = 3_000_000_000
# Processes that hold this much more, as a share, are told again.
_MORE_SHARE = 0.03


class _Other(NamedTuple):
    """Memory of processes that do not belong to the job, and when it was first seen."""

    time_ns: int
    host: str
    is_left_over: bool
    pids: list[int]
    gpu: int
    used_bytes: int
    total_bytes: int  # of the device; -1 if it is not needed
    ranks: list[int]  # whose GPU it is


class _Arrival(NamedTuple):
    """Processes that came together, with what they hold at a moment."""

    others: list[_Other]
    known_ns: int
    most_bytes: int  # that they held together of a GPU up to then
    is_little: bool
    is_news: bool = True

    @property
    def by_gpu(self) -> dict[int, list[_Other]]:
        return {gpu: [one for one in self.others if one.gpu == gpu] for gpu in sorted({one.gpu for one in self.others})}


@in_each_node(None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report what is in use before any rank creates its engine, and each process that comes after the ranks' first step.

    The former after the first step; the latter together if they came together, and again once they are or hold more.
    """
    recording, group, host = window.recording, window.subject, window.host
    if not all(len(process.steps) for process in group.processes):
        return
    begin_ns = max(int(process.steps["end_unix_ns"][0]) for process in group.processes)
    for known_ns in window.items([begin_ns]):
        yield from _check_host(group, host, recording.find_first_creations()[host], known_ns)
    gpus = _list_gpus(group, host).items()
    found = sorted(other for gpu, ranks in gpus for other in _find_arrivals(window, begin_ns, gpu, ranks))
    arrived = window.gather(found)
    begun = [[one for one in found if one[:3] == other[:3]] for other in found if _find_first(arrived, other) is other]
    first = [_tell(group, others, others[0].time_ns) for others in begun]
    told = window.follow(first, partial(_follow, group, arrived))
    yield from (_build_arrival(group, arrival) for arrival in told if arrival.is_news)


def _tell(group: Group, others: list[_Other], known_ns: int) -> _Arrival:
    arrival = _Arrival(others, known_ns, 0, is_little=True)
    most_bytes = max(sum(one.used_bytes for one in others) for others in arrival.by_gpu.values())
    is_little = all(_is_little(group, one, known_ns) for one in arrival.by_gpu.values())
    return arrival._replace(most_bytes=most_bytes, is_little=is_little)


def _find_first(arrived: Sequence[_Other], other: _Other) -> _Other:
    """Return the first of the processes that came together with one of them."""
    first: dict[tuple[str, bool], _Other] = {}
    for one in arrived:
        key = one.host, one.is_left_over
        if key not in first or one.time_ns > first[key].time_ns + _RECENT_NS:
            first[key] = one
        if one is other:
            break
    return first[other.host, other.is_left_over]


def _follow(group: Group, arrived: Sequence[_Other], last: _Arrival) -> _Arrival | None:
    """Return the arrival with the next processes that came with it, or once they hold notably more of a GPU."""
    at, known_ns, host = group.lead.at, last.known_ns, last.others[0].host
    news: list[tuple[int, list[_Other]]] = []  # when, and the processes with their bytes then
    for gpu, others in last.by_gpu.items():
        samples = at.records("gpu_processes", host, "gpu", gpu).read_window(last.known_ns, at.cursor_ns)
        if not len(samples):
            continue
        known_ns = max(known_ns, int(samples.times[-1]))
        is_theirs = np.isin(samples.rows["pid"], [pid for other in others for pid in other.pids])
        moments, places = np.unique(samples.times[is_theirs], return_inverse=True)
        sums = np.bincount(places, weights=samples.rows["used_bytes"][is_theirs], minlength=len(moments))
        news += [(time_ns, last.others) for time_ns in moments[sums >= (1 + _MORE_SHARE) * last.most_bytes][:1].tolist()]
    joined = [one for one in arrived if _find_first(arrived, one)[:5] == last.others[0][:5]]
    known = [other[:5] for other in last.others]
    joining = [one for one in joined if one[:5] not in known]
    for join_ns in sorted({one.time_ns for one in joining})[:1]:
        news.append((max(join_ns, last.known_ns), last.others + [one for one in joining if one.time_ns == join_ns]))
    if not news:
        return last._replace(known_ns=known_ns, is_news=False) if known_ns > last.known_ns else None
    time_ns, others = min(news, key=lambda one: (one[0], -len(one[1])))
    arrival = _tell(group, _read_bytes(at, host, others, time_ns), time_ns)
    most_bytes = max(last.most_bytes, arrival.most_bytes)
    return arrival._replace(most_bytes=most_bytes, is_little=arrival.is_little and last.is_little)


def _read_bytes(at: At, host: str, others: list[_Other], time_ns: int) -> list[_Other]:
    """Return the processes with the bytes that they hold of their GPUs at a time."""
    held: dict[tuple[int, int], int] = {}
    for gpu in {other.gpu for other in others}:
        samples = at.records("gpu_processes", host, "gpu", gpu).read_window(time_ns - _RECENT_NS, time_ns)
        for row in samples.rows[samples.times == samples.times.max(initial=0)]:
            held[gpu, int(row["pid"])] = int(row["used_bytes"])
    return [other._replace(used_bytes=held.get((other.gpu, other.pids[0]), 0)) for other in others]


def _check_host(group: Group, host: str, created_ns: int, known_ns: int) -> Iterator[Finding]:
    by_gpu: dict[GpuKey, _Other] = {}
    for process in group.processes_on(host):
        key = process.gpu_key
        other = _find_earlier(process, key, created_ns) if key is not None and key not in by_gpu else None
        if key is None or other is None:
            continue
        held = _read_holders(process, key, known_ns)
        pids = [pid for pid in other.pids if pid in held]
        if pids or not other.pids:  # it has not ended meanwhile
            by_gpu[key] = other._replace(pids=pids)
    if by_gpu:
        others = list(by_gpu.values())
        most = max(others, key=lambda other: other.used_bytes)
        evidence: dict[str, float] = {"used_bytes": most.used_bytes, "total_bytes": most.total_bytes}
        yield _build_finding(
            _BEFORE.with_changes(severity=Severity.INFO)
            if all(_is_little(group, [other], known_ns) for other in others)
            else _BEFORE,
            group,
            others,
            known_ns,
            evidence,
            step=None,
            verb="was" if len(others) == 1 else "were each",
            share=most.used_bytes / most.total_bytes,
        )


def _find_earlier(process: Process, gpu_key: GpuKey, created_ns: int) -> _Other | None:
    if process.events_of(Entered):
        return None  # it was there before the first sample itself, in a container perhaps under another PID
    samples, allocator = process.gpu_samples.read_first(), process.records("allocator").read_first()
    if not len(samples) or not len(allocator):
        return None
    used, total = int(samples.rows["used_bytes"][0]), int(samples.rows["total_bytes"][0])
    first = process.at.records("gpu_processes", gpu_key[0]).read_first()
    held = _read_holders(process, gpu_key, int(first.times[0])) if len(first) else {}
    used = min(used, sum(held.values()) or used)  # the driver needs some, too
    # Ranks may have created their context before the engine: only a sampler that started before the ranks can tell.
    events = [event.unix_ns for event in process.recording.events_of(RankFound) if event.writer.host == gpu_key[0]]
    if int(samples.times[0]) >= min([*events, created_ns]) or used < OTHERS_BYTES:
        return None
    return _Other(int(samples.times[0]), gpu_key[0], False, sorted(held), gpu_key[1], used, total, [process.rank])


def _read_holders(process: Process, gpu_key: GpuKey, time_ns: int) -> dict[int, int]:
    """Return the bytes of each process with memory on the GPU, by NVML's PIDs, in the last sample up to a time."""
    host, gpu = gpu_key
    samples = process.at.records("gpu_processes", host, "gpu", gpu).read_window(time_ns - _RECENT_NS, time_ns)
    rows = samples.rows[samples.times == samples.times.max(initial=0)]
    return dict(zip(rows["pid"].tolist(), rows["used_bytes"].tolist(), strict=True))


def _list_gpus(group: Group, host: str) -> dict[int, list[int]]:
    """Return the ranks that use each GPU of a node."""
    gpus: dict[int, list[int]] = {}
    for process in group.processes_on(host):
        if process.gpu_key is not None:
            gpus.setdefault(process.gpu_key[1], []).append(process.rank)
    return gpus


def _find_arrivals(window: SearchWindow[Group], begin_ns: int, gpu: int, ranks: list[int]) -> Iterator[_Other]:
    recording, group, host = window.recording, window.subject, window.host
    records = recording.at.records("gpu_processes", host, "gpu", gpu)
    samples = window.records(records).clip_window(begin_ns, recording.cursor_ns)
    if not len(samples):
        return
    # In a container NVML has the host's PIDs: then the job's processes cannot be recognized.
    own = [other.source.pid for other in group.processes_on(host)]
    own += [event.pid for event in recording.events_of(GpuProcess) if event.of_job and event.writer.host == host]
    is_own = np.isin(samples.rows["pid"], own)
    if window.find_once(lambda: True if is_own.any() else None, gpu) is None:
        return
    first_ns = int(recording.at.records("gpu_processes", host).read_first().times[0])
    first = records.read_window(first_ns - 1, first_ns).rows
    before = first["pid"][first["used_bytes"] >= OTHERS_BYTES].tolist()
    earlier = {process.source.pid for process in _list_earlier(recording, group) if process.host == host}
    large = np.flatnonzero(~is_own & (samples.rows["used_bytes"] >= OTHERS_BYTES))
    _, first_of_pid = np.unique(samples.rows["pid"][large], return_index=True)
    for at in large[np.sort(first_of_pid)].tolist():
        pid, used = int(samples.rows["pid"][at]), int(samples.rows["used_bytes"][at])
        if (pid not in before or pid in earlier) and window.is_news(pid, operator.ne, (gpu, pid)):
            yield _Other(int(samples.times[at]), host, pid in earlier, [pid], gpu, used, -1, ranks)


def _list_earlier(recording: Evidence, group: Group) -> list[Process]:
    """Return the processes of the attempts before this one."""
    return [process for other in recording.groups[: recording.groups.index(group)] for process in other.processes]


def _build_arrival(group: Group, arrival: _Arrival) -> Finding:
    others, is_left_over = arrival.others, arrival.others[0].is_left_over
    evidence: dict[str, float] = {"used_bytes": arrival.most_bytes, "left_over": is_left_over}
    is_one = len({pid for other in others for pid in other.pids}) == 1
    kind = _LEFT_OVER if is_left_over else _ARRIVED
    if arrival.is_little:
        kind = kind.with_changes(severity=Severity.INFO)
    return _build_finding(
        kind,
        group,
        others,
        arrival.known_ns,
        evidence,
        noun="Process",
        owner="Another process holds" if is_one else "Other processes hold up to",
        verb="is" if is_one else "are",
    )


def _is_little(group: Group, others: list[_Other], known_ns: int) -> bool:
    """Whether other processes take nothing that the job needs: little memory of a GPU that has much, and no time of it."""
    at, host, gpu = group.lead.at, others[0].host, others[0].gpu
    device = at.records("gpus", host, "gpu", gpu).read_last(known_ns)
    if device is None or not 0 <= int(device["used_bytes"]) < (1 - _FREE_SHARE) * int(device["total_bytes"]):
        return False
    rows = at.records("gpu_processes", host, "gpu", gpu).read_window(known_ns - _RECENT_NS, known_ns).rows
    uses = read_column(rows, "sm_percent")[np.isin(rows["pid"], [pid for other in others for pid in other.pids])]
    used_bytes = sum(other.used_bytes for other in others)
    return used_bytes < _LITTLE_SHARE * int(device["total_bytes"]) and not (uses >= COMPUTING_PERCENT).any()


def _build_finding(
    kind: FindingKind,
    group: Group,
    others: list[_Other],
    end_ns: int,
    evidence: dict[str, float],
    noun: str = "process",
    **values: Any,
) -> Finding:
    ranks, pids = (
        sorted({rank for other in others for rank in other.ranks}),
        sorted({pid for other in others for pid in other.pids}),
    )
    return kind.at(
        group,
        min(other.time_ns for other in others),
        end_ns,
        evidence | {"processes": len(pids)},
        ranks=ranks,
        concerned=ranks,
        gpus=format_ranks(sorted({other.gpu for other in others})).replace("rank", "GPU"),
        have="has" if len(ranks) == 1 else "have",
        pids=f"{pluralize(len(pids), noun)} {', '.join(map(str, pids))}" if pids else None,
        pid_list=",".join(map(str, pids)) or None,
        **values,
    )
