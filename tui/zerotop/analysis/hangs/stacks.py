"""Stacks of the threads of a silent rank, as its probe or py-spy saw them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zerotop.analysis.processes.alive_ranks import RankProcess
from zerotop.session.events.event_files import Event, select_events
from zerotop.session.reader import Session
from zerotop_probe.recording import event_values
from zerotop_probe.recording.events import RANK_STACKS, STACKS

# The value of the event's field ``why``.
SILENT = event_values.SILENT


class StackFrame(NamedTuple):
    file: str
    line: int
    function: str
    own: bool  # it is the job's own code

    @property
    def place(self) -> str:
        """``train.py:71 in save``; ``train.py:71`` outside of functions; ``libc.so.6 in sleep`` in C."""
        file = f"{self.file}:{self.line}" if self.line else self.file
        return file if self.function == "<module>" else f"{file} in {self.function}"


@dataclass(frozen=True, slots=True)
class ThreadStack:
    thread: str  # "" for the training thread
    call: str  # the C function that the innermost frame calls; "" without one
    frames: tuple[StackFrame, ...]  # innermost first

    @property
    def own_frame(self) -> StackFrame | None:
        """The innermost frame of the job's own code, else the innermost; None without frames."""
        return next((frame for frame in self.frames if frame.own), self.frames[0] if self.frames else None)


class Collectives(NamedTuple):
    """The collectives that a rank has called in one process group, from PyTorch's flight recorder."""

    group: str
    called: int  # collectives so far
    name: str  # function of the first that has not ended; "" without one
    is_pending: bool  # whether there is one


# Collectives in which all ranks pass tensors of one shape.
_SAME_SHAPES = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "_allgather_base",
                "_reduce_scatter_base")  # fmt: skip


class Call(NamedTuple):
    """One collective that a rank has called, as PyTorch's flight recorder says."""

    group: str
    number: int
    name: str
    place: str  # ``train.py:94 in step``; "" where unknown
    shape: tuple[int, ...] | None = None  # of its first tensor; None where unknown

    @property
    def sized_name(self) -> str:
        """The name with the shape, if all ranks must pass tensors of one shape: ``all_reduce of 4,096 x 4``."""
        if self.shape is None or self.name not in _SAME_SHAPES:
            return self.name
        return f"{self.name} of {' x '.join(f'{size:,}' for size in self.shape) or 'a scalar'}"


class Launched(NamedTuple):
    """The number of operations of a kind that a process has launched on its GPU, according to NCCL."""

    operation: str
    pid: int
    operations: int


@dataclass(frozen=True, slots=True)
class RankStacks:
    """The stacks of a rank's threads at one moment of its silence."""

    process: RankProcess
    time_ns: int  # unix time
    step: int | None
    where: str  # the outermost phase, or "between phases"
    threads: tuple[ThreadStack, ...]  # the training thread first
    collectives: tuple[Collectives, ...] = ()  # of each process group
    calls: tuple[Call, ...] = ()  # the last ones of each process group
    launched: tuple[Launched, ...] = ()  # by ranks of this node that have launched different numbers
    is_running: bool = True  # False if py-spy saw them: the rank's Python did not run
    allocations: int | None = None  # blocks that PyTorch's allocator had handed out on the GPU; None if unknown
    is_device_still: bool = False  # nothing was allocated on the GPU since the stacks before, which are the same
    idle_s: float = 0.0  # for how long the rank had done nothing, if it had written nothing before

    @property
    def training(self) -> ThreadStack:
        """The stack of the training thread."""
        return self.threads[0]


def read_silent_stacks(session: Session, process: RankProcess, begin_ns: int, end_ns: int) -> list[RankStacks]:
    """Return the stacks of a silent rank after ``begin_ns`` and up to ``end_ns`` (unix time), oldest first."""
    key = process.host, process.pid
    own = select_events(session.process_events(STACKS, *process, end_ns), begin_ns + 1, end_ns)
    seen = select_events(session.events_named(RANK_STACKS, end_ns), begin_ns + 1, end_ns)
    found = [_build_stacks(event, process) for event in own if event.facts.get("why") == SILENT]
    found += [_build_stacks(event, process) for event in seen if (event.host, event.facts.get("pid")) == key]
    ordered = sorted((stacks for stacks in found if stacks.threads), key=lambda stacks: stacks.time_ns)
    return [_compare_with_last(stacks, last) for stacks, last in zip(ordered, [None, *ordered], strict=False)]


def _compare_with_last(stacks: RankStacks, last: RankStacks | None) -> RankStacks:
    """Return the stacks, with facts that follow from a comparison with the stacks before them."""
    if last is None or stacks.allocations is None or stacks.allocations != last.allocations:
        return stacks
    return replace(stacks, is_device_still=stacks.training == last.training)


def _build_stacks(event: Event, process: RankProcess) -> RankStacks:
    step, is_running = event.facts.get("step"), event.name == STACKS
    where = str(event.facts.get("where") or "")
    threads = tuple(_parse_threads(event))
    collectives = tuple(_parse_collectives(event))
    step = step if isinstance(step, int) else None
    idle_s = event.facts.get("idle_s")
    idle_s = float(idle_s) if isinstance(idle_s, int | float) else 0.0
    count = event.facts.get("allocations")
    allocations = count if isinstance(count, int) else None
    return RankStacks(
        process,
        event.unix_ns,
        step,
        where,
        threads,
        collectives,
        calls=tuple(_parse_calls(event)),
        launched=tuple(_parse_launched(event)),
        is_running=is_running,
        allocations=allocations,
        idle_s=idle_s,
    )


def _parse_collectives(event: Event) -> Iterator[Collectives]:
    for facts in event.facts.get("collectives") or ():
        if isinstance(called := facts.get("called"), int):
            first = facts.get("waits_for")
            is_pending = isinstance(first, int) and first >= 0
            yield Collectives(str(facts.get("group") or ""), called, _name_collective(facts), is_pending)


def _name_collective(facts: dict[str, Any]) -> str:
    """Return the function of torch.distributed: with NCCL a barrier is recorded as a sum."""
    name = str(facts.get("name") or "")
    return "barrier" if name == "all_reduce_barrier" else name


def _parse_calls(event: Event) -> Iterator[Call]:
    for facts in event.facts.get("calls") or ():
        if isinstance(number := facts.get("number"), int):
            place = _parse_frame(facts).place if facts.get("file") else ""
            sizes = facts.get("shape")
            is_shape = isinstance(sizes, list) and all(isinstance(size, int) for size in sizes)
            shape = tuple(sizes) if is_shape and sizes is not None else None
            yield Call(str(facts.get("group") or ""), number, _name_collective(facts), place, shape)


def _parse_launched(event: Event) -> Iterator[Launched]:
    for facts in event.facts.get("launched") or ():
        pid, count = facts.get("pid"), facts.get("launched")
        if isinstance(pid, int) and isinstance(count, int):
            yield Launched(str(facts.get("operation") or ""), pid, count)


def _parse_threads(event: Event) -> list[ThreadStack]:
    """Return the stacks of an event, that of the training thread first; none if that is missing."""
    frames = [_parse_frame(facts) for facts in event.facts.get("frames") or ()]
    stacks = [_parse_stack(facts, frames) for facts in event.facts.get("stacks") or ()]
    threads = [stack for stack in stacks if stack.frames]
    return sorted(threads, key=lambda stack: bool(stack.thread)) if any(not one.thread for one in threads) else []


def _parse_frame(facts: dict[str, Any]) -> StackFrame:
    file, line, function = facts.get("file"), facts.get("line"), facts.get("function")
    return StackFrame(str(file or "?"), line if isinstance(line, int) else 0, str(function or "?"), bool(facts.get("own")))


def _parse_stack(facts: dict[str, Any], frames: Sequence[StackFrame]) -> ThreadStack:
    indexes = [index for index in facts.get("frames") or () if isinstance(index, int) and 0 <= index < len(frames)]
    return ThreadStack(
        str(facts.get("thread") or ""), str(facts.get("call") or ""), tuple(frames[index] for index in indexes)
    )
