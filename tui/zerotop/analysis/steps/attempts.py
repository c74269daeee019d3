"""The attempts of a job: the processes that train together, until ranks start anew."""

from __future__ import annotations

from collections.abc import Iterable

from zerotop.recording.steps.step_table import RankSteps


def split_attempts(processes: Iterable[RankSteps]) -> list[list[RankSteps]]:
    """Return the processes of each attempt, given in order of their creation: a rank that appears again means a restart."""
    groups: list[list[RankSteps]] = []
    ranks: set[int] = set()
    for process in processes:
        if not groups or process.source.rank in ranks:
            groups.append([])
            ranks = set()
        groups[-1].append(process)
        ranks.add(process.source.rank)
    return groups
