"""What the microscope saw: every byte that tensors asked for, in the colours of phases, and what was alive at the peak."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.memory.microscope import AllocationTrace
from zerotop.analysis.processes.phases import phase_name
from zerotop.ui.charts import AXIS_WIDTH, Canvas, Quantity, add_axes, choose_scale, draw_time_axis, plot_grid, plot_stack
from zerotop.ui.charts.columns import Floats
from zerotop.ui.drawing.formatting import format_duration, format_grouped
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import draw_rule
from zerotop.ui.drawing.text import fit_text, wrap_text
from zerotop.ui.memory.ledger_style import SizeUnit, choose_unit

BLOCK_COUNT = 5
_BLOCKS_WIDTH = 34
_MIN_CHART_WIDTH = 30

REQUEST_HINT, REPLAY_HINT, NO_GPU_HINT = (
    "No look has been taken yet. x takes one at the next step: every allocation and free of it, at hardly any cost.",
    "This recording has none. While a job runs, x on this screen takes one at the next step; so does"
    " zerotop microscope SESSION, which with --stacks also keeps PyTorch's own snapshot.",
    "It looks at PyTorch's allocator on a GPU: no rank of this job has one.",
)
REQUESTED_HINT = "Asked: it looks at the step after the one in progress, and shows what it saw once that is over."


def draw_curve(
    trace: AllocationTrace | None, hint: str, width: int, height: int, glyphs: Glyphs, *, focused: bool = False
) -> list[Row]:
    """The last look's curve and the largest blocks at its peak; without one ``hint`` says how to get it."""
    style = "title-focused" if focused else "title"
    if trace is None or not len(trace.times_ns):
        said = hint or (trace.refused if trace is not None else "")
        rows = [draw_rule((("Microscope", style),), width, glyphs)]
        rows += [((line, "muted"),) for line in wrap_text(said, width, height - 1, glyphs)]
        return fit_height([fit_row(row, width, glyphs) for row in rows], width, height, glyphs)
    unit = choose_unit(trace.peak_bytes)
    last = trace.first_step + trace.steps - 1
    steps = f"step {last}" if trace.steps == 1 else f"steps {trace.first_step} to {last}"
    title: Row = ((f"Microscope, {steps} of rank {trace.rank}, {unit.name}", style),)
    rows = [draw_rule(title, width, glyphs)]
    beside = _BLOCKS_WIDTH if width >= _MIN_CHART_WIDTH + _BLOCKS_WIDTH + 2 else 0
    chart = _draw_chart(trace, width - (beside + 2 if beside else 0), height - 1, glyphs)
    words = [fit_row(row, beside, glyphs) for row in _draw_details(trace, unit, hint, beside, glyphs)] if beside else []
    for place, row in enumerate(chart):
        side = words[place] if place < len(words) else fit_row((), beside, glyphs)
        rows.append((*row, ("  ", "text"), *side) if beside else row)
    return fit_height([fit_row(row, width, glyphs) for row in rows], width, height, glyphs)


def _draw_chart(trace: AllocationTrace, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    canvas = Canvas(width - AXIS_WIDTH, max(1, height - 1), glyphs)
    axis = choose_scale(Quantity.BYTES, float(trace.peak_bytes), canvas.height)
    plot_grid(canvas, axis)
    highest, phases = resample_curve(trace, canvas.width)
    layers = [
        (phase_style(phase_name(code)), np.where(phases == code, highest, 0.0))
        for code in np.unique(phases).tolist()
        if code >= 0
    ]
    plot_stack(canvas, layers, top=axis.highest)
    begin, length = trace.begin_ns, max(1, trace.end_ns - trace.begin_ns)
    at = min(canvas.width - 1, int((trace.peak_ns - begin) / length * canvas.width))
    canvas.write_mark(at, 0, glyphs.marked, "warn")
    return add_axes(canvas, axis, draw_time_axis(0.0, length / 1e9, canvas.width, glyphs))


def resample_curve(trace: AllocationTrace, count: int) -> tuple[Floats, NDArray[np.int64]]:
    """(the highest in each of ``count`` equal pieces of the look, the phase it was in, -1 before the first)."""
    borders = trace.begin_ns + (trace.end_ns - trace.begin_ns) * np.arange(count + 1) // max(1, count)
    places = np.searchsorted(trace.times_ns, borders)
    highest, phases = np.zeros(count), np.full(count, -1, np.int64)
    for column in range(count):
        # What was held when a piece began counts too: the last that happened before it.
        first, end = max(0, int(places[column]) - 1), int(places[column + 1])
        if end > first:
            place = first + int(np.argmax(trace.curve_bytes[first:end]))
            highest[column] = trace.curve_bytes[place]
            phases[column] = trace.phases[place] if end > places[column] else -1
    # Where nothing was allocated or freed, the phase that a column lies in most.
    quiet = np.flatnonzero((phases < 0) & (highest > 0))
    middles = (borders[quiet] + borders[quiet + 1]) // 2
    changes = np.searchsorted(trace.changes_ns, middles, "right") - 1
    known = changes >= 0
    phases[quiet[known]] = trace.changed_to[changes[known]]
    phases[(phases < 0) & (highest > 0)] = 0
    return highest, phases


def _draw_details(trace: AllocationTrace, unit: SizeUnit, hint: str, width: int, glyphs: Glyphs) -> Sequence[Row]:
    peak = f"{unit.format_bytes(trace.peak_bytes).strip()} {unit.name}"
    rows: list[Row] = [
        ((glyphs.marked, "warn"), (f" {peak}", "value"), (f" in {trace.peak_phase.replace('_', ' ')}", "text")),
        (
            (
                f"after {format_duration((trace.peak_ns - trace.begin_ns) / 1e9)}, of {format_grouped(len(trace.curve_bytes))} events",
                "muted",
            ),
        ),
        (("alive then, by size, phase, age:", "label"),),
    ]
    for block in trace.largest[:BLOCK_COUNT]:
        of = choose_unit(block.size_bytes)
        size = f"{of.format_bytes(block.size_bytes)} {of.name}"
        style = phase_style(block.phase)
        told = fit_text(
            f"{block.phase.replace('_', ' ')}, {format_duration(block.age_ns / 1e9)}", width - len(size) - 4, glyphs
        )
        rows.append(((f"{size} ", "value"), (glyphs.find_sample(style), style), (f" {told}", "muted")))
    before = f"{unit.format_bytes(trace.before_bytes)} {unit.name}"
    rows.append(((f"{before} ", "value"), ("  there before", "muted")))
    rows += [((line, "accent"),) for line in wrap_text(hint, width, 3, glyphs)] if hint else []
    return rows
