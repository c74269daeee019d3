"""Another Python thread of a rank that began to compute when iterations became longer.

A rank on a CPU that began to hold up the others within forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zerotop.analysis.code_line import CodeLine, find_own
from zerotop.analysis.findings.support.causes.host_causes import measure_change_loads
from zerotop.analysis.findings.support.causes.step_change import Advice, Cause, StepChange, count_iterations
from zerotop.analysis.findings.support.evidence import Process, Rows
from zerotop.analysis.findings.support.host_load import SLOW_TIMES, hides_slow_cores, measure_thread_use
from zerotop.analysis.findings.support.started_threads import find_outermost, is_in_pool
from zerotop.analysis.findings.support.thresholds import STALL_SECONDS
from zerotop.analysis.formatting import Text, format_seconds
from zerotop.analysis.hangs.stacks import list_stacks
from zerotop.analysis.hangs.waits import WaitKind, find_wait
from zerotop_probe.recording import events

_COMPUTES: Advice = (
    "See what only this rank computes in forward and backward; if nothing, its cores are slower.",
    "py-spy dump --pid {slow_pid}",
)
_WAITS: Advice = ("See what else runs on its cores, and bind each rank to cores of its own.", "taskset -pc {slow_pid}")


def check_slow_cores(change: StepChange) -> Cause | None:
    """Return the cause that one rank began to compute longer than the others, or to wait for a core."""
    if change.added_s <= 0 or len(change.group.processes) < 2 or not hides_slow_cores(change.group):
        return None
    own_before, own_after = change.measure_own()
    if not own_after - own_before < change.added_s / 2:  # work between the phases, or unknown, which is NaN
        return None
    before, after = (
        [_measure_use(change, process, rows) for process in change.group.processes] for rows in (change.before, change.after)
    )
    uses = np.array([before, after])  # before and after, process, computed and waited
    if np.isnan(uses).any():
        return None
    for part, verb, advice in ((0, "computes for", _COMPUTES), (1, "waits for a core for", _WAITS)):
        rise = uses[1, :, part] - uses[0, :, part]
        index, (others, most) = int(np.argmax(rise)), np.sort(rise)[-2:].tolist()
        # Who was late before may be so still.
        after_s = np.sort(uses[1, :, part])
        if most - others >= max(STALL_SECONDS, change.added_s / 2) and after_s[-1] >= SLOW_TIMES * after_s[-2]:
            if part == 1 and _is_by_others(change):
                return None
            culprit = change.group.processes[index]
            values = {"before": float(uses[0, index, part]), "after": float(uses[1, index, part])}
            text = Text(
                f"rank {culprit.rank} {verb} {{after:seconds}} in each iteration instead of {{before:seconds}}", values
            )
            fix = advice[1].replace("{slow_pid}", str(culprit.source.pid))
            return Cause(text, advice[0], fix, 0.85, finding="slow_cores", culprit=culprit)
    return None


def _is_by_others(change: StepChange) -> bool:
    """Whether other processes use the cores, which takes them from ranks at random; true if that is unknown."""
    return any(load is None or load.is_starved or load.is_disturbed for load in measure_change_loads(change))


def _measure_use(change: StepChange, process: Process, rows: Rows) -> tuple[float, float]:
    """Return the seconds of an iteration in which a rank computed, and in which it waited for a core; NaN if unknown."""
    window = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    use = measure_thread_use(process, *window, known_ns=change.known_ns)
    count = count_iterations(rows)
    return (use.computed / count, use.waited / count) if use is not None else (float("nan"), float("nan"))


# Python hands over its lock after 5 ms. A thread that waits longer than this on average (seconds) often finds it taken.
_LOCK_WAIT_S = 0.0002
# The training thread waits at most while the other one runs: that must be this part of the time that was lost. A thread that
# waits for a core may hold the lock meanwhile.
_EXPLAINED_SHARE = 1 / 3
# Threads hold the lock if they compute in this share of the time for which another one waits for it.
_HELD_SHARE = 0.5
# Tolerances: how long (ns) a thread may have computed while still seen idle, and by how many steps a change may be off.
_UNSEEN_NS, _STEPS_OFF = 100_000_000, 2

# In these a thread gives the lock away.
_WAITING = frozenset((WaitKind.SLEEP, WaitKind.LOCK, WaitKind.FILE, WaitKind.NETWORK, WaitKind.DATA, WaitKind.WORKERS))
_BACKWARD_FILES = ("torch/autograd/graph.py", "torch/autograd/__init__.py")

_ADVICE = (
    "Python runs one thread at a time: move the work of {thread} to a separate process, or do it less often while the"
    " training thread needs the lock."
)


class ThreadCause(NamedTuple):
    """A thread that began to compute, in unix nanoseconds; ``line`` is where it spent the most time."""

    name: str
    begin_ns: int
    busy_ns: int
    cores: float
    held_s: float  # how long another thread waited for the lock meanwhile, on average; 0 if this is not known to be why
    line: CodeLine | None
    target: str  # the job's own function that the thread runs, if it is one of a module
    is_in_pool: bool  # whether an executor of threads runs that function

    @property
    def fix(self) -> str:
        """The same work without Python's lock."""
        if self.is_in_pool:
            return "concurrent.futures.ProcessPoolExecutor()"
        if self.target:
            return f"multiprocessing.Process(target={self.target}, daemon=True).start()"
        return self.line.location if self.line is not None else "py-spy dump --pid {pid}"

    def describe(self, whose: str, others: int, cores: float) -> str:
        """Return the end of a sentence about the thread, and about so many others that use ``cores`` together with it."""
        place = f" at {self.line.text}" if self.line is not None else ""
        began = f"thread {self.name}{whose}{f' and {others} more' if others else ''} began to use {cores:.1f} cores{place}"
        return f"{began}, and {'hold' if others else 'holds'} Python's lock meanwhile"


def awaits_threads(change: StepChange) -> bool:
    """Whether the probe may still be searching for the thread that began to compute."""
    is_slower = change.added_s > 0
    return bool(is_slower) and any(
        event.watches_threads for process in change.group.processes for event in process.events_of(events.Hello)
    )


def check_threads(change: StepChange) -> Cause | None:
    """Return the cause that a thread began to compute in the iterations that became longer."""
    # Steps in between may only have been counted.
    earliest_ns, latest_ns = int(change.before["end_unix_ns"][-1]), int(change.after["end_unix_ns"][0])
    off_ns = _UNSEEN_NS + round(_STEPS_OFF * 1e9 * change.after_s)
    return _find_cause(change, earliest_ns - off_ns, latest_ns + off_ns)


def check_drift_threads(change: StepChange) -> Cause | None:
    """Return the cause that a thread began to compute while iterations became longer and longer."""
    return _find_cause(change, int(change.before["begin_unix_ns"][0]), int(change.after["begin_unix_ns"][0]))


def find_busy_threads(process: Process, since_ns: int, known_ns: int) -> list[ThreadCause]:
    """Return the threads that were seen to hold Python's lock from ``since_ns`` on, the busiest first."""
    found = [thread for thread in _list_threads(process, known_ns) if thread.busy_ns >= since_ns]
    return sorted(found, key=lambda thread: -thread.cores)


def list_holders(process: Process, known_ns: int) -> list[ThreadCause]:
    """Return the threads that were seen to hold Python's lock for long at a time."""
    return [thread for thread in _list_threads(process, known_ns) if thread.held_s]


def advise_on_thread(thread: ThreadCause) -> str:
    """Return the advice about a thread that holds Python's lock."""
    return _ADVICE.format(thread=thread.name)


def _find_cause(change: StepChange, earliest_ns: int, latest_ns: int) -> Cause | None:
    before, after = change.before_s, change.after_s
    found = [
        (thread, process)
        for process in change.group.processes
        for thread in _list_threads(process, change.latest_ns)
        if thread.begin_ns <= latest_ns and thread.busy_ns >= earliest_ns
    ]
    lost = 1 - before / after
    if not found or not lost > 0:
        return None
    is_by_cores = sum(thread.cores for thread, _ in found) >= _EXPLAINED_SHARE * lost
    if not is_by_cores:
        found = [(thread, process) for thread, process in found if _holds_long(change, thread, process)]
        if not found:
            return None
    thread, process = max(found, key=lambda one: one[0].cores if is_by_cores else one[0].held_s)
    whose = f" of rank {process.rank}" if len(change.group.processes) > 1 else ""
    text = thread.describe(whose, len(found) - 1, sum(thread.cores for thread, _ in found))
    waits = "" if is_by_cores else f", for which others wait {format_seconds(thread.held_s)}"
    return Cause(f"{text}{waits}", advise_on_thread(thread), thread.fix, 0.85, line=thread.line)


def _holds_long(change: StepChange, thread: ThreadCause, process: Process) -> bool:
    """Whether one wait for the lock explains much of the lost time, which the training thread does not compute itself.

    A thread that computes little may hold the lock for long at a time.
    """
    if thread.held_s < _EXPLAINED_SHARE * change.added_s:
        return False
    before, after = (_measure_use(change, process, rows)[0] for rows in (change.before, change.after))
    return not after - before >= change.added_s / 2  # false for NaN: unknown


def _list_threads(process: Process, known_ns: int) -> Iterator[ThreadCause]:
    """Yield the threads that hold Python's lock, from events written until ``known_ns``."""
    offset_ns = process.source.offset_ns
    for event in process.events_of(events.BusyThread):
        name = event.thread
        # A template of the advice must not take a part of the name for a value.
        is_plain = name.isprintable() and not set(name) & set("{}[]")
        wait_s, held_s = event.lock_wait_s or 0.0, event.held_s or 0.0
        is_held = held_s > 0 and held_s >= _HELD_SHARE * wait_s
        is_other = _is_training(event) or (_is_waiting(event) and not is_held)
        if event.unix_ns <= known_ns and wait_s >= _LOCK_WAIT_S and is_plain and not is_other:
            times = event.begin_ns + offset_ns, event.busy_ns + offset_ns
            measured = event.cores, held_s if is_held else 0.0
            place = find_outermost(event)
            target = place.function if place is not None and place.function.isidentifier() else ""
            yield ThreadCause(name, *times, *measured, _find_line(event), target, is_in_pool(event))


def _is_training(event: events.BusyThread) -> bool:
    """Whether the thread runs the backward: PyTorch recomputes the forward of checkpointed layers in another thread."""
    return any(frame.file in _BACKWARD_FILES for frame in event.frames)


def _is_waiting(event: events.BusyThread) -> bool:
    """Whether the thread was seen to wait as often as to compute: a thread that waits does not hold the lock."""
    counts = [(stack.count or 1, is_wait) for stack, is_wait in _list_kinds(event)]
    return 2 * sum(count for count, is_wait in counts if is_wait) >= sum(count for count, _ in counts)


def _list_kinds(event: events.BusyThread) -> list[tuple[events.SampledStack, bool]]:
    """Return the stacks of an event, and whether the thread waits in each."""
    return [(one, find_wait(read).kind in _WAITING) for one, read in zip(event.stacks, list_stacks(event), strict=True)]


def _find_line(event: events.BusyThread) -> CodeLine | None:
    """Return the line of the function in the job's own code with the most samples; waits count only without others."""
    found = [(find_own(event.frames, stack), stack, is_wait) for stack, is_wait in _list_kinds(event)]
    is_working = any(own is not None and not is_wait for own, _, is_wait in found)
    seconds: dict[CodeLine, float] = {}
    for own, stack, is_wait in found:
        if own is not None and not (is_wait and is_working):
            line = CodeLine(own.file, own.line, own.function, ())
            seconds[line] = seconds.get(line, 0.0) + (stack.seconds or 0.0)
    by_function: dict[tuple[str, str], float] = {}
    for line, weight in seconds.items():
        key = line.file, line.function
        by_function[key] = by_function.get(key, 0.0) + weight
    if not by_function:
        return None
    most = max(by_function, key=lambda key: by_function[key])
    return max((line for line in seconds if (line.file, line.function) == most), key=lambda line: seconds[line])
