"""The ranks of a job that stands still, grouped by where they stand, and which of them the others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerotop.analysis.failures.rank_ends import RankEnd
from zerotop.analysis.hangs.stacks import Frame, RankStacks
from zerotop.analysis.hangs.waits import FOR_OTHERS, Wait, find_wait
from zerotop.analysis.processes.alive_ranks import RankProcess


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks that stand in the same place. Without stacks, ranks that ended or whose Python did not run."""

    processes: tuple[RankProcess, ...]
    stacks: tuple[RankStacks, ...]  # of each of them; () without
    wait: Wait | None  # None without stacks
    frame: Frame | None  # the job's own line where they stand
    end: RankEnd | None  # how the first of them ended; None while they live

    @property
    def ranks(self) -> tuple[int, ...]:
        """Their ranks, in order."""
        return tuple(process.rank for process in self.processes)

    @property
    def awaits_others(self) -> bool:
        """Whether other ranks keep them waiting."""
        return self.wait is not None and self.wait.kind in FOR_OTHERS

    @property
    def place(self) -> str:
        """``train.py:71 in save``; "" where unknown."""
        if self.frame is not None:
            return self.frame.place
        return self.end.traceback.place if self.end is not None and self.end.traceback is not None else ""


@dataclass(frozen=True, slots=True)
class Standstill:
    """A job in which no phase begins or ends."""

    groups: tuple[StackGroup, ...]  # the odd one first, then by size
    odd: StackGroup | None  # the one that the others wait for; None if they do not differ, or that cannot be told

    @property
    def is_mismatch(self) -> bool:
        """Whether all ranks wait for each other, in different places."""
        return len(self.groups) > 1 and all(group.awaits_others for group in self.groups)


def group_ranks(
    processes: Sequence[RankProcess], stacks: Mapping[RankProcess, RankStacks], ends: Mapping[RankProcess, RankEnd]
) -> Standstill:
    """Group all ranks of an attempt by their stacks, or by how they ended."""
    members: dict[tuple[object, ...], list[RankProcess]] = {}
    for process in processes:
        members.setdefault(_choose_key(process, stacks, ends), []).append(process)
    groups = [_build_group(tuple(part), stacks, ends) for part in members.values()]
    odd = _find_odd(groups)
    return Standstill(tuple(sorted(groups, key=lambda group: (group is not odd, -len(group.ranks), group.ranks))), odd)


def _choose_key(
    process: RankProcess, stacks: Mapping[RankProcess, RankStacks], ends: Mapping[RankProcess, RankEnd]
) -> tuple[object, ...]:
    if process in ends:
        return "ended", ends[process].signal_number, ends[process].exit_code
    if process not in stacks:
        return ("silent",)
    stack = stacks[process].training
    return find_wait(stack), stack.own_frame


def _build_group(
    processes: tuple[RankProcess, ...], stacks: Mapping[RankProcess, RankStacks], ends: Mapping[RankProcess, RankEnd]
) -> StackGroup:
    first = processes[0]
    if first in ends:
        return StackGroup(processes, (), None, None, ends[first])
    if first not in stacks:
        return StackGroup(processes, (), None, None, None)
    stack = stacks[first].training
    return StackGroup(processes, tuple(stacks[one] for one in processes), find_wait(stack), stack.own_frame, None)


def _find_odd(groups: Sequence[StackGroup]) -> StackGroup | None:
    """Return the group that the others wait for.

    Ranks in a collective wait for those that are not in it. If all of them are in one, but not in the same, the fewest are
    taken to be wrong; of as many, the one that is further in the same function has left out what the other one waits in.
    """
    if len(groups) < 2:
        return None
    late = [group for group in groups if not group.awaits_others]
    candidates = late if late and len(late) < len(groups) else list(groups)
    ordered = sorted(candidates, key=_rank_suspicion)
    first, *others = ordered
    if not others or _rank_suspicion(first) < _rank_suspicion(others[0]):
        return first
    return _find_further(first, others[0]) if len(others) == 1 else None


def _rank_suspicion(group: StackGroup) -> tuple[bool, bool, int]:
    """Order groups: ended ranks first, then those whose Python does not run, then the smallest."""
    return group.end is None, group.wait is not None, len(group.ranks)


def _find_further(one: StackGroup, other: StackGroup) -> StackGroup | None:
    if one.frame is None or other.frame is None:
        return None
    if (one.frame.file, one.frame.function) != (other.frame.file, other.frame.function):
        return None
    return max(one, other, key=lambda group: group.frame.line if group.frame is not None else 0)
