"""Ranks of this node, and which of those that share a launcher, or its variables, are one job."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from zerotop_probe.outside import procfs
from zerotop_probe.outside.procfs import ProcessHandle


@dataclass(frozen=True)
class FoundRank:
    """A rank of this node. ``rank`` is None for a process that no launcher numbered."""

    process: ProcessHandle
    rank: int | None
    environment: Mapping[str, str] = field(repr=False)


def split_same_ranks(ranks: Sequence[FoundRank]) -> list[list[FoundRank]]:
    """Return the jobs that ranks make up: two processes with the same rank are of two jobs.

    Jobs that one script or program starts differ in a process above all ranks of each, or in their process groups. Where
    they do not, the first process of each rank is of the first job, and so on.
    """
    numbers = [rank.rank for rank in ranks if rank.rank is not None]
    if len(set(numbers)) == len(numbers):
        return [list(ranks)]
    lines = {rank.process: procfs.list_ancestors(rank.process.pid)[::-1] for rank in ranks}
    depths = range(1, max(map(len, lines.values())) + 1)
    trees = (_partition(ranks, lambda rank, depth=depth: tuple(lines[rank.process][:depth])) for depth in depths)  # type: ignore[misc]
    parts = next((parts for parts in trees if len(parts) > 1), [])
    if not _are_jobs(parts, min(numbers)):
        parts = _partition(ranks, _read_group)
    if not _are_jobs(parts, min(numbers)):
        return _split_by_start(ranks)
    return [job for part in parts for job in split_same_ranks(part)]


def _partition(ranks: Sequence[FoundRank], find_key: Callable[[FoundRank], Hashable]) -> list[list[FoundRank]]:
    parts: dict[Hashable, list[FoundRank]] = {}
    for rank in ranks:
        parts.setdefault(find_key(rank), []).append(rank)
    return list(parts.values())


def _are_jobs(parts: Sequence[Sequence[FoundRank]], first: int) -> bool:
    """Whether each part is a job, or several: one that has a single other rank than the first is a part of a job."""
    return len(parts) > 1 and all(len(part) > 1 or part[0].rank == first for part in parts)


def _read_group(rank: FoundRank) -> int:
    stat = procfs.read_stat(rank.process.pid)
    return stat.group if stat is not None else 0


def _split_by_start(ranks: Sequence[FoundRank]) -> list[list[FoundRank]]:
    seen: dict[int | None, int] = {}
    places: dict[ProcessHandle, int] = {}
    for rank in sorted(ranks, key=lambda rank: (rank.process.start, rank.process.pid)):
        places[rank.process] = seen[rank.rank] = seen.get(rank.rank, -1) + 1
    return _partition(ranks, lambda rank: places[rank.process])
