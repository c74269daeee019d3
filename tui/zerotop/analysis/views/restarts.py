"""Which rank processes trained together, and until when each counts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from zerotop.analysis.processes.process_exits import ProcessExits
from zerotop.analysis.steps.step_table import RankSteps, Rows
from zerotop.session.reader import Source


@dataclass(frozen=True, slots=True)
class AttemptMember:
    """The steps of a rank process, and when it was gone (unix time): None while it may go on."""

    rows: Rows
    gone_ns: int | None
    missed_steps: int = 0  # how many steps of the others lie before its first, as of one that was entered later

    @property
    def step_count(self) -> int:
        """How many steps of the attempt were over when it had finished its last in its time."""
        if self.gone_ns is None:
            return self.missed_steps + len(self.rows)
        return self.missed_steps + bisect_right(self.rows["end_unix_ns"], self.gone_ns)

    def read_steps(self, begin: int, end: int) -> Rows:
        """Its steps among those of the attempt."""
        return self.rows[max(0, begin - self.missed_steps) : max(0, min(end, self.step_count) - self.missed_steps)]


def group_attempts(
    processes: Iterable[RankSteps], exits: ProcessExits, recording_end_ns: int | None
) -> list[list[AttemptMember]]:
    """Return the processes that trained together, oldest first: where a rank appears again, the job was started again.

    ``processes`` are in order of birth. ``over_ns``: the end of a recording that nobody writes any more.
    """
    groups = _group_processes(processes)
    until = [*(group[0].source.created_ns for group in groups[1:]), recording_end_ns]
    return [_build_members(group, exits, end) for group, end in zip(groups, until, strict=False)]


def _build_members(group: Iterable[RankSteps], exits: ProcessExits, end_ns: int | None) -> list[AttemptMember]:
    found: list[AttemptMember] = []
    first: int | None = None
    for process in group:
        rows, late = process.step_rows, 0
        if len(rows):
            first = int(rows["step"][0]) if first is None else first
            late = int(rows["step"][0]) - first
        if all(member.gone_ns is not None for member in found):  # steps that nobody has told of are none
            late = min(late, max((member.step_count for member in found), default=0))
        found.append(AttemptMember(rows[max(0, -late) :], _find_gone(process.source, exits, end_ns), max(0, late)))
    return found


def _group_processes(processes: Iterable[RankSteps]) -> list[list[RankSteps]]:
    groups: list[list[RankSteps]] = []
    ranks: set[int] = set()
    for process in processes:
        if not groups or process.source.rank in ranks:
            groups.append([])
            ranks = set()
        groups[-1].append(process)
        ranks.add(process.source.rank)
    return groups


def _find_gone(source: Source, exits: ProcessExits, end_ns: int | None) -> int | None:
    """The first that is known of its own end, its probe's, its job's, or that of all (``end_ns``)."""
    known = (exits.reported_until(source), end_ns)
    return min((time for time in known if time is not None and time >= source.created_ns), default=None)
