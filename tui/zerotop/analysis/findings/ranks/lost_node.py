"""A node of a collected recording fell silent: it, its network or zerotop there failed. Told again when it is back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from zerotop.analysis.code_line import CodeLine, find_own
from zerotop.analysis.findings.support import Finding, FindingKind, SearchWindow, Severity, in_events
from zerotop.analysis.findings.support.rank_process import AdvancingRecording
from zerotop.analysis.processes.phases import find_current
from zerotop.recording.events.event_index import get_event_time
from zerotop.recording.moments.at import RankAt
from zerotop_probe.recording.events import NodeLost, NodeReturned, Stacks, TrainingStack

_KIND = FindingKind(
    name="lost_node",
    severity=Severity.ERROR,
    confidence=0.9,
    headline="Node {host} has sent nothing for {silent_s:seconds}[: {concerned:ranks}]",
    details=(
        "[Last seen in {phase}, step {last_step}.][ The line last sampled there, {line_s:seconds} before, is {line}.] The"
        " node, its network or zerotop there has failed or stands still. The others are recorded on; what this one still"
        " records follows when it is back."
    ),
    advice="See whether the node answers, and whether the job goes on there.",
    fix="ping -c 3 {host}",
)
_BACK = _KIND.with_changes(
    severity=Severity.INFO,
    headline="Node {host} is back after {silent_s:seconds}[: {concerned:ranks}]",
    details="What it recorded meanwhile has followed, or follows now.",
    advice="",
    fix="",
)
_NO_SERVER = _KIND.with_changes(
    severity=Severity.WARNING,
    headline="No node has been heard for {silent_s:seconds}: the server cannot be reached",
    details="The collector's connection to the NATS server is lost. The nodes record on, and send it all later.",
    advice="See whether nats-server runs, and whether this machine reaches it.",
    fix="",
)
_SERVER_BACK = _BACK.with_changes(headline="The server is back after {silent_s:seconds}")
# By whether it is the server, and whether it is back.
_KINDS = {(False, False): _KIND, (False, True): _BACK, (True, False): _NO_SERVER, (True, True): _SERVER_BACK}


class _Last(NamedTuple):
    phase: str | None = None
    step: int | None = None
    line: str | None = None
    line_ns: int = 0


@in_events(kinds=None, by_ranks=True)
def detect(window: SearchWindow[AdvancingRecording]) -> Iterator[Finding]:
    """Report a node when it fell silent, and when it is back."""
    recording = window.subject
    reports: list[NodeLost | NodeReturned] = [*recording.events_of(NodeLost), *recording.events_of(NodeReturned)]
    silences: dict[str | None, tuple[int, _Last]] = window.keep(dict)  # by node, as it was seen then: its records follow
    for event in window.items(sorted(reports, key=get_event_time)):
        host, seconds, is_back = event.host, event.seconds or 0.0, isinstance(event, NodeReturned)
        processes = [one for one in recording.at.at(event.unix_ns).ranks.values() if one.host == host]
        ranks = [process.rank for process in processes]
        if is_back and host in silences:  # one finding tells both
            begin_ns, last = silences.pop(host)
        else:
            begin_ns, last = event.unix_ns - int(seconds * 1e9), _find_last(processes)
            silences[host] = begin_ns, last
        line_s = max(0, begin_ns - last.line_ns) / 1e9 if last.line else None
        values: dict[str, Any] = {"step": last.step, "phase": last.phase, "last_step": last.step, "host": host}
        values |= {"line": last.line, "line_s": line_s, "concerned": ranks or None}
        yield _KINDS[host is None, is_back].at(None, begin_ns, event.unix_ns, {"silent_s": seconds}, ranks=ranks, **values)


def _find_last(processes: list[RankAt]) -> _Last:
    """Return phase, step and line of the rank that came least far, as far as its records go."""
    found: list[tuple[int, str, int, RankAt]] = []
    for process in processes:
        begins, spans = (process.at.find_table(name, process.process) for name in ("begins", "spans"))
        if begins is not None and begins.last_ns:
            phase, _, step = find_current(begins, spans, min(begins.last_ns, process.at.cursor_ns))
            if phase and step is not None:
                found.append((step, phase, process.rank, process))
    if not found:
        return _Last()
    step, phase, _, process = min(found)
    return _Last(phase, step, *_find_line(process))


def _find_line(process: RankAt) -> tuple[str | None, int]:
    """Return the line of the job's own code that was sampled last in a rank's training thread, and when (unix time)."""
    sampled: list[Stacks | TrainingStack] = [*process.events_of(Stacks), *process.events_of(TrainingStack)]
    for event in sorted(sampled, key=get_event_time, reverse=True):
        for stack in event.stacks:
            own = find_own(event.frames, stack) if stack.thread is None else None
            if own is not None:
                return CodeLine(own.file, own.line, own.function, own.callees).text, event.unix_ns
    return None, 0
