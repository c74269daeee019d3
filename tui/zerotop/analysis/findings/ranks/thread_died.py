"""An exception ended a thread of a rank other than the training thread, which goes on without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerotop.analysis.failures.tracebacks import THREAD_MARK, Traceback, parse_tracebacks
from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, Group, SearchWindow, in_job
from zerotop.analysis.hangs.sentences import name_thread
from zerotop.recording.output.tail import LineFollower

_KIND = FindingKind(
    name="thread_died",
    confidence=0.95,
    headline="{thread} ended with {error}[ at {place}]",
    details="{text} An exception that nobody catches ends its thread only: training goes on without it, or waits for it.",
    advice="Catch it in the thread and pass it on to the training thread, for example through the queue that it fills.",
    fix="[{line}]",
)
# A traceback is at most so many lines.
_MOST_LINES = 400
# Of many threads that end alike, such as those of a pool, the first ones are reported.
_MOST = 3


@in_job(kinds=None)
def detect(window: SearchWindow[Evidence]) -> Iterator[Finding | None]:
    """Report the first threads that an exception has ended, as Python prints it."""
    recording = window.recording
    follower = window.keep(LineFollower)  # reads each line of the output once
    for lines in follower.read_after(recording.at, THREAD_MARK, _MOST_LINES):
        for traceback in parse_tracebacks(lines):
            is_own = traceback.thread and traceback.error != "KeyboardInterrupt"  # Ctrl-C, which a queue passes on
            if is_own and window.count_reports(_KIND) < _MOST:
                key = traceback.thread, traceback.time_ns
                yield window.find_once(lambda traceback=traceback: _build_finding(recording, traceback), key)  # type: ignore[misc]


def _build_finding(recording: Evidence, traceback: Traceback) -> Finding:
    groups = [group for group in recording.groups if group.lead.source.created_ns <= traceback.time_ns]
    group: Group | None = groups[-1] if groups else None
    ranks = [one.rank for one in group.processes] if group is not None else []
    named = [traceback.rank] if traceback.rank is not None else ranks if len(ranks) == 1 else []
    values: dict[str, Any] = {**traceback.describe(), "thread": name_thread(traceback.thread)}
    return _KIND.at(group, traceback.time_ns, traceback.time_ns, {}, ranks=named, **values)
