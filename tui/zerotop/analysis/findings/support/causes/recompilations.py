"""Why torch.compile compiled again: the assumption that failed, as PyTorch keeps it, and how to go without it."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from zerotop.analysis.code_line import read_line
from zerotop.analysis.findings.support.causes.step_change import Advice
from zerotop.analysis.findings.support.rank_process import Process
from zerotop.recording.events.event_files import select_events
from zerotop_probe.recording.events import Compiled, FailedGuard

_SHAPES: Advice = (
    "A shape keeps changing: let it compile one graph for all shapes, or pad batches to a few lengths.",
    "torch.compile(model, dynamic=True)",
)
_SETTING = "PyTorch takes this value as a constant: make it a tensor, or set this before it compiles."
_OTHER = "Keep what it checks as it is, or take it out of the compiled function."
_SHAPE = re.compile(r"size mismatch|stride mismatch|\.size\(\)|\.shape\[|\.stride\(\)")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class FailedAssumption(NamedTuple):
    """The assumption that failed most often in some time."""

    text: str  # that of the last time, and its line
    advice: Advice


def find_failed_assumption(process: Process, begin_ns: int, end_ns: int, known_ns: int) -> FailedAssumption | None:
    """Return the assumption whose failure let torch.compile compile again in most cases; None if unknown, or if none was."""
    offset_ns = process.source.offset_ns
    found = [
        guard
        for event in select_events(process.events_of(Compiled), begin_ns, known_ns)
        if event.begin_ns + offset_ns <= end_ns
        for guard in event.failed or ()
        if guard.guard and guard.guard.isprintable()
    ]
    if not found:
        return None
    kind, count = Counter(map(_name_kind, found)).most_common(1)[0]
    if count <= len(found) / 2:
        return None
    last = next(guard for guard in reversed(found) if _name_kind(guard) == kind)
    line = read_line(last)
    text = f"{last.guard} ({line.text})" if line is not None else last.guard
    if _SHAPE.search(last.guard):
        return FailedAssumption(text, _SHAPES)
    if last.setting and last.setting.isidentifier():
        return FailedAssumption(text, (_SETTING, f"torch._dynamo.config.{last.setting} = True"))
    return FailedAssumption(text, (_OTHER, line.location if line is not None else ""))


def _name_kind(guard: FailedGuard) -> str:
    """Return the guard and its line, whatever its numbers."""
    return f"{guard.file}:{guard.line} {_NUMBER.sub('0', guard.guard)}"
