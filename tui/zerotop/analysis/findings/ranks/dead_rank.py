"""A rank's process ended too early: a signal killed it, an exception ended it, or it vanished."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from zerotop.analysis.failures.crashes import COUNTED_NS, LAST_MEMORY_NS, LAUNCHER_NS, explain_rank
from zerotop.analysis.failures.end import End
from zerotop.analysis.failures.rank_ends import ONE_LOOK_NS, RankEnd, find_ends, is_ray_worker, read_printed_ends
from zerotop.analysis.findings.support import Finding, FindingKind, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.evidence import Evidence, Group, Process
from zerotop.analysis.findings.support.links import TO_GPU_FAULTS, TO_HANGS, Kinds, took_down, was_killed_for_memory
from zerotop_probe.recording import events

_KIND = FindingKind(
    name="dead_rank",
    severity=Severity.ERROR,
    confidence=0.95,
    headline="",
    explained_by=(
        *TO_GPU_FAULTS,
        Kinds(was_killed_for_memory, "host_memory_short", "host_memory_forecast"),
        Kinds(took_down, "out_of_memory", shares_ranks=False),
        *TO_HANGS,
    ),
)
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
"""Signals that ask a job to end."""


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report the first rank that died in each attempt: the others fail because of it. None if the job was being stopped.

    It is told again if samples soon show whether the kernel killed it for lack of memory.
    """
    recording, group = window.recording, window.subject
    check = partial(_check_ends, recording, group)
    told = window.find_once(
        lambda: next(filter(None, map(check, window.extend(partial(_find_next, recording, group), 0))), None)
    )
    if told is not None:
        yield told
        window.is_closed = recording.cursor_ns > told.begin_ns + LAUNCHER_NS
        yield _find_counted(recording, group, told)


def _find_counted(recording: Evidence, group: Group, told: Finding) -> Finding | None:
    """Return the finding with what the next sample of its node says of the kernel's kills, if that is something else."""
    host = next((process.host for process in group.processes if process.rank in told.ranks), None)
    if host is None:  # it wrote nothing
        return None
    samples = recording.at.records("hosts", host).read_window(told.known_ns, recording.cursor_ns)
    known_ns = next((time_ns for time_ns in samples.times.tolist() if time_ns >= told.begin_ns + COUNTED_NS), None)
    if known_ns is None or known_ns > told.begin_ns + LAUNCHER_NS:
        return None
    counted = _check_ends(recording, group, known_ns)
    return counted if counted is not None and counted.event == told.event and counted.advice != told.advice else None


def _find_next(recording: Evidence, group: Group, before_ns: int | None) -> int | None:
    """Return the next time at which ends of processes were known."""
    for end_ns in _list_ends(recording, group):
        known_ns = _find_known(recording, group, end_ns)
        if known_ns is None or known_ns > (before_ns or 0):
            return known_ns
    return None


def _list_ends(recording: Evidence, group: Group) -> list[int]:
    """Return when processes of an attempt ended, in order."""
    keys = {process.key for process in group.processes}
    ends = [event.unix_ns for event in recording.events_of(events.RankGone) if event.process_key in keys]
    ends += [event.unix_ns for process in group.processes for event in process.events_of(events.Goodbye)]
    return sorted(ends)


def _find_known(recording: Evidence, group: Group, end_ns: int) -> int | None:
    """Return when the end of a process became known; None while that is open."""
    begin_ns = group.lead.source.created_ns
    job_ends = [event.unix_ns for event in recording.events_of(events.JobEnded) if event.unix_ns >= begin_ns]
    if not job_ends and _has_unread_files(recording, group, end_ns):
        return None
    limits = [max(end_ns, job_end_ns) for job_end_ns in job_ends]
    if not is_ray_worker(recording.at, group.lead.process):
        limits.append(end_ns + LAUNCHER_NS)
    elif not limits:
        return None  # whether it failed is known by how the driver ends
    until_ns = min(*limits, recording.cursor_ns)
    reports = read_printed_ends(recording.at.at(until_ns)).reports
    times = [one.time_ns for one in reports if one.is_first and one.time_ns >= begin_ns]
    # Other ranks that ended at the same time are known by then too: the first of them counts.
    known_ns = min([*limits, *(max(end_ns, time_ns) + ONE_LOOK_NS for time_ns in times)])
    return known_ns if known_ns <= recording.cursor_ns else None


def _has_unread_files(recording: Evidence, group: Group, end_ns: int) -> bool:
    """Whether a rank has ended that wrote to a file, which is read when the sampler finds the rank gone."""
    files = {event.process_key for event in recording.events_of(events.OutputFiles)}
    gone = {event.process_key for event in recording.events_of(events.RankGone)}
    ended = [process for process in group.processes if process.key in files - gone]
    return any(event.unix_ns <= end_ns for process in ended for event in process.events_of(events.Goodbye))


def _check_ends(recording: Evidence, group: Group, known_ns: int) -> Finding | None:
    processes = {process.process: process for process in group.processes}
    greeted = [process.source for process in group.processes if process.events_of(events.Hello)]
    at = recording.at.at(known_ns)
    ends = find_ends(at, greeted)
    if not ends or _is_expected(recording, group, ends[0], known_ns):
        return None
    return build_finding(processes.get(ends[0].process), explain_rank(at, ends, list(processes)), known_ns)


def build_finding(process: Process | None, end: End, known_ns: int) -> Finding:
    """Return the finding about the end of a process; None: of a job before any trained."""
    texts = end.cause.texts if end.cause is not None else {}
    ranks = sorted(end.ranks)
    return _KIND.with_changes(**texts).at(process, end.unix_ns, known_ns, end.evidence, ranks=ranks, **end.values)


def _is_expected(recording: Evidence, group: Group, end: RankEnd, known_ns: int) -> bool:
    """Whether the job was being stopped, or a reported lack of memory ended the rank."""
    # A launcher whose rank has died ends with that rank's exit code: a signal that ends the launcher was sent to it.
    ended = [one for one in recording.events_of(events.JobEnded) if one.signal in STOP_SIGNALS]
    stops = [*recording.events_of(events.StopSent), *(one for one in ended if one.unix_ns >= group.lead.source.created_ns)]
    if (
        any(stop.unix_ns <= known_ns for stop in stops)
        or read_printed_ends(recording.at.at(known_ns)).stopped_ns is not None
    ):
        return True
    errors = [error.unix_ns for error in recording.at.process_events(events.OutOfMemory, end.process)]
    if end.signal_number is None and any(known_ns - LAST_MEMORY_NS <= error <= known_ns for error in errors):
        return True
    if end.traceback is not None:
        return end.traceback.error == "KeyboardInterrupt"
    return end.report is None and _was_taken_down(recording, group, end)


def _was_taken_down(recording: Evidence, group: Group, end: RankEnd) -> bool:
    """Whether another rank had ended normally before this one vanished."""
    gone = recording.events_of(events.RankGone)
    time_ns = next((event.unix_ns for event in gone if event.process_key == (end.process.host, end.process.pid)), 0)
    # If others wait for a rank, it ends within moments of the first one, and its goodbye means nothing.
    ended = [event.unix_ns for process in group.processes for event in process.events_of(events.Goodbye)]
    return any(goodbye < time_ns and any(goodbye <= event.unix_ns < time_ns for event in gone) for goodbye in ended)
