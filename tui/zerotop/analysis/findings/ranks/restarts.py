"""A job failed and was started again, by its launcher or its script: which attempts failed, and what became of the last one.

Attempts that ended before they trained count too. An attempt that failed before its first step has no other finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerotop.analysis.failures.attempts import Attempt, read_attempts
from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, SearchWindow, Severity, in_job
from zerotop.analysis.formatting import format_count
from zerotop_probe.recording import events

_KIND = FindingKind(
    name="restarted",
    confidence=0.95,
    lost_once="lost_s",
    headline="Failed {place} ({cause}), restarted {times}{outcome}",
    details="{attempts}[ {lost_s:seconds} passed before the last attempt began.]",
    advice="See why the first attempt failed: the output has its traceback. Saving more often limits how much is repeated.",
    fix="[{line}]",
)
_SIGNALLED = _KIND.with_changes(
    advice="Look at the kernel's log for the sender of the signal. Saving more often limits how much is repeated.",
    fix="dmesg -T | grep -i kill",
)
_FAILED = _KIND.with_changes(
    severity=Severity.ERROR,
    headline="Rank {rank} ended with {last_cause}[ at {last_place}] in attempt {number}",
    advice="Its output may say why it ended. The attempts before may have failed for another reason.",
    fix="[{last_line}]",
)
_NO_CAUSE = "reason unknown"
_TIMES = {1: "once", 2: "twice"}
# Launchers print how an attempt failed within this time after the next one has begun.
_PRINTED_NS = 3 * 10**9
_MOST_TOLD = 4
_LONGEST_TEXT = 120


_Begin = events.RankFound | events.Hello


@in_job(None)
def detect(window: SearchWindow[Evidence]) -> Iterator[Finding | None]:
    """Report each restart, and the outcome when the job has ended."""
    recording = window.recording
    found, hello = recording.events_of(events.RankFound), recording.events_of(events.Hello)
    ended: Sequence[events.JobEnded] = recording.events_of(events.JobEnded)[-1:]
    end_ns = ended[0].unix_ns if ended else recording.cursor_ns
    begun: list[_Begin] = [*window.items(found, events.RankFound), *window.items(hello, events.Hello)]
    printed = window.await_each(begun, lambda event: True if event.unix_ns + _PRINTED_NS <= end_ns else None)
    begins, new_ends = {event.unix_ns for event, _ in printed}, window.items(ended, events.JobEnded)
    if not (begins or new_ends) or not _has_twice([*found, *hello]):
        return
    attempts = read_attempts(recording.at.at(end_ns))
    for attempt in attempts[1:]:
        known_ns = attempt.begin_ns + _PRINTED_NS
        if attempt.begin_ns in begins and len(until := read_attempts(recording.at.at(known_ns))) > 1:
            yield _build_finding(recording, until, known_ns, None)
    if new_ends and len(attempts) > 1:
        yield _build_finding(recording, attempts, end_ns, new_ends[0])


def _has_twice(found: Sequence[_Begin]) -> bool:
    """Whether a rank had more than one process."""
    processes = {(event.rank, *event.process_key) for event in found}
    return len({rank for rank, *_ in processes}) < len(processes)


def _build_finding(recording: Evidence, attempts: list[Attempt], known_ns: int, ended: events.JobEnded | None) -> Finding:
    first, last = attempts[0], attempts[-1]
    has_failed = ended is not None and ended.exit_code != 0 and last.end is not None
    # A rank that trained has a finding of its own.
    is_last_word = has_failed and last.step is None and bool(last.cause)
    failed = attempts if has_failed else attempts[:-1]
    outcome = "" if ended is None else f", failed again {last.describe_place()}" if has_failed else ""
    if ended is not None and ended.exit_code == 0:
        outcome = ", finished"
    restarts = len(attempts) - 1
    group = next((one for one in recording.groups if one.lead.source.created_ns >= first.begin_ns), None)
    is_signalled = first.end is not None and first.end.signal_number is not None
    return (_FAILED if is_last_word else _SIGNALLED if is_signalled else _KIND).at(
        group,
        last.begin_ns,
        known_ns,
        {"lost_s": (last.begin_ns - first.begin_ns) / 1e9, "attempts": len(attempts)},
        step=first.step,
        ranks=sorted({rank for one in failed if one.end is not None for rank in one.end.ranks}),
        rank=last.end.process.rank if last.end is not None else None,
        place=first.describe_place(),
        cause=first.cause or _NO_CAUSE,
        line=_find_place(first) or None,
        times=_TIMES.get(restarts, f"{restarts} times"),
        outcome=outcome,
        attempts=" ".join(_describe_attempts(attempts, failed)),
        number=last.number,
        last_cause=last.cause,
        last_place=_find_place(last) or None,
        last_line=_find_place(last) or None,
    )


def _find_place(attempt: Attempt) -> str:
    traceback = attempt.end.traceback if attempt.end is not None else None
    return traceback.place.partition(" in ")[0] if traceback is not None else ""


def _describe_attempts(attempts: Sequence[Attempt], failed: Sequence[Attempt]) -> Iterator[str]:
    """Yield a sentence about each failed attempt; of many, about the first ones and the last one."""
    for attempt in failed if len(failed) <= _MOST_TOLD else [*failed[: _MOST_TOLD - 1], failed[-1]]:
        if attempt.end is None:
            continue
        traceback = attempt.end.traceback
        text = (traceback.text if traceback is not None and not attempt.end.signal_number else attempt.cause) or _NO_CAUSE
        text = text.rstrip(".") if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."
        where = f", {line}" if (line := _find_place(attempt)) else ""
        count = len(attempt.processes)
        size = f" of {format_count(count, 'rank')}" if count != len(attempts[0].processes) else ""
        who = f"Attempt {attempt.number}{size} failed on {attempt.end.who}"
        yield f"{who} {attempt.describe_place()}: {text}{where}."
    last = attempts[-1]
    if last not in failed and len(last.processes) != len(attempts[0].processes):
        yield f"Attempt {last.number} has {format_count(len(last.processes), 'rank')}, not {len(attempts[0].processes)}."
