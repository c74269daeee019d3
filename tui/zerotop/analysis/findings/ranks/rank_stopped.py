"""A signal stopped a rank (SIGSTOP, or Ctrl-Z in its terminal), and the others wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, in_each_attempt
from zerotop.recording.keys import ProcessKey
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
_Event = events.RankStopped | events.RankContinued | events.RankGone
_EVENTS: tuple[type[_Event], ...] = (events.RankStopped, events.RankContinued, events.RankGone)


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report a stop when it ends, and earlier if it lasts long; only once for ranks that were stopped together."""
    ranks = {process.key: process.rank for process in window.subject.processes}
    stopped: dict[ProcessKey, int] = window.keep(dict)  # since when, of those that are stopped now
    stops: list[tuple[int, int]] = window.keep(list)  # (when, rank) of all stops
    new = (event for kind in _EVENTS for event in window.items(window.recording.events_of(kind), kind.__name__))
    for event in sorted(new, key=lambda event: event.unix_ns):
        key = event.process_key
        if isinstance(event, events.RankStopped):
            if key in ranks and key not in stopped:
                stopped[key] = event.unix_ns
                stops.append((event.unix_ns, ranks[key]))
        elif (since_ns := stopped.pop(key, None)) is not None:
            yield from _check_still(window, stops, key, since_ns, event.unix_ns)
            duration_s = (event.unix_ns - since_ns) / 1e9
            is_long = isinstance(event, events.RankContinued) and duration_s >= STOPPED_SECONDS
            if is_long and _is_new(window, "continued", since_ns):
                concerned, evidence = _find_together(stops, since_ns), {"stopped_s": duration_s}
                yield _KIND.at(window.subject, since_ns, event.unix_ns, evidence, ranks=concerned, concerned=concerned)
    for key, since_ns in stopped.items():
        yield from _check_still(window, stops, key, since_ns, window.recording.cursor_ns)


def _check_still(
    window: SearchWindow[Group], stops: list[tuple[int, int]], key: ProcessKey, since_ns: int, until_ns: int
) -> Iterator[Finding]:
    known_ns = since_ns + int(STILL_SECONDS * 1e9)
    if known_ns <= until_ns and _is_new(window, "still", since_ns):
        concerned, evidence = _find_together(stops, since_ns), {"stopped_s": STILL_SECONDS}
        texts: dict[str, Any] = {"concerned": concerned, "pid": key[1]}
        yield _STILL.at(window.subject, since_ns, known_ns, evidence, ranks=concerned, cost=1.0, **texts)


def _find_together(stops: list[tuple[int, int]], since_ns: int) -> list[int]:
    """Return the ranks that were stopped at about the same time."""
    near = takewhile(lambda stop: stop[0] >= since_ns - _TOGETHER_NS, reversed(stops))
    return sorted({rank for time_ns, rank in near if time_ns <= since_ns + _TOGETHER_NS})


def _is_new(window: SearchWindow[Group], what: str, since_ns: int) -> bool:
    """Whether no rank that was stopped at about the same time has been reported in this way."""
    return window.is_news(since_ns, lambda last, now: abs(last - now) > _TOGETHER_NS, what)
