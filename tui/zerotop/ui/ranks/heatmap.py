"""The ranks screen's maps: ranks down, steps across, the newest at the right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from zerotop.analysis.ranks.matrix import Metric
from zerotop.ui.charts import step_axis
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, filled
from zerotop.ui.drawing.table import rule
from zerotop.ui.drawing.text import wrap
from zerotop.ui.live.memory import panel_title
from zerotop.ui.ranks.labels import NAMES, told
from zerotop.ui.ranks.lines import Plan, plan
from zerotop.ui.ranks.model import Picture
from zerotop.ui.ranks.section import FIGURE_WIDTH, Section, Shape

_LABELS = 12  # cells for the longest name of a line
_TALLEST, _TALLEST_OTHER = 6, 3  # rows of one rank, of one in another metric's map
_STEP_WIDTHS = (24, 16, 12, 8, 6, 4, 3, 2, 1)  # cells for each step: few, so that the map is rescaled seldom


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
    """One panel as it is drawn."""

    picture: Picture
    width: int
    height: int
    glyphs: Glyphs
    focused: bool

    def map(self) -> Map:
        """All of it: the metric that was asked for, the steps, and in what is left of the room other metrics."""
        sentence = self.sentence
        main = self._section(self.picture.metric, self.plan)
        small = replace(self.plan, tall=self.tall[1])
        order = "by number" if self.picture.by_number else "outliers first"
        title: Row = (*panel_title(f"Ranks: {main.words}", self.focused), (f"  {order}", "muted"))
        rows = [main.title(title, self.width), *sentence, *main.rows()]
        ranks = self._places(1 + len(sentence), self.plan)
        for metric in self.picture.other_metrics if self.plan.tall else ():
            if len(rows) + small.height + 2 > self.height:
                break
            if self.air:
                rows.append(filled((), self.width, self.glyphs))
            section = self._section(metric, small)
            rows.append(section.title(((section.words, "title-value"),), self.width))
            ranks |= self._places(len(rows), small)
            rows += section.rows()
        rows.append(self._axis())
        rows = (rows + [filled((), self.width, self.glyphs)] * self.height)[: self.height]
        return Map(rows, {row: rank for row, rank in ranks.items() if row < self.height})

    def _places(self, begin: int, plan: Plan) -> dict[int, int]:
        ranks = self.picture.matrix.ranks
        return {begin + row: int(ranks[plan.lines[plan.line_at(row)].rows[0]]) for row in range(plan.height)}

    def _section(self, metric: Metric, plan: Plan) -> Section:
        return Section(self.picture, metric, plan, self.glyphs, self.shape)

    @cached_property
    def sentence(self) -> list[Row]:
        """How ranks differ, in as many rows as there is room for."""
        skew = self.picture.skew
        rank = None if skew is None else int(self.picture.matrix.ranks[skew.row])
        text, short, attention = told(skew, rank, len(self.picture.matrix.processes))
        most = 3 if self.height >= 18 else 2 if self.height >= 12 else 1 if self.height >= 6 else 0
        room = max(1, self.width - 1)
        lines = wrap(self.glyphs.plain(text), room, most + 1, self.glyphs)
        if len(lines) > most:
            lines = wrap(self.glyphs.plain(short), room, most, self.glyphs) if most else []
        style = "warn" if attention else "muted"
        return [filled(((f" {line}", style),), self.width, self.glyphs) for line in lines]

    @cached_property
    def plan(self) -> Plan:
        """The lines of the metric that was asked for."""
        return replace(self._least, tall=self.tall[0])

    @cached_property
    def _least(self) -> Plan:
        return plan(self.picture, max(1, self.height - 2 - len(self.sentence)), self.glyphs)

    @cached_property
    def tall(self) -> tuple[int, int]:
        """Rows of each line, of the metric that was asked for and of the others: more where all of these fit."""
        least, others = self._least, len(self.picture.other_metrics)
        room, lines = self._room, len(least.lines)
        for small in range(_TALLEST_OTHER, 0, -1):
            for tall in range(_TALLEST, max(small, least.tall), -1):
                if least.tall and lines * (tall + small * others) <= room:
                    return tall, small
        return least.tall, 1

    @cached_property
    def air(self) -> bool:
        """Whether there is a row to spare above each of the others."""
        lines, others = len(self.plan.lines), len(self.picture.other_metrics)
        return lines * (self.tall[0] + self.tall[1] * others) + others <= self._room

    @property
    def _room(self) -> int:
        """Rows for the lines of all metrics."""
        return self.height - 2 - len(self.sentence) - len(self.picture.other_metrics)

    @cached_property
    def shape(self) -> Shape:
        """What all sections have in common, so that steps stand under one another."""
        label = 2 + min(_LABELS, max((len(line.label) for line in self.plan.lines), default=1))
        room = max(1, self.width - label - FIGURE_WIDTH - 1)
        count = len(self.picture.matrix.steps)
        planned = max(count, min(self.picture.total_steps or 0, room))
        step_width = next((width for width in _STEP_WIDTHS if planned * width <= room), 1)
        return Shape(self.width, label, room, step_width, min(count, room // step_width))

    def _axis(self) -> Row:
        shape, steps = self.shape, self.picture.matrix.steps
        shown = [int(step) for step in steps[len(steps) - shape.shown :]]
        axis = step_axis(shown, shape.room, self.glyphs, step_width=shape.step_width, x=shape.lead)
        row: Row = ((" " * (shape.label - 1), "axis"), (self.glyphs.corner, "rule"), *axis)
        return filled(row, self.width, self.glyphs)
