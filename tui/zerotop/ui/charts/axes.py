"""Axes around a canvas: values at its left, time or steps below."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone

import numpy as np

from zerotop.ui.charts.canvas import SPACE, Canvas
from zerotop.ui.charts.step_axis import LABEL_WIDTH, Scale, draw_axis_labels
from zerotop.ui.drawing.formatting import format_clock as passed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_row, merge_spans

AXIS_WIDTH = LABEL_WIDTH + 1  # cells that the value axis takes

_SUBSECOND_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_WHOLE_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
TICK_INTERVALS_S = (*_SUBSECOND_S, *map(float, _WHOLE_S))  # seconds between ticks of a time axis, as people count

TickLabel = tuple[int, str]  # column, text


def plot_grid(canvas: Canvas, scale: Scale) -> None:
    """Faint lines at the ticks of the value axis, in cells where nothing was drawn: draw it first or last."""
    if not canvas.glyphs.grid.strip():
        return
    rows = [row for row in scale.tick_rows(canvas.height) if 0 <= row < canvas.height]
    blank = (canvas.characters[rows] == SPACE) & (canvas.back[rows] == 0)
    canvas.characters[rows] = np.where(blank, np.uint32(ord(canvas.glyphs.grid)), canvas.characters[rows])
    canvas.fore[rows] = np.where(blank, np.int16(canvas.number_style("grid")), canvas.fore[rows])


def add_axes(canvas: Canvas, scale: Scale, below: Row | None = None) -> list[Row]:
    """The canvas with its value axis at the left, ``AXIS_WIDTH`` cells wider, and ``below`` under it.

    ``below`` is what :func:`time_axis` or :func:`step_axis` gave for the canvas's width.
    """
    glyphs = canvas.glyphs
    sides = draw_axis_labels(scale, canvas.height, glyphs)
    rows = [(*side, *row) for side, row in zip(sides, canvas.to_rows(), strict=True)]
    if below is not None:
        rows.append(merge_spans(((" " * LABEL_WIDTH, "axis"), (glyphs.corner, "rule"), *below)))
    return rows


def draw_axis(marks: Iterable[TickLabel], width: int, glyphs: Glyphs) -> Row:
    """A horizontal axis: each text begins under its column. What does not fit, or touches the one before, is left out."""
    spans: list[tuple[str, str]] = []
    at = 0
    for column, text in marks:
        begin = max(column, 0)
        if begin < at + (1 if at else 0) or begin + len(text) > width or column < 0:
            continue
        spans.extend(((glyphs.rule * (begin - at), "rule"), (text, "axis")))
        at = begin + len(text)
    spans.append((glyphs.rule * max(0, width - at), "rule"))
    return fit_row(merge_spans(spans), max(0, width), glyphs)


def draw_time_axis(
    begin_s: float, end_s: float, width: int, glyphs: Glyphs, *, zone_s: float | None = None, zero_s: float | None = None
) -> Row:
    """The axis of a chart whose columns are equal pieces of the time from ``begin_s`` to ``end_s``.

    Ticks are at round times, from a millisecond to days apart. By default times are those of the axis itself, as durations
    (``0:42``, ``12.5 s``).

    Args:
        zero_s: durations count from here, for example from the recording's begin.
        zone_s: times are unix seconds, shown by the clock of a place that is this far east of UTC, in seconds.
    """
    origin = -zone_s if zone_s is not None else zero_s or 0.0
    marks = list(choose_time_ticks(begin_s - origin, end_s - origin, width, by_clock=zone_s is not None))
    return draw_axis(marks, width, glyphs)


def choose_time_ticks(begin_s: float, end_s: float, width: int, *, by_clock: bool = False) -> list[TickLabel]:
    """(column, text) of the round times of an axis."""
    length = end_s - begin_s
    if width <= 0 or not 0 < length < math.inf or not math.isfinite(begin_s):
        return []
    distance = choose_tick_interval(length, width)
    first, beyond = math.ceil(begin_s / distance - 1e-9), math.floor(end_s / distance + 1e-9)
    numbers = range(first, min(beyond, first + width) + 1)
    times = [number * distance for number in numbers]
    return [
        (int((time - begin_s) / length * width + 1e-6), format_tick(time, distance, by_clock=by_clock)) for time in times
    ]


def choose_tick_interval(length_s: float, width: int, *, apart: int = 14) -> float:
    """Seconds between ticks that are at least ``apart`` columns from one another."""
    needed = length_s / max(1, width) * apart
    for distance in TICK_INTERVALS_S:
        if distance >= needed:
            return distance
    return _round_days(needed / 86400) * 86400.0


def _round_days(needed: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(needed))
    return next((power * factor for factor in (1, 2, 5, 10) if power * factor >= needed), needed)


def format_tick(seconds: float, distance_s: float, *, by_clock: bool = False) -> str:
    """A time on an axis, as exact as the distance between its ticks."""
    decimals = max(0, -math.floor(math.log10(distance_s) + 1e-9)) if distance_s < 1 else 0
    if by_clock:
        return _format_clock(seconds, distance_s, decimals)
    sign = "-" if seconds < 0 and round(seconds, decimals) else ""
    size = abs(seconds)
    if size < 60 and distance_s < 60:
        return f"{sign}{size:.{decimals}f} s"
    whole = math.floor(round(size, decimals))
    part = f"{round(size, decimals) - whole:.{decimals}f}"[1:] if decimals else ""
    return f"{sign}{passed(whole)}{part}"


def _format_clock(seconds: float, distance_s: float, decimals: int) -> str:
    try:
        moment = datetime.fromtimestamp(round(seconds, decimals), timezone.utc)
    except (OverflowError, ValueError, OSError):
        return ""
    if distance_s >= 86400:
        return f"{moment:%d %b}"
    if distance_s >= 60:
        return f"{moment:%H:%M}"
    part = f"{moment.microsecond / 1e6:.{decimals}f}"[1:] if decimals else ""
    return f"{moment:%H:%M:%S}{part}"


def compute_utc_offset(unix_s: float) -> float:
    """How far east of UTC this machine's clock is at a moment, in seconds."""
    try:
        offset = datetime.fromtimestamp(unix_s, timezone.utc).astimezone().utcoffset()
    except (OverflowError, ValueError, OSError):
        offset = None
    return (offset or timedelta()).total_seconds()


def draw_step_axis(steps: Sequence[int], width: int, glyphs: Glyphs, *, step_width: int = 1, x: int = 0) -> Row:
    """The axis of a chart with ``step_width`` columns for each step, from column ``x`` on: round numbers."""
    largest = max((abs(int(step)) for step in (steps[0], steps[-1])), default=0) if len(steps) else 0
    distance = _choose_step_interval((len(str(largest)) + 3) / max(1, step_width))
    return draw_axis(
        ((x + place * step_width, str(step)) for place, step in enumerate(steps) if int(step) % distance == 0), width, glyphs
    )


def _choose_step_interval(needed: float) -> int:
    power: int = 10 ** math.floor(math.log10(max(1.0, needed)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= needed)
