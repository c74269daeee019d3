"""Which rank processes trained together, and until when each counts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from zerotop.analysis.ends import Ends
from zerotop.analysis.steps import RankSteps, Rows
from zerotop.session.reader import Source


@dataclass(frozen=True, slots=True)
class Member:
    """The steps of a rank process, and when it was gone (unix time): None while it may go on."""

    rows: Rows
    gone_ns: int | None

    @property
    def count(self) -> int:
        """How many steps it finished in its time."""
        if self.gone_ns is None:
            return len(self.rows)
        return bisect_right(self.rows["end_unix_ns"], self.gone_ns)


def attempts(processes: Iterable[RankSteps], ends: Ends, over_ns: int | None) -> list[list[Member]]:
    """The processes that trained together, oldest first: where a rank appears again, the job was started again.

    ``processes`` are in order of birth. ``over_ns``: the end of a recording that nobody writes any more.
    """
    groups = _groups(processes)
    until = [*(group[0].source.born_ns for group in groups[1:]), over_ns]
    return [
        [Member(process.rows, _gone(process.source, ends, end)) for process in group]
        for group, end in zip(groups, until, strict=False)
    ]


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
