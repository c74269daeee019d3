"""Steps of some ranks are missing or incomplete in the recording, for example because its disk was full.

A gap is known when the process has recorded a step after it or has ended. By then most other ranks have continued too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from zerotop.analysis.findings.support.evidence import Evidence, Group, Process
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.steps.gaps import Gap, find_end, find_final_gap, find_gaps, find_loss_reason
from zerotop.recording.steps.missing_steps import find_recorded

_KIND = FindingKind(
    name="steps_not_recorded",
    severity=Severity.WARNING,
    confidence=1.0,
    headline="{steps_text} of {concerned:ranks} {verb} missing or incomplete in the recording",
    details="{gap_s:seconds} in all[: {why}]. Times and peaks leave them out.",
    advice="Free space where the recording is, or record elsewhere.",
    fix="zerotop run --recording DIR",
)
# The most gaps of an attempt that are reported: a disk may be full again and again.
MOST_GAPS = 20
# Ranks lose about the same steps.
SIMILAR_STEPS = 2


class _ProcessState:
    checked_steps = 0
    has_ended = False


class _GroupState:
    def __init__(self) -> None:
        self.reported: list[Gap] = []


def detect(recording: Evidence) -> Iterator[Finding]:
    """Report each gap once, for all ranks known to have it."""
    for group in recording.groups:
        state = group.get_state(_GroupState)
        found = [(known_ns, gap, process) for process in group.processes for known_ns, gap in _find_new(recording, process)]
        for known_ns, gap, process in sorted(found, key=lambda one: one[:2]):
            if len(state.reported) < MOST_GAPS and not any(_covers_gap(other, gap) for other in state.reported):
                state.reported.append(gap)
                yield _build_finding(recording, group, process, gap, known_ns)


def _find_new(recording: Evidence, process: Process) -> Iterator[tuple[int, Gap]]:
    """Find the gaps that became known since the last call, and when."""
    state = process.get_state(_ProcessState)
    if state.has_ended:
        return
    end = find_end(recording.at, process.source)
    rows = process.aligned_steps[state.checked_steps :]
    recorded = np.flatnonzero(find_recorded(rows))
    if end is None:
        rows = rows[: recorded[-1] + 1 if len(recorded) else 0]
    state.checked_steps, state.has_ended = state.checked_steps + len(rows), end is not None
    if len(recorded) < len(rows):
        ends = rows["end_unix_ns"][recorded]
        for gap in find_gaps(rows):
            after = bisect_right(ends, gap.end_ns)
            if after < len(ends):
                yield int(ends[after]), gap
            elif end is not None:
                yield end.unix_ns, gap
    final = find_final_gap(recording.at, process.rank_steps)
    if final is not None and end is not None:
        yield end.unix_ns, final


def _covers_gap(reported: Gap, gap: Gap) -> bool:
    return gap.first_step >= reported.first_step - SIMILAR_STEPS and gap.last_step <= reported.last_step + SIMILAR_STEPS


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
