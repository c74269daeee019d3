"""Time per step as columns of stacked phases, the newest at the right."""

from __future__ import annotations

import math

import numpy as np

from zerotop.analysis.view import Floats, Iterations, LiveView
from zerotop.ui.drawing.columns import stacked_column
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.memory import panel_title
from zerotop.ui.drawing.rows import Row, Span, filled, merged
from zerotop.ui.drawing.table import rule
from zerotop.ui.drawing.words import ITERATION_PHASES, last_phases
from zerotop.ui.format import fixed, ticks, time_unit

LEGEND_WIDTH = 16
_NAMES = {"forward": "forward", "backward": "backward", "step": "step", "data": "data", "other": "other"}


def draw_iteration(
    view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False
) -> list[Row]:
    """Title, chart with a y axis and a legend with the last step's values, step numbers below."""
    iterations = view.iterations
    chart_height = height - 2
    if chart_height < 2 or len(iterations.step) == 0:
        rows = [rule(panel_title("Iteration", focused), width, glyphs)]
        if chart_height >= 1:
            rows.append(filled((("  no step finished yet", "muted"),), width, glyphs))
        return (rows + [filled((), width, glyphs)] * height)[:height]
    return _chart(view, width, height, glyphs, focused)


def _chart(view: LiveView, width: int, height: int, glyphs: Glyphs, focused: bool) -> list[Row]:
    iterations = view.iterations
    legend = LEGEND_WIDTH if width >= 36 else 0
    axis = 5
    room = width - axis - 1 - (legend + 2 if legend else 0)
    step_width = _step_width(view.progress.total_steps, room)
    shown = min(len(iterations.step), room // step_width)
    recent = slice(len(iterations.step) - shown, None)
    unit, factor, distance, top = _scale(iterations.iteration_s[recent], height - 2)
    title = f"Iteration {unit}"
    rows = [rule(panel_title(title, focused), width, glyphs)]
    plot = _plot(iterations, recent, top / factor, step_width, height - 2, glyphs)
    labels = _labels(distance, top, height - 2, glyphs)
    side = _legend(iterations, unit, factor, height - 2, glyphs) if legend else [()] * (height - 2)
    for label, cells, entry in zip(labels, plot, side, strict=True):
        body = filled((*label, *cells), width - (legend + 2 if legend else 0), glyphs)
        rows.append(filled((*body, ("  ", "text"), *entry) if legend else body, width, glyphs))
    rows.append(filled(_steps(iterations, recent, step_width, axis, room, glyphs), width, glyphs))
    return rows


def _step_width(total: int | None, room: int) -> int:
    """Cells for each step: more than one only where the job's whole run fits, so that nothing is rescaled later."""
    return max(1, min(4, room // total)) if total else 1


def _scale(seconds: Floats, height: int) -> tuple[str, float, float, float]:
    """(unit, how many in a second, distance of ticks, top), the last two in that unit.

    A few steps much longer than the others (a first step that compiles) are clipped, not made the measure of all.
    """
    seconds = seconds[~np.isnan(seconds)]
    longest = float(seconds.max()) if len(seconds) else 0.0
    usual = float(np.quantile(seconds, 0.9)) if len(seconds) else 0.0
    if len(seconds) >= 8 and longest > 2 * usual:
        longest = usual * 1.25
    unit, factor = time_unit(longest)
    distance, top = ticks(longest * factor, 4 if height >= 8 else 3 if height >= 5 else 2)
    return unit, factor, distance, top


def _labels(distance: float, top: float, height: int, glyphs: Glyphs) -> list[Row]:
    """The y axis: a label in the cell that its value's line is nearest to the upper edge of."""
    places = {}
    number = 1
    while number * distance <= top * 1.001:
        row = height - round(number * distance / top * height)
        places[max(0, row)] = number * distance
        number += 1
    rows: list[Row] = []
    for row in range(height):
        text = _tick_text(places[row], distance) if row in places else ""
        rows.append(((text.rjust(4), "axis"), (glyphs.tick if row in places else glyphs.line, "rule")))
    return rows


def _tick_text(value: float, distance: float) -> str:
    decimals = max(0, -math.floor(math.log10(distance) + 1e-9))
    return f"{value:.{decimals}f}"[:4]


def _plot(
    iterations: Iterations, recent: slice, top_s: float, step_width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    """The chart's rows without axis and legend."""
    steps = list(
        zip(
            *(_column(iterations, index, top_s, height, glyphs) for index in _range(iterations, recent)),
            strict=True,
        )
    )
    gap = step_width > 2
    rows: list[Row] = []
    for cells in steps:
        spans: list[Span] = []
        for text, style in cells:
            spans.append((text * (step_width - gap), style))
            spans.append((" " * gap, "text"))
        rows.append(merged(spans))
    return rows


def _range(iterations: Iterations, recent: slice) -> range:
    return range(*recent.indices(len(iterations.step)))


def _column(iterations: Iterations, index: int, top_s: float, height: int, glyphs: Glyphs) -> list[Span]:
    parts = [(f"phase-{name}", _seconds(iterations, name, index)) for name in ITERATION_PHASES]
    cells = stacked_column(parts, top_s, height, glyphs)
    if iterations.iteration_s[index] > top_s * 1.001:
        cells[0] = (glyphs.clipped, f"clipped/{_style_of(cells[0])}" if glyphs.smooth else "text")
    if iterations.skipped[index]:
        above = next((row for row in reversed(range(height)) if cells[row][0] == " "), None)
        row = above if above is not None else 0
        cells[row] = (glyphs.skipped, "warn" if above is not None else f"skipped/{_style_of(cells[0])}")
    return cells


def _style_of(span: Span) -> str:
    return span[1].split("/")[0]


def _seconds(iterations: Iterations, name: str, index: int) -> float:
    if name in iterations.phase_s:
        value = float(iterations.phase_s[name][index])
    else:
        rest = (float(values[index]) for values in iterations.phase_s.values())
        value = float(iterations.iteration_s[index]) - sum(
            second for second in rest if not math.isnan(second)
        )
    return 0.0 if math.isnan(value) else max(0.0, value)


def _legend(iterations: Iterations, unit: str, factor: float, height: int, glyphs: Glyphs) -> list[Row]:
    """The last step's phases from the top of its column down, then its sum."""
    last = last_phases(iterations)
    names = [
        name
        for name in reversed(ITERATION_PHASES)
        if last.get(name, 0.0) > 0 or name in ("forward", "backward", "step")
    ]
    rows: list[Row] = []
    total = float(iterations.iteration_s[-1])
    heading = f"step {int(iterations.step[-1])}"
    if height >= len(names) + 2:
        rows.append(
            (
                (heading.ljust(10), "heading"),
                (_figure(total * factor), "value"),
            )
        )
    smallest = sorted(names, key=lambda name: last.get(name, 0.0))[: max(0, len(names) - height)]
    for name in names:
        if name in smallest:
            continue
        part = glyphs.swatch if glyphs.smooth else glyphs.part(f"phase-{name}")
        figure = _figure(last.get(name, math.nan) * factor)
        rows.append(((f"{part} ", f"phase-{name}"), (_NAMES[name].ljust(8), "text"), (figure, "value")))
    skipped = int(iterations.skipped.sum())
    if skipped and len(rows) + 1 < height:
        rows.append(((f"{glyphs.skipped} ", "warn"), ("skipped ", "text"), (str(skipped).rjust(6), "value")))
    return (rows + [()] * height)[:height]


def _figure(value: float) -> str:
    return fixed(value, 2 if value < 10 else 1 if value < 100 else 0, 6)


def _steps(
    iterations: Iterations, recent: slice, step_width: int, axis: int, room: int, glyphs: Glyphs
) -> Row:
    """The x axis: numbers of some steps, each beginning under its column."""
    line = [glyphs.rule] * room
    distance = _label_distance(int(iterations.step[-1]), step_width)
    for place, index in enumerate(_range(iterations, recent)):
        step = int(iterations.step[index])
        text = str(step)
        begin = place * step_width
        if step % distance == 0 and begin + len(text) <= room:
            line[begin : begin + len(text)] = list(text)
    text = "".join(line)
    spans: list[Span] = [("0".rjust(axis - 1), "axis"), (glyphs.corner, "rule")]
    for character in text:
        spans.append((character, "rule" if character == glyphs.rule else "axis"))
    return merged(spans)


def _label_distance(largest: int, step_width: int) -> int:
    needed = (len(str(largest)) + 3) / step_width
    power: int = 10 ** math.floor(math.log10(max(1.0, needed)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= needed)
