"""A rank's process died while the job ran."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.processes.process_exits import find_vanished
from zerotop.session.reader import Event

_KIND = FindingKind(
    name="dead_rank",
    severity=Severity.ERROR,
    confidence=0.9,
    headline="Rank {rank}'s process {pid} died unexpectedly[ after {steps:count step}]{early}",
    advice="Look at its last output and at the kernel's log. Saving more often limits how much work is lost.",
    fix="dmesg -T | grep -i kill",
)
_KILLED = _KIND.with_changes(
    confidence=0.95,
    details="The kernel killed a process of its control group for lack of memory just then.",
    advice="Use less host memory: {less_host_memory}.",
    fix="{less_host_memory_fix}",
)
_STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report the first one of each attempt: launchers end the others. None if the job was stopped or a rank ended before."""
    for group in recording.groups:
        processes = {process.key: process for process in group.processes if process.events_named("hello")}
        gone = [e for e in recording.events_named("rank_gone") if (e.host, e.facts.get("pid")) in processes]
        goodbyes = [event for process in group.processes for event in process.events_named("goodbye")]
        event = find_vanished(gone, goodbyes)
        if event is not None and not _is_expected(recording, group, event.unix_ns):
            yield _build_finding(recording, processes[event.host, event.facts["pid"]], event)


def _is_expected(recording: Evidence, group: Group, time_ns: int) -> bool:
    """Whether the job was being stopped, or another rank had ended before: then this one was taken down."""
    stops = [event.unix_ns for event in recording.events_named("stop_sent")]
    # A launcher whose rank has died ends with that rank's exit code: a signal that ends the launcher was sent to it.
    stops += [end.unix_ns for end in recording.events_named("job_ended") if end.facts.get("signal") in _STOP_SIGNALS]
    # A rank that others wait for ends within moments of the first one: its goodbye says nothing then.
    ended = [event.unix_ns for process in group.processes for event in process.events_named("goodbye")]
    gone = [event.unix_ns for event in recording.events_named("rank_gone")]
    ended = [end for end in ended if end < time_ns and any(end <= at < time_ns for at in gone)]
    return any(stop <= time_ns for stop in stops) or bool(ended)


def _build_finding(recording: Evidence, process: Process, event: Event) -> Annotation:
    known_ns = event.unix_ns
    steps, sample = process.steps_until(known_ns), process.host_samples.read_last(known_ns)
    finished = int(steps["step"][-1]) + 1 if len(steps) else 0
    kills = _count_kills(recording, process, known_ns)
    evidence = {
        "finished_steps": finished,
        "host_rss_bytes": sample["rss_bytes"] if sample is not None else None,
        "oom_kills": kills or None,
    }
    kind, early = _KILLED if kills else _KIND, "" if finished else " before its first step was finished"
    return kind.at(process, known_ns, known_ns, evidence, pid=process.source.pid, steps=finished or None, early=early)


def _count_kills(recording: Evidence, process: Process, known_ns: int) -> int:
    """How many processes the kernel killed for lack of memory in the three seconds before."""
    samples = recording.get_records("hosts", process.host).read_window(known_ns - 3 * 10**9, known_ns)
    if not len(samples) or samples.rows["cgroup_oom_kills"].min() < 0:
        return 0
    return int(samples.rows["cgroup_oom_kills"][-1] - samples.rows["cgroup_oom_kills"][0])
