"""Allocated device memory grows from step to step, because something keeps tensors alive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Ints, Process, Rows
from zerotop.analysis.annotations.support.lines.line_findings import await_each
from zerotop.analysis.annotations.support.lines.stack_lines import find_deadline
from zerotop.analysis.annotations.support.memory.looks import await_look
from zerotop.analysis.annotations.support.memory.phase_peaks import read_held_bytes
from zerotop.analysis.annotations.support.steps.onsets import find_growth_onset
from zerotop.analysis.annotations.support.thresholds import CREEP_BYTES
from zerotop.analysis.memory.block_lines import Look
from zerotop.analysis.memory.tensor_inventory import HeldTensors, read_held
from zerotop.session.steps.growable_array import GrowingArray
from zerotop_probe.recording import events
from zerotop_probe.recording.directory import STACKS_SETTING
from zerotop_probe.recording.event_values import CREEP

_KIND = FindingKind(
    name="memory_creep",
    severity=Severity.WARNING,
    confidence=0.9,
    headline="GPU memory grows {bytes_per_step:bytes} a step on {concerned:ranks}[; full near step {last_step:.0f}]",
    details=(
        "Each of {steps:.0f} steps left more memory allocated than the one before: {grown_bytes:bytes} in all,"
        " {held_bytes:bytes} now."
    ),
    advice="Keep numbers instead of tensors where losses or outputs are collected: loss.item() in place of loss.",
)
_LINE_KIND = _KIND.with_changes(
    confidence=0.95,
    headline="{place} leaks {bytes_per_step:bytes} a step on {concerned:ranks}[; full near step {last_step:.0f}]",
    details=f"{_KIND.details} The leaked memory was allocated at {{line}}.",
    advice="Keep numbers, or copies on the host, instead of what {place} allocates; del what is no longer needed.",
)
_NO_LINE_KIND = _KIND.with_changes(details=f"{_KIND.details} The leaked memory was allocated by {{where}}.")
_HELD_KIND = _KIND.with_changes(
    confidence=0.95,
    headline="{holder} keeps {bytes_per_step:bytes} more a step on {concerned:ranks}[; full near step {last_step:.0f}]",
    details=f"{_KIND.details} {{held_by}}[ It was allocated at {{line}}.]",
    advice="Keep numbers, or copies on the host, in {holder}; or clear it.",
    fix="{clearing}",
)
_VIEW_KIND = _HELD_KIND.with_changes(
    details=f"{_HELD_KIND.details} A view of {{view}} keeps a block of {{block}}.",
    advice="Keep a copy of the view: .clone() lets the block go.",
    fix="{cloning}",
)
# The part of the leaked memory that a line must have allocated, or a variable hold in this many tensors.
_LINE_SHARE, _LEAST_HELD = 0.5, 3
# How long a finding waits for its line (ns), and at most which part of the time that is left.
_LOOK_NS = 30_000_000_000
_PATIENCE_SHARE = 0.1
# Steps in a row with growth. A leak that matters grows in every step.
CREEP_STEPS = 12
# Where most steps are only counted: readings in a row that are higher than any before, and how many steps they span.
_SPARSE_RECORDS, _SPARSE_SPAN = 5, 2 * CREEP_STEPS
# Fewer readings suffice where each step adds as much: rises between readings, by how much they differ at most, and how many
# steps they span.
_EVEN_RISES, _EVEN_FACTOR, _EVEN_SPAN = 3, 1.1, CREEP_STEPS


class _Stretch(NamedTuple):
    """Consecutive readings of a process's memory, each higher than the one before.

    ``held``: bytes after the step before the first one, and after each step.
    """

    process: Process
    before_step: int
    rows: Rows
    held: Ints

    @property
    def slope(self) -> float:
        steps = np.concatenate([[self.before_step], self.rows["step"]])
        return float(np.median(np.diff(self.held) / np.maximum(1, np.diff(steps))))

    @property
    def last_step(self) -> int | None:
        """The step in which the device will be full; None if that is unknown."""
        peak, device = int(self.rows["allocated_peak_bytes"][-1]), self.process.device_bytes
        if not device or peak <= 0 or self.slope <= 0:
            return None
        return int(self.rows["step"][-1]) + int((device - peak) / self.slope)

    @property
    def left_ns(self) -> float:
        """The time until then."""
        last_step, duration_s = self.last_step, float(np.nanmedian(self.rows["iteration_s"]))
        return inf if last_step is None else duration_s * 1e9 * max(0, last_step - int(self.rows["step"][-1]))

    @property
    def begin_ns(self) -> int:
        return int(self.rows["begin_unix_ns"][0])

    @property
    def end_ns(self) -> int:
        return int(self.rows["end_unix_ns"][-1])


class _Found(NamedTuple):
    """A look at the leaked blocks, the variable that holds them, and when both are known (unix nanoseconds)."""

    look: Look | None
    known_ns: int
    holder: HeldTensors | None


class _Creep(NamedTuple):
    """Ranks whose memory creeps alike, and the steps of one of them."""

    stretch: _Stretch
    ranks: list[int]


@dataclass
class _Reported:
    """The last finding of a group."""

    ranks: list[int] = field(default_factory=list)
    end_ns: int = 0
    slope: float = 0.0


@dataclass
class _State:
    steps_read: int = 0
    held_bytes: int = -1  # after the last step
    stretch_length: int = 0  # steps in a row with growth, up to the last one
    base_bytes: int = -1  # held before them
    base_step: int = -1  # the one before them
    highest_bytes: int = -1  # held after any step
    records: int = 0  # steps in a row that left behind more than any before, up to the last one
    rises: tuple[float, ...] = (-1.0,) * (_EVEN_RISES - 1)  # bytes a step, between the last readings
    last_steps: tuple[int, ...] = (-1,) * _EVEN_RISES  # after which these were
    is_reported: bool = False


class _Readings:
    """The readings of a process's memory at the ends of steps: the indices of the steps, and bytes."""

    def __init__(self) -> None:
        self._searched = 0
        self._indices, self._held = GrowingArray(np.int64), GrowingArray(np.int64)

    def read_new(self, process: Process) -> None:
        fresh = process.steps[self._searched :]
        held = read_held_bytes(process, fresh)
        known = np.flatnonzero(held >= 0)
        self._indices.add_rows(len(known))[:] = known + self._searched
        self._held.add_rows(len(known))[:] = held[known]
        self._searched += len(fresh)

    def select(self, process: Process, begin: int, end: int | None = None) -> tuple[Rows, Ints]:
        return process.steps[self._indices.rows[begin:end]], self._held.rows[begin:end]


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report each stretch of growth that has reached CREEP_STEPS steps and CREEP_BYTES, once for ranks that grow alike."""
    for group in recording.groups:
        for creep, found in await_each(group, _KIND.name, _find_creeps(group), partial(_await_look, group)):
            yield _build_finding(creep, found)


def _find_creeps(group: Group) -> Iterator[_Creep]:
    found = [stretch for process in group.processes for stretch in _read_stretches(process)]
    for stretch in sorted(found, key=lambda one: (one.end_ns, one.process.rank)):
        last = group.get_state(_Reported)
        is_same = last.slope > 0 and stretch.process.rank in last.ranks and stretch.begin_ns <= last.end_ns
        if not is_same and group.count_report(_KIND.name):
            last.ranks = [process.rank for process in group.processes if _grows_alike(process, stretch)]
            last.end_ns, last.slope = stretch.end_ns, stretch.slope
            yield _Creep(stretch, last.ranks)


def _await_look(group: Group, creep: _Creep) -> _Found | None:
    """Return the look at the leaked blocks from the first rank that has one; None while it or the holder may still come."""
    stretch = creep.stretch
    patience_ns = int(min(_LOOK_NS, _PATIENCE_SHARE * stretch.left_ns))
    found = [
        await_look(process, CREEP, lambda look: look.end_ns > stretch.begin_ns, stretch.end_ns, patience_ns)
        for process in group.processes
        if process.rank in creep.ranks
    ]
    known = [one for one in found if one is not None and one.look is not None]
    if not known and None in found:
        return None
    look = min(known or [one for one in found if one is not None], key=lambda one: one.known_ns)
    deadline_ns = find_deadline(stretch.process, stretch.end_ns, patience_ns)
    holder, holder_ns = _find_holder(stretch, deadline_ns)
    if holder is None and stretch.process.at.cursor_ns < deadline_ns and _counts_again(stretch.process):
        return None
    return _Found(look.look, max(look.known_ns, holder_ns), holder)


def _counts_again(process: Process) -> bool:
    """Whether the probe may name the variable that holds the memory."""
    has_stacks = process.at.session.info.get(STACKS_SETTING) is True
    return has_stacks and any(event.pools for event in process.events_of(events.Tensors))


def _find_holder(stretch: _Stretch, deadline_ns: int) -> tuple[HeldTensors | None, int]:
    """Return the variable that holds most of what has been left, and when that was known."""
    for event in stretch.process.events_of(events.Tensors):
        allocated = event.allocated_bytes
        if not stretch.begin_ns <= event.unix_ns <= deadline_ns or not event.held or allocated is None:
            continue
        grown = allocated - int(stretch.held[0])
        holder = max(read_held(event.held), key=lambda one: one.bytes, default=None)
        if holder is not None and holder.count >= _LEAST_HELD and holder.bytes >= _LINE_SHARE * grown:
            return holder, event.unix_ns
    return None, 0


def _read_stretches(process: Process) -> list[_Stretch]:
    state = process.get_state(_State)
    stretches = []
    readings = process.get_state(_Readings)
    readings.read_new(process)
    fresh, fresh_held = readings.select(process, state.steps_read)
    if len(fresh):
        for begin, end in _find_stretches(fresh["step"], fresh_held, state):
            rows, held = readings.select(process, begin, end + 1)
            stretches.append(_Stretch(process, int(rows["step"][0]), rows[1:], held))
        state.steps_read += len(fresh)
    return stretches


def _grows_alike(process: Process, stretch: _Stretch) -> bool:
    """Whether a rank's memory grew by about as much a step in the same steps, as far as it has finished them."""
    if process is stretch.process:
        return True
    rows, held = process.get_state(_Readings).select(process, 0)
    inside = (rows["end_unix_ns"] <= stretch.end_ns) & (rows["step"] >= stretch.rows["step"][0])
    if inside.sum() < len(stretch.rows) - 1:
        return False
    growth = np.diff(held[inside]) / np.maximum(1, np.diff(rows["step"][inside]))
    return bool((growth > 0).all() and stretch.slope / 2 < np.median(growth) < stretch.slope * 2)


def _find_stretches(steps: Ints, held: Ints, state: _State) -> Iterator[tuple[int, int]]:
    """Yield, as indices of readings, the last one before each stretch, and the one that makes it long enough to report."""
    indices = np.arange(len(held))
    before = np.concatenate([[state.held_bytes], held[:-1]])
    grows = (before >= 0) & (held > before)
    # The index of the last step without growth; -1 is before these steps.
    broken = np.maximum.accumulate(np.where(grows, -1, indices))
    carried = broken < 0
    length = np.where(carried, indices + 1 + state.stretch_length, indices - broken)
    base = np.where(carried, state.base_bytes if state.stretch_length else state.held_bytes, held[broken])
    base_step = np.where(carried, state.base_step, steps[broken])
    highest = np.maximum.accumulate(np.concatenate([[state.highest_bytes], held]))
    is_record = (highest[:-1] >= 0) & (held > highest[:-1])
    unbroken = np.maximum.accumulate(np.where(is_record, -1, indices))
    records = np.where(unbroken < 0, indices + 1 + state.records, indices - unbroken)
    rises = np.concatenate([state.rises, (held - before) / np.maximum(1, np.diff(steps, prepend=state.last_steps[-1]))])
    last_rises = np.lib.stride_tricks.sliding_window_view(rises, _EVEN_RISES)
    is_even = (last_rises.min(1) > 0) & (last_rises.max(1) <= _EVEN_FACTOR * last_rises.min(1))
    read = np.concatenate([state.last_steps, steps])
    is_even &= read[_EVEN_RISES:] - read[:-_EVEN_RISES] >= _EVEN_SPAN
    enough_records = (records >= _SPARSE_RECORDS) | (is_even & (records > _EVEN_RISES))
    is_long = (length >= CREEP_STEPS) | (enough_records & (steps - base_step >= _SPARSE_SPAN))
    reported = carried & state.is_reported
    enough = np.flatnonzero(grows & ~reported & is_long & (held - base >= CREEP_BYTES))
    for index in enough[np.diff(broken[enough], prepend=-2) != 0].tolist():
        yield state.steps_read + index - int(length[index]), state.steps_read + index
    state.is_reported = bool(reported[-1]) or bool((broken[enough] == broken[-1]).any())
    state.held_bytes, state.stretch_length, state.base_bytes = int(held[-1]), int(length[-1]), int(base[-1])
    state.base_step, state.highest_bytes, state.records = int(base_step[-1]), int(highest[-1]), int(records[-1])
    state.last_steps = tuple(read[len(read) - _EVEN_RISES :].tolist())
    state.rises = tuple(rises[len(rises) - _EVEN_RISES + 1 :].tolist())


def _build_finding(creep: _Creep, found: _Found) -> Annotation:
    (process, _, rows, held), ranks = creep.stretch, creep.ranks
    onset = find_growth_onset(np.concatenate([[creep.stretch.before_step], rows["step"]]), held, creep.stretch.slope)
    begin, end = np.searchsorted(process.steps["step"], [onset, rows["step"][-1]])
    evidence = {
        "bytes_per_step": creep.stretch.slope,
        "grown_bytes": held[-1] - held[0],
        "steps": int(rows["step"][-1]) - onset + 1,
        "held_bytes": held[-1],
        "last_step": creep.stretch.last_step,
    }
    kind, values = _choose_kind(found.look)
    if found.holder is not None:
        kind, values = _name_holder(found.holder, values)
    # A full device ends the job, and the training since the last checkpoint is lost.
    steps, known_ns = process.steps[begin : end + 1], found.known_ns
    return kind.at_steps(process, steps, evidence, known_ns=known_ns, ranks=ranks, concerned=ranks, cost=1.0, **values)


def _name_holder(holder: HeldTensors, values: dict[str, str]) -> tuple[FindingKind, dict[str, str]]:
    """Return the kind of finding with the variable that keeps the memory, and the values of its templates."""
    added = f", and {holder.line} adds to it" if holder.line else ""
    graph = ", with the graphs that computed them" if holder.keeps_graph else ""
    values = values | {
        "holder": holder.name,
        "held_by": f"{holder.text[:1].upper()}{holder.text[1:]} keeps {holder.count:,} tensors{graph}{added}.",
    }
    # An attribute is named by its class: what the script calls the object is unknown.
    variable = holder.name if holder.name.isidentifier() else f"self.{holder.name.rpartition('.')[2]}"
    is_list = " list " in f" {holder.text.partition(holder.name)[0]} " and not holder.text.startswith("a ")
    values["cloning"] = f"{variable}[:] = [one.clone() for one in {variable}]" if is_list else ""
    values["clearing"] = f"{variable}.clear()" if is_list else ""
    if not holder.view_of:
        return _HELD_KIND, values
    view, block = (" x ".join(f"{size:,}" for size in sizes) for sizes in (holder.shape, holder.view_of))
    return _VIEW_KIND, values | {"view": view, "block": f"{block} elements" if len(holder.view_of) == 1 else block}


def _choose_kind(look: Look | None) -> tuple[FindingKind, dict[str, str]]:
    """Return the kind of finding, and the values of its templates that are not evidence."""
    blocks = look.blocks[0] if look is not None and look.blocks else None
    if look is None or blocks is None or blocks.total_bytes < _LINE_SHARE * look.whole_bytes:
        return _KIND, {}
    if blocks.line is not None:
        return _LINE_KIND, {"place": blocks.line.place, "line": blocks.line.text}
    return _NO_LINE_KIND, {"where": blocks.text}
