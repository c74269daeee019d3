"""Gaps of a recording: runs of steps that a rank made but that were not, or not completely, recorded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from zerotop.analysis.formatting import format_ranks
from zerotop.recording.keys import identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.reader import Source
from zerotop.recording.samples import Rows
from zerotop.recording.steps.missing_steps import find_recorded
from zerotop.recording.steps.step_table import RankSteps
from zerotop_probe.recording import events

_ENDS: tuple[type[events.LossEvent], ...] = (events.Goodbye, events.Left)


class Gap(NamedTuple):
    """Consecutive steps of a process that are missing or incomplete in its recording."""

    rank: int
    first_step: int
    last_step: int
    begin_ns: int  # unix time
    end_ns: int

    @property
    def step_count(self) -> int:
        return self.last_step - self.first_step + 1

    @property
    def steps_text(self) -> str:
        """``Step 7`` or ``Steps 40 to 51``."""
        return f"Step {self.first_step}" if self.step_count == 1 else f"Steps {self.first_step} to {self.last_step}"


def find_gaps(rows: Rows) -> list[Gap]:
    """Return the gaps in consecutive steps of a process (STEP_DTYPE)."""
    unknown = np.flatnonzero(~find_recorded(rows))
    if not len(unknown):
        return []
    runs = np.split(unknown, np.flatnonzero(np.diff(unknown) > 1) + 1)
    return [_build_gap(rows[run[0]], rows[run[-1]]) for run in runs]


def _build_gap(first: Rows, last: Rows) -> Gap:
    numbers = (int(first["rank"]), int(first["step"]), int(last["step"]))
    return Gap(*numbers, int(first["begin_unix_ns"]), int(last["end_unix_ns"]))


def find_final_gap(at: At, process: RankSteps) -> Gap | None:
    """Return the steps that a process counted until its end, and that are missing after its last recorded step."""
    rows, source = process.step_rows, process.source
    end = find_end(at, source)
    last_step = end.step if end is not None else None
    if end is None or not len(rows) or last_step is None or last_step <= rows["step"][-1]:
        return None
    return Gap(source.rank, int(rows["step"][-1]) + 1, last_step, int(rows["end_unix_ns"][-1]), end.unix_ns)


def find_end(at: At, source: Source) -> events.LossEvent | None:
    """Return the event of a process that it, or the probe in it, ended up to the cursor."""
    ends = [
        event
        for kind in _ENDS
        for event in at.process_events(kind, identify_process(source))
        if event.unix_ns >= source.created_ns
    ]
    return min(ends, key=lambda event: event.unix_ns, default=None)


def find_loss_reason(at: At, source: Source, gap: Gap) -> str | None:
    """Return why spans of a process could not be written in a gap, as the operating system says it."""
    for event in at.process_events(events.RecordsLost, identify_process(source)):
        if gap.begin_ns <= event.unix_ns <= gap.end_ns and event.why:
            return event.why
    return None


def describe_gaps(at: At, processes: Iterable[RankSteps]) -> str:
    """Return one sentence about the steps of all ranks that are missing or incomplete at the cursor; "" without any."""
    gaps: list[Gap] = []
    reasons: list[str] = []
    has_ends = any(at.events_of(kind) for kind in _ENDS)
    for process in processes:
        rows = process.step_rows
        own = find_gaps(rows[rows["end_unix_ns"] <= at.cursor_ns]) if len(process.recorded_steps) < len(rows) else []
        final = find_final_gap(at, process) if has_ends else None
        own += [final] if final is not None and rows["end_unix_ns"][-1] <= at.cursor_ns else []
        gaps += own
        reasons += filter(None, (find_loss_reason(at, process.source, gap) for gap in own))
    if not gaps:
        return ""
    merged = merge_gaps(gaps)
    what = merged[0].steps_text
    if len(merged) > 1:
        what = f"{sum(gap.step_count for gap in merged)} of the steps {merged[0].first_step} to {merged[-1].last_step}"
    verb = "is" if len(merged) == merged[0].step_count == 1 else "are"
    ranks = format_ranks(sorted({gap.rank for gap in gaps}))
    return f"{what} of {ranks} {verb} missing or incomplete in the recording{f': {reasons[0]}' if reasons else ''}."


def merge_gaps(gaps: Iterable[Gap]) -> list[Gap]:
    """Merge gaps of several ranks whose steps overlap."""
    merged: list[Gap] = []
    for gap in sorted(gaps, key=lambda gap: gap.first_step):
        if merged and gap.first_step <= merged[-1].last_step + 1:
            merged[-1] = merged[-1]._replace(last_step=max(merged[-1].last_step, gap.last_step))
        else:
            merged.append(gap)
    return merged
