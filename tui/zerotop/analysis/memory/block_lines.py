"""The lines that allocated blocks of device memory, as the probe has recorded them in its looks at a step or two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from zerotop.analysis.code_line import CodeLine, name_function
from zerotop.analysis.formatting import Text
from zerotop.analysis.processes.phases import OTHER, find_innermost, find_phase_name
from zerotop.recording.keys import RankProcess
from zerotop.recording.moments.at import At
from zerotop.recording.reader import Event
from zerotop_probe.recording import events
from zerotop_probe.recording.event_values import CREEP, EVALUATION
from zerotop_probe.recording.tables import PHASES

# Functions through which every module is called.
_CALLING = ("_wrapped_call_impl", "_call_impl")
_TORCH = "torch/"
# Lines that a sentence names.
_MOST_LINES = 2


class AllocatingLine(CodeLine):
    """A line beneath which memory was allocated, and the function that did."""

    _VERB = ""


@dataclass(frozen=True, slots=True)
class LineBlocks:
    """The blocks that a line has allocated."""

    line: CodeLine | None  # None: allocated by a thread without Python, as in backward
    phase: str  # the innermost in which the first was allocated
    sizes: tuple[tuple[int, int], ...]  # requested size of a block, number of blocks

    @property
    def total_bytes(self) -> int:
        return sum(size * count for size, count in self.sizes)

    @property
    def place(self) -> str:
        """File and line, short; the phase where no line is known."""
        return self.line.place if self.line is not None else self.phase

    @property
    def text(self) -> str:
        """The place of the allocation, as it stands in a sentence."""
        if self.line is not None:
            return self.line.text
        return "threads without Python" if self.phase == PHASES[OTHER] else f"{self.phase} itself"


@dataclass(frozen=True, slots=True)
class Look:
    """One look. Times are unix nanoseconds."""

    why: str
    first_step: int
    begin_ns: int
    end_ns: int
    known_ns: int
    whole_bytes: int  # in all blocks that stayed, or requested at the peak
    before_bytes: int  # at the peak: in blocks from before, whose lines are unknown
    blocks: tuple[LineBlocks, ...]  # by line, those that hold the most first

    @property
    def description(self) -> str:
        """The step or evaluation of the blocks: ``Peak memory of step 4``."""
        if self.why == CREEP:
            return f"Memory kept after step {self.first_step}"
        before = "the evaluation before " if self.why == EVALUATION else ""
        return f"Peak memory of {before}step {self.first_step}"

    def describe_lines(self) -> Text | None:
        """Return a sentence about the lines that have allocated the most; None without any.

        What no line has allocated, such as backward itself, is named where it is more than that of a named line.
        """
        sums: dict[str, int] = {}
        texts: dict[str, set[str]] = {}
        for blocks in self.blocks:
            sums[blocks.place] = sums.get(blocks.place, 0) + blocks.total_bytes
            texts.setdefault(blocks.place, set()).add(blocks.text)
        ordered = sorted(sums, key=lambda place: sums[place], reverse=True)
        named = {blocks.place for blocks in self.blocks if blocks.line is not None}
        lines = [place for place in ordered if place in named][:_MOST_LINES]
        if not lines:
            return None
        largest = [place for place in ordered if place in lines or (place not in named and sums[place] > sums[lines[-1]])]
        values: dict[str, Any] = {}
        for number, place in enumerate(largest):
            text, *others = sorted(texts[place])
            if others:  # the calls below the line that all count, and of which none is named
                text = text.partition(" (")[0]
            values |= {f"size{number}": sums[place], f"line{number}": text}
        words = ["at" if place in lines else "by" if place == PHASES[OTHER] else "in" for place in largest]
        parts = [f"{{size{number}:size}} {word} {{line{number}}}" for number, word in enumerate(words)]
        return Text(f"{self.description}, by line: {', '.join(parts)}.", values)


def read_last_look(at: At, process: RankProcess) -> Look | None:
    """Return the last look of a process up to a cursor; None without any."""
    found = at.process_events(events.MemoryLines, process)
    return read_look(at, found[-1]) if found else None


def read_look(at: At, event: events.MemoryLines) -> Look:
    """Return the look that a ``memory_lines`` event describes."""
    process = RankProcess(*event.process_key, event.writer.rank)
    spans = at.at(event.unix_ns).find_table("spans", process)
    offset_ns = spans.offset_ns if spans is not None else 0
    sizes: dict[CodeLine | None, dict[int, int]] = {}
    first_ns: dict[CodeLine | None, int] = {}
    for stack in event.stacks:
        line = _find_line(event.frames, stack.frames)
        of_line = sizes.setdefault(line, {})
        of_line[stack.size_bytes] = of_line.get(stack.size_bytes, 0) + stack.count
        first_ns.setdefault(line, 1000 * (stack.unix_us or 0))
    phases = _find_phases(at, event, list(first_ns.values()))
    blocks = [
        LineBlocks(line, phase, tuple(of_line.items())) for (line, of_line), phase in zip(sizes.items(), phases, strict=True)
    ]
    return Look(
        why=event.why,
        first_step=event.first_step,
        begin_ns=event.begin_ns + offset_ns,
        end_ns=event.end_ns + offset_ns,
        known_ns=event.unix_ns,
        whole_bytes=event.staying_bytes or event.peak_bytes or 0,
        before_bytes=event.before_bytes or 0,
        blocks=tuple(sorted(blocks, key=lambda one: one.total_bytes, reverse=True)),
    )


def _find_phases(at: At, event: Event, times_ns: Sequence[int]) -> list[str]:
    """Return the name of the innermost phase of a rank at each time."""
    process = RankProcess(*event.process_key, event.writer.rank)
    begins, spans = (at.at(event.unix_ns).find_table(name, process) for name in ("begins", "spans"))
    if begins is None or not times_ns:
        return [PHASES[OTHER]] * len(times_ns)
    moments, back = np.unique(np.array(times_ns, np.int64), return_inverse=True)
    codes = np.maximum(find_innermost(begins, spans, moments, event.unix_ns), 0)
    return [find_phase_name(code) for code in codes[back].tolist()]


def _find_line(frames: Sequence[events.SampledFrame], numbers: Sequence[int]) -> CodeLine | None:
    """Return the job's own line, or else a library's, and the library function that it calls."""
    stack = [frames[number] for number in numbers if 0 <= number < len(frames)]
    if not stack or not all(frame.file.isprintable() and frame.function.isprintable() for frame in stack):
        return None
    own = next((index for index, frame in enumerate(stack) if frame.own), None)
    beneath = [frame for frame in stack[:own] if frame.function not in _CALLING]
    if own is None:
        own, beneath = 0, []
    called = _name_called(beneath)
    return AllocatingLine(stack[own].file, stack[own].line, stack[own].function, (called,) if called else ())


def _name_called(beneath: Sequence[events.SampledFrame]) -> str:
    """Name PyTorch's function that allocated, and the line of another library that called it.

    ``beneath``: frames, innermost first.
    """
    of_torch = beneath[0] if beneath and beneath[0].file.startswith(_TORCH) else None
    other = next((frame for frame in beneath if not frame.file.startswith(_TORCH)), None)
    parts = []
    if other is not None:
        parts.append(f"{PurePosixPath(other.file).name}:{other.line} in {other.function}")
    if of_torch is not None:
        file, function = of_torch.file, of_torch.function
        module = PurePosixPath(file).with_suffix("")
        parts.append(".".join(module.parts) if function == "forward" else name_function(file, function))
    return ": ".join(parts)
