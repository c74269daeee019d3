"""What the microscope saw: every byte that tensors asked for, in the colours of phases, and what was alive at the peak."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.memory.microscope import Look
from zerotop.analysis.processes.phases import name
from zerotop.ui.charts import AXIS_WIDTH, Canvas, Kind, framed, grid, scale, stack, time_axis
from zerotop.ui.charts.columns import Floats
from zerotop.ui.drawing.formatting import grouped, seconds
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style
from zerotop.ui.drawing.rows import Row, filled, to_height
from zerotop.ui.drawing.table import rule
from zerotop.ui.drawing.text import fit, wrap
from zerotop.ui.memory.ledger_style import Unit, unit_for

BLOCKS = 5
_BLOCKS_WIDTH = 34
_LEAST_CHART = 30

ASK, LATER, NO_GPU = (
    "No look has been taken yet. x takes one at the next step: every allocation and free of it, at hardly any cost.",
    "This recording has none. While a job runs, x on this screen takes one at the next step; so does"
    " zerotop microscope SESSION, which with --stacks also keeps PyTorch's own snapshot.",
    "It looks at PyTorch's allocator on a GPU: no rank of this job has one.",
)
ASKED = "Asked: it looks at the step after the one in progress, and shows what it saw once that is over."


def draw_curve(look: Look | None, hint: str, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """The last look's curve and the largest blocks at its peak; without one ``hint`` says how to get it."""
    style = "title-focused" if focused else "title"
    if look is None or not len(look.times_ns):
        said = hint or (look.refused if look is not None else "")
        rows = [rule((("Microscope", style),), width, glyphs)]
        rows += [((line, "muted"),) for line in wrap(said, width, height - 1, glyphs)]
        return to_height([filled(row, width, glyphs) for row in rows], width, height, glyphs)
    unit = unit_for(look.peak_bytes)
    last = look.first_step + look.steps - 1
    steps = f"step {last}" if look.steps == 1 else f"steps {look.first_step} to {last}"
    title: Row = ((f"Microscope, {steps} of rank {look.rank}, {unit.name}", style),)
    rows = [rule(title, width, glyphs)]
    beside = _BLOCKS_WIDTH if width >= _LEAST_CHART + _BLOCKS_WIDTH + 2 else 0
    chart = _chart(look, width - (beside + 2 if beside else 0), height - 1, glyphs)
    words = [filled(row, beside, glyphs) for row in _words(look, unit, hint, beside, glyphs)] if beside else []
    for place, row in enumerate(chart):
        side = words[place] if place < len(words) else filled((), beside, glyphs)
        rows.append((*row, ("  ", "text"), *side) if beside else row)
    return to_height([filled(row, width, glyphs) for row in rows], width, height, glyphs)


def _chart(look: Look, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    canvas = Canvas(width - AXIS_WIDTH, max(1, height - 1), glyphs)
    axis = scale(Kind.BYTES, float(look.peak_bytes), canvas.height)
    grid(canvas, axis)
    highest, phases = columns(look, canvas.width)
    layers = [
        (phase_style(name(code)), np.where(phases == code, highest, 0.0)) for code in np.unique(phases).tolist() if code >= 0
    ]
    stack(canvas, layers, top=axis.highest)
    begin, length = look.begin_ns, max(1, look.end_ns - look.begin_ns)
    at = min(canvas.width - 1, int((look.peak_ns - begin) / length * canvas.width))
    canvas.mark(at, 0, glyphs.marked, "warn")
    return framed(canvas, axis, time_axis(0.0, length / 1e9, canvas.width, glyphs))


def columns(look: Look, count: int) -> tuple[Floats, NDArray[np.int64]]:
    """(the highest in each of ``count`` equal pieces of the look, the phase it was in, -1 before the first)."""
    borders = look.begin_ns + (look.end_ns - look.begin_ns) * np.arange(count + 1) // max(1, count)
    places = np.searchsorted(look.times_ns, borders)
    highest, phases = np.zeros(count), np.full(count, -1, np.int64)
    for column in range(count):
        # What was held when a piece began counts too: the last that happened before it.
        first, end = max(0, int(places[column]) - 1), int(places[column + 1])
        if end > first:
            place = first + int(np.argmax(look.curve_bytes[first:end]))
            highest[column] = look.curve_bytes[place]
            phases[column] = look.phases[place] if end > places[column] else -1
    # Where nothing was allocated or freed, the phase that a column lies in most.
    quiet = np.flatnonzero((phases < 0) & (highest > 0))
    middles = (borders[quiet] + borders[quiet + 1]) // 2
    changes = np.searchsorted(look.changes_ns, middles, "right") - 1
    known = changes >= 0
    phases[quiet[known]] = look.changed_to[changes[known]]
    phases[(phases < 0) & (highest > 0)] = 0
    return highest, phases


def _words(look: Look, unit: Unit, hint: str, width: int, glyphs: Glyphs) -> Sequence[Row]:
    peak = f"{unit.text(look.peak_bytes).strip()} {unit.name}"
    rows: list[Row] = [
        ((glyphs.marked, "warn"), (f" {peak}", "value"), (f" in {look.peak_phase.replace('_', ' ')}", "text")),
        ((f"after {seconds((look.peak_ns - look.begin_ns) / 1e9)}, of {grouped(len(look.curve_bytes))} events", "muted"),),
        (("alive then, by size, phase, age:", "label"),),
    ]
    for block in look.largest[:BLOCKS]:
        of = unit_for(block.size_bytes)
        size = f"{of.text(block.size_bytes)} {of.name}"
        style = phase_style(block.phase)
        told = fit(f"{block.phase.replace('_', ' ')}, {seconds(block.age_ns / 1e9)}", width - len(size) - 4, glyphs)
        rows.append(((f"{size} ", "value"), (glyphs.sample(style), style), (f" {told}", "muted")))
    before = f"{unit.text(look.before_bytes)} {unit.name}"
    rows.append(((f"{before} ", "value"), ("  there before", "muted")))
    rows += [((line, "accent"),) for line in wrap(hint, width, 3, glyphs)] if hint else []
    return rows
