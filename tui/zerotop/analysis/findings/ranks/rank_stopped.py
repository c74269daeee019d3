"""A signal stopped a rank (SIGSTOP, or Ctrl-Z in its terminal), and the others wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop_probe.recording import events

_KIND = FindingKind(
    name="rank_stopped",
    confidence=1.0,
    lost_once="stopped_s",
    headline="A signal stopped {concerned:ranks} for {stopped_s:seconds}",
    details=(
        "It was SIGSTOP, or Ctrl-Z in a terminal; schedulers that suspend jobs send SIGSTOP too. The iteration took that"
        " much longer, which says nothing about the training."
    ),
)
_STILL = _KIND.with_changes(
    headline="A signal has stopped {concerned:ranks}, and training waits",
    details="It was SIGSTOP, or Ctrl-Z in a terminal.",
    advice="Let it continue.",
    fix="kill -CONT {pid}",
)
# Shorter stops cost little.
STOPPED_SECONDS = 1.0
# A rank that has been stopped for this long may have been forgotten.
STILL_SECONDS = 10.0
# Ranks that were stopped within this time were stopped together.
_TOGETHER_NS = 2 * 10**9
_EVENTS: tuple[type[events.RankEvent], ...] = (events.RankStopped, events.RankContinued, events.RankGone)


class _Stop(NamedTuple):
    """A rank that was stopped, until it ended or went on, or up to the cursor."""

    since_ns: int
    until_ns: int
    process: Process
    goes_on: bool


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report a stop when it ends, and earlier if it lasts long; only once for ranks that were stopped together."""
    stops, still_ns = list(_list_stops(window)), int(STILL_SECONDS * 1e9)
    still = [(one.since_ns + still_ns, one) for one in stops if one.until_ns >= one.since_ns + still_ns]
    ended = [(one.until_ns, one) for one in stops if one.goes_on and one.until_ns >= one.since_ns + STOPPED_SECONDS * 1e9]
    for kind, known, cost in ((_STILL, still, 1.0), (_KIND, ended, 0.0)):
        told_ns = 0
        for known_ns, stop in sorted(known, key=lambda one: one[0]):
            near = [one for one in stops if abs(one.since_ns - stop.since_ns) <= _TOGETHER_NS and one.since_ns <= known_ns]
            if abs(stop.since_ns - told_ns) > _TOGETHER_NS:
                told_ns, ranks = stop.since_ns, sorted({one.process.rank for one in near})
                values: dict[str, Any] = {"ranks": ranks, "concerned": ranks, "pid": stop.process.source.pid, "cost": cost}
                evidence = {"stopped_s": (known_ns - stop.since_ns) / 1e9}
                yield kind.at(window.subject, stop.since_ns, known_ns, evidence, **values)


def _list_stops(window: SearchWindow[Group]) -> Iterator[_Stop]:
    stopped: dict[Process, int] = {}
    processes = {process.key: process for process in window.subject.processes}
    found = (event for kind in _EVENTS for event in window.recording.events_of(kind))
    for event in sorted(found, key=lambda event: event.unix_ns):
        process = processes.get(event.process_key)
        if process is None or event.unix_ns < process.source.created_ns:
            continue
        if isinstance(event, events.RankStopped):
            stopped.setdefault(process, event.unix_ns)
        elif process in stopped:
            yield _Stop(stopped.pop(process), event.unix_ns, process, isinstance(event, events.RankContinued))
    yield from (_Stop(since_ns, window.recording.cursor_ns, one, goes_on=False) for one, since_ns in stopped.items())
