"""Axes of charts: human units, calm scales, faint lines at the ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from zerotop.analysis.live_view import Floats
from zerotop.ui.drawing.formatting import choose_ticks, choose_time_unit
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, merge_spans, row_width
from zerotop.ui.drawing.units import giga_unit

LABEL_WIDTH = 4
_MIN_TOP = 0.04  # of a scale of memory, in its unit: labels of a smaller one would be too long


@dataclass(frozen=True)
class Scale:
    """A vertical axis from zero.

    ``distance`` (of ticks) and ``top`` are in ``unit``, ``factor`` of which are one of what is measured: a second, a byte.
    """

    unit: str
    factor: float
    distance: float
    top: float

    @property
    def highest(self) -> float:
        """The top in what is measured."""
        return self.top / self.factor

    def tick_rows(self, height: int) -> dict[int, float]:
        """Row (0 is the uppermost) -> the value at its upper edge."""
        number = round(self.top / self.distance)
        if height < number:
            return {0: self.top}
        return {height - n * (self.count_plot_rows(height) // number): n * self.distance for n in range(1, number + 1)}

    def count_plot_rows(self, height: int) -> int:
        """Rows that are drawn on, of ``height``: as many as make all ticks equally far apart."""
        number = round(self.top / self.distance)
        return height - height % number if height >= number else height


def choose_time_scale(seconds: Floats, height: int) -> Scale:
    """A scale for these durations.

    A few much longer than the others (a first step that compiles) are to be clipped, not the measure of all.
    """
    seconds = seconds[np.isfinite(seconds)]
    longest = float(seconds.max()) if len(seconds) else 0.0
    if len(seconds) >= 8:
        usual = float(np.quantile(seconds, 0.9))
        longest = usual * 1.25 if longest > 2 * usual else longest
    unit, factor = choose_time_unit(longest)
    distance, top = choose_ticks(longest * factor, 4 if height >= 8 else 3 if height >= 5 else 2)
    return Scale(unit, factor, distance, top)


def choose_memory_scale(size: float, height: int) -> Scale:
    """A scale in GiB or GB for amounts up to ``size`` bytes."""
    unit = giga_unit()
    most = 4 if height >= 8 else 3 if height >= 6 else 2
    return Scale(unit.name, 1 / unit.bytes, *choose_ticks(max(size / unit.bytes, _MIN_TOP), most))


@lru_cache(maxsize=256)
def draw_axis_labels(scale: Scale, height: int, glyphs: Glyphs) -> tuple[Row, ...]:
    """The axis itself, ``LABEL_WIDTH`` + 1 cells wide."""
    places = scale.tick_rows(height)
    decimals = max(0, -math.floor(math.log10(scale.distance) + 1e-9))
    rows: list[Row] = []
    for row in range(height):
        text = f"{places[row]:.{decimals}f}" if row in places else ""
        text = text if len(text) <= LABEL_WIDTH else f"{places[row] / 1000:.0f}k"
        rows.append(((text.rjust(LABEL_WIDTH), "axis"), (glyphs.tick if row in places else glyphs.line, "rule")))
    return tuple(rows)


def draw_grid_row(cells: Iterable[Span], width: int, glyphs: Glyphs) -> Row:
    """A tick's row of the chart: its empty cells get a faint line at their upper edge."""
    spans = list(cells)
    spans.append((" " * max(0, width - row_width(spans)), "text"))
    return merge_spans((glyphs.grid * len(text), "grid") if not text.strip() else (text, style) for text, style in spans)


def draw_step_axis(steps: Iterable[int], step_width: int, room: int, glyphs: Glyphs) -> Row:
    """The horizontal axis: numbers of some steps, each beginning under its column."""
    shown = list(steps)
    distance = choose_distance(shown[-1] if shown else 0, step_width)
    line = [glyphs.rule] * room
    for place, step in enumerate(shown):
        text, begin = str(step), place * step_width
        if step % distance == 0 and begin + len(text) <= room:
            line[begin : begin + len(text)] = text
    spans: list[Span] = [(" " * LABEL_WIDTH, "axis"), (glyphs.corner, "rule")]
    spans.extend((character, "rule" if character == glyphs.rule else "axis") for character in line)
    return merge_spans(spans)


def choose_distance(largest: int, step_width: int) -> int:
    """Steps from one number on the axis to the next, in 1-2-5 steps, so that they do not touch."""
    needed = (len(str(largest)) + 3) / step_width
    power: int = 10 ** math.floor(math.log10(max(1.0, needed)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= needed)
