"""An iteration of the chosen rank beside that of the others, as two tall bars of phases."""

from __future__ import annotations

import numpy as np

from zerotop.ui.charts import AXIS_WIDTH, Canvas, add_axes, choose_time_scale, plot_grid, plot_stack
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_row
from zerotop.ui.drawing.table import draw_rule
from zerotop.ui.ranks.model import RankPicture

_MIN_HEIGHT, _MAX_HEIGHT, _MAX_WIDTH = 9, 24, 52
_GAP = 2  # cells beside each bar


def draw_iteration_bars(picture: RankPicture, usual: str, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw the bars under a title and an empty row, in the colours of the table's phases; nothing without the room.

    ``usual`` names whom the chosen rank is compared with.
    """
    phases = [row for row in picture.table_rows if row.metric.value.style]
    if height < _MIN_HEIGHT or len(picture.matrix.processes) < 2 or picture.chosen is None or not phases:
        return []
    canvas = Canvas(min(width, _MAX_WIDTH) - AXIS_WIDTH, min(height, _MAX_HEIGHT) - 3, glyphs)
    times = np.array([(row.own, row.usual) for row in phases])
    scale = choose_time_scale(times.sum(axis=0), canvas.height)
    bar_width = (canvas.width - 4 * _GAP) // 2
    filled = np.zeros((2, canvas.width))
    for place in range(2):
        begin = _GAP + place * (bar_width + 2 * _GAP)
        filled[place, begin : begin + bar_width] = 1.0
    layers = [(row.metric.value.style, seconds @ filled) for row, seconds in zip(phases, times, strict=True)]
    plot_stack(canvas, layers, top=scale.highest)
    plot_grid(canvas, scale)
    names = f"rank {picture.matrix.rank_numbers[picture.chosen]}", usual
    below = (" " * (2 * _GAP)).join(name.center(bar_width) for name in names).center(canvas.width)
    title = draw_rule(((f"Phases {scale.unit}", "title-value"),), width, glyphs)
    chart = add_axes(canvas, scale, ((below, "label"),))
    return [fit_row(row, width, glyphs) for row in ((), title, *chart)]
