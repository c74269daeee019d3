"""A rank's process was gone without having ended in good order, while the job ran."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.annotations.support.annotation import Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.formatting import format_count
from zerotop.analysis.processes.process_exits import find_vanished
from zerotop.session.reader import Event

_STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")


def detect(facts: Evidence) -> Iterator[Annotation]:
    """The first of each attempt: launchers end the others. None where somebody stopped the job, or a rank ended before."""
    for group in facts.groups:
        processes = {process.key: process for process in group.processes if process.events_named("hello")}
        gone = [e for e in facts.events_named("rank_gone") if (e.host, e.facts.get("pid")) in processes]
        goodbyes = [event for process in group.processes for event in process.events_named("goodbye")]
        event = find_vanished(gone, goodbyes)
        if event is not None and not _is_expected(facts, group, event.unix_ns):
            yield _build_finding(facts, processes[event.host, event.facts["pid"]], event)


def _is_expected(facts: Evidence, group: Group, time_ns: int) -> bool:
    """Whether the job was being stopped, or another rank had ended clearly before: then it was taken down."""
    stops = [event.unix_ns for event in facts.events_named("stop_sent")]
    # A launcher whose rank has died ends by that rank's code: a signal that ends itself was sent to it.
    stops += [end.unix_ns for end in facts.events_named("job_ended") if end.facts.get("signal") in _STOP_SIGNALS]
    # A rank that others wait for ends within moments of the first; its goodbye says nothing then.
    ended = [event.unix_ns for process in group.processes for event in process.events_named("goodbye")]
    known = [event.unix_ns for event in facts.events_named("rank_gone")]
    before = [end for end in ended if end < time_ns and any(end <= gone < time_ns for gone in known)]
    return any(stop <= time_ns for stop in stops) or bool(before)


def _build_finding(facts: Evidence, process: Process, event: Event) -> Annotation:
    known_ns = event.unix_ns
    steps, sample = process.steps_until(known_ns), process.host_samples.read_last(known_ns)
    finished = int(steps["step"][-1]) + 1 if len(steps) else 0
    evidence = {"finished_steps": float(finished)}
    if sample is not None:
        evidence["host_rss_bytes"] = float(sample["rss_bytes"])
    kills = _count_kills(facts, process, known_ns)
    text = f"Rank {process.rank}'s process {process.source.pid} was gone without having ended in good order"
    text += f", after {format_count(finished, 'step')}" if finished else ", before its first step was finished"
    if kills:
        evidence["oom_kills"] = float(kills)
        text += ": the kernel killed a process of the control group for memory just then"
        advice = 'Lower host memory: "offload_optimizer.pin_memory": false, or fewer dataloader_num_workers.'
    else:
        advice = "Look at its last output and at dmesg; Trainer's save_steps bounds what such an end loses."
    return Annotation(
        name="dead_rank",
        begin_ns=known_ns,
        end_ns=known_ns,
        known_ns=known_ns,
        step=process.step_at(known_ns),
        ranks=(process.rank,),
        severity=Severity.ERROR,
        confidence=0.95 if kills else 0.9,
        sentence=text + ".",
        advice=advice,
        evidence=evidence,
    )


def _count_kills(facts: Evidence, process: Process, known_ns: int) -> int:
    """Processes that the kernel killed for memory in the last seconds before."""
    samples = facts.get_records("hosts", process.source.host).read_window(known_ns - 3 * 10**9, known_ns)
    if not len(samples) or samples.rows["cgroup_oom_kills"].min() < 0:
        return 0
    return int(samples.rows["cgroup_oom_kills"][-1] - samples.rows["cgroup_oom_kills"][0])
