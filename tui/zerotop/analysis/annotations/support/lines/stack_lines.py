"""The line of the job's own code at which a rank spent its time, by the stacks that its probe has sampled."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from zerotop.analysis.annotations.support.lines.known_calls import KnownCall, find_known_call
from zerotop.analysis.annotations.support.rank_process import Process
from zerotop.session.reader import Event
from zerotop_probe.recording import events
from zerotop_probe.recording.directory import STACKS_SETTING

BETWEEN = "between phases"
"""The place of stacks that are in no phase."""

SLOW, SHARE = "slow", "share"
"""Why stacks were sampled: the place took longer than usual, or usually takes a notable share."""

# A line that calls these only says that the job trains, in each place, in the phases that compute, and in data loading.
_LIBRARIES = ("deepspeed.", "accelerate.", "transformers.", "trl.", "peft.", "lightning.", "pytorch_lightning.")
_COMPUTING = ("forward", "backward", "step")
# A comprehension, a generator expression or a lambda at the end of a function's name.
_EXPRESSION = re.compile(r"(\.<locals>)?\.<\w+>$")
_LOADERS = "torch.utils.data."

# The smallest share of the samples with which a line explains a delay.
_LINE_SHARE = 0.3
# Samples are written a moment after they were taken: a finding waits so long for them (ns).
_PATIENCE_NS = 3_000_000_000
_LAST_EVENTS = ("goodbye", "left")
# Of a longer path a headline has only the end.
_LONGEST_PLACE = 20


@dataclass(frozen=True, slots=True)
class StackLine:
    """A line of the job's own code, and the functions beneath it."""

    file: str
    line: int
    function: str
    callees: tuple[str, ...]  # the function that the line calls, the one that this calls, and so on; empty for none
    seconds: float  # that its samples stand for
    share: float  # of all samples of the place

    @property
    def place(self) -> str:
        """File and line, short enough for a headline."""
        whole = f"{self.file}:{self.line}"
        if len(whole) > _LONGEST_PLACE:
            whole = f"{PurePosixPath(self.file).name}:{self.line}"
        return whole if len(whole) <= _LONGEST_PLACE else f"...{whole[3 - _LONGEST_PLACE :]}"

    @property
    def known_call(self) -> KnownCall | None:
        """What the line calls, if that is known to take time."""
        return find_known_call(self.callees)

    @property
    def text(self) -> str:
        """The line in a sentence: ``train.py:88 in build_batch (time.sleep)``."""
        name = _EXPRESSION.sub("", self.function).rpartition("<locals>.")[2]
        function = "" if name == "<module>" else f" in {name}"
        called = self._name_called()
        return f"{self.file}:{self.line}{function}{f' ({called})' if called else ''}"

    def _name_called(self) -> str:
        if not self.callees:
            return ""
        known = self.known_call
        if known is not None and known.waits_for_gpu:
            return f"{self.callees[-1]}, which waits for the GPU"
        first = next((name for name in self.callees if "<locals>" not in name), self.callees[0])
        if known is None:
            return first
        called = next(name for name in self.callees if find_known_call([name]) is known)
        return called if called == first else f"{first}, which calls {called}"


class FoundLine(NamedTuple):
    """A line, or None, and when that is known (unix nanoseconds)."""

    line: StackLine | None
    known_ns: int


def find_line(
    process: Process,
    where: str,
    begin_ns: int,
    end_ns: int,
    known_ns: int,
    *,
    why: str = "",
    callee: str = "",
) -> StackLine | None:
    """Return the line at which a rank was most in a place within a window of time, by what was written until ``known_ns``.

    ``where`` is an outermost phase or ``BETWEEN``, ``why`` one of the reasons for samples, by default each. With
    ``callee`` only stacks count that contain this function beneath the line.
    """
    total = 0.0
    seconds: dict[tuple[str, int, str], float] = {}
    callees: dict[tuple[str, int, str], dict[tuple[str, ...], float]] = {}
    for event in _select_events(process, where, begin_ns, end_ns):
        if event.unix_ns > known_ns:
            break
        if why and event.facts["why"] != why:
            continue
        for stack in event.facts["stacks"]:
            found = _find_own(event.facts["frames"], stack)
            if callee and (found is None or callee not in found[1]):
                continue
            weight = stack.get("seconds") or 0.0
            total += weight
            if found is not None and not trains(found[1], where):
                key, beneath = found
                seconds[key] = seconds.get(key, 0.0) + weight
                each = callees.setdefault(key, {})
                each[beneath] = each.get(beneath, 0.0) + weight
    if not seconds or total <= 0:
        return None
    key, weight = _choose_line(seconds, total)
    beneath = max(callees[key], key=lambda names: callees[key][names])
    return StackLine(*key, beneath, weight, weight / total) if weight >= _LINE_SHARE * total else None


def await_line(
    process: Process, where: str, begin_ns: int, end_ns: int, known_ns: int, callee: str = ""
) -> FoundLine | None:
    """Return the line as :func:`find_line` does; None while stacks of that time may still be written.

    Without ``where`` no line is searched.
    """
    line = find_line(process, where, begin_ns, end_ns, known_ns, callee=callee) if where else None
    if line is not None or not where or process.recording.session.info.get(STACKS_SETTING) is not True:
        return FoundLine(line, known_ns)
    deadline_ns = min(known_ns + _PATIENCE_NS, find_end(process, known_ns))
    for event in _select_events(process, where, begin_ns, end_ns):
        if known_ns < event.unix_ns <= deadline_ns:
            line = find_line(process, where, begin_ns, end_ns, event.unix_ns, callee=callee)
            if line is not None:
                return FoundLine(line, event.unix_ns)
    return FoundLine(None, deadline_ns) if process.recording.cursor_ns >= deadline_ns else None


def _select_events(process: Process, where: str, begin_ns: int, end_ns: int) -> Iterator[Event]:
    offset_ns = process.source.offset_ns
    for event in process.events_named(events.STACKS):
        facts = event.facts
        if facts["where"] == where and facts["why"] != "silent":
            is_before, is_after = facts["end_ns"] + offset_ns <= begin_ns, facts["begin_ns"] + offset_ns >= end_ns
            if not (is_before or is_after):
                yield event


def find_end(process: Process, known_ns: int) -> int:
    """When the process wrote its last event after a time; a late time if it has not."""
    ends = [event.unix_ns for name in _LAST_EVENTS for event in process.events_named(name) if event.unix_ns >= known_ns]
    return min(ends, default=known_ns + _PATIENCE_NS)


def _find_own(
    frames: Sequence[dict[str, Any]], stack: dict[str, Any]
) -> tuple[tuple[str, int, str], tuple[str, ...]] | None:
    """Return the innermost frame of the job's own code, and the functions beneath it, outermost first."""
    callees = [stack["call"]] if stack.get("call") else []
    for number in stack["frames"]:
        if not 0 <= number < len(frames):
            return None
        frame = frames[number]
        if frame.get("own"):
            key = frame["file"], frame["line"], frame["function"]
            is_clean = key[0].isprintable() and key[2].isprintable() and all(name.isprintable() for name in callees)
            return (key, tuple(callees)) if is_clean else None
        callees.insert(0, _name_function(frame["file"], frame["function"]))
    return None


def trains(callees: Sequence[str], where: str = _COMPUTING[0]) -> bool:
    """Whether functions beneath a line are the training itself there, which takes the time that it takes."""
    if find_known_call(callees) is not None:
        return False
    is_computing = where in _COMPUTING
    return any(
        name.startswith(_LIBRARIES)
        or (is_computing and name.startswith("torch."))
        or (is_computing and "." not in name and name not in vars(builtins))  # a method, perhaps of a tensor
        or (where == "data" and name.startswith(_LOADERS))
        for name in callees
    )


def _name_function(file: str, function: str) -> str:
    """Return the full name of a library's function; those of torch without the module, as its users call them."""
    path = PurePosixPath(file)
    parts = [*path.parent.parts, path.stem]
    is_short = len(parts) > 1 and (parts[0] == "torch" or parts[-1] == "__init__")
    return ".".join([*parts[: -1 if is_short else None], function])


def _choose_line(seconds: dict[tuple[str, int, str], float], total: float) -> tuple[tuple[str, int, str], float]:
    """Return the line that took most, and its seconds; where no line took much, those of the function that did."""
    line = max(seconds, key=lambda key: seconds[key])
    if seconds[line] >= _LINE_SHARE * total:
        return line, seconds[line]
    functions: dict[tuple[str, str], float] = {}
    for (file, _, function), weight in seconds.items():
        functions[file, function] = functions.get((file, function), 0.0) + weight
    most = max(functions, key=lambda key: functions[key])
    return max((key for key in seconds if (key[0], key[2]) == most), key=lambda key: seconds[key]), functions[most]
