"""Axes around a canvas: values at its left, time or steps below."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from zerotop.ui.charts.canvas import SPACE, Canvas
from zerotop.ui.charts.scales import Scale
from zerotop.ui.drawing.formatting import format_clock
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_row, merge_spans

LABEL_WIDTH = 4
AXIS_WIDTH = LABEL_WIDTH + 1  # cells of the value axis

_SUBSECOND_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_WHOLE_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
TICK_INTERVALS_S = (*_SUBSECOND_S, *map(float, _WHOLE_S))
_MIN_TICK_DISTANCE = 14  # columns between ticks of a time axis

TickLabel = tuple[int, str]  # column, text


def plot_grid(canvas: Canvas, scale: Scale) -> None:
    """Draw faint lines at the ticks of the value axis in empty cells. Call it before everything else, or after."""
    if not canvas.glyphs.grid.strip():
        return
    rows = [row for row in scale.tick_rows(canvas.height) if 0 <= row < canvas.height]
    blank = (canvas.characters[rows] == SPACE) & (canvas.back[rows] == 0)
    canvas.characters[rows] = np.where(blank, np.uint32(ord(canvas.glyphs.grid)), canvas.characters[rows])
    canvas.fore[rows] = np.where(blank, np.int16(canvas.number_style("grid")), canvas.fore[rows])


def add_axes(canvas: Canvas, scale: Scale, below: Row | None = None) -> list[Row]:
    """Return the canvas with its value axis at the left, ``AXIS_WIDTH`` cells wider, and ``below`` as its last row.

    ``below`` is a row as wide as the canvas, such as :func:`draw_time_axis` or :func:`draw_step_axis` return.
    """
    glyphs = canvas.glyphs
    sides = draw_axis_labels(scale, canvas.height, glyphs)
    rows = [(*side, *row) for side, row in zip(sides, canvas.to_rows(), strict=True)]
    if below is not None:
        rows.append(merge_spans(((" " * LABEL_WIDTH, "axis"), (glyphs.corner, "rule"), *below)))
    return rows


@lru_cache(maxsize=256)
def draw_axis_labels(scale: Scale, height: int, glyphs: Glyphs) -> tuple[Row, ...]:
    """Draw the value axis alone: ``height`` rows of ``AXIS_WIDTH`` cells."""
    ticks = scale.tick_rows(height)
    decimals = max(0, -math.floor(math.log10(scale.distance) + 1e-9))
    rows: list[Row] = []
    for row in range(height):
        text = f"{ticks[row]:.{decimals}f}" if row in ticks else ""
        text = text if len(text) <= LABEL_WIDTH else f"{ticks[row] / 1000:.0f}k"
        rows.append(((text.rjust(LABEL_WIDTH), "axis"), (glyphs.tick if row in ticks else glyphs.line, "rule")))
    return tuple(rows)


def draw_axis(marks: Iterable[TickLabel], width: int, glyphs: Glyphs) -> Row:
    """Draw a horizontal axis. Texts begin at their columns; one that touches the previous one or does not fit is dropped."""
    spans: list[tuple[str, str]] = []
    end = 0
    for column, text in marks:
        if column < end + (1 if end else 0) or column + len(text) > width:
            continue
        spans.extend(((glyphs.rule * (column - end), "rule"), (text, "axis")))
        end = column + len(text)
    spans.append((glyphs.rule * max(0, width - end), "rule"))
    return fit_row(merge_spans(spans), max(0, width), glyphs)


def draw_time_axis(begin_s: float, end_s: float, width: int, glyphs: Glyphs) -> Row:
    """Draw the axis of a chart whose columns are equal parts of the time from ``begin_s`` to ``end_s``.

    Ticks are durations (``0:42``, ``12.5 s``) at round times, from a millisecond to days apart. An axis that ends within the
    first second is in milliseconds, as durations in texts are.
    """
    return draw_axis(choose_time_ticks(begin_s, end_s, width), width, glyphs)


def choose_time_ticks(begin_s: float, end_s: float, width: int) -> list[TickLabel]:
    """Return (column, text) of the round times of an axis."""
    length = end_s - begin_s
    if width <= 0 or not 0 < length < math.inf or not math.isfinite(begin_s):
        return []
    distance = choose_tick_interval(length, width)
    first, last = math.ceil(begin_s / distance - 1e-9), math.floor(end_s / distance + 1e-9)
    times = [number * distance for number in range(first, min(last, first + width) + 1)]
    texts = [f"{time * 1e3:.0f} ms" if abs(begin_s) < 1 > end_s else format_tick(time, distance) for time in times]
    return [(int((time - begin_s) / length * width + 1e-6), text) for time, text in zip(times, texts, strict=True)]


def choose_tick_interval(length_s: float, width: int) -> float:
    """Return the smallest round number of seconds that leaves enough columns between ticks."""
    needed = length_s / max(1, width) * _MIN_TICK_DISTANCE
    interval = next((interval for interval in TICK_INTERVALS_S if interval >= needed), None)
    return interval or _round_up(needed / 86400) * 86400.0


def _round_up(number: float) -> float:
    """Return 1, 2 or 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(number))
    return next((power * factor for factor in (1, 2, 5, 10) if power * factor >= number), number)


def format_tick(seconds: float, distance_s: float) -> str:
    """Format a time on an axis with the precision that the distance between ticks needs."""
    decimals = max(0, -math.floor(math.log10(distance_s) + 1e-9)) if distance_s < 1 else 0
    sign = "-" if seconds < 0 and round(seconds, decimals) else ""
    size = abs(seconds)
    if size < 60 and distance_s < 60:
        return f"{sign}{size:.{decimals}f} s"
    whole = math.floor(round(size, decimals))
    fraction = f"{round(size, decimals) - whole:.{decimals}f}"[1:] if decimals else ""
    return f"{sign}{format_clock(whole)}{fraction}"


def draw_step_axis(steps: Sequence[int], columns: Sequence[int], width: int, glyphs: Glyphs) -> Row:
    """Draw the axis of a chart whose steps begin at these columns, about equally far apart, with round numbers."""
    largest = max((abs(int(step)) for step in (steps[0], steps[-1])), default=0) if len(steps) else 0
    step_width = (columns[-1] - columns[0]) / (len(columns) - 1) if len(columns) > 1 else 1.0
    distance = int(_round_up(max(1.0, (len(str(largest)) + 3) / max(1.0, step_width))))
    marks = ((column, str(step)) for column, step in zip(columns, steps, strict=True) if int(step) % distance == 0)
    return draw_axis(marks, width, glyphs)
