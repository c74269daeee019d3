"""Steps of some ranks are missing or incomplete in the recording, for example because its disk was full.

A gap is known when the process has recorded a step after it or has ended. By then most other ranks have continued too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.steps.gaps import Gap, find_end, find_final_gap, find_gaps, find_loss_reason
from zerotop.recording.steps.missing_steps import find_recorded

_KIND = FindingKind(
    name="steps_not_recorded",
    confidence=1.0,
    headline="{steps_text} of {concerned:ranks} {verb} missing or incomplete in the recording",
    details="{gap_s:seconds} in all[: {why}]. Times and peaks leave them out.",
    advice="Free space where the recording is, or record elsewhere.",
    fix="zerotop run --recording DIR",
)
# The most gaps of an attempt that are reported: a disk may be full again and again.
_MOST_GAPS = 20
# Ranks lose about the same steps.
_SIMILAR_STEPS = 2


@in_each_attempt(None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each gap once, for all ranks known to have it."""
    reported: list[Gap] = []
    fresh = [one for process in window.subject.processes for one in _find_new(window, process)]
    for known_ns, gap, process in sorted(window.results(fresh, None), key=lambda one: one[:2]):
        if len(reported) < _MOST_GAPS and not any(_covers_gap(other, gap) for other in reported):
            reported.append(gap)
            yield _build_finding(window.recording, window.subject, process, gap, known_ns)


def _find_new(window: SearchWindow[Group], process: Process) -> Iterator[tuple[int, Gap, Process]]:
    """Find the gaps that became known since the last call, and when."""
    end = find_end(window.recording.at, process.source)
    rows, recorded = process.aligned_steps, process.steps["end_unix_ns"]
    if end is None:
        rows = rows[: bisect_right(rows["end_unix_ns"], recorded[-1]) if len(recorded) else 0]
    for gap in find_gaps(rows[window.steps(rows, of=process)]):
        after = bisect_right(recorded, gap.end_ns)
        if after < len(recorded):
            yield int(recorded[after]), gap, process
        elif end is not None:
            yield end.unix_ns, gap, process
    for event in window.items([end] if end is not None else [], process):
        final = find_final_gap(window.recording.at, process.rank_steps)
        if final is not None:
            yield event.unix_ns, final, process


def _covers_gap(reported: Gap, gap: Gap) -> bool:
    return gap.first_step >= reported.first_step - _SIMILAR_STEPS and gap.last_step <= reported.last_step + _SIMILAR_STEPS


def _build_finding(recording: Evidence, group: Group, process: Process, gap: Gap, known_ns: int) -> Finding:
    concerned = [other.rank for other in group.processes if other is process or _is_missing(other, gap, known_ns)]
    return _KIND.at(
        group,
        gap.begin_ns,
        gap.end_ns,
        {"missing_steps": gap.step_count, "gap_s": (gap.end_ns - gap.begin_ns) / 1e9},
        known_ns=known_ns,
        step=gap.first_step,
        ranks=concerned,
        concerned=concerned,
        steps_text=gap.steps_text,
        verb="is" if gap.step_count == 1 else "are",
        why=find_loss_reason(recording.at, process.source, gap),
    )


def _is_missing(process: Process, gap: Gap, known_ns: int) -> bool:
    """Whether the process is known to have lost a step of the gap too."""
    rows = process.aligned_steps[: bisect_right(process.aligned_steps["end_unix_ns"], known_ns)]
    low, high = np.searchsorted(rows["step"], (gap.first_step, gap.last_step + 1))
    return not bool(find_recorded(rows[low:high]).all())
