"""Which rank processes trained together, and until when each counts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterable
from dataclasses import dataclass

from zerotop.analysis.processes.process_exits import Ends
from zerotop.analysis.processes.ranks_and_hosts import RANKS
from zerotop.analysis.steps.step_table import RankSteps, Rows
from zerotop.session.reader import Source


@dataclass(frozen=True, slots=True)
class Member:
    """The steps of a rank process, and when it was gone (unix time): None while it may go on."""

    rows: Rows
    gone_ns: int | None
    late: int = 0  # how many steps of the others lie before its first, as of one that was entered later

    @property
    def count(self) -> int:
        """How many steps of the attempt were over when it had finished its last in its time."""
        if self.gone_ns is None:
            return self.late + len(self.rows)
        return self.late + bisect_right(self.rows["end_unix_ns"], self.gone_ns)

    def between(self, begin: int, end: int) -> Rows:
        """Its steps among those of the attempt."""
        return self.rows[max(0, begin - self.late) : max(0, min(end, self.count) - self.late)]


def attempts(processes: Iterable[RankSteps], ends: Ends, over_ns: int | None) -> Generator[None, None, list[list[Member]]]:
    """In pieces the processes that trained together, oldest first: where a rank appears again, the job was started again.

    ``processes`` are in order of birth. ``over_ns``: the end of a recording that nobody writes any more.
    """
    groups = _groups(processes)
    until = [*(group[0].source.born_ns for group in groups[1:]), over_ns]
    found = []
    for group, end in zip(groups, until, strict=False):
        found.append((yield from _members(group, ends, end)))
    return found


def _members(group: Iterable[RankSteps], ends: Ends, end_ns: int | None) -> Generator[None, None, list[Member]]:
    found: list[Member] = []
    first: int | None = None
    for number, process in enumerate(group, 1):
        if not number % RANKS:
            yield
        rows, late = process.rows, 0
        if len(rows):
            first = int(rows["step"][0]) if first is None else first
            late = int(rows["step"][0]) - first
        if all(member.gone_ns is not None for member in found):  # steps that nobody has told of are none
            late = min(late, max((member.count for member in found), default=0))
        found.append(Member(rows[max(0, -late) :], _gone(process.source, ends, end_ns), max(0, late)))
    return found


def _groups(processes: Iterable[RankSteps]) -> list[list[RankSteps]]:
    groups: list[list[RankSteps]] = []
    ranks: set[int] = set()
    for process in processes:
        if not groups or process.source.rank in ranks:
            groups.append([])
            ranks = set()
        groups[-1].append(process)
        ranks.add(process.source.rank)
    return groups


def _gone(source: Source, ends: Ends, end_ns: int | None) -> int | None:
    """The first that is known of its own end, its probe's, its job's, or that of all (``end_ns``)."""
    known = (ends.told_until(source), end_ns)
    return min((time for time in known if time is not None and time >= source.born_ns), default=None)
