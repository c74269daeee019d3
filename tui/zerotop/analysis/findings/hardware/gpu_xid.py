"""A GPU reported an Xid or another fault, or cannot be reached any more: whose fault it is, and which rank it ended."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from zerotop.analysis.failures.rank_ends import find_ends
from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, Process, SearchWindow, Severity, in_job
from zerotop.analysis.findings.support.gpu_faults import find_rank_processes
from zerotop.analysis.findings.support.links import Kinds, tells_fault
from zerotop.analysis.hardware.gpu_faults import FOLLOWS_NS, LEAVE, find_earlier, list_gpus
from zerotop.analysis.hardware.operational_events import (
    FATAL,
    RECOVERABLE,
    find_xid,
    is_of_memory,
    name_category,
    name_code,
    name_severity,
    read_severity,
)
from zerotop.analysis.hardware.xids import Origin, Xid, describe_xid
from zerotop.recording.events.event_files import select_events
from zerotop_probe.recording.events import Goodbye, GpuFault, JobEnded, RankGone, StopSent

_KIND = FindingKind(
    name="gpu_xid",
    confidence=0.9,
    headline="GPU {gpu}[ of {concerned:ranks}] reported Xid {xid}, {called}",
    details="{meaning} Cause, after NVIDIA's document: {origin}.[ It came in step {step}.]",
    advice="{action}",
    fix="CUDA_LAUNCH_BLOCKING=1",
    superseded_by=(Kinds(tells_fault, "dead_rank"),),
)
_HARDWARE = _KIND.with_changes(
    superseded_by=(),
    severity=Severity.ERROR,
    confidence=0.95,
    details="{meaning} It is not your code.[ It came in step {step}.]",
    fix="nvidia-smi -q -i {gpu}",
)
_NOTED = _KIND.with_changes(severity=Severity.INFO, fix="")
_ENDED = "GPU {gpu} reported Xid {xid}, {called}, {apart_s:seconds} before rank {ended} ended"
_EVENT = FindingKind(
    name="gpu_event",
    confidence=0.8,
    headline="GPU {gpu}[ of {concerned:ranks}] reported {called}, {bad}",
    details="The driver's event {code} says so.[ It came in step {step}.]",
    advice="Look it up in the catalog of NVIDIA's GPU Operational Events, in the edition of your driver.",
    fix="nvidia-smi -q -i {gpu}",
)
_EVENT_ENDED = "GPU {gpu} reported {called}, {bad}, {apart_s:seconds} before rank {ended} ended"
_MEMORY_EVENT = "The driver's event {code} says so. It is not your code.[ It came in step {step}.]"
_LOST = FindingKind(
    name="gpu_lost",
    severity=Severity.ERROR,
    confidence=0.95,
    headline="NVML lost GPU {gpu}[ of {concerned:ranks}]: it does not respond any more",
    details=(
        "The driver cannot reach the GPU: power, heat, the slot, or the GPU itself. It is not your code."
        "[ It came in step {step}.]"
    ),
    advice="Restart from the last checkpoint on another node, and have this one drained and its GPU checked.",
    fix="nvidia-smi -q -i {gpu}",
)
_LOST_ENDED = "NVML lost GPU {gpu} {apart_s:seconds} before rank {ended} ended"
_BROKEN = {
    "unavailable": "The driver gave up GPU {gpu}[ of {concerned:ranks}]",
    "poison_fatal": "GPU {gpu}[ of {concerned:ranks}] met data in memory that it could not repair",
    "dram_failed": "GPU {gpu}[ of {concerned:ranks}] could not replace bad memory",
}
# Within this time, an Xid of a process that was ended follows the first one on its GPU, and a lost GPU its Xid.
_ALSO_NS = 10 * 10**9
# Within this time after a rank's end, launchers print how it ended.
_REPORTED_NS = 5 * 10**9
# What the driver does in the end of a job that was asked to stop.
_STOPPING_NS = 60 * 10**9


class _Reported(NamedTuple):
    fault: GpuFault
    users: list[Process]
    step: int | None


class _End(NamedTuple):
    """The end of a rank after a fault of its GPU, and when it was known to be no normal one."""

    rank: int
    time_ns: int
    known_ns: int
    is_failure: bool


@in_job(kinds=None)
def detect(window: SearchWindow[Evidence]) -> Iterator[Finding]:
    """Report each Xid of a GPU of the job at once, and again when a rank on it ends soon after."""
    reported = []
    for fault in window.items(window.recording.events_of(GpuFault)):
        xid = find_xid(fault)
        what = (fault.kind, fault.report.module, fault.report.code) if fault.report is not None else (fault.kind,)
        key = fault.writer.host, fault.gpu, *(("xid", xid) if xid is not None else what)
        first = window.find_once(partial(_begin_report, window.recording, fault), key)
        if first is not None and first.fault is fault:
            reported.append(first)
            yield _build_finding(first, None)
    for one, end in window.await_each(reported, partial(_find_end, window.recording)):
        if end.is_failure:
            yield _build_finding(one, end)


def _begin_report(recording: Evidence, fault: GpuFault) -> _Reported | None:
    """Return the fault as one to be reported; None if it is of another kind, an aftermath, or another job's."""
    is_bad = find_xid(fault) is not None or read_severity(fault) >= RECOVERABLE or fault.kind in ("lost", *_BROKEN)
    if not is_bad or _is_aftermath(recording, fault):
        return None
    users, is_ours = find_rank_processes(recording, fault.writer.host, list_gpus(fault), fault.unix_ns)
    is_ours &= bool(users) or _find_origin(fault) is not Origin.CODE  # the driver stops processes that use the GPU
    return _Reported(fault, users, users[0].step_at(fault.unix_ns) if users else None) if is_ours else None


def _is_aftermath(recording: Evidence, fault: GpuFault) -> bool:
    """Whether it only follows another Xid of its GPU, or the end of a job that was asked to stop."""
    faults = recording.events_of(GpuFault)
    if fault.kind == "lost":
        return find_earlier(faults, fault, _ALSO_NS, lambda other: find_xid(other) is not None) is not None
    if fault.report is not None and fault.report.group is not None and find_xid(fault) is None:
        return any(_is_worse_part(other, fault) for other in faults)
    origin = _find_origin(fault)
    if origin not in (Origin.CODE, Origin.CLEANUP):
        return False
    stops = select_events(recording.events_of(StopSent), fault.unix_ns - _STOPPING_NS, fault.unix_ns)
    is_tidied = bool(stops) and origin is Origin.CLEANUP
    return is_tidied or find_earlier(faults, fault, _ALSO_NS, _is_cause) is not None


def _is_cause(fault: GpuFault) -> bool:
    return _find_origin(fault) not in (None, Origin.CLEANUP)


def _is_worse_part(other: GpuFault, fault: GpuFault) -> bool:
    """Whether another operational event tells more about the incident that this one is part of."""
    is_same = (other.writer.host, other.gpu) == (fault.writer.host, fault.gpu) and other is not fault
    if not is_same or other.report is None or fault.report is None or other.report.group != fault.report.group:
        return False
    return find_xid(other) is not None or (read_severity(other), -other.unix_ns) > (read_severity(fault), -fault.unix_ns)


def _find_origin(fault: GpuFault) -> Origin | None:
    xid = find_xid(fault)
    return describe_xid(xid).origin if xid is not None else None


def _find_end(recording: Evidence, one: _Reported) -> _End | None:
    """Return how the first rank on the GPU ended soon after its fault; None while that is open."""
    begin_ns = one.fault.unix_ns
    gone = {event.process_key: event.unix_ns for event in reversed(recording.events_of(RankGone))}
    ends = []
    for process in one.users:
        times = [event.unix_ns for event in process.events_of(Goodbye)] + [gone.get(process.key, 0)]
        ends += [(time_ns, process.rank) for time_ns in times if begin_ns <= time_ns <= begin_ns + FOLLOWS_NS]
    if not ends:
        return None
    time_ns, rank = min(ends)
    job_ends = [event.unix_ns for event in recording.events_of(JobEnded) if event.unix_ns >= time_ns]
    known_ns = min([time_ns + _REPORTED_NS, *job_ends])
    if known_ns > recording.cursor_ns:
        return None
    attempt = next(group.processes for group in recording.groups if one.users[0] in group.processes)
    failed = {end.process.rank for end in find_ends(recording.at.at(known_ns), [other.source for other in attempt])}
    was_stopped = bool(select_events(recording.events_of(StopSent), begin_ns, time_ns))
    return _End(rank, time_ns, known_ns, rank in failed and not was_stopped)


def _choose_kind(xid: Xid) -> FindingKind:
    if xid.origin in (Origin.HARDWARE, Origin.DRIVER):
        return _HARDWARE
    return _NOTED if xid.origin in (Origin.CLEANUP, Origin.NOTE) else _KIND


def _build_finding(one: _Reported, end: _End | None) -> Finding:
    fault, ranks = one.fault, sorted({process.rank for process in one.users})
    known_ns = end.known_ns if end is not None else fault.unix_ns
    evidence = {"apart_s": (end.time_ns - fault.unix_ns) / 1e9 if end is not None else None}
    values: dict[str, Any] = {"gpu": fault.gpu, "concerned": ranks or None, "ended": end.rank if end is not None else None}
    number = find_xid(fault)
    if number is not None or fault.kind == "xid":
        xid = describe_xid(number if number is not None else -1)
        kind = _choose_kind(xid)
        # What the driver tidies up is no reason for an end.
        kind = kind.with_changes(headline=_ENDED) if end is not None and kind is not _NOTED else kind
        values |= {"called": xid.name, "meaning": xid.meaning, "action": xid.action, "origin": xid.origin.value}
        evidence |= {"xid": xid.number}
    elif fault.report is not None:
        kind = _EVENT.with_changes(details=_MEMORY_EVENT) if is_of_memory(fault.report) else _EVENT
        if read_severity(fault) >= FATAL:
            advice = LEAVE if is_of_memory(fault.report) else kind.advice
            kind = kind.with_changes(severity=Severity.ERROR, confidence=0.9, advice=advice)
        kind = kind.with_changes(headline=_EVENT_ENDED) if end is not None else kind
        values |= {
            "called": name_category(fault.report),
            "bad": name_severity(fault.report),
            "code": name_code(fault.report),
        }
    elif fault.kind == "lost":
        kind = _LOST.with_changes(headline=_LOST_ENDED) if end is not None else _LOST
    else:
        kind = _LOST.with_changes(headline=_BROKEN[fault.kind])
    values["xid"] = fault.value
    return kind.at(
        one.users[0] if one.users else None,
        fault.unix_ns,
        known_ns,
        evidence,
        ranks=ranks,
        step=one.step,
        cost=1.0 if kind.severity is Severity.ERROR else 0.0,
        **values,
    )
