"""The probe was not loaded in ranks, so that their training is not recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, SearchWindow, Severity, in_job
from zerotop.analysis.processes.missing_probe import MissingProbe, find_missing_probes
from zerotop_probe.recording import events

_KIND = FindingKind(
    name="probe_missing",
    confidence=1.0,
    headline="{headline}",
    details="{why}. {whose} steps are not recorded.",
    advice="{remedy} While it runs, E on the screen or this command loads the probe.",
    fix="zerotop attach {pid} --enter",
)
_OVER = _KIND.with_changes(advice="{remedy}", fix="")
_LOADED_LATE = _OVER.with_changes(
    headline="The probe was loaded late: {short}", details="{why}. Steps before it was loaded are not recorded."
)
_HELPER = _OVER.with_changes(
    severity=Severity.INFO,
    headline="A process with PyTorch runs without the probe: {short}",
    details="{why}. Another process trains and is recorded: this one may be a helper of it.",
    advice="",
)
# The ranks of a job import PyTorch within this time (ns).
_TOGETHER_NS = 5 * 10**9


@in_job(kinds=None)
def detect(window: SearchWindow[Evidence]) -> Iterator[Finding]:
    """Report when all ranks have imported PyTorch, unless the probe was loaded meanwhile, and again when the job has ended.

    Then the probe cannot be loaded any more.
    """
    at, found = window.recording.at, window.recording.events_of(events.ProbeMissing)
    times = [event.unix_ns + _TOGETHER_NS for event in found if event.is_rank]
    ended = [event.unix_ns for event in window.recording.events_of(events.JobEnded)]
    early: tuple[MissingProbe, ...] | None = None
    if times and min(times) <= min(ended, default=at.cursor_ns):
        early = window.find_once(lambda: tuple(find_missing_probes(at.at(min(times)))))
    for missing in early or ():
        yield _build_finding(missing, min(times), _KIND)
    reported_ns = {event.process_key: event.unix_ns for event in window.recording.events_of(events.Hello)}
    if found and ended:
        window.is_closed = True
        known, last = _list_keys(early or ()), find_missing_probes(at.at(ended[0]))
        for missing in early or ():
            kind = _LOADED_LATE if _list_keys([missing]) & reported_ns.keys() else _HELPER
            yield _build_finding(missing, ended[0], _OVER if _list_keys([missing]) & _list_keys(last) else kind)
        for missing in last:
            if not _list_keys([missing]) & known:
                yield _build_finding(missing, ended[0], _OVER)
    elif reported_ns:
        first_ns = min(reported_ns.values())
        for missing in early or ():
            if first_ns > min(times) and all(event.rank is None for event in missing.events):
                is_late = _list_keys([missing]) & reported_ns.keys()
                yield from [] if is_late else [_build_finding(missing, first_ns, _HELPER)]


def _list_keys(found: Iterable[MissingProbe]) -> set[tuple[str, object]]:
    return {event.process_key for missing in found for event in missing.events}


def _build_finding(missing: MissingProbe, known_ns: int, kind: FindingKind) -> Finding:
    numbers = {event.rank for event in missing.events}
    return kind.at(
        None,
        min(event.unix_ns for event in missing.events),
        known_ns,
        {"processes": float(len(missing.events))},
        ranks=sorted(number for number in numbers if number is not None),
        headline=missing.headline,
        short=missing.headline.rpartition(": ")[2],
        why=missing.why[:1].upper() + missing.why[1:],
        whose="Its" if len(missing.events) == 1 else "Their",
        remedy=missing.remedy,
        pid=missing.events[0].pid,
    )
