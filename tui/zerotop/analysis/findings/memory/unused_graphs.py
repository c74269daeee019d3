"""Forwards with gradients enabled that no backward follows, mostly an evaluation without ``torch.no_grad()``.

The probe has seen that their graphs were freed before any backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.code_line import read_line
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.links import Kinds, is_told_again, skips_backwards
from zerotop.analysis.findings.support.memory.phase_peaks import find_settled_peaks
from zerotop.analysis.findings.support.thresholds import JUMP_BYTES
from zerotop_probe.recording.events import UnusedGraphs
from zerotop_probe.recording.tables import BEGIN, END, PHASE_CODE

_KIND = FindingKind(
    name="unused_graphs",
    confidence=0.95,
    gpu_bytes="held_bytes",
    headline="Forwards have gradients enabled, but no backward follows[: {place}]",
    details=(
        "{forwards_s:seconds} were spent in {least}{forwards:count forward}[, the first at {line}]. Each kept what a"
        " backward needs until it was freed unused[; of the last ones up to {held_bytes:bytes} were kept][, with which"
        " {whole_bytes:bytes} were allocated; training needs {training_bytes:bytes}].{in_training_mode}"
    ),
    advice="Without gradients they need less memory and time: run them under torch.no_grad().",
    fix="with torch.no_grad():",
    superseded_by=(Kinds(is_told_again, "unused_graphs"), Kinds(skips_backwards, "long_pause")),
)
# A single forward, such as one that measures a model, costs nothing.
_FEWEST = 2
# The part of the time or of the device's memory from which they are worth a warning.
_COST_SHARE = 0.05
# From so many times training's peak on they decide how much memory the job needs.
_PEAK_TIMES = 1.5


class _First(NamedTuple):
    """The first series of forwards at a line."""

    rank: int
    begin_ns: int


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each line once, by its first rank, and again with each doubling of its series."""
    fresh = [
        (event.unix_ns, process.rank, process, event)
        for process in window.subject.processes
        for event in window.items(process.events_of(UnusedGraphs), process.rank)
    ]
    for _, _, process, event in sorted(fresh, key=lambda one: one[:2]):
        first = window.find_once(partial(_First, process.rank, event.begin_ns), (event.file, event.line))
        if first is not None and process.rank == first.rank and event.forwards >= _FEWEST:
            yield _build_finding(process, event, first.begin_ns + process.source.offset_ns)


def _build_finding(process: Process, event: UnusedGraphs, begin_ns: int) -> Finding:
    line, (held_bytes, whole_bytes) = read_line(event), _measure_held(process, event)
    peaks = find_settled_peaks(process) if whole_bytes is not None else None
    needs_most = peaks is not None and (whole_bytes or 0) >= _PEAK_TIMES * peaks.highest_bytes
    steps = process.steps_until(event.unix_ns)
    elapsed_s = (event.unix_ns - int(steps["begin_unix_ns"][0])) / 1e9 if len(steps) else 0.0
    is_costly = event.seconds >= _COST_SHARE * elapsed_s or (held_bytes or 0) >= _COST_SHARE * (
        process.device_bytes or np.inf
    )
    kind = _KIND if is_costly or needs_most else _KIND.with_changes(severity=Severity.INFO)
    return kind.at(
        process,
        begin_ns,
        event.end_ns + process.source.offset_ns,
        {"forwards": event.forwards, "forwards_s": event.seconds, "series": event.series, "held_bytes": held_bytes},
        known_ns=event.unix_ns,
        least="at least " if event.training else "",
        in_training_mode=" The model was in training mode." if event.training else "",
        place=line.place if line is not None else None,
        line=line.text if line is not None else None,
        held_bytes=held_bytes,
        whole_bytes=whole_bytes if needs_most else None,
        training_bytes=peaks.highest_bytes if peaks is not None and needs_most else None,
    )


def _measure_held(process: Process, event: UnusedGraphs) -> tuple[float | None, float | None]:
    """Return the most bytes that the last series added in use after a forward, and all that were; None if unknown or few."""
    offset_ns = process.source.offset_ns
    records = process.records("allocator").read_window(event.begin_ns + offset_ns - 1, event.end_ns + offset_ns).rows
    # The one of an evaluation is read at its begin, and at the end of each of its forwards.
    forwards = records[np.isin(records["phase"], (PHASE_CODE["forward"], PHASE_CODE["eval"]))] if len(records) else records
    if not len(forwards):
        return None, None
    begins, ends = (forwards["allocated_bytes"][forwards["edge"] == edge] for edge in (BEGIN, END))
    whole = float(ends.max(initial=0))
    held = whole - float(begins[0]) if len(begins) else 0.0
    return (held, whole) if held >= JUMP_BYTES else (None, None)
