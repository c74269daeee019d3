"""Groups rank processes that trained together, from one restart of the job to the next.

Rows that stand for blocks of steps: the same blocks on all ranks, although each node makes its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.steps.attempts import split_attempts
from zerotop.recording.moments.process_exits import ProcessExits
from zerotop.recording.reader import Source
from zerotop.recording.samples import Rows
from zerotop.recording.steps.missing_steps import erase_measures, find_recorded
from zerotop.recording.steps.span_sums import DURATION_COLUMNS, STAGES_COLUMN
from zerotop.recording.steps.step_dtype import COUNT_COLUMNS, MEMORY_COLUMNS, PHASE_COLUMNS, erase_phases, has_phases
from zerotop.recording.steps.step_table import RankSteps

_MEANS = ("iteration_s", *DURATION_COLUMNS, *COUNT_COLUMNS, "skipped")


def align_blocks(ranks: Sequence[Rows]) -> list[Rows]:
    """Return the rows of each rank, merged so that a block of any rank is one on all of them."""
    block_counts = [_count_blocks(rows) for rows in ranks]
    if not any(block_counts):
        return list(ranks)
    size = 1 << (max(int(rows["steps"].max(initial=1)) for rows in ranks) - 1).bit_length()
    last = max(int(rows["step"][count - 1]) for rows, count in zip(ranks, block_counts, strict=True) if count)
    end = (last // size + 1) * size
    return [merge_before(rows, end, size) for rows in ranks]


def _count_blocks(rows: Rows) -> int:
    """Return the number of rows up to the last one that is a block."""
    blocks = np.flatnonzero(rows["steps"] > 1)
    return int(blocks[-1]) + 1 if len(blocks) else 0


def merge_before(rows: Rows, end: int, size: int) -> Rows:
    """Merge the rows of steps before the number ``end`` whose steps have the same number divided by ``size``."""
    count = int(np.searchsorted(rows["step"], end))
    blocks = rows["step"][:count] // size
    firsts = np.flatnonzero(np.append(True, blocks[1:] != blocks[:-1])) if count else np.empty(0, np.intp)
    if len(firsts) == count:
        return rows
    lasts = np.append(firsts[1:], count) - 1
    merged = rows[lasts].copy()
    recorded = find_recorded(rows[:count])
    merged["steps"] = np.add.reduceat(rows["steps"][:count], firsts)
    phased = has_phases(rows[:count])
    counts = np.add.reduceat(rows["steps"][:count] * recorded, firsts)
    merged["counted"] = (counts > 0) & (np.add.reduceat(phased.astype(np.int64), firsts) == 0)
    for name in _MEANS:
        known = phased if name in PHASE_COLUMNS or name in COUNT_COLUMNS else recorded
        weights = rows["steps"][:count] * known
        sums = np.add.reduceat(np.where(known, rows[name][:count], 0) * weights, firsts)
        means = sums / np.maximum(np.add.reduceat(weights, firsts), 1)
        merged[name] = means > 0.5 if name == "skipped" else means if rows[name].dtype.kind == "f" else np.rint(means)
    merged["iteration_s"][counts == 0] = merged[STAGES_COLUMN] = np.nan
    for name in MEMORY_COLUMNS:
        merged[name] = np.maximum.reduceat(rows[name][:count], firsts)
    merged["begin_unix_ns"] = rows["begin_unix_ns"][firsts]
    erase_phases(merged)
    erase_measures(merged)
    return np.concatenate([merged, rows[count:]])


@dataclass(frozen=True, slots=True)
class AttemptMember:
    """The steps of a rank process."""

    rows: Rows
    gone_ns: int | None  # unix time of its exit; None while it may go on
    missed_steps: int = 0  # steps of the others before its first one, for example if it was entered later

    @property
    def step_count(self) -> int:
        """Number of the attempt's steps at its last step before its exit."""
        if self.gone_ns is None:
            return self.missed_steps + len(self.rows)
        return self.missed_steps + bisect_right(self.rows["end_unix_ns"], self.gone_ns)

    def read_steps(self, begin: int, end: int) -> Rows:
        """Return its steps among the attempt's steps from ``begin`` to ``end``."""
        return self.rows[max(0, begin - self.missed_steps) : max(0, min(end, self.step_count) - self.missed_steps)]


def group_attempts(
    processes: Iterable[RankSteps], exits: ProcessExits, recording_end_ns: int | None
) -> list[list[AttemptMember]]:
    """Return the processes that trained together, oldest first; a rank that appears again means a restart.

    Args:
        processes: oldest first.
        recording_end_ns: None while the recording is live.
    """
    groups = split_attempts(processes)
    until = [*(group[0].source.created_ns for group in groups[1:]), recording_end_ns]
    return [_build_members(group, exits, end) for group, end in zip(groups, until, strict=False)]


def _build_members(group: Iterable[RankSteps], exits: ProcessExits, end_ns: int | None) -> list[AttemptMember]:
    members: list[AttemptMember] = []
    lead: Rows | None = None
    processes = list(group)
    most: int | None = 0  # steps of the members so far; None once one of them may go on
    for process, rows in zip(processes, align_blocks([process.step_rows for process in processes]), strict=True):
        late = 0
        if len(rows):
            lead = rows if lead is None else lead
            late = _count_missed(rows, lead)
        if most is not None:  # steps that no member recorded do not count
            late = min(late, most)
        member = AttemptMember(rows[max(0, -late) :], _find_gone(process.source, exits, end_ns), max(0, late))
        members.append(member)
        most = None if most is None or member.gone_ns is None else max(most, member.step_count)
    return members


def _count_missed(rows: Rows, lead: Rows) -> int:
    """Return how many of the lead's rows end before the first step of another rank, negative if that began earlier."""
    if lead["steps"][0] == 1:
        return int(rows["step"][0]) - int(lead["step"][0])
    return int(np.searchsorted(lead["step"], rows["step"][0])) - int(np.searchsorted(rows["step"], lead["step"][0]))


def _find_gone(source: Source, exits: ProcessExits, end_ns: int | None) -> int | None:
    """Return the earliest of its own exit, its probe's, its job's, and ``end_ns``."""
    times = (exits.reported_until(source), end_ns)
    return min((time for time in times if time is not None and time >= source.created_ns), default=None)
