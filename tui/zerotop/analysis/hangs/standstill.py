"""The ranks of a job that stands still, grouped by their place in the code, and the group that the others wait for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zerotop.analysis.failures.rank_ends import RankEnd
from zerotop.analysis.hangs.stacks import Call, Collectives, StackFrame, StackReport
from zerotop.analysis.hangs.waits import DESTROYING, FOR_OTHERS, Wait, WaitKind, find_wait
from zerotop.recording.keys import RankProcess

# Files of libraries that run forward, backward and step.
_TRAINING = (
    *("torch/nn/modules/module.py", "torch/nn/parallel/", "torch/_tensor.py", "torch/autograd/", "torch/optim/"),
    *("deepspeed/runtime/engine.py", "deepspeed/runtime/pipe/"),
)


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks in the same place of the code. Without stacks, ranks that ended or whose Python did not run."""

    processes: tuple[RankProcess, ...]
    stacks: tuple[StackReport, ...]  # of each of them; () without
    wait: Wait | None  # None without stacks
    frame: StackFrame | None  # the job's own line where they stand
    end: RankEnd | None  # how the first of them ended; None while they live
    collectives: Collectives | None = None  # that they have called in a process group of all ranks
    reads: int = 0  # batches that each has read at least, if they do nothing else

    @property
    def ranks(self) -> tuple[int, ...]:
        """Their ranks, in order."""
        return tuple(process.rank for process in self.processes)

    @property
    def awaited(self) -> Collectives | None:
        """The process group in which a collective that they have called has not ended; None without one."""
        return next((one for stacks in self.stacks for one in stacks.collectives if one.is_pending), None)

    @property
    def pending(self) -> str | None:
        """The collective that they have called and that has not ended; None without one."""
        return self.awaited.name if self.awaited is not None else None

    @property
    def awaits_others(self) -> bool:
        """Whether the ranks have arrived and wait for others.

        With NCCL a rank continues after calling a collective, until it waits for the GPU. A rank that waits for a GPU
        without an unfinished collective computes.
        """
        if self.reads or self.has_left:
            return False
        if self.wait is None or self.pending is not None:
            return self.pending is not None
        knows = any(stacks.collectives for stacks in self.stacks)
        return self.wait.kind in FOR_OTHERS and not (knows and self.wait.kind is WaitKind.DEVICE)

    @property
    def has_left(self) -> bool:
        """Whether the ranks have come to the end of their script, which destroys the process group or exits."""
        return self.wait is not None and (self.wait.kind is WaitKind.EXIT or self.wait.name == DESTROYING)

    @property
    def awaits_device(self) -> bool:
        """Whether they wait for their GPUs, other than for a collective."""
        return self.wait is not None and self.wait.kind is WaitKind.DEVICE and self.pending is None and not self.reads

    @property
    def is_device_still(self) -> bool:
        """Whether their GPUs still work on kernels launched long ago: no tensor has been allocated since."""
        return bool(self.stacks) and all(stacks.is_device_still for stacks in self.stacks)

    @property
    def activity(self) -> str:
        """The collective that they wait in, or the function that they are in; "" in a line of the job's own."""
        if self.wait is None:
            return ""
        return self.wait.name if self.pending is None or self.wait.kind is WaitKind.COLLECTIVE else self.pending

    @property
    def place(self) -> str:
        """``train.py:71 in save``; "" where unknown."""
        if self.frame is not None:
            return self.frame.place
        return self.end.traceback.place if self.end is not None and self.end.traceback is not None else ""


class CallGap(NamedTuple):
    """The first known collective of a process group that differs between ranks."""

    number: int
    calls: tuple[tuple[StackGroup, Call], ...]  # the calls of each group of ranks, the smallest group first

    @property
    def is_of_shapes(self) -> bool:
        """Whether the ranks called the same collective, with tensors of different shapes."""
        return len({call.name.partition(" of ")[0] for _, call in self.calls}) == 1

    @property
    def odd(self) -> StackGroup | None:
        """The ranks that called something else than the others; None if they cannot be told apart."""
        ranks = _count_ranks(self.calls)
        (first, call), *others = self.calls
        is_alone = all(other.name != call.name for _, other in others)
        return first if is_alone and all(ranks[call.name] < ranks[other.name] for _, other in others) else None


class Absence(NamedTuple):
    """Ranks that have not called the collective that others wait for."""

    waiting: StackGroup
    name: str
    absent: tuple[int, ...]  # ranks


@dataclass(frozen=True, slots=True)
class Standstill:
    """A job in which no phase begins or ends."""

    groups: tuple[StackGroup, ...]  # the odd one first, then by size
    odd: StackGroup | None  # the group that the others wait for; None if they do not differ, or if it is unknown
    difference: CallGap | None = None  # None if the ranks have called the same collectives, or if that is unknown

    @property
    def is_mismatch(self) -> bool:
        """Whether all ranks wait for each other, in different places."""
        return len(self.groups) > 1 and all(group.awaits_others for group in self.groups)

    @property
    def departure(self) -> StackFrame | None:
        """The line, in the function in which the other ranks still train, from which the odd ranks went on to the end."""
        odd = self.odd
        if (
            odd is None
            or odd.wait is None
            or odd.wait.name != DESTROYING
            or not any(one.awaits_others for one in self.groups)
        ):
            return None
        others = [stacks.training.frames for group in self.groups if group is not odd for stacks in group.stacks]
        if not any(frame.file.startswith(_TRAINING) and not frame.own for frames in others for frame in frames):
            return None  # they may have left it, too
        training = {(frame.file, frame.function) for frames in others for frame in frames if frame.own}
        own = [frame for frame in odd.stacks[0].training.frames if frame.own]
        return next((frame for frame in own if (frame.file, frame.function) in training), own[-1] if own else None)

    def list_absences(self) -> list[Absence]:
        """Return for each group of ranks that waits in a collective which ranks have not called it, if that is known."""
        found = (_find_absence(group, self.groups) for group in self.groups)
        return [absence for absence in found if absence is not None]


def group_ranks(
    processes: Sequence[RankProcess],
    stacks: Mapping[RankProcess, StackReport],
    ends: Mapping[RankProcess, RankEnd],
    reads: Mapping[RankProcess, int] | None = None,
) -> Standstill:
    """Group all ranks of an attempt by their stacks, or by how they ended, or because they only read batches.

    ``reads``: how many batches those have read that do nothing else.
    """
    reads = reads or {}
    shared = _find_shared_group(list(stacks.values()))
    members: dict[tuple[object, ...], list[RankProcess]] = {}
    for process in processes:
        key = ("reads",) if reads.get(process) else _choose_key(process, stacks, ends, shared)
        members.setdefault(key, []).append(process)
    groups = [
        replace(_build_group(tuple(part), stacks, ends, shared), reads=min(reads.get(process, 0) for process in part))
        for part in members.values()
    ]
    difference = _find_difference(groups, shared)
    odd = difference.odd if difference is not None else _find_odd(groups)
    ordered = tuple(sorted(groups, key=lambda group: (group is not odd, -len(group.ranks), group.ranks)))
    return Standstill(ordered, odd, difference)


def _find_absence(waiting: StackGroup, groups: Sequence[StackGroup]) -> Absence | None:
    """Return the ranks that have called fewer collectives of its process group, else those that have called none."""
    awaited = waiting.awaited
    if awaited is None:
        return None
    called = {
        stacks.process.rank: next((one.called for one in stacks.collectives if one.group == awaited.group), 0)
        for group in groups
        for stacks in group.stacks
        if stacks.collectives
    }
    behind = sorted(rank for rank, count in called.items() if count < awaited.awaited)
    some = [rank for rank in behind if called[rank]]
    return Absence(waiting, awaited.name, tuple(some or behind)) if behind else None


def _find_difference(groups: Sequence[StackGroup], shared: str | None) -> CallGap | None:
    """Return the first number at which ranks, all waiting in a collective, have called different collectives."""
    if len(groups) < 2 or not all(group.awaits_others for group in groups):
        return None
    known = [
        (group, {call.number: call for call in group.stacks[0].calls if call.group == shared} if group.stacks else {})
        for group in groups
    ]
    numbers = sorted(set.intersection(*(set(calls) for _, calls in known)))
    for number in numbers:
        called = [(group, calls[number]) for group, calls in known]
        if len({call.name for _, call in called}) == 1:
            called = [(group, call._replace(name=call.sized_name)) for group, call in called]
        if len({call.name for _, call in called}) > 1:
            ranks = _count_ranks(called)
            # Of two groups of equal size, the one that has called more: the others do not know of the collective.
            return CallGap(number, tuple(sorted(called, key=lambda one: (ranks[one[1].name], -_count_called(one[0])))))
    return None


def _count_ranks(calls: Iterable[tuple[StackGroup, Call]]) -> dict[str, int]:
    """Return how many ranks have called each collective, by its name."""
    counts: dict[str, int] = {}
    for group, call in calls:
        counts[call.name] = counts.get(call.name, 0) + len(group.ranks)
    return counts


def _count_called(group: StackGroup) -> int:
    return group.collectives.called if group.collectives is not None else 0


def _find_shared_group(stacks: Sequence[StackReport]) -> str | None:
    """Return the process group that all of several ranks have used, the one that the first of them used last."""
    if len(stacks) < 2:
        return None
    names = [{one.group for one in rank.collectives} for rank in stacks]
    return next((one.group for one in stacks[0].collectives if all(one.group in known for known in names)), None)


def _read_collectives(stacks: StackReport, shared: str | None) -> Collectives | None:
    return next((one for one in stacks.collectives if one.group == shared), None)


def _choose_key(
    process: RankProcess,
    stacks: Mapping[RankProcess, StackReport],
    ends: Mapping[RankProcess, RankEnd],
    shared: str | None,
) -> tuple[object, ...]:
    if process in ends:
        return "ended", ends[process].signal_number, ends[process].exit_code
    if process not in stacks:
        return ("silent",)
    stack = stacks[process].training
    called = _read_collectives(stacks[process], shared)
    count = called.called if called is not None else None
    sizes = [call.sized_name for call in stacks[process].calls if call.group == shared and call.number == count]
    return find_wait(stack), stack.own_frame, count, *sizes


def _build_group(
    processes: tuple[RankProcess, ...],
    stacks: Mapping[RankProcess, StackReport],
    ends: Mapping[RankProcess, RankEnd],
    shared: str | None,
) -> StackGroup:
    first = processes[0]
    if first in ends:
        return StackGroup(processes, (), None, None, ends[first])
    if first not in stacks:
        return StackGroup(processes, (), None, None, None)
    stack, own = stacks[first].training, tuple(stacks[one] for one in processes)
    return StackGroup(processes, own, find_wait(stack), stack.own_frame, None, _read_collectives(stacks[first], shared))


def _find_odd(groups: Sequence[StackGroup]) -> StackGroup | None:
    """Return the group that the others wait for.

    Ranks that have called fewer collectives are behind. Ranks in a collective wait for those that are not in it. If all are
    in collectives, but in different ones, the smallest group is assumed to be wrong.
    """
    if len(groups) < 2:
        return None
    behind = _find_behind(groups)
    if len(behind) == 1:
        return behind[0]
    late = [group for group in groups if not group.awaits_others]
    candidates = late if late and len(late) < len(groups) else list(groups)
    ordered = sorted(candidates, key=_rank_suspicion)
    first, *others = ordered
    return first if not others or _rank_suspicion(first) < _rank_suspicion(others[0]) else None


def _find_behind(groups: Sequence[StackGroup]) -> list[StackGroup]:
    """Return the groups that have called the fewest collectives; none if all called the same number, or it is unknown."""
    called = [group.collectives.called for group in groups if group.collectives is not None]
    if len(called) < len(groups) or min(called) == max(called):
        return []
    return [group for group, count in zip(groups, called, strict=True) if count == min(called)]


def _rank_suspicion(group: StackGroup) -> tuple[bool, bool, int]:
    """Return a sort key: ended ranks first, then those whose Python does not run, then the smallest group."""
    return group.end is None, group.wait is not None or bool(group.reads), len(group.ranks)
