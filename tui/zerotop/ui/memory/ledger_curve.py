"""An allocation trace: all bytes that tensors requested, in the colours of phases, and the largest blocks at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.memory.microscope import AllocationTrace
from zerotop.analysis.processes.phases import find_phase_name
from zerotop.ui.charts import AXIS_WIDTH, Canvas, add_axes, choose_scale, draw_time_axis, plot_grid, plot_stack
from zerotop.ui.charts.columns import Floats
from zerotop.ui.drawing.formatting import SizeUnit, choose_size_unit, format_duration, format_grouped, format_size
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import draw_rule, panel_title
from zerotop.ui.drawing.text import fit_text, wrap_text
from zerotop_probe.recording.metrics import BYTES

BLOCK_COUNT = 5
_BLOCKS_WIDTH = 34
_MIN_CHART_WIDTH = 30

REQUEST_HINT, REPLAY_HINT, NO_GPU_HINT = (
    "No trace yet. x traces the next step: every allocation and free, at hardly any cost.",
    "No trace of every allocation: while a job runs, x or zerotop microscope records one of its next step.",
    "The microscope traces PyTorch's allocator on a GPU, which no rank of this job recorded.",
)
REQUESTED_HINT = "Requested: the step after the current one is traced, and shown when it is over."


def draw_curve(
    trace: AllocationTrace | None, hint: str, width: int, height: int, glyphs: Glyphs, *, focused: bool = False
) -> list[Row]:
    """Draw the last trace and the largest blocks at its peak; without a trace, ``hint`` explains how to get one."""
    if trace is None or not len(trace.times_ns):
        text = hint or (trace.refused if trace is not None else "")
        rows = [draw_rule(panel_title("Microscope", focused), width, glyphs)]
        rows += [((line, "muted"),) for line in wrap_text(text, width, height - 1, glyphs)]
        return fit_height([fit_row(row, width, glyphs) for row in rows], width, height, glyphs)
    unit = choose_size_unit(trace.peak_bytes)
    last = trace.first_step + trace.steps - 1
    steps = f"step {last}" if trace.steps == 1 else f"steps {trace.first_step} to {last}"
    title = panel_title(f"Microscope, {steps} of rank {trace.rank}, {unit.name}", focused)
    rows = [draw_rule(title, width, glyphs)]
    if width >= _MIN_CHART_WIDTH + _BLOCKS_WIDTH + 2:
        chart = _draw_chart(trace, width - _BLOCKS_WIDTH - 2, height - 1, glyphs)
        details = _draw_details(trace, unit, hint, _BLOCKS_WIDTH, glyphs)[: len(chart)]
        rows += [(*row, ("  ", "text"), *detail) for row, detail in zip_longest(chart, details, fillvalue=())]
    else:
        rows += _draw_chart(trace, width, height - 1, glyphs)
    return fit_height([fit_row(row, width, glyphs) for row in rows], width, height, glyphs)


def _draw_chart(trace: AllocationTrace, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    canvas = Canvas(width - AXIS_WIDTH, max(1, height - 1), glyphs)
    axis = choose_scale(BYTES, float(trace.peak_bytes), canvas.height)
    plot_grid(canvas, axis)
    highest, phases = resample_curve(trace, canvas.width)
    layers = [
        (phase_style(find_phase_name(code)), np.where(phases == code, highest, 0.0))
        for code in np.unique(phases).tolist()
        if code >= 0
    ]
    plot_stack(canvas, layers, top=axis.highest)
    begin, length = trace.begin_ns, max(1, trace.end_ns - trace.begin_ns)
    peak_x = min(canvas.width - 1, int((trace.peak_ns - begin) / length * canvas.width))
    canvas.write_mark(peak_x, 0, glyphs.marked, "warn")
    return add_axes(canvas, axis, draw_time_axis(0.0, length / 1e9, canvas.width, glyphs))


def describe_curve(trace: AllocationTrace, width: int, x: int) -> str:
    """Return the bytes at a column of the chart in a panel of this width; empty beside it."""
    count = (width - _BLOCKS_WIDTH - 2 if width >= _MIN_CHART_WIDTH + _BLOCKS_WIDTH + 2 else width) - AXIS_WIDTH
    if trace.refused or not 0 <= x - AXIS_WIDTH < count:
        return ""
    highest, phases = resample_curve(trace, count)
    size, code = float(highest[x - AXIS_WIDTH]), int(phases[x - AXIS_WIDTH])
    after = (trace.end_ns - trace.begin_ns) / 1e9 * (x - AXIS_WIDTH) / count
    return f"{format_duration(after)}: {format_size(size)}" + (f" in {find_phase_name(code)}" if code >= 0 else "")


def resample_curve(trace: AllocationTrace, count: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return the maximum in each of ``count`` equal parts of the trace and its phase code, -1 before the first one."""
    borders = trace.begin_ns + (trace.end_ns - trace.begin_ns) * np.arange(count + 1) // max(1, count)
    bounds = np.searchsorted(trace.times_ns, borders)
    highest, phases = np.zeros(count), np.full(count, -1, np.int64)
    for column in range(count):
        # The value when a part begins counts too: that of the last event before it.
        first, end = max(0, int(bounds[column]) - 1), int(bounds[column + 1])
        if end > first:
            index = first + int(np.argmax(trace.curve_bytes[first:end]))
            highest[column] = trace.curve_bytes[index]
            phases[column] = trace.phases[index] if end > bounds[column] else -1
    # A column without events has the phase at its middle.
    quiet = np.flatnonzero((phases < 0) & (highest > 0))
    middles = (borders[quiet] + borders[quiet + 1]) // 2
    changes = np.searchsorted(trace.changes_ns, middles, "right") - 1
    known = changes >= 0
    phases[quiet[known]] = trace.changed_to[changes[known]]
    phases[(phases < 0) & (highest > 0)] = 0
    return highest, phases


def _draw_details(trace: AllocationTrace, unit: SizeUnit, hint: str, width: int, glyphs: Glyphs) -> Sequence[Row]:
    peak = f"{unit.format_bytes(trace.peak_bytes).strip()} {unit.name}"
    after = format_duration((trace.peak_ns - trace.begin_ns) / 1e9)
    rows: list[Row] = [
        ((glyphs.marked, "warn"), (f" {peak}", "value"), (f" in {trace.peak_phase.replace('_', ' ')}", "text")),
        ((f"after {after}, {format_grouped(len(trace.curve_bytes))} events", "muted"),),
        (("alive then: size, phase, age", "label"),),
    ]
    for block in trace.largest[:BLOCK_COUNT]:
        block_unit = choose_size_unit(block.size_bytes)
        size = f"{block_unit.format_bytes(block.size_bytes)} {block_unit.name}"
        style = phase_style(block.phase)
        text = f"{block.phase.replace('_', ' ')}, {format_duration(block.age_ns / 1e9)}"
        text = fit_text(text, width - len(size) - 4, glyphs)
        rows.append(((f"{size} ", "value"), (glyphs.find_sample(style), style), (f" {text}", "muted")))
    before = f"{unit.format_bytes(trace.before_bytes)} {unit.name}"
    rows.append(((f"{before} ", "value"), ("  allocated before", "muted")))
    return rows + [((line, "accent"),) for line in wrap_text(hint, width, 3, glyphs)]
