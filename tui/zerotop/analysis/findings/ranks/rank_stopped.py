"""A signal stopped a rank (SIGSTOP, or Ctrl-Z in its terminal), and the others wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from zerotop.analysis.findings.support.evidence import Evidence, Group
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.recording.keys import ProcessKey
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


class _State:
    """The stops of an attempt so far: reading all again in each window would be quadratic where ranks are stopped often."""

    def __init__(self) -> None:
        self.stopped: dict[ProcessKey, int] = {}  # since when, of those that are stopped now
        self.stops: list[tuple[int, int]] = []  # (when, rank) of all stops


def detect(recording: Evidence) -> Iterator[Finding]:
    """Report a stop when it ends, and earlier if it lasts long; only once for ranks that were stopped together."""
    if not recording.events_of(events.RankStopped):
        return
    for group in recording.groups:
        state, ranks = group.get_state(_State), {process.key: process.rank for process in group.processes}
        new = (event for kind in _EVENTS for event in group.read_new_items(recording.events_of(kind), kind.__name__))
        for event in sorted(new, key=lambda event: event.unix_ns):
            yield from _take_event(group, ranks, state, event)
        for key, since_ns in state.stopped.items():
            yield from _check_still(group, state, key, since_ns, recording.cursor_ns)


def _take_event(group: Group, ranks: dict[ProcessKey, int], state: _State, event: _Event) -> Iterator[Finding]:
    key = event.process_key
    if key not in ranks:
        return
    if isinstance(event, events.RankStopped):
        if key not in state.stopped:
            state.stopped[key] = event.unix_ns
            state.stops.append((event.unix_ns, ranks[key]))
    elif (since_ns := state.stopped.pop(key, None)) is not None:
        yield from _check_still(group, state, key, since_ns, event.unix_ns)
        duration_s = (event.unix_ns - since_ns) / 1e9
        is_long = isinstance(event, events.RankContinued) and duration_s >= STOPPED_SECONDS
        if is_long and _is_new(group, "continued", since_ns):
            concerned, evidence = _find_together(state, since_ns), {"stopped_s": duration_s}
            yield _KIND.at(group, since_ns, event.unix_ns, evidence, ranks=concerned, concerned=concerned)


def _check_still(group: Group, state: _State, key: ProcessKey, since_ns: int, until_ns: int) -> Iterator[Finding]:
    known_ns = since_ns + int(STILL_SECONDS * 1e9)
    if known_ns <= until_ns and _is_new(group, "still", since_ns):
        concerned, evidence = _find_together(state, since_ns), {"stopped_s": STILL_SECONDS}
        yield _STILL.at(group, since_ns, known_ns, evidence, ranks=concerned, concerned=concerned, pid=key[1], cost=1.0)


def _find_together(state: _State, since_ns: int) -> list[int]:
    """Return the ranks that were stopped at about the same time."""
    near = takewhile(lambda stop: stop[0] >= since_ns - _TOGETHER_NS, reversed(state.stops))
    return sorted({rank for time_ns, rank in near if time_ns <= since_ns + _TOGETHER_NS})


def _is_new(group: Group, what: str, since_ns: int) -> bool:
    """Whether no rank that was stopped at about the same time has been reported in this way."""
    reported: list[int] = group.get_state(list, f"{_KIND.name} {what}")
    if reported and abs(reported[-1] - since_ns) <= _TOGETHER_NS:
        return False
    reported[:] = [since_ns]
    return group.count_report(f"{_KIND.name} {what}")
