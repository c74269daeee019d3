"""A table that compares the chosen rank with the median rank."""

from __future__ import annotations

import numpy as np

from zerotop.analysis.formatting import format_percent
from zerotop.analysis.ranks.matrix import METRIC_TABLES, RankMetric
from zerotop.analysis.ranks.outliers import MEETING_METRICS, RankComparison, Skew
from zerotop.ui.drawing.formatting import MISSING
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_height, fit_row, row_width
from zerotop.ui.drawing.table import Column, draw_rule, panel_title, place_columns
from zerotop.ui.drawing.text import fit_text, sanitize
from zerotop.ui.ranks.iteration_bars import draw_iteration_bars
from zerotop.ui.ranks.labels import ESTIMATE_MARK, choose_unit, format_estimate
from zerotop.ui.ranks.model import RankPicture

_FIGURE_WIDTH = 9
_MAX_WIDTH = 52  # wider tables are hard to read across


def draw_table(picture: RankPicture, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Draw a row for each metric with this rank, the median rank and the difference, and a note on the figures."""
    table = picture.table_rows
    if len(picture.matrix.processes) == 1:  # there is no other rank to wait for it
        table = tuple(row for row in table if row.metric is not RankMetric.WAIT)
    if len(table) >= height:  # memory says more than what all ranks do alike
        table = tuple(row for row in table if row.metric is not RankMetric.APART or not np.isclose(row.own, row.usual, 0.1))
    if picture.chosen is None or not table:
        return fit_height([draw_rule(panel_title("Rank", focused), width, glyphs)], width, height, glyphs)
    matrix = picture.matrix
    host = fit_text(sanitize(matrix.host_names[picture.chosen], glyphs), 16, glyphs, at_words=False)
    placed = place_columns(_build_columns(picture, glyphs), min(width, _MAX_WIDTH))
    title = panel_title(f"Rank {matrix.rank_numbers[picture.chosen]}", focused)
    name: Row = title if width < 46 else (*title, (f" {host}", "muted"))
    rows = [draw_rule(name, width, glyphs, placed), *(placed.draw_row(row, width, glyphs) for row in table)]
    shown = {row.metric for row in table}
    notes = _describe_figures(picture, width, max(1, height - len(rows)), shown)
    if len(rows) >= height and not matrix.estimated_metrics:  # a title with the steps leaves all figures their rows
        short: Row = (*title, (glyphs.to_plain(f" · mean, {_name_steps(picture)}"), "muted"))
        if row_width(short) + 1 < placed.columns[1][1] + _FIGURE_WIDTH - len("rank"):
            rows[0], notes = draw_rule(short, width, glyphs, placed), []
    rows[height - len(notes) :] = [fit_row(((f"  {glyphs.to_plain(note)}", "muted"),), width, glyphs) for note in notes]
    rows += draw_iteration_bars(picture, _name_usual(picture), width, height - len(rows), glyphs)
    return fit_height(rows, width, height, glyphs)


def _name_usual(picture: RankPicture) -> str:
    return "other" if len(picture.matrix.processes) == 2 else "others"


def _describe_figures(picture: RankPicture, width: int, most: int, shown: set[RankMetric]) -> list[str]:
    """Return how the figures were made, and of which steps, in at most ``most`` lines: one or two."""
    matrix, steps = picture.matrix, _name_steps(picture)
    cores = ", median cores" if RankMetric.CORES in shown else ""
    lines = [f"{steps}: mean times{cores}" if shown & METRIC_TABLES.keys() else f"means of {steps}"]
    if matrix.estimated_metrics and most > 1:
        lines.append(f"{ESTIMATE_MARK} estimated from {matrix.figured_steps} of them")
    elif matrix.estimated_metrics:
        return [f"{ESTIMATE_MARK} estimated from {matrix.figured_steps} of {steps}"]
    lines.append(_describe_readings(picture))
    whole = "; ".join(line for line in lines if line)
    return [whole] if len(whole) + 2 <= width else [line for line in lines if line][:most]


def _describe_readings(picture: RankPicture) -> str:
    """Return of which steps the peak is known if it is of few: those between are counted, while memory may grow."""
    if not any(row.metric is RankMetric.PEAK for row in picture.table_rows):
        return ""
    matrix = picture.matrix
    is_known = ~np.isnan(matrix.cut_recent(picture.find_values(RankMetric.PEAK))[picture.chosen])
    steps = matrix.recent_steps[is_known]
    return f"peak: of {len(steps)} of them, the last {steps[-1]}" if 0 < 2 * len(steps) < len(is_known) else ""


def _build_columns(picture: RankPicture, glyphs: Glyphs) -> list[Column[RankComparison]]:
    def draw_value(value: float, row: RankComparison, width: int, style: str) -> Row:
        return _draw_value(value, row, width, style, is_estimate=row.metric in picture.matrix.estimated_metrics)

    columns: list[Column[RankComparison]] = [
        Column("", 16, 9, lambda row, _: _draw_name(row, glyphs), grows=True, left=True),
        Column("rank", _FIGURE_WIDTH, 9, lambda row, width: draw_value(row.own, row, width, "value")),
        Column(_name_usual(picture), _FIGURE_WIDTH, 5, lambda row, width: draw_value(row.usual, row, width, "text")),
        Column("diff", 7, 7, lambda row, width: _draw_difference(row, picture.skew, width, glyphs)),
    ]
    return columns if len(picture.matrix.processes) > 1 else columns[:2]


def _draw_name(row: RankComparison, glyphs: Glyphs) -> Row:
    style = row.metric.value.style
    swatch = glyphs.find_sample(style) if style else " "
    return ((f"{swatch} ", style or "text"), (row.metric.value.label, "text"))


def _draw_value(value: float, row: RankComparison, width: int, style: str, *, is_estimate: bool) -> Row:
    largest = max(abs(row.own), abs(row.usual))
    unit, factor = choose_unit(row.metric, largest)
    figure = format_estimate(value * factor, largest * factor, width - 4, is_estimate=is_estimate)
    return ((f"{figure} {unit:<3}"[:width].rjust(width), style),)


def _draw_difference(row: RankComparison, skew: Skew | None, width: int, glyphs: Glyphs) -> Row:
    """Draw the difference in percent; a warning where it is a cause: neither less time nor waiting for another rank."""
    if not row.usual > 0 or row.metric is RankMetric.WAIT:
        text = glyphs.to_plain(MISSING) if row.is_alike else "more"
    else:
        share = (row.own - row.usual) / row.usual
        text = format_percent(abs(share)) if abs(share) < 9.995 else f"{glyphs.times}{row.own / row.usual:.0f}"
        if abs(share) < 9.995:
            text = ("+" if share >= 0 else glyphs.minus) + text if text != "0 %" else "0 %"
    is_effect = row.metric in MEETING_METRICS and skew is not None and (skew.is_waited_for or skew.is_effect)
    is_less = row.own < row.usual and row.metric is not RankMetric.FREE
    return ((text.rjust(width), "muted" if row.is_alike else "text" if is_effect or is_less else "warn"),)


def _name_steps(picture: RankPicture) -> str:
    """Name the steps that the figures are of."""
    first, last = (int(picture.matrix.recent_steps[place]) for place in (0, -1))
    return f"steps {first}–{last}" if first < last else f"step {last}"
