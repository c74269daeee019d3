"""Heat maps of the ranks screen: a line for each rank, a column for each step, the newest at the right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from zerotop.analysis.ranks.matrix import RankMetric
from zerotop.analysis.stats.medians import round_count_up
from zerotop.ui.charts import draw_step_axis
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_row
from zerotop.ui.drawing.table import draw_rule, panel_title
from zerotop.ui.drawing.text import wrap_text
from zerotop.ui.ranks.labels import describe_alike, describe_hang, describe_network, describe_skew
from zerotop.ui.ranks.lines import MapPlan, plan_lines
from zerotop.ui.ranks.model import RankPicture
from zerotop.ui.ranks.section import FIGURE_WIDTH, RANGE_WIDTH, MapShape, Section

_MAX_LABEL_WIDTH = 12  # cells
_MAX_NODE_WIDTH, _NODE_SHARE = 28, 4  # the same with the names of nodes, and the largest part of the panel for them
_LEAST_RANGE_WIDTH = 40  # cells of a panel with room for ranges of values
_MAX_LINE_ROWS, _MAX_OTHER_ROWS = 6, 3  # rows of a line in the main map and in the other ones
_MAX_STEP_WIDTH = 24  # cells


@dataclass(frozen=True)
class MapRows:
    """The rows of a panel, and the rank that each row of a map shows."""

    rows: list[Row]
    ranks: dict[int, int]
    sections: tuple[tuple[int, Section], ...] = ()  # (first row of its lines, section)

    def describe_cell(self, x: int, y: int) -> str:
        """Return ``rank 1, step 23: 512 ms``; empty outside the maps."""
        return next((text for begin, section in self.sections if (text := section.describe_cell(x, y - begin))), "")


def max_shown_steps(width: int) -> int:
    """Return the most steps that a map of this width shows."""
    return max(1, width - 4 - FIGURE_WIDTH)


def draw_map(picture: RankPicture, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> MapRows:
    """Draw the title with the meaning of the colours, a sentence, the maps, and the step axis."""
    if picture.why_empty or not picture.values.size:
        title = draw_rule(panel_title(f"Ranks: {picture.metric.value.label}", focused), width, glyphs)
        lines = wrap_text(glyphs.to_plain(picture.why_empty), max(1, width - 2), max(0, height - 1), glyphs)
        rows = [title, *(fit_row(((f" {line}", "muted"),), width, glyphs) for line in lines)]
        return MapRows((rows + [fit_row((), width, glyphs)] * height)[:height], {})
    return _MapPanel(picture, width, height, glyphs, focused).draw_map()


@dataclass(frozen=True)
class _MapPanel:
    """The layout of one panel."""

    picture: RankPicture
    width: int
    height: int
    glyphs: Glyphs
    focused: bool

    def draw_map(self) -> MapRows:
        """Draw the chosen metric, other metrics in the spare room, and the steps."""
        sentence = self.sentence_rows
        main = self._build_section(self.picture.metric, self.main_plan)
        small = replace(self.main_plan, tall=self.line_heights[1])
        order = "by number" if self.picture.by_number else "odd nodes first" if self.picture.nodes else "outliers first"
        title: Row = (*panel_title(f"Ranks: {main.metric_label}", self.focused), (f"  {order}", "muted"))
        if self.main_plan.part:
            title = (*title[:-1], (f"  nodes {self.main_plan.part}", "title-warn"), title[-1])
        rows = [main.draw_title(title, self.width), *sentence, *main.draw_rows()]
        ranks = self._find_ranks(1 + len(sentence), self.main_plan)
        sections = [(1 + len(sentence), main)]
        for metric in self.picture.other_metrics if self.main_plan.tall else ():
            if len(rows) + small.height + 2 > self.height:
                break
            if self.has_gaps:
                rows.append(fit_row((), self.width, self.glyphs))
            section = self._build_section(metric, small)
            rows.append(section.draw_title(((section.metric_label, "title-value"),), self.width))
            ranks |= self._find_ranks(len(rows), small)
            sections.append((len(rows), section))
            rows += section.draw_rows()
        rows.append(self._draw_axis())
        if self.picture.alike_metrics:
            text = describe_alike(self.picture.alike_metrics, self.picture.alike_s)
            rows.append(fit_row(((f" {text}", "muted"),), self.width, self.glyphs))
        rows = (rows + [fit_row((), self.width, self.glyphs)] * self.height)[: self.height]
        return MapRows(rows, {row: rank for row, rank in ranks.items() if row < self.height}, tuple(sections))

    def _find_ranks(self, begin: int, plan: MapPlan) -> dict[int, int]:
        ranks = self.picture.matrix.rank_numbers
        return {begin + row: int(ranks[plan.lines[plan.find_line(row)].matrix_rows[0]]) for row in range(plan.height)}

    def _build_section(self, metric: RankMetric, plan: MapPlan) -> Section:
        return Section(self.picture, metric, plan, self.glyphs, self.map_shape)

    @cached_property
    def sentence_rows(self) -> list[Row]:
        """Sentence on how ranks differ, in as many rows as fit."""
        skew = self.picture.skew
        rank = None if skew is None else int(self.picture.matrix.rank_numbers[skew.row])
        ranks, hang = len(self.picture.matrix.processes), self.picture.hang
        text, short, attention = describe_skew(skew, rank, ranks)
        if hang is not None:
            short, attention = describe_hang(hang, ranks), True
            text = f"{short} {'In the other steps' if hang.is_over else 'Before that'}: {text}"
        most = 3 if self.height >= 18 else 2 if self.height >= 12 else 1 if self.height >= 5 else 0
        room = max(1, self.width - 1)
        lines = wrap_text(self.glyphs.to_plain(text), room, most + 1, self.glyphs)
        if len(lines) > most:
            lines = wrap_text(self.glyphs.to_plain(short), room, most, self.glyphs) if most else []
        style = "warn" if attention else "muted"
        rows = [fit_row(((f" {line}", style),), self.width, self.glyphs) for line in lines]
        network = describe_network(self.picture.network) if most else ""
        return rows + [fit_row(((f" {network}", "muted"),), self.width, self.glyphs)] * bool(network)

    @cached_property
    def main_plan(self) -> MapPlan:
        """The lines of the chosen metric."""
        return replace(self._least_plan, tall=self.line_heights[0])

    @cached_property
    def _least_plan(self) -> MapPlan:
        return plan_lines(self.picture, max(1, self.height - 2 - len(self.sentence_rows)), self.glyphs)

    @cached_property
    def line_heights(self) -> tuple[int, int]:
        """Rows of a line of the chosen metric and of the others: the most with which all of them fit."""
        least, others = self._least_plan, len(self.picture.other_metrics)
        room, lines = self._line_room, len(least.lines)
        for small in range(_MAX_OTHER_ROWS, 0, -1):
            for tall in range(_MAX_LINE_ROWS, max(small, least.tall), -1):
                if least.tall and lines * (tall + small * others) <= room:
                    return tall, small
        return least.tall, 1

    @cached_property
    def has_gaps(self) -> bool:
        """Whether an empty row fits above each of the other metrics."""
        lines, others = len(self.main_plan.lines), len(self.picture.other_metrics)
        return lines * (self.line_heights[0] + self.line_heights[1] * others) + others <= self._line_room

    @property
    def _line_room(self) -> int:
        """Rows that are left for the lines of all metrics."""
        return self.height - 2 - len(self.sentence_rows) - len(self.picture.other_metrics)

    @cached_property
    def map_shape(self) -> MapShape:
        """The horizontal layout, the same in all sections so that their steps are aligned."""
        by_node = bool(self.picture.nodes)
        most = min(_MAX_NODE_WIDTH, self.width // _NODE_SHARE) if by_node else _MAX_LABEL_WIDTH
        label = 2 + min(most, max((len(line.mark + line.label) for line in self.main_plan.lines), default=1))
        figure = RANGE_WIDTH if by_node and self.width >= _LEAST_RANGE_WIDTH else FIGURE_WIDTH
        room = max(1, self.width - label - figure - 1)
        count = len(self.picture.matrix.steps)
        planned = max(count, min(self.picture.total_steps or round_count_up(count), room))
        step_width = max(1.0, min(_MAX_STEP_WIDTH, room / max(1, planned)))
        return MapShape(self.width, label, room, step_width, min(count, room), figure)

    def _draw_axis(self) -> Row:
        shape, steps = self.map_shape, self.picture.matrix.steps
        shown = [int(step) for step in steps[len(steps) - shape.shown_steps :]]
        axis = draw_step_axis(shown, shape.step_columns[:-1].tolist(), shape.map_width, self.glyphs)
        row: Row = ((" " * (shape.label_width - 1), "axis"), (self.glyphs.corner, "rule"), *axis)
        return fit_row(row, self.width, self.glyphs)
