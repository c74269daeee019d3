"""One metric of the ranks screen: a title that says what its colours stand for, and a line of them for each rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zerotop.analysis.ranks.matrix import RECENT, Matrix, Metric, median
from zerotop.ui.charts import HEAT, Canvas, heatmap, levels
from zerotop.ui.drawing.formatting import ticks
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, both_ends, filled, merged, row_width
from zerotop.ui.drawing.table import rule
from zerotop.ui.ranks.labels import NAMES, figure, unit
from zerotop.ui.ranks.lines import Plan, values_of
from zerotop.ui.ranks.model import Picture

FIGURE_WIDTH = 6
_SPREAD = 0.25  # of the usual value that the colours span at least: what is alike looks alike


@dataclass(frozen=True)
class Shape:
    """Cells of a panel's parts, from left to right."""

    width: int  # of all
    label: int  # a mark, a name, a gap
    room: int  # for the map
    step_width: int
    shown: int  # steps

    @property
    def lead(self) -> int:
        """Cells of the map at the left that no step needs."""
        return self.room - self.shown * self.step_width


@dataclass(frozen=True, eq=False)
class Section:
    """A metric as it is drawn."""

    picture: Picture
    metric: Metric
    plan: Plan
    glyphs: Glyphs
    shape: Shape

    @property
    def words(self) -> str:
        """What it is, and in what."""
        named, _ = unit(self.metric, self.span[1])
        return NAMES[self.metric] + (f" {named}" if named else "")

    @cached_property
    def recent(self) -> Matrix:
        """Ranks x shown steps."""
        return self.picture.of(self.metric)[:, len(self.picture.matrix.steps) - self.shape.shown :]

    @cached_property
    def values(self) -> Matrix:
        """Lines x shown steps."""
        return values_of(self.plan.lines, self.recent, self.metric)

    @cached_property
    def usual(self) -> Matrix:
        """The usual value of each line."""
        return median(self.values[:, -RECENT:], 1)

    @cached_property
    def deviation(self) -> Matrix:
        """Of each rank, 0 where it is like the others."""
        return self.picture.deviation_of(self.metric)

    @cached_property
    def span(self) -> tuple[float, float]:
        """What the first and the last colour stand for."""
        return heat_span(self.recent, self.metric, self.picture.matrix.times)

    def title(self, title: Row, width: int) -> Row:
        """A rule that begins with these words and ends with the colours and what they stand for."""
        low, high = self.span
        _, factor = unit(self.metric, high)
        ends = [figure(value * factor, high * factor, FIGURE_WIDTH).strip() for value in (low, high)]
        if self.metric is Metric.FREE:
            ends.reverse()
        canvas = Canvas(len(HEAT), 1, self.glyphs)
        heatmap(canvas, np.arange(len(HEAT))[None, :])
        legend: Row = ((f" {ends[0]} ", "axis"), *canvas.rows()[0], (f" {ends[1]}", "axis"))
        while len(title) > 1 and row_width(title) + row_width(legend) + 2 > width:
            title = title[:-1]
        if row_width(title) + row_width(legend) + 2 > width:
            return rule(title, width, self.glyphs)
        return both_ends(rule(title, width - row_width(legend), self.glyphs), legend, width, self.glyphs)

    def rows(self) -> list[Row]:
        """Labels, colours, and each line's usual value."""
        lead: Span = (" " * self.shape.lead, "text")
        rows: list[Row] = []
        for row, heat in enumerate(self._heat()):
            label, value = self._side(row)
            spans = merged((*label, lead, *heat, (" ", "text"), *value))
            rows.append(filled(spans, self.shape.width, self.glyphs))
        return rows

    def _heat(self) -> list[Row]:
        found = levels(self.values, *self.span)
        if self.metric is Metric.FREE:  # what is loud is what is short
            found = np.where(found < 0, found, len(HEAT) - 1 - found)
        found = np.repeat(found, self.shape.step_width, axis=1)
        if self.plan.tall > 1:
            found = np.repeat(found, self.plan.tall, axis=0)
        canvas = Canvas(found.shape[1], self.plan.height, self.glyphs)
        heatmap(canvas, found, halves=self.plan.tall == 0)
        if self.plan.tall and self.plan.apart and self.glyphs.smooth:
            _set_apart(canvas, self.plan.tall)
        return canvas.rows()

    def _side(self, row: int) -> tuple[Row, Row]:
        """Label and figure of a row; a line several rows tall has them in the first."""
        if self.plan.tall > 1 and row % self.plan.tall:
            return ((" " * self.shape.label, "text"),), ((" " * FIGURE_WIDTH, "text"),)
        place, mine = self._told(row)
        line = self.plan.lines[place]
        alone = len(line.rows) == 1
        room = self.shape.label - 2
        style = "title-focused" if mine else "warn" if alone and self.picture.odd[line.rows[0]] > 0 else "label"
        mark = self.glyphs.prompt if mine else " "
        label: Row = ((mark, "accent"), (line.label[:room].rjust(room), style), (" ", "text"))
        _, factor = unit(self.metric, self.span[1])
        value = figure(float(self.usual[place]) * factor, self.span[1] * factor, FIGURE_WIDTH)
        odd = alone and self.deviation[line.rows[0]] > 0
        return label, ((self.glyphs.plain(value), "warn" if odd else "value" if mine else "muted"),)

    def _told(self, row: int) -> tuple[int, bool]:
        """Which line a row names, and whether it is the chosen rank's: of two in a row that one, else the upper."""
        first = self.plan.line_at(row)
        both = [first, first + 1] if self.plan.tall == 0 and first + 1 < len(self.plan.lines) else [first]
        for place in both:
            rows = self.plan.lines[place].rows
            if len(rows) == 1 and rows[0] == self.picture.chosen:
                return place, True
        return first, False


def _set_apart(canvas: Canvas, tall: int) -> None:
    """A thin line of the background's colour under each rank."""
    lowest = slice(tall - 1, None, tall)
    there = canvas.fore[lowest] > 0
    canvas.back[lowest] = np.where(there, canvas.fore[lowest], canvas.back[lowest])
    canvas.characters[lowest] = np.where(there, np.uint32(ord(canvas.glyphs.up[1])), canvas.characters[lowest])
    canvas.fore[lowest] = np.where(there, np.int16(canvas.number("ground")), canvas.fore[lowest])


def heat_span(values: Matrix, metric: Metric, times: dict[Metric, Matrix]) -> tuple[float, float]:
    """What colours span: nearly all values, at least a quarter of the usual one, in round figures."""
    known = values[np.isfinite(values)]
    if not known.size:
        return 0.0, 1.0
    low, tenth, middle, ninth, high = (float(value) for value in np.quantile(known, (0.005, 0.1, 0.5, 0.9, 0.995)))
    high = min(high, ninth + 2 * (ninth - tenth))  # a few steps that are far off do not make all others look alike
    least = abs(middle) * _SPREAD
    if metric is Metric.WAIT:
        low, least = 0.0, 0.1 * float(np.nanmedian(times[Metric.ITERATION]))
    elif high - low < least:
        low = max(0.0, middle - least * 0.15)  # what is alike is calm
    high = max(high, low + least)
    _, factor = unit(metric, high)
    distance, _ = ticks(max(high - low, 1e-9) * factor, 10)
    ends = math.floor(low * factor / distance + 1e-6), math.ceil(high * factor / distance - 1e-6)
    return ends[0] * distance / factor, ends[1] * distance / factor
