"""Stacks of the threads of a silent rank, as its probe or py-spy saw them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from zerotop.recording.events.event_files import select_events
from zerotop.recording.keys import RankProcess
from zerotop.recording.reader import Recording
from zerotop_probe.recording import event_values
from zerotop_probe.recording.events import CollectiveCall, CollectiveReport, RankStacks, StackEvent, Stacks

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
    daemon: bool | None = None  # whether Python ends without waiting for it; None if unknown

    @property
    def own_frame(self) -> StackFrame | None:
        """The innermost frame of the job's own code, else the innermost; None without frames."""
        return next((frame for frame in self.frames if frame.own), self.frames[0] if self.frames else None)


class Collectives(NamedTuple):
    """The collectives that a rank has called in one process group, from PyTorch's flight recorder."""

    group: str
    called: int  # collectives so far
    name: str  # function of the first that has not ended; "" without one
    awaited: int  # its number; -1 without one

    @property
    def is_pending(self) -> bool:
        """Whether one of them has not ended."""
        return self.awaited >= 0


# Collectives in which all ranks pass tensors of one shape.
_SAME_SHAPES = (
    *("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("_allgather_base", "_all_gather_base", "_reduce_scatter_base"),
)


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
class StackReport:
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


def read_silent_stacks(recording: Recording, process: RankProcess, begin_ns: int, end_ns: int) -> list[StackReport]:
    """Return the stacks of a silent rank after ``begin_ns`` and up to ``end_ns`` (unix time), oldest first."""
    key = process.host, process.pid
    own = select_events(recording.process_events(Stacks, *process, end_ns), begin_ns + 1, end_ns)
    seen = select_events(recording.events_of(RankStacks, end_ns), begin_ns + 1, end_ns)
    found = [_build_stacks(event, process) for event in own if event.why == SILENT]
    found += [_build_stacks(event, process) for event in seen if event.process_key == key]
    ordered = sorted((stacks for stacks in found if stacks.threads), key=lambda stacks: stacks.time_ns)
    compared: list[StackReport] = []
    for stacks in ordered:
        compared.append(_compare_with_last(stacks, compared[-1] if compared else None))
    return compared


def _compare_with_last(stacks: StackReport, last: StackReport | None) -> StackReport:
    """Return the stacks, with facts that follow from a comparison with the stacks before them."""
    if last is not None and not stacks.is_running and stacks.training.own_frame == last.training.own_frame:
        return replace(stacks, collectives=last.collectives, calls=last.calls)  # py-spy does not see them
    if last is None or stacks.allocations is None or stacks.allocations != last.allocations:
        return stacks
    return replace(stacks, is_device_still=stacks.training == last.training)


def _build_stacks(event: Stacks | RankStacks, process: RankProcess) -> StackReport:
    threads = tuple(_list_threads(event))
    if isinstance(event, RankStacks):
        launched, idle_s = tuple(_list_launched(event)), event.idle_s or 0.0
        return StackReport(process, event.unix_ns, None, "", threads, launched=launched, is_running=False, idle_s=idle_s)
    called = (one for one in event.collectives or () if one.called is not None)
    return StackReport(
        process,
        event.unix_ns,
        event.step,
        event.where,
        threads,
        tuple(Collectives(one.group or "", one.called or 0, _name_collective(one), one.waits_for or 0) for one in called),
        calls=tuple(
            Call(one.group or "", one.number, _name_collective(one), _describe_place(one), _read_shape(one))
            for one in event.calls or ()
            if one.number is not None
        ),
        allocations=event.allocations,
    )


def _name_collective(called: CollectiveReport | CollectiveCall) -> str:
    """Return the function of torch.distributed: with NCCL a barrier is recorded as a sum."""
    return "barrier" if called.name == "all_reduce_barrier" else called.name or ""


def _read_shape(call: CollectiveCall) -> tuple[int, ...] | None:
    return tuple(call.shape) if call.shape is not None else None


def _describe_place(call: CollectiveCall) -> str:
    return StackFrame(call.file, call.line or 0, call.function or "?", own=True).place if call.file else ""


def _list_launched(event: RankStacks) -> Iterator[Launched]:
    for one in event.launched or ():
        if one.pid is not None and one.launched is not None:
            yield Launched(one.operation or "", one.pid, one.launched)


def list_stacks(event: StackEvent) -> list[ThreadStack]:
    """Return the stacks of an event, in its order."""
    frames = [StackFrame(one.file, one.line, one.function, bool(one.own)) for one in event.frames]
    return [
        ThreadStack(
            one.thread or "", one.call or "", tuple(frames[at] for at in one.frames if 0 <= at < len(frames)), one.daemon
        )
        for one in event.stacks
    ]


def _list_threads(event: Stacks | RankStacks) -> list[ThreadStack]:
    """Return the stacks of an event, that of the training thread first; none if that is missing."""
    threads = [stack for stack in list_stacks(event) if stack.frames]
    return sorted(threads, key=lambda stack: bool(stack.thread)) if any(not one.thread for one in threads) else []
