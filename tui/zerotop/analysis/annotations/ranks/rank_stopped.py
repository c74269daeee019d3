"""A signal stopped a rank (SIGSTOP, or Ctrl-Z in its terminal), and the others wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.window import SearchWindow, in_each_attempt
from zerotop.session.keys import ProcessKey
from zerotop_probe.recording import events

_KIND = FindingKind(
    name="rank_stopped",
    severity=Severity.WARNING,
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
_Event = events.RankStopped | events.RankContinued | events.RankGone
_EVENTS: tuple[type[_Event], ...] = (events.RankStopped, events.RankContinued, events.RankGone)


class _Stop(NamedTuple):
    """A stop of a rank, in unix nanoseconds."""

    since_ns: int
    until_ns: int  # its end, or the cursor
    rank: int
    pid: int
    has_continued: bool


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Annotation]:
    """Report a stop when it ends, and earlier if it lasts long; only once for ranks that were stopped together."""
    stops = sorted(_list_stops(window.recording, window.subject)) if window.recording.events_of(events.RankStopped) else []
    still_ns = int(STILL_SECONDS * 1e9)
    still = [(stop.since_ns + still_ns, _STILL, stop) for stop in stops if stop.until_ns - stop.since_ns >= still_ns]
    ended = [one for one in stops if one.has_continued and one.until_ns - one.since_ns >= STOPPED_SECONDS * 1e9]
    last_ns = dict.fromkeys((_KIND, _STILL), -_TOGETHER_NS)
    for known_ns, kind, stop in sorted([*still, *((one.until_ns, _KIND, one) for one in ended)], key=lambda one: one[0]):
        if abs(stop.since_ns - last_ns[kind]) > _TOGETHER_NS:
            last_ns[kind] = stop.since_ns
            near = [one for one in stops if abs(one.since_ns - stop.since_ns) <= _TOGETHER_NS and one.since_ns <= known_ns]
            evidence, ranks = {"stopped_s": (known_ns - stop.since_ns) / 1e9}, sorted({one.rank for one in near})
            cost = float(kind is _STILL)
            values: dict[str, Any] = {"concerned": ranks, "pid": stop.pid}
            yield kind.at(window.subject, stop.since_ns, known_ns, evidence, ranks=ranks, cost=cost, **values)


def _list_stops(recording: Evidence, group: Group) -> Iterator[_Stop]:
    ranks, since = {process.key: process.rank for process in group.processes}, dict[ProcessKey, int]()
    changes = [one for kind in _EVENTS for one in recording.events_of(kind) if one.process_key in ranks]
    for event in sorted(changes, key=lambda event: event.unix_ns):
        key = event.process_key
        if isinstance(event, events.RankStopped):
            since.setdefault(key, event.unix_ns)
        elif key in since:
            has_continued = isinstance(event, events.RankContinued)
            yield _Stop(since.pop(key), event.unix_ns, ranks[key], key[1], has_continued)
    for key, since_ns in since.items():
        yield _Stop(since_ns, recording.cursor_ns, ranks[key], key[1], False)
