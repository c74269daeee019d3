"""One metric of the ranks screen: a title with the range of its colours, and the heat map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zerotop.analysis.ranks.matrix import Matrix, RankMetric
from zerotop.recording.samples import Ints
from zerotop.ui.charts import HEAT, Canvas, compute_levels, plot_heatmap
from zerotop.ui.drawing.formatting import choose_ticks
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, align_ends, fit_row, merge_spans, row_width
from zerotop.ui.drawing.table import draw_rule
from zerotop.ui.ranks.labels import choose_unit, format_estimate, format_figure
from zerotop.ui.ranks.lines import MapPlan, compute_line_values
from zerotop.ui.ranks.model import RankPicture

FIGURE_WIDTH, RANGE_WIDTH = 6, 13  # of a value, and of the range of a node's values
_MIN_SPREAD = 0.25  # share of the usual value that the colours span at least, so that similar values look similar


@dataclass(frozen=True, eq=False)
class MapShape:
    """The horizontal layout of a panel, in cells."""

    width: int
    label_width: int  # with a mark and a gap
    map_width: int
    step_width: float  # on average: steps are drawn in whole cells
    shown_steps: int  # number of steps
    figure_width: int = FIGURE_WIDTH

    @cached_property
    def step_columns(self) -> Ints:
        """The first cell of each step and, last, the end of the map, from its left edge: shape (shown_steps + 1,)."""
        left: Ints = np.rint(np.arange(self.shown_steps, -1, -1) * self.step_width).astype(np.int64)
        return self.map_width - left

    @property
    def lead_width(self) -> int:
        """Empty cells at the left of the map."""
        return int(self.step_columns[0])


@dataclass(frozen=True, eq=False)
class Section:
    """A metric with the layout of its heat map."""

    picture: RankPicture
    metric: RankMetric
    plan: MapPlan
    glyphs: Glyphs
    shape: MapShape

    @property
    def metric_label(self) -> str:
        """The metric's name and unit."""
        unit, _ = choose_unit(self.metric, self.heat_range[1])
        return f"{self.metric.value.label} {unit}".rstrip()

    @cached_property
    def rank_values(self) -> Matrix:
        """Values of the shown steps, shape (ranks, steps)."""
        return self.picture.find_values(self.metric)[:, len(self.picture.matrix.steps) - self.shape.shown_steps :]

    @cached_property
    def line_values(self) -> Matrix:
        """Values of the shown steps, shape (lines, steps)."""
        return compute_line_values(self.plan.lines, self.rank_values, self.metric)

    @cached_property
    def usual_values(self) -> Matrix:
        """The usual value of each line's rank, as in the table; of several ranks the worst."""
        return self._find_usual_values()

    def _find_usual_values(self, *, best: bool = False) -> Matrix:
        usual = self.picture.matrix.find_usual(self.metric, self.picture.find_values(self.metric))
        return compute_line_values(self.plan.lines, usual[:, None], self.metric, best=best)[:, 0]

    @cached_property
    def usual_ranges(self) -> Matrix:
        """The lowest and the highest usual value of each line's ranks, shape (2, lines)."""
        return np.sort([self.usual_values, self._find_usual_values(best=True)], axis=0)

    @cached_property
    def rank_deviations(self) -> Matrix:
        """Deviation of each rank, 0 where it is like the others."""
        return self.picture.find_deviation(self.metric)

    @cached_property
    def heat_range(self) -> tuple[float, float]:
        """Values of the first and the last colour."""
        return choose_heat_range(self.rank_values, self.metric, self.picture.matrix.times)

    def draw_title(self, title: Row, width: int) -> Row:
        """Draw a rule with the title at its left, and the colours with their range at its right."""
        low, high = self.heat_range
        _, factor = choose_unit(self.metric, high)
        ends = [format_figure(value * factor, high * factor, FIGURE_WIDTH).strip() for value in (low, high)]
        if np.nanmax(self.line_values, initial=high) > high:  # extreme steps have the last colour, too
            ends[1] += "+"
        canvas = Canvas(len(HEAT), 1, self.glyphs)
        plot_heatmap(canvas, np.arange(len(HEAT))[None, :])
        legend: Row = ((f" {ends[0]} ", "axis"), *canvas.to_rows()[0], (f" {ends[1]}", "axis"))
        while len(title) > 1 and row_width(title) + row_width(legend) + 2 > width:
            title = title[:-1]
        if row_width(title) + row_width(legend) + 2 > width:
            return draw_rule(title, width, self.glyphs)
        return align_ends(draw_rule(title, width - row_width(legend), self.glyphs), legend, width, self.glyphs)

    def draw_rows(self) -> list[Row]:
        """Draw the label, the colours and the usual value of each line."""
        lead: Span = (" " * self.shape.lead_width, "text")
        rows: list[Row] = []
        for row, heat in enumerate(self._draw_heat()):
            label, value = self._draw_side(row)
            spans = merge_spans((*label, lead, *heat, (" ", "text"), *value))
            rows.append(fit_row(spans, self.shape.width, self.glyphs))
        return rows

    def describe_cell(self, x: int, row: int) -> str:
        """Return the value at a cell, counted from the first row of the lines; empty beside the map."""
        place = int(np.searchsorted(self.shape.step_columns, x - self.shape.label_width, "right")) - 1
        if not (0 <= row < self.plan.height and 0 <= place < self.shape.shown_steps):
            return ""
        index, _ = self._choose_line(row)
        line = self.plan.lines[index]
        steps = self.picture.matrix.steps
        step = int(steps[len(steps) - self.shape.shown_steps + place])
        word = "" if line.host else "rank "
        unit, factor = choose_unit(self.metric, self.heat_range[1])
        value = format_figure(float(self.line_values[index, place]) * factor, self.heat_range[1] * factor, FIGURE_WIDTH)
        return f"{word}{line.label}, step {step}: {value.strip()} {unit}".rstrip()

    def _draw_heat(self) -> list[Row]:
        levels = compute_levels(self.line_values, *self.heat_range)
        levels = np.repeat(levels, np.diff(self.shape.step_columns), axis=1)
        levels = np.repeat(levels, max(1, self.plan.tall), axis=0)
        canvas = Canvas(levels.shape[1], self.plan.height, self.glyphs)
        plot_heatmap(canvas, levels, halves=self.plan.tall == 0)
        if self.plan.tall and self.plan.has_gaps and self.glyphs.smooth:
            _separate_lines(canvas, self.plan.tall)
        return canvas.to_rows()

    def _draw_side(self, row: int) -> tuple[Row, Row]:
        """Draw the label and the figure of a row; a line several rows tall has them in its first row."""
        if self.plan.tall > 1 and row % self.plan.tall:
            return ((" " * self.shape.label_width, "text"),), ((" " * self.shape.figure_width, "text"),)
        index, is_chosen = self._choose_line(row)
        line = self.plan.lines[index]
        is_compared = len(line.matrix_rows) == 1 or bool(line.host)
        is_odd = is_compared and self.picture.oddness[line.matrix_rows].max() > 0
        room = self.shape.label_width - 2
        usual = "muted" if line.host in self.picture.network.reduced else "label"
        style = "accent" if is_chosen else "warn" if is_odd else usual
        mark = self.glyphs.prompt if is_chosen else " "
        # The names of nodes begin alike.
        name = line.label[-max(1, room - len(line.mark)) :].ljust(room - len(line.mark))
        text = line.mark + name if line.mark else line.label[:room].rjust(room)
        label: Row = ((mark, "accent"), (text, style), (" ", "text"))
        deviates = is_compared and self.rank_deviations[line.matrix_rows].max() > 0
        value = self.glyphs.to_plain(self._format_usual(index))
        return label, ((value, "warn" if deviates else "value" if is_chosen else "muted"),)

    def _format_usual(self, index: int) -> str:
        """Return the usual value of a line's rank; where nodes have lines, the range of those of a node's ranks."""
        _, factor = choose_unit(self.metric, self.heat_range[1])
        ends = self.usual_ranges[:, index] if self.shape.figure_width > FIGURE_WIDTH else (self.usual_values[index],)
        largest, is_estimate = self.heat_range[1] * factor, self.metric in self.picture.matrix.estimated_metrics
        told = [format_estimate(float(end) * factor, largest, FIGURE_WIDTH, is_estimate=is_estimate).strip() for end in ends]
        return "–".join(dict.fromkeys(told)).rjust(self.shape.figure_width)

    def _choose_line(self, row: int) -> tuple[int, bool]:
        """Return the line for a row, and whether it is the chosen rank's: of two lines that one, else the upper."""
        first = self.plan.find_line(row)
        last = first if self.plan.tall else min(first + 1, len(self.plan.lines) - 1)
        for index in range(first, last + 1):
            if self.plan.lines[index].is_chosen:
                return index, True
        return first, False


def _separate_lines(canvas: Canvas, tall: int) -> None:
    """Draw a thin line in the background colour under each line of the map."""
    lowest = slice(tall - 1, None, tall)
    filled = canvas.fore[lowest] > 0
    canvas.back[lowest] = np.where(filled, canvas.fore[lowest], canvas.back[lowest])
    canvas.characters[lowest] = np.where(filled, np.uint32(ord(canvas.glyphs.eighths[1])), canvas.characters[lowest])
    canvas.fore[lowest] = np.where(filled, np.int16(canvas.number_style("ground")), canvas.fore[lowest])


def choose_heat_range(values: Matrix, metric: RankMetric, times: dict[RankMetric, Matrix]) -> tuple[float, float]:
    """Return the range of the colours: nearly all values, at least a quarter of the usual one, rounded."""
    known = values[np.isfinite(values)]
    if not known.size:
        return 0.0, 1.0
    low, tenth, middle, ninth, high = (float(value) for value in np.quantile(known, (0.005, 0.1, 0.5, 0.9, 0.995)))
    high = min(high, ninth + 2 * (ninth - tenth))  # so that a few extreme steps do not make all others look alike
    least = abs(middle) * _MIN_SPREAD
    if metric is RankMetric.WAIT:
        low, least = 0.0, 0.1 * float(np.nanmedian(times[RankMetric.ITERATION]))
    elif high - low < least:
        low = max(0.0, middle - least * 0.15)  # similar values get weak colours
    high = max(high, low + least)
    if high <= low:  # most steps have no such time at all
        high = float(known.max())
    _, factor = choose_unit(metric, high)
    distance, _ = choose_ticks(max(high - low, 1e-9) * factor, 10)
    ends = math.floor(low * factor / distance + 1e-6), math.ceil(high * factor / distance - 1e-6)
    return ends[0] * distance / factor, ends[1] * distance / factor
