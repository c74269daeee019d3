"""The probe was not loaded in ranks, so that their training is not recorded."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence
from zerotop.analysis.processes.missing_probe import MissingProbe, find_missing_probes
from zerotop_probe.recording import events

_KIND = FindingKind(
    name="probe_missing",
    severity=Severity.WARNING,
    confidence=1.0,
    headline="{headline}",
    details="{why}. {whose} steps are not recorded.",
    advice="{remedy} While it runs, E on the screen or this command loads the probe.",
    fix="zerotop attach {pid} --enter",
)
_OVER = _KIND.with_changes(advice="{remedy}", fix="")
# The ranks of a job import PyTorch within this time (ns).
_TOGETHER_NS = 5 * 10**9


class _State:
    is_over = False


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report once, when all ranks have imported PyTorch or the job has ended, unless the probe was loaded meanwhile."""
    state = recording.get_state(_State, _KIND.name)
    if state.is_over:
        return
    found = recording.events_of(events.ProbeMissing)
    times = [event.unix_ns for event in found if event.is_rank]
    ended = recording.events_of(events.JobEnded)
    due_ns = [event.unix_ns for event in ended] + [time_ns + _TOGETHER_NS for time_ns in times]
    if not found or not due_ns or min(due_ns) > recording.cursor_ns:
        return
    state.is_over = True
    for missing in find_missing_probes(recording.session, min(due_ns)):
        yield _build_finding(missing, min(due_ns), is_over=bool(ended) and ended[0].unix_ns <= min(due_ns))


def _build_finding(missing: MissingProbe, known_ns: int, *, is_over: bool) -> Annotation:
    numbers = {event.rank for event in missing.events}
    return (_OVER if is_over else _KIND).at(
        None,
        min(event.unix_ns for event in missing.events),
        known_ns,
        {"processes": float(len(missing.events))},
        ranks=sorted(number for number in numbers if number is not None),
        headline=missing.headline,
        why=missing.why[:1].upper() + missing.why[1:],
        whose="Its" if len(missing.events) == 1 else "Their",
        remedy=missing.remedy,
        pid=missing.events[0].pid,
    )
