"""The lines that allocated blocks of device memory, as the probe has recorded them in its looks at a step or two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.annotations.support.evidence import Process
from zerotop.analysis.annotations.support.lines.code_line import CodeLine, name_function
from zerotop.analysis.annotations.support.lines.stack_lines import find_deadline
from zerotop.analysis.processes.phases import phase_name
from zerotop.session.reader import Event
from zerotop_probe.recording import events
from zerotop_probe.recording.directory import STACKS_SETTING

CREEP, PEAK = "creep", "peak"
"""Why the probe looked."""

# A look must fit into the probe's budget first: a finding waits so long for one (ns).
_PATIENCE_NS = 10_000_000_000
# The part of what has grown, or of a peak, from which on a line is named.
_NOTABLE_SHARE = 0.25
# Functions through which every module is called.
_CALLING = ("_wrapped_call_impl", "_call_impl")
_TORCH = "torch/"
# A column of the allocator's table that is as old as the looks.
_AS_OLD_AS_LOOKS = "device_allocs"


@dataclass(frozen=True, slots=True)
class LineBlocks:
    """The blocks that a line has allocated."""

    line: CodeLine | None  # None: allocated by a thread without Python, as in backward
    phase: str  # the outermost in which the first was allocated; "" if unknown
    sizes: tuple[tuple[int, int], ...]  # requested size of a block, number of blocks

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(size * count for size, count in self.sizes)

    @property
    def place(self) -> str:
        """What tells their line from others."""
        return f"{self.line.file}:{self.line.line}" if self.line is not None else self.phase

    @property
    def text(self) -> str:
        """Where they were allocated, in a sentence."""
        if self.line is not None:
            return self.line.text
        return f"{self.phase} itself" if self.phase else "a thread without Python"


@dataclass(frozen=True, slots=True)
class Look:
    """One look. Times are unix nanoseconds."""

    first_step: int
    begin_ns: int
    end_ns: int
    known_ns: int
    whole_bytes: int  # in all blocks that stayed, or requested at the peak
    before_bytes: int  # at the peak: in blocks from before, whose lines are unknown
    blocks: tuple[LineBlocks, ...]  # by line, those that hold the most first


class FoundLook(NamedTuple):
    """A look, or None, and when that is known (unix nanoseconds)."""

    look: Look | None
    known_ns: int


def read_looks(process: Process, why: str) -> Iterator[Look]:
    """Iterate over the looks of a process for a reason, in order."""
    for event in process.events_named(events.MEMORY_LINES):
        if event.facts["why"] == why:
            yield _read_look(process, event)


def await_look(
    process: Process, why: str, fits: Callable[[Look], bool], known_ns: int, patience_ns: int = _PATIENCE_NS
) -> FoundLook | None:
    """Return the first look that fits, for a finding that is known without it at ``known_ns``; None while one may come."""
    deadline_ns = find_deadline(process, known_ns, patience_ns)
    for look in read_looks(process, why):
        if fits(look) and look.known_ns <= deadline_ns:
            return FoundLook(look, max(known_ns, look.known_ns))
    if not _may_look(process):
        return FoundLook(None, known_ns)
    return FoundLook(None, deadline_ns) if process.recording.cursor_ns >= deadline_ns else None


def _may_look(process: Process) -> bool:
    if process.recording.session.info.get(STACKS_SETTING) is not True:
        return False
    sources = process.recording.process_sources("allocator", process.source)
    return any(_AS_OLD_AS_LOOKS in (source.array.dtype.names or ()) for source in sources)


def _read_look(process: Process, event: Event) -> Look:
    facts, offset_ns = event.facts, process.source.offset_ns
    begin_ns, end_ns = facts["begin_ns"] + offset_ns, facts["end_ns"] + offset_ns
    sizes: dict[CodeLine | None, dict[int, int]] = {}
    first_us: dict[CodeLine | None, int] = {}
    for stack in facts["stacks"]:
        line = _find_line(facts["frames"], stack["frames"])
        of_line = sizes.setdefault(line, {})
        of_line[stack["size_bytes"]] = of_line.get(stack["size_bytes"], 0) + stack["count"]
        first_us.setdefault(line, stack.get("unix_us") or 0)
    phases = _find_phases(process, begin_ns, end_ns, [1000 * time_us for time_us in first_us.values()])
    blocks = [
        LineBlocks(line, phase, tuple(of_line.items())) for (line, of_line), phase in zip(sizes.items(), phases, strict=True)
    ]
    return Look(
        first_step=facts["first_step"],
        begin_ns=begin_ns,
        end_ns=end_ns,
        known_ns=event.unix_ns,
        whole_bytes=facts.get("staying_bytes") or facts.get("peak_bytes") or 0,
        before_bytes=facts.get("before_bytes") or 0,
        blocks=tuple(sorted(blocks, key=lambda one: one.total_bytes, reverse=True)),
    )


def _find_phases(process: Process, begin_ns: int, end_ns: int, times_ns: Sequence[int]) -> list[str]:
    """Return the name of the outermost phase at each time; empty between phases."""
    spans = process.spans.read_window(begin_ns, end_ns)
    if not len(spans):
        return [""] * len(times_ns)
    outer = spans.select_rows(spans.rows["depth"] == 0)
    begins = process.compute_begins(outer)
    found = []
    for time_ns in times_ns:
        inside = np.flatnonzero((begins <= time_ns) & (time_ns <= outer.times))
        found.append(phase_name(int(outer.rows["phase"][inside[0]])) if len(inside) else "")
    return found


def _find_line(frames: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> CodeLine | None:
    """Return the job's own line, or a library's where no own one is known, and the library's call beneath it."""
    stack = [frames[number] for number in numbers if 0 <= number < len(frames)]
    if not stack or not all(frame["file"].isprintable() and frame["function"].isprintable() for frame in stack):
        return None
    own = next((index for index, frame in enumerate(stack) if frame.get("own")), None)
    beneath = [frame for frame in stack[:own] if frame["function"] not in _CALLING]
    if own is None:
        own, beneath = 0, []
    called = _name_called(beneath)
    return CodeLine(stack[own]["file"], stack[own]["line"], stack[own]["function"], (called,) if called else ())


def _name_called(beneath: Sequence[Mapping[str, Any]]) -> str:
    """Name PyTorch's function that allocated, and the line of another library that called it.

    ``beneath``: frames, innermost first.
    """
    of_torch = beneath[0] if beneath and beneath[0]["file"].startswith(_TORCH) else None
    other = next((frame for frame in beneath if not frame["file"].startswith(_TORCH)), None)
    parts = []
    if other is not None:
        parts.append(f"{PurePosixPath(other['file']).name}:{other['line']} in {other['function']}")
    if of_torch is not None:
        file, function = of_torch["file"], of_torch["function"]
        module = PurePosixPath(file).with_suffix("")
        parts.append(".".join(module.parts) if function == "forward" else name_function(file, function))
    return ": ".join(parts)


class Growth(NamedTuple):
    """The blocks of a line that hold more than in an earlier look, and how much more in all blocks of the line."""

    blocks: LineBlocks
    grown_bytes: int


def find_growth(look: Look, before: Look | None) -> Growth | None:
    """Return what has grown the most since an earlier look, or what holds the most; None where no line stands out."""
    last = _sum_by_place(before) if before is not None else {}
    grown = {place: size - last.get(place, 0) for place, size in _sum_by_place(look).items()}
    whole = look.whole_bytes - (before.whole_bytes if before is not None else look.before_bytes)
    place = max(grown, key=lambda one: grown[one], default=None)
    if place is None or grown[place] < _NOTABLE_SHARE * max(whole, 1):
        return None
    return Growth(next(blocks for blocks in look.blocks if blocks.place == place), grown[place])


def _sum_by_place(look: Look) -> dict[str, int]:
    sums: dict[str, int] = {}
    for blocks in look.blocks:
        sums[blocks.place] = sums.get(blocks.place, 0) + blocks.total_bytes
    return sums
