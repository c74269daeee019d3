"""The ranks screen's map: ranks down, steps across, the newest at the right."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zerotop.analysis.rank_matrix import RECENT, Matrix, Metric, median
from zerotop.ui.charts import HEAT, Canvas, heatmap, levels, step_axis
from zerotop.ui.charts.canvas import FULL
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.memory import panel_title
from zerotop.ui.drawing.rank_lines import Plan, plan, values_of
from zerotop.ui.drawing.rank_words import NAMES, figure, told, unit
from zerotop.ui.drawing.rows import Row, Span, both_ends, filled, merged, row_width
from zerotop.ui.drawing.table import rule
from zerotop.ui.drawing.text import wrap
from zerotop.ui.format import ticks
from zerotop.ui.ranking import Picture

FIGURE_WIDTH = 6
_LABELS = 12  # cells for the longest name of a line
_STEP_WIDTHS = (8, 4, 2, 1)  # cells for each step: few, so that the map is rescaled seldom
_SPREAD = 0.25  # of the usual value that the colours span at least: what is alike looks alike


@dataclass(frozen=True)
class Map:
    """The rows, and which rank each of them is about (a row of the panel -> rank)."""

    rows: list[Row]
    ranks: dict[int, int]


def columns(width: int) -> int:
    """The most steps that a map so wide shows."""
    return max(1, width - 4 - FIGURE_WIDTH)


def draw_map(picture: Picture, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> Map:
    """Title with the colours' meaning, a sentence, the map, the steps."""
    if picture.why_empty or not picture.values.size:
        title = rule(panel_title(f"Ranks: {NAMES[picture.metric]}", focused), width, glyphs)
        lines = wrap(glyphs.plain(picture.why_empty), max(1, width - 2), max(0, height - 1), glyphs)
        rows = [title, *(filled(((f" {line}", "muted"),), width, glyphs) for line in lines)]
        return Map((rows + [filled((), width, glyphs)] * height)[:height], {})
    return _Drawing(picture, width, height, glyphs, focused).map()


@dataclass(frozen=True)
class _Drawing:
    """One map as it is drawn."""

    picture: Picture
    width: int
    height: int
    glyphs: Glyphs
    focused: bool

    def map(self) -> Map:
        """All of it."""
        rows = [self._title(), *self.sentence]
        begin = len(rows)
        rows += self._body()
        rows.append(self._axis())
        rows = (rows + [filled((), self.width, self.glyphs)] * self.height)[: self.height]
        ranks = {
            begin + row: int(self.picture.matrix.ranks[lines[at].rows[0]])
            for row in range(self.plan.height)
            if (at := self.plan.line_at(row)) < len(lines := self.plan.lines)
        }
        return Map(rows, {row: rank for row, rank in ranks.items() if row < self.height})

    @cached_property
    def sentence(self) -> list[Row]:
        """How ranks differ, in as many rows as there is room for."""
        skew = self.picture.skew
        rank = None if skew is None else int(self.picture.matrix.ranks[skew.row])
        text, attention = told(skew, rank, len(self.picture.matrix.processes))
        most = 3 if self.height >= 18 else 2 if self.height >= 12 else 1 if self.height >= 6 else 0
        lines = wrap(self.glyphs.plain(text), max(1, self.width - 1), most, self.glyphs) if most else []
        style = "warn" if attention else "muted"
        return [filled(((f" {line}", style),), self.width, self.glyphs) for line in lines]

    @property
    def _room(self) -> int:
        """Rows for the map itself."""
        return max(1, self.height - 2 - len(self.sentence))

    @cached_property
    def plan(self) -> Plan:
        """Its lines."""
        return plan(self.picture, self._room, self.glyphs)

    @cached_property
    def label_width(self) -> int:
        """Cells before the map: a mark, a name, a gap."""
        return 2 + min(_LABELS, max((len(line.label) for line in self.plan.lines), default=1))

    @cached_property
    def map_width(self) -> int:
        """Cells of the map itself."""
        return max(1, self.width - self.label_width - FIGURE_WIDTH - 1)

    @cached_property
    def step_width(self) -> int:
        """Cells of each step."""
        count = max(len(self.picture.matrix.steps), min(self.picture.total_steps or 0, self.map_width))
        return next((width for width in _STEP_WIDTHS if count * width <= self.map_width), 1)

    @cached_property
    def shown(self) -> int:
        """How many steps are shown, the newest of them."""
        return min(len(self.picture.matrix.steps), self.map_width // self.step_width)

    @cached_property
    def values(self) -> Matrix:
        """Lines x shown steps."""
        values = self.picture.values[:, len(self.picture.matrix.steps) - self.shown :]
        return values_of(self.plan.lines, values, self.picture.metric)

    @cached_property
    def span(self) -> tuple[float, float]:
        """What the first and the last colour stand for."""
        return heat_span(self.picture.values[:, -self.shown :], self.picture.metric, self.picture.matrix.times)

    def _title(self) -> Row:
        low, high = self.span
        named, factor = unit(self.picture.metric, high)
        words = f"Ranks: {NAMES[self.picture.metric]}" + (f" {named}" if named else "")
        order = "by number" if self.picture.by_number else "outliers first"
        ends = [figure(value * factor, high * factor, 0).strip() for value in (low, high)]
        if self.picture.metric is Metric.FREE:
            ends.reverse()
        canvas = Canvas(len(HEAT), 1, self.glyphs)
        heatmap(canvas, np.arange(len(HEAT))[None, :])
        legend: Row = ((f" {ends[0]} ", "axis"), *canvas.rows()[0], (f" {ends[1]}", "axis"))
        title: Row = (*panel_title(words, self.focused), (f"  {order}", "muted"))
        if row_width(title) + row_width(legend) + 2 > self.width:
            title = panel_title(words, self.focused)
        if row_width(title) + row_width(legend) + 2 > self.width:
            return rule(title, self.width, self.glyphs)
        return both_ends(rule(title, self.width - row_width(legend), self.glyphs), legend, self.width, self.glyphs)

    def _body(self) -> list[Row]:
        cells = self._heat()
        side = [self._side(row) for row in range(self.plan.height)]
        lead: Span = (" " * (self.map_width - self.shown * self.step_width), "text")
        rows = [
            merged((*label, lead, *heat, (" ", "text"), *value))
            for (label, value), heat in zip(side, cells, strict=True)
        ]
        return [filled(row, self.width, self.glyphs) for row in rows]

    def _heat(self) -> list[Row]:
        found = levels(self.values, *self.span)
        if self.picture.metric is Metric.FREE:  # what is loud is what is short
            found = np.where(found < 0, found, len(HEAT) - 1 - found)
        found = np.repeat(found, self.step_width, axis=1)
        if self.plan.tall > 1:
            found = np.repeat(found, self.plan.tall, axis=0)
        canvas = Canvas(found.shape[1], self.plan.height, self.glyphs)
        heatmap(canvas, found, halves=self.plan.tall == 0)
        if self.plan.tall > 1 and self.glyphs.smooth:  # lines that are several rows tall stay apart
            upper = canvas.characters[:: self.plan.tall]
            upper[upper == FULL] = ord(self.glyphs.meter)
        return canvas.rows()

    @cached_property
    def usual(self) -> Matrix:
        """The usual value of each line."""
        return median(self.values[:, -RECENT:], 1)

    def _side(self, row: int) -> tuple[Row, Row]:
        """Label and figure of a row; a line several rows tall has them in the first."""
        blank: tuple[Row, Row] = (((" " * self.label_width, "text"),), ((" " * FIGURE_WIDTH, "text"),))
        if self.plan.tall > 1 and row % self.plan.tall:
            return blank
        at = self.plan.line_at(row)
        both = [at, at + 1] if self.plan.tall == 0 and at + 1 < len(self.plan.lines) else [at]
        chosen = self.picture.chosen
        mine = next((place for place in both if len(self.plan.lines[place].rows) == 1 and self._row(place) == chosen), None)
        place = at if mine is None else mine
        line = self.plan.lines[place]
        room = self.label_width - 2
        text = line.label if len(line.label) <= room else line.label[:room]
        mark = self.glyphs.prompt if mine is not None else " "
        _, factor = unit(self.picture.metric, self.span[1])
        value = figure(float(self.usual[place]) * factor, self.span[1] * factor, FIGURE_WIDTH)
        alone = len(line.rows) == 1
        odd = alone and self.picture.deviation[line.rows[0]] > 0
        style = "title-focused" if mine is not None else "warn" if odd else "label"
        label: Row = ((mark, "accent"), (text.rjust(room), style), (" ", "text"))
        return label, ((value, "warn" if odd else "value" if mine is not None else "muted"),)

    def _row(self, place: int) -> int:
        return int(self.plan.lines[place].rows[0])

    def _axis(self) -> Row:
        steps = self.picture.matrix.steps[len(self.picture.matrix.steps) - self.shown :]
        lead = self.map_width - self.shown * self.step_width
        axis = step_axis([int(step) for step in steps], self.map_width, self.glyphs, step_width=self.step_width, x=lead)
        row: Row = ((" " * (self.label_width - 1), "axis"), (self.glyphs.corner, "rule"), *axis)
        return filled(row, self.width, self.glyphs)


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
        low = max(0.0, middle - least * 0.4)
    high = max(high, low + least)
    distance, _ = ticks(max(high - low, 1e-9), 10)
    return math.floor(low / distance + 1e-6) * distance, math.ceil(high / distance - 1e-6) * distance
