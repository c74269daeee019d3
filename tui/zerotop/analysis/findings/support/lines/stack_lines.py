"""The line of the job's own code at which a rank spent its time, from the stacks that its probe sampled."""

from __future__ import annotations

import builtins
import io
import re
import sys
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zerotop.analysis.code_line import CodeLine, OwnFrame, find_own, list_own, runs_model
from zerotop.analysis.findings.support.lines.known_calls import KnownCall, find_known_call
from zerotop.analysis.findings.support.lines.new_lines import find_new_line, has_new_line
from zerotop.analysis.findings.support.rank_process import Process
from zerotop.recording.events.event_files import select_events
from zerotop_probe.recording import event_values, events
from zerotop_probe.recording.directory import STACKS_SETTING
from zerotop_probe.recording.events import SampledFrame, SampledStack, Stacks
from zerotop_probe.recording.tables import PHASES

BETWEEN, UNSEEN, DATA = event_values.BETWEEN_PHASES, event_values.UNKNOWN_PHASE, "data"
"""The places of stacks that are in no phase, of those in counted steps, and of those that wait for data."""

SLOW, SHARE = event_values.SLOW, event_values.SHARE
"""Why stacks were sampled: the place took longer than usual, or usually takes a notable share."""

# A line that calls these only says that the job trains, in each place, in the phases that compute, and in data loading.
_LIBRARIES = ("deepspeed.", "accelerate.", "transformers.", "trl.", "peft.", "lightning.", "pytorch_lightning.")
# What scripts call themselves, besides training: reading and gathering parameters, gradients and states; logs and profiles.
_ACCESS = (
    *("deepspeed.utils.", "deepspeed.runtime.zero.partition_parameters."),
    *("torch.utils.tensorboard.", "torch.profiler.", "torch.distributed.checkpoint."),
)
_COMPUTING = ("forward", "backward", "step", UNSEEN)
# A method, of which only the name is known, is no tensor's within these libraries, or if only these types have it.
_HOST_LIBRARIES = {*sys.stdlib_module_names, "numpy", "scipy", "pandas", "PIL", "sklearn", "skimage", "librosa", "nltk"}
_HOST_TYPES = (str, bytes, list, dict, set, io.BytesIO, type(re.compile("")), type(zlib.compressobj()), np.ndarray)
_TENSOR_METHODS = {
    *("add", "all", "any", "argmax", "argmin", "argsort", "clip", "conj", "cumprod", "cumsum", "diagonal", "dot", "flatten"),
    *("index", "item", "max", "mean", "min", "nonzero", "prod", "put", "ravel", "repeat", "reshape", "resize", "round"),
    *("size", "sort", "split", "squeeze", "std", "sum", "swapaxes", "take", "tolist", "trace", "transpose", "values"),
    *("var", "view"),
}
_HOST_METHODS = frozenset(name for kind in _HOST_TYPES for name in dir(kind)) - _TENSOR_METHODS
_LOADERS, _LOADER_FILES = "torch.utils.data.", "torch/utils/data/"
# Files of libraries whose functions compute: modules, the backward and optimizers.
_MODULE_FILES = (
    *("torch/nn/modules/module.py", "torch/nn/parallel/", "torch/_tensor.py", "torch/autograd/", "torch/optim/"),
    *("deepspeed/runtime/engine.py", "deepspeed/runtime/pipe/"),
)
# A stack with one of these is in a phase.
_PHASE_FILES = (*_MODULE_FILES, _LOADER_FILES)

_MODEL_CALL = "torch.nn.Module.__call__"

# The smallest share of the samples with which a line explains a delay.
_LINE_SHARE = 0.3
# Samples that show a line, unless those of unusual slowness, which lie close, stand for such a share of the whole delay.
_FEWEST_SAMPLES = 3
# Samples that show what a rank does beside its known phases, the least share of them in modules, the most in another line.
_FEWEST_BESIDE, _MODULES_SHARE, _BESIDE_SHARE = 10, 0.6, 0.1
# The share of the samples below a line of the loop with which a line that it calls takes its place.
_SHARED_SHARE = 0.6
# The last events with samples that are compared on each side of a change.
_MOST_EVENTS = 24
# How long a finding waits for samples (ns), which are written a moment after they were taken.
PATIENCE_NS = 3_000_000_000
_LAST_EVENTS = (events.Goodbye, events.Left)


@dataclass(frozen=True, slots=True)
class StackLine(CodeLine):
    """A line at which samples were taken."""

    seconds: float  # that its samples stand for
    share: float  # of all samples of the place
    is_gpu_idle: bool = False  # whether the GPU is known to have had nothing to do meanwhile
    is_new: bool = False  # whether it hardly took time before
    is_on_gpu: bool = True  # whether its process trains on a GPU

    @property
    def known_call(self) -> KnownCall | None:
        """The known call in the line, if there is one."""
        return find_known_call(self.callees, is_on_gpu=self.is_on_gpu)

    @property
    def called(self) -> str:
        """The function called from the line that takes the time, and the function through which it is called."""
        known, first = self.known_call, super(StackLine, self).called
        if known is None or known.title:
            return first if known is None else known.title
        if known.waits_for_ranks:
            return f"{next(name for name in self.callees if name in known.names)}, which waits for the other ranks"
        if known.waits_for_gpu:
            return self.callees[-1] if self.is_gpu_idle else f"{self.callees[-1]}, which waits for the GPU"
        called = next(name for name in self.callees if find_known_call([name]) is known)
        return called if called == first else f"{first}, which calls {called}"


_Line = tuple[str, int, str]
"""File, number and function."""


class FoundLine(NamedTuple):
    """A line, or None, and when that is known (unix nanoseconds)."""

    line: StackLine | None
    known_ns: int


class Delay(NamedTuple):
    """A rank's lost time: the place of its stacks, "" if that does not matter, and a time window in unix nanoseconds."""

    process: Process
    where: str  # an outermost phase or ``BETWEEN``
    begin_ns: int
    end_ns: int
    known_ns: int  # when the finding is known without the line
    callee: str = ""  # a function that the line must call
    patience_ns: int = PATIENCE_NS  # how long to wait for samples that are not written yet
    slow_until_ns: int = 0  # until when samples of unusual slowness count, too: what has become slow stays so for a while
    is_all_work: bool = False  # an evaluation: lines that compute count, too, and those that call the model
    is_gpu_idle: bool = False  # whether the GPU is known to have had nothing to do meanwhile
    # the seconds in an iteration before and since, of a phase that takes longer, and of the whole iteration
    levels: tuple[tuple[float, float], tuple[float, float]] | None = None
    onset_ns: int = 0  # when the place began to take longer, if that was before the window


def find_line(delay: Delay, *, why: str = "", known_ns: int | None = None) -> StackLine | None:
    """Return the line at which a rank was sampled most in a delay.

    ``why`` is a reason for samples, by default any. Events count if written until ``known_ns``, by default the delay's.
    """
    known_ns = delay.known_ns if known_ns is None else known_ns
    is_computing = delay.where in _COMPUTING
    if is_computing and (new := find_new(delay, known_ns)) is not None:
        return new
    line = _find_most(delay, why, known_ns)
    known = line.known_call if line is not None else None
    if is_computing or (line is not None and (known is None or not known.waits_for_gpu or delay.is_gpu_idle)):
        return line
    return find_new(delay, known_ns) or line


def _find_most(delay: Delay, why: str, known_ns: int) -> StackLine | None:
    """Return the line with most samples of a place."""
    process, where, callee = delay.process, delay.where, delay.callee
    is_computing, total = where in _COMPUTING, 0.0
    seconds: dict[tuple[str, int, str], float] = {}
    slow: dict[tuple[str, int, str], float] = {}  # seconds of unusual slowness
    samples: Counter[tuple[str, str]] = Counter()  # of each function
    callees: dict[tuple[str, int, str], dict[tuple[str, ...], float]] = {}
    for event in _select_events(delay, known_ns):
        # Of a phase that computes all lines are sampled in turn, whether it takes longer or not.
        if (why and event.why != why) or (is_computing and event.why == SHARE):
            continue
        for stack, found in select_stacks(event, where, outside_model=delay.is_all_work):
            if callee and (found is None or callee not in found.callees):
                continue
            weight = stack.seconds or 0.0
            total += weight
            if found is not None and (delay.is_all_work or _takes_time(process, found, where)):
                key, beneath = found[:3], found.callees
                seconds[key] = seconds.get(key, 0.0) + weight
                slow[key] = slow.get(key, 0.0) + (weight if event.why == SLOW else 0.0)
                samples[found.file, found.function] += stack.count or 0
                each = callees.setdefault(key, {})
                each[beneath] = each.get(beneath, 0.0) + weight
    if not seconds or total <= 0:
        return None
    key, weight = _choose_line(seconds, total)
    if samples[key[0], key[2]] < _FEWEST_SAMPLES and slow[key] < _LINE_SHARE * (delay.end_ns - delay.begin_ns) / 1e9:
        return None  # it may have been there by chance
    beneath = max(callees[key], key=lambda names: callees[key][names])
    if weight < _LINE_SHARE * total:
        return None
    return StackLine(*key, beneath, weight, weight / total, delay.is_gpu_idle, is_on_gpu=process.is_on_gpu)


def find_new(delay: Delay, known_ns: int, *, is_alone: bool = False) -> StackLine | None:
    """Return the line that is new in a place since the delay began, or in counted steps; None if the levels are unknown.

    ``is_alone``: the line is all that shows the delay.
    """
    is_on_cpu = not delay.process.is_on_gpu
    about = {"is_gpu_idle": delay.is_gpu_idle or is_on_cpu, "is_alone": is_alone, "is_on_cpu": is_on_cpu}
    for (before, since), level in zip(_list_sides(delay, known_ns), delay.levels or (), strict=False):
        found = find_new_line(before, since, level, **about)
        if found is not None:
            return StackLine(*found.line, found.callees, found.seconds, found.share, delay.is_gpu_idle, is_new=found.is_new)
    return None


def has_moved(delay: Delay, known_ns: int) -> bool:
    """Whether the stacks of a place, or of counted steps, have a line since the delay began that they lacked before."""
    is_idle = delay.is_gpu_idle or not delay.process.is_on_gpu
    return any(has_new_line(before, since, is_gpu_idle=is_idle) for before, since in _list_sides(delay, known_ns))


def _list_sides(delay: Delay, known_ns: int) -> Iterator[tuple[list[Stacks], list[Stacks]]]:
    """Yield the samples of usual slowness before a delay and since, in its place and in counted steps."""
    process, begin_ns = delay.process, (delay.onset_ns or delay.begin_ns) - delay.process.source.offset_ns
    known = select_events(process.events_of(Stacks), 0, known_ns)
    for where in (delay.where, UNSEEN):
        sampled = [event for event in known if event.why == SHARE and event.where == where]
        before = [event for event in sampled if event.end_ns <= begin_ns][-_MOST_EVENTS:]
        yield before, [event for event in sampled if event.begin_ns >= begin_ns][-_MOST_EVENTS:]


def find_repeated_waits(delay: Delay, *, why: str = "") -> StackLine | None:
    """Return the line at which a function waits most for the GPU, if it waits at further lines, and runs no model.

    The first of its waits may last until earlier work is finished. The GPU is idle then, and the others are for what the
    function itself has launched. The line's seconds and share are those of the others at least: all but the longest.
    """
    total = 0.0
    seconds: dict[tuple[str, str], dict[int, float]] = {}
    callees: dict[_Line, tuple[str, ...]] = {}
    running: set[tuple[str, str]] = set()  # functions that run phases
    for event in _select_events(delay, delay.known_ns):
        if why and event.why != why:
            continue
        running |= _list_running(event)
        for stack, found in select_stacks(event, delay.where):
            total += stack.seconds or 0.0
            known = find_known_call(found.callees) if found is not None else None
            if found is not None and known is not None and known.waits_for_gpu:
                each = seconds.setdefault((found.file, found.function), {})
                each[found.line] = each.get(found.line, 0.0) + (stack.seconds or 0.0)
                callees.setdefault(found[:3], found.callees)
    shares = {key: each for key, each in seconds.items() if len(each) > 1 and key not in running}
    if not shares:
        return None
    file, function = max(shares, key=lambda key: sum(shares[key].values()))
    lines = shares[file, function]
    line = max(lines, key=lambda number: lines[number])
    others = sum(lines.values()) - lines[line]
    return StackLine(file, line, function, callees[file, line, function], others, others / total, is_gpu_idle=True)


def _list_running(event: Stacks) -> set[tuple[str, str]]:
    """Return the own functions through which the stacks of an event that are in a phase run: file and name."""
    inside = (one for one in event.stacks if event.where in PHASES or _runs_through(event.frames, one, _PHASE_FILES))
    return {(file, function) for stack in inside for file, _, function in list_own(event.frames, stack)}


def find_entries(process: Process, event: Stacks) -> frozenset[tuple[str, int]]:
    """Return the fewest lines at which most samples of an event left the lines that train: file and number.

    They are the same each time, whatever they call then. None without samples, or if the lines that train are unknown.
    """
    seconds: dict[tuple[str, int], float] = {}
    for path, _, weight in _read_paths(process, [event], event.where):
        seconds[path[0][:2]] = seconds.get(path[0][:2], 0.0) + weight
    total, most, entries = sum(seconds.values()), 0.0, set()
    for line in sorted(seconds, key=lambda line: -seconds[line]):
        if most < _SHARED_SHARE * total:
            most += seconds[line]
            entries.add(line)
    return frozenset(entries)


def find_line_below(delay: Delay, entries: Container[tuple[str, int]], *, why: str = "") -> StackLine | None:
    """Return the innermost line that most samples below lines of :func:`find_entries` run through.

    If they have none in common, it is the one of those lines that took the most time.
    """
    seconds: dict[tuple[_Line, ...], float] = {}
    callees: dict[tuple[_Line, ...], dict[tuple[str, ...], float]] = {}
    sampled = (one for one in _select_events(delay, delay.known_ns) if not why or one.why == why)
    for path, beneath, weight in _read_paths(delay.process, sampled, delay.where):
        if path[0][:2] in entries:
            for depth in range(1, len(path) + 1):
                seconds[path[:depth]] = seconds.get(path[:depth], 0.0) + weight
            each = callees.setdefault(path, {})
            each[beneath] = each.get(beneath, 0.0) + weight
    first = [path for path in seconds if len(path) == 1]
    if not first:
        return None
    total = sum(seconds[path] for path in first)
    shared = [path for path, weight in seconds.items() if weight >= _SHARED_SHARE * total]
    chosen = max(shared, key=len) if shared else max(first, key=lambda path: seconds[path])
    each = callees.get(chosen, {})
    calls = max(each, key=lambda names: each[names]) if sum(each.values()) >= _SHARED_SHARE * seconds[chosen] else ()
    return StackLine(
        *chosen[-1], calls, seconds[chosen], seconds[chosen] / total, delay.is_gpu_idle, is_on_gpu=delay.process.is_on_gpu
    )


def find_shared_line(delay: Delay, *, why: str = "") -> StackLine | None:
    """Return the innermost line that most samples beside the training run through, where no single line takes much.

    The lines through which the training runs as well are those of the loop.
    """
    process, seconds, count = delay.process, dict[tuple[_Line, ...], float](), 0
    for event in _select_events(delay, delay.known_ns):
        for stack, found in select_stacks(event, delay.where) if not why or event.why == why else ():
            if found is not None and _takes_time(process, found, delay.where):
                path, count = tuple(list_own(event.frames, stack)), count + (stack.count or 0)
                for depth in range(1, len(path) + 1):
                    seconds[path[:depth]] = seconds.get(path[:depth], 0.0) + (stack.seconds or 0.0)
    total = sum(weight for path, weight in seconds.items() if len(path) == 1)
    loop = {line for event in select_events(process.events_of(Stacks), 0, delay.known_ns) for line in _list_loop(event)}
    shared = [path for path, weight in seconds.items() if weight >= _SHARED_SHARE * total and path[-1] not in loop]
    if count < _FEWEST_BESIDE or not shared:
        return None
    chosen = max(shared, key=len)
    share = seconds[chosen] / total
    return StackLine(*chosen[-1], (), seconds[chosen], share, delay.is_gpu_idle, is_on_gpu=process.is_on_gpu)


def _list_loop(event: Stacks) -> Iterator[_Line]:
    """Yield the own lines through which the stacks of an event that are in a phase run."""
    for stack in event.stacks:
        if event.where in PHASES or _runs_through(event.frames, stack, _PHASE_FILES):
            yield from list_own(event.frames, stack)


def _read_paths(
    process: Process, sampled: Iterable[Stacks], where: str
) -> Iterator[tuple[tuple[_Line, ...], tuple[str, ...], float]]:
    """Yield the own lines of stacks that take time from where they leave the lines that train on, callees, and seconds."""
    loops = [list_own(one.frames, stack) for one in process.events_of(events.TrainingStack) for stack in one.stacks]
    for event in sampled if loops else ():
        for stack, found in select_stacks(event, where):
            own = list_own(event.frames, stack)
            end = max((depth for depth, one in enumerate(own, 1) if found is not None and one == found[:3]), default=0)
            path = own[_count_same(own, loops[0]) : end]
            if found is not None and path and _takes_time(process, found, where):
                yield tuple(path), found.callees, stack.seconds or 0.0


def _count_same(lines: Sequence[_Line], others: Sequence[_Line]) -> int:
    """Return how many lines at the begin are the same."""
    differ = (depth for depth, (one, other) in enumerate(zip(lines, others, strict=False)) if one != other)
    return next(differ, min(len(lines), len(others)))


def _takes_time(process: Process, found: OwnFrame, where: str) -> bool:
    """Whether the line does extra work: it is neither part of the training nor a wait for it."""
    is_beside = found.is_hook or not is_training(found.callees, where)
    return is_beside and not _awaits_no_gpu(process, found.callees)


def _awaits_no_gpu(process: Process, callees: Sequence[str]) -> bool:
    """Whether the functions wait for a GPU, but there is none. They then only show because they release Python's lock."""
    known = find_known_call(callees, is_on_gpu=process.is_on_gpu)
    return known is not None and known.waits_for_gpu and not process.is_on_gpu


def runs_modules(process: Process, begin_ns: int, end_ns: int) -> bool:
    """Whether a rank's samples of usual slowness, of no known phase, show that modules run there, and little else.

    Those that were written in this time count, if they are enough.
    """
    inside = total = 0
    others: Counter[_Line] = Counter()  # lines that do not compute with PyTorch
    for event in select_events(process.events_of(Stacks), begin_ns, end_ns):
        if event.why != SHARE or event.where not in (BETWEEN, UNSEEN):
            continue
        for stack in event.stacks:
            count, found = stack.count or 0, find_own(event.frames, stack)
            total += count
            if _runs_through(event.frames, stack, _MODULE_FILES):
                inside += count
            elif found is not None and not is_training(found.callees, UNSEEN):
                others[found[:3]] += count
    most = max(others.values(), default=0)
    return total >= _FEWEST_BESIDE and inside >= _MODULES_SHARE * total and most <= _BESIDE_SHARE * total


def select_events_in(sampled: Iterable[Stacks], places: Container[str], why: str) -> list[Stacks]:
    """Return the events with stacks of these places that were sampled for this reason."""
    return [event for event in sampled if event.where in places and event.why == why]


def select_stacks(
    event: Stacks, where: str, *, outside_model: bool = False
) -> Iterator[tuple[SampledStack, OwnFrame | None]]:
    """Yield an event's stacks in a place, with their frame of the job's own code, or that which calls the model.

    A model that runs between the phases trains nothing: what calls it is meant there, too.
    For a counted step, the functions of a stack show whether it is between the phases or waits for data.
    """
    frames = event.frames
    for stack in event.stacks:
        is_beside_training = event.where == BETWEEN and runs_model(frames, stack)
        found = find_own(frames, stack, outside_model=outside_model or is_beside_training)
        if found is not None and is_beside_training:
            found = found._replace(callees=(*found.callees, _MODEL_CALL))
        if event.where == where:
            is_there = True
        elif where == DATA:
            is_there = _runs_through(frames, stack, (_LOADER_FILES,))
        else:
            is_beside = found is not None and not is_training(found.callees, UNSEEN)
            is_there = is_beside and not _runs_through(frames, stack, _PHASE_FILES)
        if is_there:
            yield stack, found


def _runs_through(frames: Sequence[SampledFrame], stack: SampledStack, begins: tuple[str, ...]) -> bool:
    """Whether a file of the stack's functions begins with one of these."""
    files = (frames[number].file for number in stack.frames if 0 <= number < len(frames))
    return any(file.startswith(begins) for file in files)


def await_line(delay: Delay) -> FoundLine | None:
    """Return the line as :func:`find_line` does; None while stacks of that time may still be written.

    Without a place no line is searched.
    """
    process, where, known_ns = delay.process, delay.where, delay.known_ns
    line = find_line(delay) if where else None
    if line is not None or not where or process.at.recording.info.get(STACKS_SETTING) is not True:
        return FoundLine(line, known_ns)
    deadline_ns = find_deadline(process, known_ns, delay.patience_ns)
    for event in _select_events(delay, deadline_ns):
        if event.unix_ns > known_ns:
            line = find_line(delay, known_ns=event.unix_ns)
            if line is not None:
                return FoundLine(line, event.unix_ns)
    if process.at.cursor_ns < deadline_ns:
        return None
    return FoundLine(find_line(delay, known_ns=deadline_ns), deadline_ns)  # a step of the samples may have ended since


def _select_events(delay: Delay, until_ns: int) -> Iterator[Stacks]:
    """Yield the events with samples from a delay, written until ``until_ns``.

    Samples of counted steps may be between the phases or wait for data, too, see :func:`select_stacks`. Those after the last
    step are in none: what a script does after its training slows no step down.
    """
    process, where, begin_ns = delay.process, delay.where, delay.begin_ns
    offset_ns = process.source.offset_ns
    slow_until_ns = delay.slow_until_ns
    if slow_until_ns:
        slow_until_ns = min(slow_until_ns, int(process.steps_until(until_ns)["end_unix_ns"].max(initial=0)))
    for event in select_events(process.events_of(Stacks), begin_ns, until_ns):
        is_there = event.where == where or (where in (BETWEEN, DATA) and event.where == UNSEEN)
        if is_there and event.why != event_values.SILENT:
            last_ns = max(delay.end_ns, slow_until_ns) if event.why == SLOW else delay.end_ns
            # Samples of usual slowness say nothing about a window that began later.
            shown_ns = event.begin_ns if event.why == SHARE else event.end_ns
            is_before, is_after = shown_ns + offset_ns <= begin_ns, event.begin_ns + offset_ns >= last_ns
            if not (is_before or is_after):
                yield event


def find_deadline(process: Process, known_ns: int, patience_ns: int) -> int:
    """Return when to stop waiting for the process's events: its end, the recording's end, or the end of patience."""
    return min([known_ns + patience_ns, *(end_ns for end_ns in _list_ends(process) if end_ns >= known_ns)])


def find_known_end(process: Process) -> int | None:
    """Return when the process, or its recording, ended; None as long as it goes on."""
    last_ns = int(process.steps["end_unix_ns"][-1]) if len(process.steps) else 0
    ends = [end_ns for end_ns in _list_ends(process) if last_ns <= end_ns <= process.at.cursor_ns]
    return min(ends, default=None)


def _list_ends(process: Process) -> list[int]:
    ends = [event.unix_ns for kind in _LAST_EVENTS for event in process.events_of(kind)]
    for event in process.recording.events_of(events.RankGone):
        if event.process_key == process.key:
            ends.append(event.unix_ns)
    recording = process.at.recording
    return ends if recording.is_live else [*ends, recording.last_written_ns]


def is_training(callees: Sequence[str], where: str = _COMPUTING[0]) -> bool:
    """Whether functions called from a line are part of the training, whose time needs no explanation."""
    if find_known_call(callees) is not None or (callees and callees[0].startswith(_ACCESS)):
        return False
    is_computing = where in _COMPUTING
    return any(
        name.startswith(_LIBRARIES)
        or (is_computing and name.startswith("torch."))
        or (is_computing and _is_by_tensor(name, before))
        or (where in (DATA, UNSEEN) and name.startswith(_LOADERS))
        for before, name in zip(("", *callees), callees, strict=False)
    )


def _is_by_tensor(name: str, caller: str) -> bool:
    """Whether a function called by another one may be a method of a tensor."""
    is_method = "." not in name and name not in vars(builtins) and name not in _HOST_METHODS
    return is_method and caller.partition(".")[0] not in _HOST_LIBRARIES


def _choose_line(seconds: dict[tuple[str, int, str], float], total: float) -> tuple[tuple[str, int, str], float]:
    """Return the line that took the most time, and its seconds.

    If no single line took much, it is the first line of the function that took most, with the seconds of that function.
    """
    line = max(seconds, key=lambda key: seconds[key])
    if seconds[line] >= _LINE_SHARE * total:
        return line, seconds[line]
    functions: dict[tuple[str, str], float] = {}
    for (file, _, function), weight in seconds.items():
        functions[file, function] = functions.get((file, function), 0.0) + weight
    most = max(functions, key=lambda key: functions[key])
    return max((key for key in seconds if (key[0], key[2]) == most), key=lambda key: seconds[key]), functions[most]
